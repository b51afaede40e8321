"""Several engines as one.

A session stays with the engine that it used last, which has its earlier turns in its cache, as long as that
one is healthy and not far busier than the others; any other request goes to the least busy. An engine that
cannot be reached is left out until it answers again and serves the newest policy. A request that it had not
begun to answer goes to another one.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

from instar.engines.base import Engine, EngineInfo, EngineStatus, Prompt
from instar.errors import ConfigError, EngineError, EngineUnavailable, InstarError
from instar.types import Floats, Policy, SamplingParams, TokenChunk

PolicySource = Callable[[], Awaitable[Policy | None]]

MAX_MISSED_CHECKS = 2
"""Health checks in a row that an engine may miss before it is left out."""
MAX_SESSIONS = 65_536
"""Sessions whose engine is remembered; the ones that were silent longest are forgotten."""
LOAD_FACTOR = 2
LOAD_SLACK = 8
"""A session leaves its engine where that has more than BUSIER times the requests of the idlest, and SLACK."""


@dataclass(eq=False, slots=True)
class PoolMember:
    engine: Engine
    index: int
    healthy: bool = False
    reason: str = "it has not answered yet"
    """Why it is not healthy."""
    failures: int = 0
    draining: bool = False
    """Whether it takes no further request, healthy as it is."""
    in_flight: int = 0
    other_requests: int = 0
    """Requests that others have there, as of the last check."""
    total_requests: int = 0
    loaded_version: int | None = None
    """The version that the pool itself made it serve."""
    check_requested: asyncio.Event = field(default_factory=asyncio.Event)
    """Something failed: it is to be looked at now."""
    first_token_timeouts: set[asyncio.Timeout] = field(default_factory=set[asyncio.Timeout])
    """Requests that wait for their first token."""

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
        """What it has not begun to answer is for others."""
        while self.first_token_timeouts:
            self.first_token_timeouts.pop().reschedule(asyncio.get_running_loop().time())


class EnginePool(Engine):
    """Call ``start`` first. ``newest`` tells which policy is to be served, where others than the pool load
    policies; a returning engine is given it before it serves. Closing the pool closes its engines."""

    def __init__(
        self,
        engines: Sequence[Engine],
        *,
        period: float = 1.0,
        timeout: float = 3.0,
        newest_policy: PolicySource | None = None,
    ) -> None:
        """``period``: seconds between two health checks of an engine. ``timeout``: deadline of one."""
        self.members = [PoolMember(engine, place) for place, engine in enumerate(engines)]
        self._period = period
        self._timeout = timeout
        self._newest = newest_policy
        self._policy: Policy | None = None
        self._info: EngineInfo | None = None
        self._sessions: OrderedDict[str, PoolMember] = OrderedDict()
        self._watchers: dict[PoolMember, asyncio.Task[None]] | None = None
        """Those who look after each member, once the pool is started."""

    async def start(self, timeout: float = 60.0) -> None:
        """Wait until an engine answers, at most ``timeout`` seconds. Raises ConfigError where two that
        answer do not serve the same model."""
        async with contextlib.AsyncExitStack() as undo:
            undo.push_async_callback(self._stop)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout):
                    await self._first_answers()
            self._pick(())
            self._watchers = {member: asyncio.create_task(self._watch(member)) for member in self.members}
            undo.pop_all()

    async def _first_answers(self) -> None:
        pause = 0.05
        while True:
            await asyncio.gather(*(self._check(member) for member in self.members))
            self._refuse_mixed()
            if any(member.healthy for member in self.members):
                return
            await asyncio.sleep(pause)
            pause = min(2 * pause, 1.0)

    @property
    def info(self) -> EngineInfo:
        if self._info is None:
            raise EngineUnavailable("no engine has answered yet")
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
            member.in_flight += 1
            member.total_requests += 1
            began = False
            try:
                async with aclosing(member.engine.generate(prompt_ids, params)) as chunks:
                    first = await self._first(member, chunks)
                    began = True
                    yield first
                    async for chunk in chunks:
                        yield chunk
                return
            except EngineUnavailable as error:
                member.mark_unhealthy(str(error))
                if began:
                    raise
            finally:
                member.in_flight -= 1

    async def logprobs(self, token_ids: Prompt) -> Floats:
        tried: list[PoolMember] = []
        while True:
            member = self._pick(tried)
            tried.append(member)
            member.in_flight += 1
            try:
                return await member.engine.logprobs(token_ids)
            except EngineUnavailable as error:
                member.mark_unhealthy(str(error))
            finally:
                member.in_flight -= 1

    async def load(self, policy: Policy) -> None:
        """Into every healthy engine; the others are given it when they return. Raises what an engine says
        that refuses it, and EngineUnavailable where none could be reached."""
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
        """From now on the pool is of these; a new one serves once it has answered. Those that are no longer
        of it are closed: a reply that one had begun breaks off, any other goes to another engine."""
        gone = [member for member in self.members if member.engine not in engines]
        known = {member.engine for member in self.members}
        place = max((member.index for member in self.members), default=-1)
        self.members = [member for member in self.members if member not in gone]
        for engine in engines:
            if engine not in known:
                place += 1
                self._add(PoolMember(engine, place))
        for member in gone:
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
        member.healthy, member.reason = False, "it is no longer there"
        member.release_waiting()
        await member.engine.close()

    async def status(self) -> EngineStatus:
        """The sum over those that answer; the version is the lowest of them."""
        healthy = [member for member in self.members if member.healthy]
        statuses = await asyncio.gather(*map(self._ask, healthy), return_exceptions=True)
        answers = [status for status in statuses if isinstance(status, EngineStatus)]
        if not answers:
            raise self._nobody()
        return EngineStatus(
            version=min(status.version for status in answers),
            running=sum(status.running for status in answers),
            waiting=sum(status.waiting for status in answers),
            generated_tokens=sum(status.generated_tokens for status in answers),
            prompt_tokens=sum(status.prompt_tokens for status in answers),
            cached_tokens=sum(status.cached_tokens for status in answers),
        )

    async def close(self) -> None:
        await self._stop()
        await asyncio.gather(*(member.engine.close() for member in self.members))

    async def _stop(self) -> None:
        watchers, self._watchers = self._watchers or {}, None
        for watcher in watchers.values():
            watcher.cancel()
        await asyncio.gather(*watchers.values(), return_exceptions=True)

    # --- one request -------------------------------------------------------------------------------

    def _pick(self, tried: Iterable[PoolMember], session: str | None = None) -> PoolMember:
        open_to = [member for member in self.members if member.is_open and member not in tried]
        if not open_to:
            raise self._nobody()
        idlest = min(open_to, key=lambda member: (member.load, member.total_requests, member.index))
        if session is None:
            return idlest
        used = self._sessions.get(session)
        chosen = used if used in open_to and used.load <= LOAD_FACTOR * idlest.load + LOAD_SLACK else idlest
        self._sessions[session] = chosen
        self._sessions.move_to_end(session)
        if len(self._sessions) > MAX_SESSIONS:
            self._sessions.popitem(last=False)
        return chosen

    async def _first(self, member: PoolMember, chunks: AsyncGenerator[TokenChunk, None]) -> TokenChunk:
        """Raises EngineUnavailable also where the engine is left out meanwhile, or has been started again
        and does not serve what it was given."""
        expected = member.loaded_version
        waiting = asyncio.timeout(None)
        try:
            async with waiting:
                member.first_token_timeouts.add(waiting)
                chunk = await anext(chunks)
        except TimeoutError:
            if not waiting.expired():
                raise
            raise EngineUnavailable(member.reason) from None
        except StopAsyncIteration:
            raise EngineUnavailable("the engine ended a reply before its first token") from None
        finally:
            member.first_token_timeouts.discard(waiting)
        if expected is not None and chunk.versions and chunk.versions[0] < expected:
            raise EngineUnavailable(f"it serves version {chunk.versions[0]} and was given {expected}")
        return chunk

    def _nobody(self) -> EngineUnavailable:
        reasons = "; ".join(
            f"engine {member.index}: {'it is being drained' if member.healthy else member.reason}"
            for member in self.members
            if not member.is_open
        )
        count = len(self.members)
        return EngineUnavailable(f"none of the {count} engines can answer ({reasons or 'all were tried'})")

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
            status = await self._ask(member)
            member.draining = status.draining
            if member.loaded_version is not None and status.version < member.loaded_version:
                member.healthy = False
            if not member.healthy:
                await self._admit(member)
        except InstarError as error:
            member.failures += 1
            if not member.healthy or member.failures >= MAX_MISSED_CHECKS:
                member.healthy = False
                member.reason = str(error)
                member.release_waiting()
            return
        member.failures = 0
        member.other_requests = max(0, status.running + status.waiting - member.in_flight)

    async def _ask(self, member: PoolMember) -> EngineStatus:
        try:
            async with asyncio.timeout(self._timeout):
                return await member.engine.status()
        except TimeoutError as error:
            raise EngineUnavailable(f"it did not answer within {self._timeout:g} s") from error

    async def _admit(self, member: PoolMember) -> None:
        """Healthy again, once it serves what the others do."""
        info = await member.engine.refresh()
        if self._info is None:
            self._info = info
        elif _served(info) != _served(self._info):
            raise EngineError(f"it serves {_told(info)}, the others {_told(self._info)}")
        else:
            self._info = _together(info, self._info)
        while True:
            # The status first: a policy is known as the newest before an engine can serve it.
            status = await self._ask(member)
            policy = await self._newest() if self._newest else self._policy
            if policy is None or status.version == policy.version:
                break
            if policy.artifact.kind == "live":
                raise EngineUnavailable(f"the trainer has yet to bring it version {policy.version}")
            await self._load(member, policy)
        member.healthy = True

    async def _load(self, member: PoolMember, policy: Policy) -> None:
        try:
            await member.engine.load(policy)
        except EngineUnavailable as error:
            member.mark_unhealthy(str(error))
            raise
        if self._newest is None:
            member.loaded_version = policy.version

    def _refuse_mixed(self) -> None:
        infos = [info for member in self.members if (info := _info_of(member)) is not None]
        if len({_served(info) for info in infos}) > 1:
            raise ConfigError(f"engines of one pool differ: {' and '.join(sorted(set(map(_told, infos))))}")


class _SessionEngine(Engine):
    """The pool, as one session sees it."""

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
        """Nothing: the pool is for others too."""


def _info_of(member: PoolMember) -> EngineInfo | None:
    try:
        return member.engine.info
    except EngineUnavailable:
        return None


def _served(info: EngineInfo) -> tuple[str, int, int]:
    """What engines of one pool have in common, of whatever kind they are."""
    return info.model, info.vocab_size, info.max_context


def _together(one: EngineInfo, other: EngineInfo) -> EngineInfo:
    """What can be asked of either."""
    if one == other:
        return one
    return EngineInfo(
        kind=one.kind if one.kind == other.kind else "mixed",
        model=one.model,
        vocab_size=one.vocab_size,
        max_context=one.max_context,
        artifacts=tuple(kind for kind in one.artifacts if kind in other.artifacts),
        streams=one.streams and other.streams,
        versions_per_token=one.versions_per_token and other.versions_per_token,
        scores=one.scores and other.scores,
        routes=tuple(route for route in one.routes if route in other.routes),
    )


def _told(info: EngineInfo) -> str:
    return f"{info.model} ({info.vocab_size} tokens in its vocabulary, a context of {info.max_context})"
