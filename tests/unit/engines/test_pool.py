"""Several engines as one: who answers, who is left out, who returns, and with which policy."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from instar.config import ModelConfig, ScriptedEngineConfig
from instar.engines.base import Engine, EngineInfo, EngineStatus, Prompt
from instar.engines.factory import connect_engines
from instar.engines.pool import EnginePool, PolicySource
from instar.engines.remote import RemoteEngine
from instar.engines.scripted import ScriptedEngine
from instar.errors import ConfigError, EngineError, EngineUnavailable, PromptTooLong
from instar.gateway.serve import bind
from instar.types import Artifact, Policy, SamplingParams, TokenChunk
from tests.unit.engines.conformance import EngineConformance, collect, ids_of, versions_of, wait_until_idle
from tests.unit.engines.test_conformance import LONG_REPLY, scripted_engine, serve_engine

PROMPT = [5, 6, 7]


class TestPool(EngineConformance):
    seeds_matter = False

    @pytest.fixture
    async def engine(self, tiny: Path) -> AsyncIterator[Engine]:
        pool = EnginePool([scripted_engine(tiny), scripted_engine(tiny)])
        await pool.start(5)
        yield pool
        await pool.close()


class TestRemotePool(EngineConformance):
    seeds_matter = False

    @pytest.fixture
    async def engine(self, tiny: Path) -> AsyncIterator[Engine]:
        async with (
            serve_engine(scripted_engine(tiny), "s") as one,
            serve_engine(scripted_engine(tiny), "s") as two,
        ):
            pool = await connect_engines([one, two], "s", timeout=10)
            yield pool
            await pool.close()


class FlakyEngine(ScriptedEngine):
    """Scripted, and can be made to fail."""

    def __init__(self, tiny: Path, context: int = 256) -> None:
        super().__init__(ModelConfig(name=str(tiny), max_context=context), ScriptedEngineConfig())
        self.answers = True
        self.hangs = False
        self.failure: EngineError | None = None
        self.fails_after = 0
        self.asked = 0

    async def generate(self, prompt_ids: Prompt, params: SamplingParams) -> AsyncGenerator[TokenChunk, None]:
        self.asked += 1
        if self.hangs:
            await asyncio.Event().wait()
        count = 0
        async for chunk in super().generate(prompt_ids, params):
            if self.failure and count == self.fails_after:
                raise self.failure
            yield chunk
            count += 1

    async def load(self, policy: Policy) -> None:
        self._check_answers()
        await super().load(policy)

    async def status(self) -> EngineStatus:
        self._check_answers()
        return await super().status()

    def restart(self) -> None:
        self._version = 0

    def _check_answers(self) -> None:
        if not self.answers:
            raise EngineUnavailable("it is gone")


Start = Callable[..., Any]


@pytest.fixture
async def pool_of(tiny: Path) -> AsyncIterator[Start]:
    pools: list[EnginePool] = []

    async def start(
        count: int = 2, period: float = 0.02, newest: PolicySource | None = None
    ) -> tuple[EnginePool, list[FlakyEngine]]:
        engines = [FlakyEngine(tiny) for _ in range(count)]
        pools.append(EnginePool(engines, period=period, newest_policy=newest))
        await pools[-1].start(5)
        return pools[-1], engines

    yield start
    for pool in pools:
        await pool.close()


async def until(condition: Callable[[], bool], seconds: float = 20) -> None:
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 - what is waited for is a health check
            await asyncio.sleep(0.005)


async def answers(engine: Engine, **params: object) -> bool:
    return (await collect(engine, PROMPT, **params))[-1].finish_reason == "stop"


async def test_pool_keeps_a_session_on_its_engine_and_spreads_others(pool_of: Start) -> None:
    pool, engines = await pool_of(3)
    for _ in range(4):
        for session in range(6):
            assert await answers(pool.for_session(f"sess-{session}"))
    assert [engine.asked for engine in engines] == [8, 8, 8]
    for _ in range(5):
        assert await answers(pool.for_session("sess-0"))
    assert sorted(engine.asked for engine in engines) == [8, 8, 13]


async def test_pool_moves_a_session_away_from_a_much_busier_engine(pool_of: Start) -> None:
    pool, engines = await pool_of(2)
    assert await answers(pool.for_session("busy"))
    (used,) = [engine for engine in engines if engine.asked]
    used.hangs = True
    waiting = [asyncio.create_task(collect(pool.for_session("busy"), PROMPT)) for _ in range(9)]
    await until(lambda: used.asked == 10)
    assert await answers(pool.for_session("busy"))
    assert used.asked == 10
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)


async def test_pool_sends_requests_to_the_least_busy_engine(pool_of: Start) -> None:
    pool, engines = await pool_of(3)
    for engine in engines:
        engine.hangs = True
    waiting = [asyncio.create_task(collect(pool, PROMPT)) for _ in range(6)]
    await until(lambda: sum(engine.asked for engine in engines) == 6)
    assert [engine.asked for engine in engines] == [2, 2, 2]
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)


async def test_pool_counts_requests_of_other_clients_as_load(pool_of: Start) -> None:
    pool, engines = await pool_of(2)
    engines[0].hangs = True
    engines[0]._running = 5  # what another gateway has there
    await asyncio.sleep(0.1)
    for _ in range(4):
        assert await answers(pool)
    assert engines[1].asked == 4
    engines[0]._running = 0


async def test_pool_retries_on_another_engine_before_the_first_token(pool_of: Start) -> None:
    pool, engines = await pool_of(2)
    assert await answers(pool.for_session("s"))
    engines[0].failure = engines[1].failure = None
    used = next(engine for engine in engines if engine.asked)
    used.failure, used.answers = EngineUnavailable("restarting"), False
    assert await answers(pool.for_session("s"))
    assert used.asked == 2
    assert await answers(pool.for_session("s"))
    assert used.asked == 2, "left out while it does not answer"
    used.failure, used.answers = None, True
    other = next(engine for engine in engines if engine is not used)
    await until(lambda: pool.members[engines.index(used)].healthy)
    other.failure, other.answers = EngineUnavailable("restarting"), False
    assert await answers(pool.for_session("s"))
    assert used.asked == 3, "it has returned"


async def test_pool_raises_unavailable_if_an_engine_fails_after_the_first_token(pool_of: Start) -> None:
    pool, engines = await pool_of(2)
    for engine in engines:
        engine.failure, engine.fails_after = EngineUnavailable("it died"), 2
    stream = pool.generate(PROMPT, SamplingParams())
    received = [await anext(stream), await anext(stream)]
    assert len(ids_of(received)) == 2
    with pytest.raises(EngineUnavailable, match="it died"):
        await anext(stream)
    assert sum(engine.asked for engine in engines) == 1


@pytest.mark.parametrize("error", [PromptTooLong("too long"), EngineError("refused")])
async def test_pool_does_not_retry_rejected_requests(pool_of: Start, error: EngineError) -> None:
    pool, engines = await pool_of(2)
    for engine in engines:
        engine.failure = error
    with pytest.raises(type(error), match=str(error)):
        await collect(pool, PROMPT)
    assert sum(engine.asked for engine in engines) == 1
    for engine in engines:
        engine.failure = None
    assert await answers(pool)


async def test_pool_without_healthy_engines_fails_immediately_and_recovers(pool_of: Start) -> None:
    pool, engines = await pool_of(2)
    for engine in engines:
        engine.answers, engine.failure = False, EngineUnavailable("it is gone")
    for ask in (lambda: collect(pool, PROMPT), lambda: pool.status(), lambda: pool.load(policy(1))):
        with pytest.raises(EngineUnavailable, match=r"None of the 2 engines can answer .*it is gone"):
            async with asyncio.timeout(2):
                await ask()
    for engine in engines:
        engine.answers, engine.failure = True, None
    await until(lambda: any(member.healthy for member in pool.members))
    assert set(versions_of(await collect(pool, PROMPT))) == {1}, "loaded when it was known, not when reached"


async def test_pool_moves_waiting_requests_away_from_a_dead_engine(pool_of: Start) -> None:
    pool, engines = await pool_of(2)
    engines[0].hangs = engines[1].hangs = True
    waiting = asyncio.create_task(collect(pool, PROMPT))
    await until(lambda: any(engine.asked for engine in engines))
    dead = next(engine for engine in engines if engine.asked)
    for engine in engines:
        engine.hangs = engine is dead
    dead.answers = False
    async with asyncio.timeout(10):
        assert (await waiting)[-1].finish_reason == "stop"


def policy(version: int) -> Policy:
    return Policy("p", version, Artifact("base"))


async def test_pool_loads_the_newest_policy_on_a_returning_engine_first(pool_of: Start) -> None:
    pool, engines = await pool_of(2)
    await pool.load(policy(1))
    engines[0].answers = False
    await until(lambda: not pool.members[0].healthy)
    await pool.load(policy(2))
    await pool.load(policy(3))
    engines[0].restart()
    engines[0].answers, engines[1].answers = True, False
    await until(lambda: pool.members[0].healthy and not pool.members[1].healthy)
    assert set(versions_of(await collect(pool, PROMPT))) == {3}


async def test_pool_does_not_serve_old_policy_after_an_unnoticed_restart(
    pool_of: Start,
) -> None:
    pool, engines = await pool_of(2, period=60)
    await pool.load(policy(4))
    engines[0].restart()
    for _ in range(4):
        assert set(versions_of(await collect(pool, PROMPT))) == {4}
    await until(lambda: pool.members[0].healthy)
    assert (await engines[0].status()).version == 4


async def test_pool_reads_the_newest_policy_from_its_source(pool_of: Start) -> None:
    head = policy(7)

    async def newest() -> Policy:
        return head

    pool, engines = await pool_of(2, newest=newest)
    assert [(await engine.status()).version for engine in engines] == [7, 7]
    head = policy(5)
    for engine in engines:
        await engine.load(head)  # the trainer made an earlier version the head again
    assert set(versions_of(await collect(pool, PROMPT))) == {5}


async def test_pool_waits_for_live_weights_from_the_trainer(pool_of: Start) -> None:
    head = Policy("p", 0, Artifact("base"))

    async def newest() -> Policy:
        return head

    pool, engines = await pool_of(2, newest=newest)
    engines[0].answers = False
    await until(lambda: not pool.members[0].healthy)
    head = Policy("p", 4, Artifact("live"))
    engines[0].answers = True
    await until(lambda: "has not sent it version 4" in pool.members[0].reason)
    engines[0]._version = 4  # as the trainer does it
    await until(lambda: pool.members[0].healthy)


@asynccontextmanager
async def proxied(engine_url: str, strange: asyncio.Event) -> AsyncIterator[str]:
    """The engine behind a proxy, which answers in its place while ``strange`` is set."""

    async def answer(request: web.Request) -> web.Response:
        if strange.is_set():
            return web.Response(text="<html>back soon</html>")
        async with aiohttp.ClientSession() as client, client.get(engine_url + request.path) as response:
            return web.Response(body=await response.read(), status=response.status)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def test_pool_excludes_an_engine_while_its_responses_are_invalid(tiny: Path) -> None:
    strange = asyncio.Event()
    async with serve_engine(scripted_engine(tiny), None) as url, proxied(url, strange) as address:
        pool = EnginePool([RemoteEngine(address)], period=0.02)
        await pool.start(5)
        (member,) = pool.members
        strange.set()
        await until(lambda: not member.healthy)
        assert "is no engine" in member.reason
        with pytest.raises(EngineUnavailable, match="is no engine"):
            await member.engine.refresh()
        with pytest.raises(EngineUnavailable):
            await collect(member.engine, PROMPT)
        strange.clear()
        await until(lambda: member.healthy)
        await pool.close()


async def test_pool_rejects_engines_with_different_contexts(tiny: Path) -> None:
    pool = EnginePool([FlakyEngine(tiny), FlakyEngine(tiny, context=128)])
    with pytest.raises(ConfigError, match=r"a context of 128.* and .*a context of 256"):
        await pool.start(5)
    await pool.close()


async def test_pool_excludes_an_engine_that_returns_with_another_model(pool_of: Start) -> None:
    pool, engines = await pool_of(2)
    engines[0].answers = False
    await until(lambda: not pool.members[0].healthy)
    engines[0]._info = EngineInfo("scripted", "another", 10, 20, ("base",))
    engines[0].answers = True
    await until(lambda: "another" in pool.members[0].reason)
    assert not pool.members[0].healthy


async def test_connect_engines_raises_unavailable_if_none_responds_in_time() -> None:
    with pytest.raises(EngineUnavailable, match="None of the 2 engines"):
        await connect_engines(["http://127.0.0.1:9", "http://127.0.0.1:10"], timeout=0.3)


class Process:
    """An engine process that can be killed and started again behind the same socket."""

    def __init__(self, tiny: Path) -> None:
        self._tiny = tiny
        self.listener: socket.socket = bind("127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self.listener.getsockname()[1]}"
        self.process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        if self.listener.fileno() < 0:
            self.listener = bind("127.0.0.1", int(self.url.rsplit(":", 1)[1]))
        fd = self.listener.fileno()
        self.process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "tests.unit.engines.engine_process", str(self._tiny), str(fd), LONG_REPLY),
            pass_fds=(fd,),
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )

    async def kill(self, *, refuse: bool) -> None:
        """``refuse``: nobody listens any more; else connections wait, as behind a supervisor's socket."""
        assert self.process is not None
        if refuse:
            self.listener.close()
        if self.process.returncode is None:
            self.process.send_signal(signal.SIGKILL)
        await self.process.wait()


