"""A pool of engines that behaves like one engine.

A session stays with the engine that it used last, which has its earlier turns cached, while that engine is
healthy and not much busier than the others. Other requests go to the least busy engine. An unreachable engine
is skipped until it responds again and serves the newest policy. A request that it had not begun to answer is
sent to another engine.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Generator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import msgspec

from instar.engines.base import Engine, EngineInfo, EngineStatus, Prompt
from instar.engines.connection import CONNECT_RETRY
from instar.errors import ConfigError, EngineError, EngineUnavailable, InstarError
from instar.types import Floats, Policy, SamplingParams, TokenChunk

PolicySource = Callable[[], Awaitable[Policy | None]]

MAX_MISSED_CHECKS = 2
MAX_SESSIONS = 65_536
"""The number of sessions whose engine is remembered. The least recently used are forgotten."""
LOAD_FACTOR = 2
LOAD_SLACK = 8
"""A session moves if its engine has over LOAD_FACTOR × the requests of the idlest engine, plus LOAD_SLACK."""

SUMMED_FIELDS = ("running", "waiting", "generated_tokens", "prompt_tokens", "cached_tokens")


@dataclass(eq=False, slots=True)
class PoolMember:
    engine: Engine
    index: int
    healthy: bool = False
    reason: str = "it has not responded yet"
    missed_checks: int = 0
    draining: bool = False
    """True if the engine is healthy but rejects new requests."""
    in_flight: int = 0
    other_requests: int = 0
    """The number of requests from other clients at the last check."""
    total_requests: int = 0
    loaded_version: int | None = None
    """The last version that this pool loaded into the engine."""
    check_requested: asyncio.Event = field(default_factory=asyncio.Event)
    """Set after a failure, so that the next health check happens immediately."""
    first_token_timeouts: set[asyncio.Timeout] = field(default_factory=set[asyncio.Timeout])

    @property
    def load(self) -> int:
        return self.in_flight + self.other_requests

    @property
    def is_open(self) -> bool:
        return self.healthy and not self.draining

    def mark_unhealthy(self, reason: str) -> None:
        self.healthy = False
        self.reason = reason
        self.check_requested.set()

    def release_waiting(self) -> None:
        """Abort the wait of requests without a first token, so that they go to other engines."""
        while self.first_token_timeouts:
            self.first_token_timeouts.pop().reschedule(asyncio.get_running_loop().time())

    @contextlib.contextmanager
    def request(self) -> Generator[None]:
        """Count a request while the block runs; EngineUnavailable marks the engine as unhealthy."""
        self.in_flight += 1
        try:
            yield
        except EngineUnavailable as error:
            self.mark_unhealthy(str(error))
            raise
        finally:
            self.in_flight -= 1


class EnginePool(Engine):
    """Distributes requests over several engines, which it owns and closes. Call ``start`` first.
    ``newest_policy`` returns the policy that an unreachable engine must load when it responds again, if other
    processes load policies."""

    def __init__(
        self,
        engines: Sequence[Engine],
        *,
        period: float = 1.0,
        timeout: float = 3.0,
        newest_policy: PolicySource | None = None,
    ) -> None:
        """``period`` is the time between two checks of an engine, ``timeout`` the deadline of a check."""
        self.members = [PoolMember(engine, index) for index, engine in enumerate(engines)]
        self._period = period
        self._timeout = timeout
        self._newest_policy = newest_policy
        self._policy: Policy | None = None
        self._info: EngineInfo | None = None
        self._sessions: OrderedDict[str, PoolMember] = OrderedDict()
        self._watchers: dict[PoolMember, asyncio.Task[None]] | None = None

    async def start(self, timeout: float = 60.0) -> None:
        """Wait at most ``timeout`` seconds until an engine responds. Raises ConfigError if two engines serve
        different models."""
        async with contextlib.AsyncExitStack() as undo:
            undo.push_async_callback(self._stop)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout):
                    await CONNECT_RETRY.run(self._check_all, retry_on=EngineUnavailable, seconds=timeout)
            self._pick(())
            self._watchers = {member: asyncio.create_task(self._watch(member)) for member in self.members}
            undo.pop_all()

    async def _check_all(self) -> None:
        await asyncio.gather(*(self._check(member) for member in self.members))
        self._require_same_model()
        if not any(member.healthy for member in self.members):
            raise self._none_available()

    @property
    def info(self) -> EngineInfo:
        if self._info is None:
            raise EngineUnavailable("No engine has responded yet.")
        return self._info

    def for_session(self, session: str) -> Engine:
        return _SessionEngine(self, session)

    def generate(self, prompt_ids: Prompt, params: SamplingParams) -> AsyncGenerator[TokenChunk, None]:
        return self.generate_for_session(None, prompt_ids, params)

    async def generate_for_session(
        self, session: str | None, prompt_ids: Prompt, params: SamplingParams
    ) -> AsyncGenerator[TokenChunk, None]:
        tried: list[PoolMember] = []
        while True:
            member = self._pick(tried, session)
            tried.append(member)
            member.total_requests += 1
            has_begun = False
            try:
                with member.request():
                    async with aclosing(member.engine.generate(prompt_ids, params)) as chunks:
                        first = await self._first_chunk(member, chunks)
                        has_begun = True
                        yield first
                        async for chunk in chunks:
                            yield chunk
                return
            except EngineUnavailable:
                if has_begun:
                    raise

    async def logprobs(self, token_ids: Prompt) -> Floats:
        tried: list[PoolMember] = []
        while True:
            member = self._pick(tried)
            tried.append(member)
            with contextlib.suppress(EngineUnavailable), member.request():
                return await member.engine.logprobs(token_ids)

    async def load(self, policy: Policy) -> None:
        """Load the policy into every healthy engine; the others load it when they respond again. Raises the
        error of an engine that rejects the policy, and EngineUnavailable if no engine could be reached."""
        before, self._policy = self._policy, policy
        healthy = [member for member in self.members if member.healthy]
        outcomes = await asyncio.gather(
            *(self._load(member, policy) for member in healthy), return_exceptions=True
        )
        for outcome in outcomes:
            if isinstance(outcome, BaseException) and not isinstance(outcome, EngineUnavailable):
                self._policy = before
                raise outcome
        self._pick(())

    async def replace(self, engines: Sequence[Engine]) -> None:
        """Replace the engines. A new engine serves once it has responded. Removed engines are closed: replies
        in progress break off, and requests without a first token go to other engines."""
        removed = [member for member in self.members if member.engine not in engines]
        known = {member.engine for member in self.members}
        index = max((member.index for member in self.members), default=-1)
        self.members = [member for member in self.members if member not in removed]
        for engine in engines:
            if engine not in known:
                index += 1
                self._add(PoolMember(engine, index))
        for member in removed:
            await self._remove(member)

    def _add(self, member: PoolMember) -> None:
        self.members.append(member)
        if self._watchers is not None:
            member.check_requested.set()
            self._watchers[member] = asyncio.create_task(self._watch(member))

    async def _remove(self, member: PoolMember) -> None:
        if self._watchers is not None:
            watcher = self._watchers.pop(member)
            watcher.cancel()
            await asyncio.gather(watcher, return_exceptions=True)
        member.healthy, member.reason = False, "it was removed from the pool"
        member.release_waiting()
        await member.engine.close()

    async def status(self) -> EngineStatus:
        """Return the sums over all engines that respond, and the lowest of their versions."""
        healthy = [member for member in self.members if member.healthy]
        outcomes = await asyncio.gather(*map(self._status, healthy), return_exceptions=True)
        statuses = [status for status in outcomes if isinstance(status, EngineStatus)]
        if not statuses:
            raise self._none_available()
        sums: Any = {name: sum(getattr(status, name) for status in statuses) for name in SUMMED_FIELDS}
        return EngineStatus(version=min(status.version for status in statuses), **sums)

    async def close(self) -> None:
        await self._stop()
        await asyncio.gather(*(member.engine.close() for member in self.members))

    async def _stop(self) -> None:
        watchers, self._watchers = self._watchers or {}, None
        for watcher in watchers.values():
            watcher.cancel()
        await asyncio.gather(*watchers.values(), return_exceptions=True)

    # --- one request -------------------------------------------------------------------------------

    def _pick(self, tried: Collection[PoolMember], session: str | None = None) -> PoolMember:
        candidates = [member for member in self.members if member.is_open and member not in tried]
        if not candidates:
            raise self._none_available()
        idlest = min(candidates, key=lambda member: (member.load, member.total_requests, member.index))
        if session is None:
            return idlest
        last = self._sessions.get(session)
        stays = last in candidates and last.load <= LOAD_FACTOR * idlest.load + LOAD_SLACK
        self._sessions[session] = chosen = last if last is not None and stays else idlest
        self._sessions.move_to_end(session)
        if len(self._sessions) > MAX_SESSIONS:
            self._sessions.popitem(last=False)
        return chosen

    async def _first_chunk(self, member: PoolMember, chunks: AsyncGenerator[TokenChunk, None]) -> TokenChunk:
        """Return the first chunk of a reply. Raises EngineUnavailable if the engine is marked unhealthy
        during the wait, or was restarted and does not serve the policy that the pool loaded."""
        expected = member.loaded_version
        timeout = asyncio.timeout(None)
        try:
            async with timeout:
                member.first_token_timeouts.add(timeout)
                chunk = await anext(chunks)
        except TimeoutError:
            if not timeout.expired():
                raise
            raise EngineUnavailable(member.reason) from None
        except StopAsyncIteration:
            raise EngineUnavailable("The engine ended a reply before its first token.") from None
        finally:
            member.first_token_timeouts.discard(timeout)
        if expected is not None and chunk.versions and chunk.versions[0] < expected:
            raise EngineUnavailable(f"The engine serves version {chunk.versions[0]} instead of {expected}.")
        return chunk

    def _none_available(self) -> EngineUnavailable:
        reasons = "; ".join(
            f"engine {member.index}: {'it is being drained' if member.healthy else member.reason}"
            for member in self.members
            if not member.is_open
        )
        count = len(self.members)
        return EngineUnavailable(f"None of the {count} engines can answer ({reasons or 'all were tried'}).")

    # --- health ------------------------------------------------------------------------------------

    async def _watch(self, member: PoolMember) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._period):
                    await member.check_requested.wait()
            member.check_requested.clear()
            await self._check(member)

    async def _check(self, member: PoolMember) -> None:
        try:
            status = await self._status(member)
            member.draining = status.draining
            if member.loaded_version is not None and status.version < member.loaded_version:
                member.healthy = False
            if not member.healthy:
                await self._admit(member)
        except InstarError as error:
            member.missed_checks += 1
            if not member.healthy or member.missed_checks >= MAX_MISSED_CHECKS:
                member.healthy = False
                member.reason = str(error)
                member.release_waiting()
            return
        member.missed_checks = 0
        member.other_requests = max(0, status.running + status.waiting - member.in_flight)

    async def _status(self, member: PoolMember) -> EngineStatus:
        try:
            async with asyncio.timeout(self._timeout):
                return await member.engine.status()
        except TimeoutError as error:
            raise EngineUnavailable(f"The engine did not respond within {self._timeout:g} s.") from error

    async def _admit(self, member: PoolMember) -> None:
        """Mark a member healthy once it serves the same model and policy as the others."""
        info = await member.engine.refresh()
        if self._info is None:
            self._info = info
        elif _served_model(info) != _served_model(self._info):
            raise EngineError(f"It serves {_describe(info)}, the others {_describe(self._info)}.")
        else:
            self._info = _common_info(info, self._info)
        while True:
            # The status comes first: a policy is known as the newest before an engine can serve it.
            status = await self._status(member)
            policy = await self._newest_policy() if self._newest_policy else self._policy
            if policy is None or status.version == policy.version:
                break
            if policy.artifact.kind == "live":
                raise EngineUnavailable(f"The trainer has not sent it version {policy.version} yet.")
            await self._load(member, policy)
        member.healthy = True

    async def _load(self, member: PoolMember, policy: Policy) -> None:
        try:
            await member.engine.load(policy)
        except EngineUnavailable as error:
            member.mark_unhealthy(str(error))
            raise
        if self._newest_policy is None:
            member.loaded_version = policy.version

    def _require_same_model(self) -> None:
        infos: list[EngineInfo] = []
        for member in self.members:
            with contextlib.suppress(EngineUnavailable):
                infos.append(member.engine.info)
        if len({_served_model(info) for info in infos}) > 1:
            models = " and ".join(sorted(set(map(_describe, infos))))
            raise ConfigError(f"The engines of a pool must serve the same model, not {models}.")


class _SessionEngine(Engine):
    """The pool as one session uses it."""

    def __init__(self, pool: EnginePool, session: str) -> None:
        self._pool = pool
        self._session = session

    @property
    def info(self) -> EngineInfo:
        return self._pool.info

    def generate(self, prompt_ids: Prompt, params: SamplingParams) -> AsyncGenerator[TokenChunk, None]:
        return self._pool.generate_for_session(self._session, prompt_ids, params)

    async def logprobs(self, token_ids: Prompt) -> Floats:
        return await self._pool.logprobs(token_ids)

    async def load(self, policy: Policy) -> None:
        await self._pool.load(policy)

    async def status(self) -> EngineStatus:
        return await self._pool.status()

    async def close(self) -> None:
        """Do nothing: other sessions use the pool too."""


def _served_model(info: EngineInfo) -> tuple[str, int, int]:
    return info.model, info.vocab_size, info.max_context


def _describe(info: EngineInfo) -> str:
    return f"{info.model} (a vocabulary of {info.vocab_size} tokens, a context of {info.max_context})"


def _common_info(one: EngineInfo, other: EngineInfo) -> EngineInfo:
    """Return the capabilities that both engines have."""
    return msgspec.structs.replace(
        one,
        kind=one.kind if one.kind == other.kind else "mixed",
        artifacts=tuple(kind for kind in one.artifacts if kind in other.artifacts),
        streams=one.streams and other.streams,
        versions_per_token=one.versions_per_token and other.versions_per_token,
        scores=one.scores and other.scores,
        routes=tuple(route for route in one.routes if route in other.routes),
    )
