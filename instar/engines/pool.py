"""A pool of engines that behaves like one engine.

A session stays on its engine, which has cached the earlier turns, while that engine is healthy and not much
busier than the others. Other requests go to the least busy engine. An unreachable engine gets no requests
until it responds again and serves the newest policy. Its requests that have no first token yet are retried on
other engines.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Sequence
from contextlib import aclosing
from typing import Any

from instar.async_utils import cancel_and_wait
from instar.engines.base import Engine, EngineInfo, EngineStatus, Prompt
from instar.engines.connection import CONNECT_RETRY
from instar.engines.pool_member import PoolMember
from instar.errors import ConfigError, EngineError, EngineUnavailable, InstarError, PolicyNotFound
from instar.types import Floats, Policy, PolicyRef, SamplingParams, TokenChunk

PolicySource = Callable[[], Awaitable[Policy | None]]

MAX_MISSED_CHECKS = 2
"""An engine becomes unhealthy after this many consecutive failed health checks."""
MAX_SESSIONS = 2048
"""The maximum number of sessions whose engine is remembered. The least recently used ones are evicted."""
MAX_KEPT_POLICIES = 64
"""The maximum number of policies that are kept again in engines that lost them."""
LOAD_FACTOR = 2
LOAD_SLACK = 8
"""A session moves if its engine's load exceeds LOAD_FACTOR × the least busy engine's load + LOAD_SLACK."""
SUMMED_FIELDS = ("running", "waiting", "generated_tokens", "prompt_tokens", "cached_tokens")


class EnginePool(Engine):
    """Distributes requests over several engines. Call ``connect`` first. ``close`` also closes the engines.
    Set ``newest_policy`` if other processes load policies into the engines. It returns the policy that a new
    or recovered engine must load, or None. If only the trainer can send it, the engine may serve a version at
    most ``max_versions_behind`` older. A health check fails after ``check_timeout`` seconds."""

    def __init__(
        self,
        engines: Sequence[Engine],
        *,
        check_interval: float = 1.0,
        check_timeout: float = 3.0,
        newest_policy: PolicySource | None = None,
        max_versions_behind: int = 0,
    ) -> None:
        self.members = [PoolMember(engine, index) for index, engine in enumerate(engines)]
        self._check_interval = check_interval
        self._check_timeout = check_timeout
        self._newest_policy = newest_policy
        self._max_versions_behind = max_versions_behind
        self._policy: Policy | None = None
        self._kept: OrderedDict[PolicyRef, Policy] = OrderedDict()
        self._restorations: dict[PoolMember, asyncio.Task[None]] = {}
        self._sessions: OrderedDict[str, PoolMember] = OrderedDict()
        self._watchers: dict[PoolMember, asyncio.Task[None]] | None = None

    async def connect(self, timeout: float = 60.0) -> None:
        """Wait until an engine responds, and start health checks. Raises EngineUnavailable if none accepts
        requests after ``timeout`` seconds, and ConfigError if their model, vocabulary or context differs."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await CONNECT_RETRY.run(self._check_all, retry_on=EngineUnavailable, seconds=timeout)
        self._pick(())  # raises if no engine accepts requests
        self._watchers = {member: asyncio.create_task(self._watch(member)) for member in self.members}

    async def _check_all(self) -> None:
        await asyncio.gather(*(self._check(member) for member in self.members))
        models: set[str] = set()
        for member in self.members:
            with contextlib.suppress(EngineUnavailable):
                models.add(_describe_model(member.engine.info))
        if len(models) > 1:
            names = " and ".join(sorted(models))
            raise ConfigError(f"The engines serve {names}; use the same model and context for all engines.")
        if not any(member.is_healthy for member in self.members):
            raise self._none_available_error()

    def for_session(self, session: str) -> Engine:
        return _SessionEngine(self, session)

    def generate(
        self, prompt_ids: Prompt, params: SamplingParams, policy: PolicyRef | None = None
    ) -> AsyncGenerator[TokenChunk, None]:
        return self.generate_for_session(None, prompt_ids, params, policy)

    async def generate_for_session(
        self, session: str | None, prompt_ids: Prompt, params: SamplingParams, policy: PolicyRef | None
    ) -> AsyncGenerator[TokenChunk, None]:
        tried: list[PoolMember] = []
        lacking: list[PoolMember] = []
        not_found: PolicyNotFound | None = None
        while True:
            member = self._pick_untried(tried, not_found, session)
            member.total_requests += 1
            has_begun = False
            try:
                with member.track_request():
                    async with aclosing(member.engine.generate(prompt_ids, params, policy)) as chunks:
                        expected_version = member.loaded_version if policy is None else None
                        first = await self._await_first_chunk(member, chunks, expected_version)
                        has_begun = True
                        if policy is not None and lacking:
                            self._start_restoring(lacking, policy)
                        yield first
                        async for chunk in chunks:
                            yield chunk
                return
            except (EngineUnavailable, PolicyNotFound) as error:
                if has_begun:
                    raise
                if isinstance(error, PolicyNotFound):
                    not_found = error  # another engine may have the policy
                    lacking.append(member)

    async def logprobs(self, token_ids: Prompt, policy: PolicyRef | None = None) -> Floats:
        tried: list[PoolMember] = []
        not_found: PolicyNotFound | None = None
        while True:
            member = self._pick_untried(tried, not_found)
            try:
                with contextlib.suppress(EngineUnavailable), member.track_request():
                    return await member.engine.logprobs(token_ids, policy)
            except PolicyNotFound as error:
                not_found = error  # another engine may have the policy

    async def load(self, policy: Policy) -> None:
        """Load the policy into every healthy engine. The others load it when they respond again. Raises the
        error of an engine that rejects it, and EngineUnavailable if then no engine accepts requests."""
        previous, self._policy = self._policy, policy
        healthy = [member for member in self.members if member.is_healthy]
        loads = (self._load(member, policy) for member in healthy)
        outcomes = await asyncio.gather(*loads, return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, BaseException) and not isinstance(outcome, EngineUnavailable):
                self._policy = previous
                raise outcome
        self._pick(())  # raises if no engine accepts requests

    async def keep(self, policy: Policy) -> None:
        """Keep the policy in every healthy engine. An engine that does not have it when a request names it,
        while another engine has it, loads it then."""
        self._pick(())  # raises if no engine accepts requests
        healthy = [member for member in self.members if member.is_healthy]
        keeps = (self._keep(member, policy) for member in healthy)
        for outcome in await asyncio.gather(*keeps, return_exceptions=True):
            if isinstance(outcome, BaseException) and not isinstance(outcome, EngineUnavailable):
                raise outcome
        self._pick(())
        self._kept[policy.ref] = policy
        self._kept.move_to_end(policy.ref)
        if len(self._kept) > MAX_KEPT_POLICIES:
            self._kept.popitem(last=False)

    async def unload(self, policy: PolicyRef) -> None:
        """Unload the policy from the healthy engines. Raises PolicyNotFound if none of them has it."""
        self._pick(())  # raises if no engine accepts requests
        self._kept.pop(policy, None)
        unloads = [member.engine.unload(policy) for member in self.members if member.is_healthy]
        errors = [e for e in await asyncio.gather(*unloads, return_exceptions=True) if e is not None]
        failures = [error for error in errors if not isinstance(error, PolicyNotFound)]
        if failures or len(errors) == len(unloads):
            raise (failures or errors)[0]

    async def replace(self, engines: Sequence[Engine]) -> None:
        """Replace the engines. A new engine gets requests once it has responded. Removed engines are closed:
        their replies in progress are aborted, and requests without a first token are retried elsewhere."""
        removed = [member for member in self.members if member.engine not in engines]
        current = {member.engine for member in self.members}
        next_index = max((member.index for member in self.members), default=-1) + 1
        self.members = [member for member in self.members if member not in removed]
        for index, engine in enumerate((engine for engine in engines if engine not in current), next_index):
            member = PoolMember(engine, index)
            self.members.append(member)
            if self._watchers is not None:
                member.check_requested.set()
                self._watchers[member] = asyncio.create_task(self._watch(member))
        for member in removed:
            if self._watchers is not None:
                await cancel_and_wait(self._watchers.pop(member))
            member.is_healthy, member.unhealthy_reason = False, "removed from the pool"
            member.release_waiting_requests()
            await member.engine.close()

    async def status(self) -> EngineStatus:
        """Return the sums over all engines that respond, their lowest version and all their policies."""
        healthy = [member for member in self.members if member.is_healthy]
        outcomes = await asyncio.gather(*map(self._query_status, healthy), return_exceptions=True)
        statuses = [status for status in outcomes if isinstance(status, EngineStatus)]
        if not statuses:
            raise self._none_available_error()
        sums: Any = {name: sum(getattr(status, name) for status in statuses) for name in SUMMED_FIELDS}
        policies = tuple(sorted({ref for status in statuses for ref in status.policies}))
        version = min(status.version for status in statuses)
        return EngineStatus(version=version, policies=policies, **sums)

    async def close(self) -> None:
        watchers, self._watchers = self._watchers or {}, None
        await cancel_and_wait(*watchers.values(), *self._restorations.values())
        await asyncio.gather(*(member.engine.close() for member in self.members))

    def _pick_untried(
        self, tried: list[PoolMember], not_found: PolicyNotFound | None, session: str | None = None
    ) -> PoolMember:
        """Return an engine that was not tried and add it to ``tried``. If there is none, raise the error that
        the policy is not loaded, if an engine raised it."""
        try:
            member = self._pick(tried, session)
        except EngineUnavailable as error:
            raise (not_found or error) from None
        tried.append(member)
        return member

    def _pick(self, tried: Collection[PoolMember], session: str | None = None) -> PoolMember:
        candidates = [member for member in self.members if member.can_accept_requests and member not in tried]
        if not candidates:
            raise self._none_available_error()
        least_busy = min(candidates, key=lambda member: (member.load, member.total_requests, member.index))
        if session is None:
            return least_busy
        previous = self._sessions.get(session)
        has_capacity = previous in candidates and previous.load <= LOAD_FACTOR * least_busy.load + LOAD_SLACK
        self._sessions[session] = chosen = previous if previous is not None and has_capacity else least_busy
        self._sessions.move_to_end(session)
        if len(self._sessions) > MAX_SESSIONS:
            self._sessions.popitem(last=False)
        return chosen

    async def _await_first_chunk(
        self, member: PoolMember, chunks: AsyncGenerator[TokenChunk, None], expected_version: int | None
    ) -> TokenChunk:
        """Return the first chunk of a reply. Raises EngineUnavailable if the engine becomes unhealthy, ends
        the reply without a chunk, or has restarted and serves an older version than ``expected_version``."""
        timeout = asyncio.timeout(None)
        try:
            async with timeout:
                member.first_token_timeouts.add(timeout)
                chunk = await anext(chunks)
        except TimeoutError:
            if not timeout.expired():
                raise
            raise EngineUnavailable(member.unhealthy_reason) from None
        except StopAsyncIteration:
            raise EngineUnavailable("ended a reply without a token") from None
        finally:
            member.first_token_timeouts.discard(timeout)
        if expected_version is not None and chunk.versions and chunk.versions[0] < expected_version:
            raise EngineUnavailable(f"serves version {chunk.versions[0]} instead of {expected_version}")
        return chunk

    def _none_available_error(self) -> EngineUnavailable:
        reasons = "; ".join(
            f"engine {m.index}: {'draining' if m.is_healthy else m.unhealthy_reason.rstrip('.')}"
            for m in self.members
            if not m.can_accept_requests
        )
        default = "every engine has failed" if self.members else "no engine has been started"
        return EngineUnavailable(f"No engine is available ({reasons or default}).")

    async def _watch(self, member: PoolMember) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._check_interval):
                    await member.check_requested.wait()
            member.check_requested.clear()
            await self._check(member)

    async def _check(self, member: PoolMember) -> None:
        try:
            status = await self._query_status(member)
            member.is_draining = status.draining
            if member.loaded_version is not None and status.version < member.loaded_version:
                member.is_healthy = False
            if not member.is_healthy:
                await self._admit(member)
        except InstarError as error:
            member.missed_checks += 1
            if not member.is_healthy or member.missed_checks >= MAX_MISSED_CHECKS:
                member.is_healthy = False
                member.unhealthy_reason = str(error)
                member.release_waiting_requests()
            return
        member.missed_checks = 0
        member.other_requests = max(0, status.running + status.waiting - member.in_flight)

    async def _query_status(self, member: PoolMember) -> EngineStatus:
        try:
            async with asyncio.timeout(self._check_timeout):
                return await member.engine.status()
        except TimeoutError as error:
            raise EngineUnavailable(f"no response within {self._check_timeout:g} s") from error

    async def _admit(self, member: PoolMember) -> None:
        info = await member.engine.refresh()
        if self._info is None:
            self._info = info
        elif (model := _describe_model(info)) != (pool_model := _describe_model(self._info)):
            raise EngineError(f"serves {model}, but the other engines serve {pool_model}")
        else:
            self._info = info.intersect(self._info)
        while True:
            # Read the status first. Otherwise, a policy older than the served one could be loaded.
            status = await self._query_status(member)
            policy = await self._newest_policy() if self._newest_policy else self._policy
            if policy is None or status.version == policy.version:
                break
            if policy.artifact.kind == "live":
                if 0 < policy.version - status.version <= self._max_versions_behind:
                    break
                raise EngineUnavailable(f"the trainer has not sent version {policy.version} yet")
            await self._load(member, policy)
        member.is_healthy = True

    async def _keep(self, member: PoolMember, policy: Policy) -> None:
        try:
            await member.engine.keep(await member.engine.upload_files(policy))
        except EngineUnavailable as error:
            member.mark_unhealthy(str(error))
            raise

    def _start_restoring(self, members: Sequence[PoolMember], policy: PolicyRef) -> None:
        """Keep a policy again in engines that have lost it, for example because they restarted."""

        async def restore(member: PoolMember, kept: Policy) -> None:
            with contextlib.suppress(EngineError):
                await self._keep(member, kept)

        if (kept := self._kept.get(policy)) is None:
            return
        for member in members:
            if member not in self._restorations:
                task = self._restorations[member] = asyncio.create_task(restore(member, kept))
                task.add_done_callback(lambda _, member=member: self._restorations.pop(member, None))

    async def _load(self, member: PoolMember, policy: Policy) -> None:
        try:
            await member.engine.load(policy)
        except EngineUnavailable as error:
            member.mark_unhealthy(str(error))
            raise
        if self._newest_policy is None:
            member.loaded_version = policy.version


class _SessionEngine(Engine):
    def __init__(self, pool: EnginePool, session: str) -> None:
        self._pool = pool
        self._session = session

    @property
    def info(self) -> EngineInfo:
        return self._pool.info

    def generate(
        self, prompt_ids: Prompt, params: SamplingParams, policy: PolicyRef | None = None
    ) -> AsyncGenerator[TokenChunk, None]:
        return self._pool.generate_for_session(self._session, prompt_ids, params, policy)

    async def logprobs(self, token_ids: Prompt, policy: PolicyRef | None = None) -> Floats:
        return await self._pool.logprobs(token_ids, policy)

    async def load(self, policy: Policy) -> None:
        await self._pool.load(policy)

    async def status(self) -> EngineStatus:
        return await self._pool.status()

    async def close(self) -> None:
        """Do nothing, because other sessions use the same pool."""


def _describe_model(info: EngineInfo) -> str:
    return f"{info.model} (a vocabulary of {info.vocab_size} tokens, a context of {info.max_context})"