@pytest.fixture
async def processes(tiny: Path) -> AsyncIterator[list[Process]]:
    made = [Process(tiny) for _ in range(3)]
    for process in made:
        await process.start()
    yield made
    for process in made:
        await process.kill(refuse=True)


async def test_pool_serves_requests_while_engines_are_killed_and_restarted(processes: list[Process]) -> None:
    remotes = [await RemoteEngine.connect(process.url, timeout=60) for process in processes]
    pool = EnginePool(remotes, period=0.1, timeout=0.5)
    await pool.start(60)
    await pool.load(policy(2))
    broken_off: list[int] = []
    done = 0
    stop = asyncio.Event()

    async def talk(session: str) -> None:
        nonlocal done
        while not stop.is_set():
            received: list[TokenChunk] = []
            try:
                stream = pool.for_session(session).generate(
                    PROMPT, SamplingParams(max_tokens=8, temperature=0)
                )
                async for chunk in stream:
                    received.append(chunk)
            except EngineUnavailable:
                broken_off.append(len(received))
                continue
            assert len(ids_of(received)) == 8
            assert set(versions_of(received)) == {2}
            done += 1

    talking = [asyncio.create_task(talk(f"sess-{i}")) for i in range(12)]
    await asyncio.sleep(0.5)
    for place, refuse in ((0, True), (1, False)):
        member = pool.members[place]
        await processes[place].kill(refuse=refuse)
        await until(lambda member=member: not member.healthy)
        before = done
        await until(lambda before=before: done > before + 50)
        await processes[place].start()
        await until(lambda member=member: member.healthy, 60)
        served = member.total_requests
        talking += [asyncio.create_task(talk(f"sess-{place}-{i}")) for i in range(6)]
        await until(lambda member=member, served=served: member.total_requests > served + 5)
    stop.set()
    await asyncio.gather(*talking)
    assert all(count > 0 for count in broken_off), "nothing failed that had not begun"
    assert 1 <= len(broken_off) <= 30, "what had begun there was told to have ended"
    await wait_until_idle(pool)
    await pool.close()


async def test_pool_replace_adds_and_removes_engines(pool_of: Start, tiny: Path) -> None:
    pool, (stays, goes) = await pool_of()
    goes.hangs = stays.hangs = True
    waiting = asyncio.create_task(collect(pool, PROMPT, max_tokens=8))
    await until(lambda: stays.asked + goes.asked == 1)
    left, gone = (stays, goes) if goes.asked else (goes, stays)
    left.hangs = False
    comes = FlakyEngine(tiny)
    comes.answers = False
    await pool.replace([left, comes])
    assert len(ids_of(await waiting)) == 8, "what the one that went had not begun is for others"
    assert [member.engine for member in pool.members] == [left, comes]
    for _ in range(3):
        await collect(pool, PROMPT, max_tokens=2)
    assert comes.asked == 0
    comes.answers = True
    await until(lambda: pool.members[1].healthy)
    await pool.replace([comes])
    await collect(pool, PROMPT, max_tokens=2)
    assert (gone.asked, comes.asked) == (1, 1)


async def exhaust(stream: AsyncGenerator[TokenChunk, None]) -> None:
    async for _ in stream:
        pass


async def test_pool_replace_aborts_replies_of_removed_engines(tiny: Path) -> None:
    engine = ScriptedEngine(
        ModelConfig(name=str(tiny), max_context=256),
        ScriptedEngineConfig(replies=["on and on " * 20], delay=0.05),
    )
    async with serve_engine(engine, "s") as url:
        pool = EnginePool([RemoteEngine(url, "s")])
        await pool.start(10)
        stream = pool.generate(PROMPT, SamplingParams(max_tokens=100))
        await anext(stream)
        await pool.replace([])
        with pytest.raises(EngineUnavailable):
            await asyncio.wait_for(exhaust(stream), 3)
        await pool.close()
