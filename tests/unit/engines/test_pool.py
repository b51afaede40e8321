"""Tests for the engine pool: routing, health checks, retries and the policy of each engine."""

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
from instar.engines.policies import PolicyTable
from instar.engines.pool import EnginePool
from instar.engines.remote import RemoteEngine
from instar.engines.scripted import ScriptedEngine
from instar.errors import ConfigError, EngineError, EngineUnavailable, PolicyNotFound, PromptTooLong
from instar.gateway.serve import bind
from instar.types import Artifact, Policy, PolicyRef, SamplingParams, TokenChunk
from tests.unit.engines.conformance import (
    MultiPolicyConformance,
    collect,
    get_ids,
    get_versions,
    wait_until_idle,
)
from tests.unit.engines.test_conformance import LONG_REPLY, create_scripted_engine, serve_engine

PROMPT = [5, 6, 7]


class TestPool(MultiPolicyConformance):
    seeds_matter = False

    @pytest.fixture
    async def engine(self, tiny_model: Path) -> AsyncIterator[Engine]:
        pool = EnginePool([create_scripted_engine(tiny_model), create_scripted_engine(tiny_model)])
        await pool.connect(5)
        yield pool
        await pool.close()


class TestRemotePool(MultiPolicyConformance):
    seeds_matter = False

    @pytest.fixture
    async def engine(self, tiny_model: Path) -> AsyncIterator[Engine]:
        async with (
            serve_engine(create_scripted_engine(tiny_model), "s") as first_url,
            serve_engine(create_scripted_engine(tiny_model), "s") as second_url,
        ):
            pool = await connect_engines([first_url, second_url], "s", timeout=10)
            yield pool
            await pool.close()


class FlakyEngine(ScriptedEngine):
    """A scripted engine that fails on demand."""

    def __init__(self, tiny_model: Path, max_context: int = 256) -> None:
        super().__init__(ModelConfig(name=str(tiny_model), max_context=max_context), ScriptedEngineConfig())
        self.is_reachable = True
        self.hangs = False
        self.failure: EngineError | None = None
        self.chunks_before_failure = 0
        self.request_count = 0

    async def keep(self, policy: Policy) -> None:
        if not self.is_reachable:
            raise EngineUnavailable("not reachable")
        await super().keep(policy)

    async def generate(
        self, prompt_ids: Prompt, params: SamplingParams, policy: PolicyRef | None = None
    ) -> AsyncGenerator[TokenChunk, None]:
        self.request_count += 1
        if self.hangs:
            await asyncio.Event().wait()
        count = 0
        async for chunk in super().generate(prompt_ids, params, policy):
            if self.failure and count == self.chunks_before_failure:
                raise self.failure
            yield chunk
            count += 1

    async def load(self, policy: Policy) -> None:
        self._check_reachable()
        await super().load(policy)

    async def status(self) -> EngineStatus:
        self._check_reachable()
        return await super().status()

    def serve_version(self, version: int) -> None:
        self._policies.set_head(PolicyRef("p", version), None)

    def restart(self) -> None:
        self._policies = PolicyTable(None, 4, lambda _: None)

    def _check_reachable(self) -> None:
        if not self.is_reachable:
            raise EngineUnavailable("not reachable")


CreatePool = Callable[..., Any]


@pytest.fixture
async def create_pool(tiny_model: Path) -> AsyncIterator[CreatePool]:
    pools: list[EnginePool] = []

    async def start(
        count: int = 2, check_interval: float = 0.02, **options: Any
    ) -> tuple[EnginePool, list[FlakyEngine]]:
        engines = [FlakyEngine(tiny_model) for _ in range(count)]
        pools.append(EnginePool(engines, check_interval=check_interval, **options))
        await pools[-1].connect(5)
        return pools[-1], engines

    yield start
    for pool in pools:
        await pool.close()


async def wait_until(condition: Callable[[], bool], timeout_seconds: float = 20) -> None:
    async with asyncio.timeout(timeout_seconds):
        while not condition():  # noqa: ASYNC110 - health checks have no event
            await asyncio.sleep(0.005)


async def send_request(engine: Engine) -> None:
    """Send a request and check that its reply is complete."""
    assert (await collect(engine, PROMPT))[-1].finish_reason == "stop"


async def test_pool_keeps_a_session_on_its_engine_and_spreads_others(create_pool: CreatePool) -> None:
    pool, engines = await create_pool(3)
    for _ in range(4):
        for session in range(6):
            await send_request(pool.for_session(f"sess-{session}"))
    assert [engine.request_count for engine in engines] == [8, 8, 8]
    for _ in range(5):
        await send_request(pool.for_session("sess-0"))
    assert sorted(engine.request_count for engine in engines) == [8, 8, 13]


async def test_pool_moves_a_session_away_from_a_much_busier_engine(create_pool: CreatePool) -> None:
    pool, engines = await create_pool(2)
    await send_request(pool.for_session("busy"))
    (used_engine,) = [engine for engine in engines if engine.request_count]
    used_engine.hangs = True
    waiting_tasks = [asyncio.create_task(collect(pool.for_session("busy"), PROMPT)) for _ in range(9)]
    await wait_until(lambda: used_engine.request_count == 10)
    await send_request(pool.for_session("busy"))
    assert used_engine.request_count == 10
    for task in waiting_tasks:
        task.cancel()
    await asyncio.gather(*waiting_tasks, return_exceptions=True)


async def test_pool_sends_requests_to_the_least_busy_engine(create_pool: CreatePool) -> None:
    pool, engines = await create_pool(3)
    for engine in engines:
        engine.hangs = True
    waiting_tasks = [asyncio.create_task(collect(pool, PROMPT)) for _ in range(6)]
    await wait_until(lambda: sum(engine.request_count for engine in engines) == 6)
    assert [engine.request_count for engine in engines] == [2, 2, 2]
    for task in waiting_tasks:
        task.cancel()
    await asyncio.gather(*waiting_tasks, return_exceptions=True)


async def test_pool_counts_requests_from_other_clients_as_load(create_pool: CreatePool) -> None:
    pool, engines = await create_pool(2)
    engines[0].hangs = True
    engines[0]._status.running = 5  # Requests from another gateway.
    await asyncio.sleep(0.1)
    for _ in range(4):
        await send_request(pool)
    assert engines[1].request_count == 4
    engines[0]._status.running = 0


async def test_pool_retries_on_another_engine_before_the_first_token(create_pool: CreatePool) -> None:
    pool, engines = await create_pool(2)
    await send_request(pool.for_session("s"))
    used_engine = next(engine for engine in engines if engine.request_count)
    used_engine.failure, used_engine.is_reachable = EngineUnavailable("restarting"), False
    await send_request(pool.for_session("s"))
    assert used_engine.request_count == 2
    await send_request(pool.for_session("s"))
    assert used_engine.request_count == 2, "an unreachable engine was used"
    used_engine.failure, used_engine.is_reachable = None, True
    other_engine = next(engine for engine in engines if engine is not used_engine)
    await wait_until(lambda: pool.members[engines.index(used_engine)].is_healthy)
    other_engine.failure, other_engine.is_reachable = EngineUnavailable("restarting"), False
    await send_request(pool.for_session("s"))
    assert used_engine.request_count == 3, "the recovered engine was not used"


async def test_pool_raises_unavailable_if_an_engine_fails_after_the_first_token(
    create_pool: CreatePool,
) -> None:
    pool, engines = await create_pool(2)
    for engine in engines:
        engine.failure, engine.chunks_before_failure = EngineUnavailable("the engine crashed"), 2
    stream = pool.generate(PROMPT, SamplingParams())
    received = [await anext(stream), await anext(stream)]
    assert len(get_ids(received)) == 2
    with pytest.raises(EngineUnavailable, match="the engine crashed"):
        await anext(stream)
    assert sum(engine.request_count for engine in engines) == 1


@pytest.mark.parametrize("error", [PromptTooLong("too long"), EngineError("rejected")])
async def test_pool_does_not_retry_rejected_requests(create_pool: CreatePool, error: EngineError) -> None:
    pool, engines = await create_pool(2)
    for engine in engines:
        engine.failure = error
    with pytest.raises(type(error), match=str(error)):
        await collect(pool, PROMPT)
    assert sum(engine.request_count for engine in engines) == 1
    for engine in engines:
        engine.failure = None
    await send_request(pool)


async def test_pool_without_healthy_engines_fails_immediately_and_recovers(create_pool: CreatePool) -> None:
    pool, engines = await create_pool(2)
    for engine in engines:
        engine.is_reachable, engine.failure = False, EngineUnavailable("not reachable")
    for call in (lambda: collect(pool, PROMPT), lambda: pool.status(), lambda: pool.load(make_policy(1))):
        with pytest.raises(EngineUnavailable, match=r"No engine is available .*not reachable"):
            async with asyncio.timeout(20):
                await call()
    for engine in engines:
        engine.is_reachable, engine.failure = True, None
    await wait_until(lambda: any(member.is_healthy for member in pool.members))
    assert set(get_versions(await collect(pool, PROMPT))) == {1}, (
        "the policy was not loaded after the engines recovered"
    )


async def test_pool_moves_waiting_requests_away_from_a_dead_engine(create_pool: CreatePool) -> None:
    pool, engines = await create_pool(2)
    engines[0].hangs = engines[1].hangs = True
    waiting_task = asyncio.create_task(collect(pool, PROMPT))
    await wait_until(lambda: any(engine.request_count for engine in engines))
    dead_engine = next(engine for engine in engines if engine.request_count)
    for engine in engines:
        engine.hangs = engine is dead_engine
    dead_engine.is_reachable = False
    async with asyncio.timeout(10):
        assert (await waiting_task)[-1].finish_reason == "stop"


def make_policy(version: int) -> Policy:
    return Policy("p", version, Artifact("base"))


async def test_pool_loads_the_newest_policy_before_it_uses_a_returning_engine(
    create_pool: CreatePool,
) -> None:
    pool, engines = await create_pool(2)
    await pool.load(make_policy(1))
    engines[0].is_reachable = False
    await wait_until(lambda: not pool.members[0].is_healthy)
    await pool.load(make_policy(2))
    await pool.load(make_policy(3))
    engines[0].restart()
    engines[0].is_reachable, engines[1].is_reachable = True, False
    await wait_until(lambda: pool.members[0].is_healthy and not pool.members[1].is_healthy)
    assert set(get_versions(await collect(pool, PROMPT))) == {3}


async def test_pool_does_not_serve_the_old_policy_after_an_unnoticed_restart(
    create_pool: CreatePool,
) -> None:
    pool, engines = await create_pool(2, check_interval=60)
    await pool.load(make_policy(4))
    engines[0].restart()
    for _ in range(4):
        assert set(get_versions(await collect(pool, PROMPT))) == {4}
    await wait_until(lambda: pool.members[0].is_healthy)
    assert (await engines[0].status()).version == 4


async def test_pool_reads_the_newest_policy_from_its_source(create_pool: CreatePool) -> None:
    newest = make_policy(7)

    async def get_newest_policy() -> Policy:
        return newest

    pool, engines = await create_pool(2, newest_policy=get_newest_policy)
    assert [(await engine.status()).version for engine in engines] == [7, 7]
    newest = make_policy(5)
    for engine in engines:
        await engine.load(newest)  # The trainer rolled back to an earlier version.
    assert set(get_versions(await collect(pool, PROMPT))) == {5}


async def test_pool_waits_for_weights_that_only_the_trainer_can_send(
    create_pool: CreatePool,
) -> None:
    newest = Policy("p", 0, Artifact("base"))

    async def get_newest_policy() -> Policy:
        return newest

    pool, engines = await create_pool(2, newest_policy=get_newest_policy)
    engines[0].is_reachable = False
    await wait_until(lambda: not pool.members[0].is_healthy)
    newest = Policy("p", 4, Artifact("live"))
    engines[0].is_reachable = True
    await wait_until(lambda: "has not sent version 4" in pool.members[0].unhealthy_reason)
    engines[0].serve_version(4)  # The trainer has sent the weights.
    await wait_until(lambda: pool.members[0].is_healthy)


@pytest.mark.parametrize(("version", "is_accepted"), [(1, False), (2, True), (4, True), (5, False)])
async def test_pool_accepts_live_versions_that_are_at_most_max_versions_behind(
    create_pool: CreatePool, version: int, is_accepted: bool
) -> None:
    newest = Policy("p", 0, Artifact("base"))

    async def get_newest_policy() -> Policy:
        return newest

    pool, engines = await create_pool(2, newest_policy=get_newest_policy, max_versions_behind=2)
    engines[0].is_reachable = False
    await wait_until(lambda: not pool.members[0].is_healthy)
    newest = Policy("p", 4, Artifact("live"))
    engines[0].serve_version(version)
    engines[0].is_reachable = True
    await wait_until(
        lambda: pool.members[0].is_healthy or "not sent version 4" in pool.members[0].unhealthy_reason
    )
    assert pool.members[0].is_healthy == is_accepted


@asynccontextmanager
async def serve_proxy(engine_url: str, is_invalid: asyncio.Event) -> AsyncIterator[str]:
    """Run a proxy for the engine and yield its URL. The proxy returns HTML while ``is_invalid`` is set."""

    async def handle(request: web.Request) -> web.Response:
        if is_invalid.is_set():
            return web.Response(text="<html>maintenance</html>")
        async with aiohttp.ClientSession() as client, client.get(engine_url + request.path) as response:
            return web.Response(body=await response.read(), status=response.status)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def test_pool_excludes_an_engine_while_its_responses_are_invalid(tiny_model: Path) -> None:
    is_invalid = asyncio.Event()
    async with (
        serve_engine(create_scripted_engine(tiny_model), None) as url,
        serve_proxy(url, is_invalid) as proxy_url,
    ):
        pool = EnginePool([RemoteEngine(proxy_url)], check_interval=0.02)
        await pool.connect(5)
        (member,) = pool.members
        is_invalid.set()
        await wait_until(lambda: not member.is_healthy)
        assert "did not send a valid engine response" in member.unhealthy_reason
        with pytest.raises(EngineUnavailable, match="did not send a valid engine response"):
            await member.engine.refresh()
        with pytest.raises(EngineUnavailable):
            await collect(member.engine, PROMPT)
        is_invalid.clear()
        await wait_until(lambda: member.is_healthy)
        await pool.close()


async def test_pool_rejects_engines_with_different_max_contexts(tiny_model: Path) -> None:
    pool = EnginePool([FlakyEngine(tiny_model), FlakyEngine(tiny_model, max_context=128)])
    with pytest.raises(ConfigError, match=r"a context of 128.* and .*a context of 256"):
        await pool.connect(5)
    await pool.close()


async def test_pool_excludes_an_engine_that_returns_with_a_different_model(create_pool: CreatePool) -> None:
    pool, engines = await create_pool(2)
    engines[0].is_reachable = False
    await wait_until(lambda: not pool.members[0].is_healthy)
    engines[0]._info = EngineInfo("scripted", "other-model", 10, 20, ("base",))
    engines[0].is_reachable = True
    await wait_until(lambda: "other-model" in pool.members[0].unhealthy_reason)
    assert not pool.members[0].is_healthy


async def test_connect_engines_raises_unavailable_if_none_responds_in_time() -> None:
    with pytest.raises(EngineUnavailable, match="No engine is available"):
        await connect_engines(["http://127.0.0.1:9", "http://127.0.0.1:10"], timeout=0.3)


async def test_empty_pool_says_that_no_engine_has_been_started() -> None:
    with pytest.raises(EngineUnavailable, match="no engine has been started"):
        await EnginePool([]).connect(0.1)


class EngineProcess:
    """An engine process that can be killed and started again on the same port."""

    def __init__(self, tiny_model: Path) -> None:
        self._tiny_model = tiny_model
        self.listener: socket.socket = bind("127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self.listener.getsockname()[1]}"
        self.process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        if self.listener.fileno() < 0:
            self.listener = bind("127.0.0.1", int(self.url.rsplit(":", 1)[1]))
        fd = self.listener.fileno()
        self.process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "tests.unit.engines.engine_process", str(self._tiny_model), str(fd), LONG_REPLY),
            pass_fds=(fd,),
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )

    async def kill(self, *, close_socket: bool) -> None:
        """Kill the process. Unless ``close_socket`` is set, new connections wait in the socket's backlog."""
        assert self.process is not None
        if close_socket:
            self.listener.close()
        if self.process.returncode is None:
            self.process.send_signal(signal.SIGKILL)
        await self.process.wait()


@pytest.fixture
async def processes(tiny_model: Path) -> AsyncIterator[list[EngineProcess]]:
    started = [EngineProcess(tiny_model) for _ in range(3)]
    for process in started:
        await process.start()
    yield started
    for process in started:
        await process.kill(close_socket=True)


async def test_pool_serves_requests_while_engines_are_killed_and_restarted(
    processes: list[EngineProcess],
) -> None:
    remotes = [await RemoteEngine.connect(process.url, timeout=60) for process in processes]
    pool = EnginePool(remotes, check_interval=0.1, check_timeout=0.5)
    await pool.connect(60)
    await pool.load(make_policy(2))
    aborted_chunk_counts: list[int] = []
    completed = 0
    stop = asyncio.Event()

    async def send_requests(session: str) -> None:
        nonlocal completed
        while not stop.is_set():
            received: list[TokenChunk] = []
            try:
                stream = pool.for_session(session).generate(
                    PROMPT, SamplingParams(max_tokens=8, temperature=0)
                )
                async for chunk in stream:
                    received.append(chunk)
            except EngineUnavailable:
                aborted_chunk_counts.append(len(received))
                continue
            assert len(get_ids(received)) == 8
            assert set(get_versions(received)) == {2}
            completed += 1

    clients = [asyncio.create_task(send_requests(f"sess-{i}")) for i in range(12)]
    await asyncio.sleep(0.5)
    for index, close_socket in ((0, True), (1, False)):
        member = pool.members[index]
        await processes[index].kill(close_socket=close_socket)
        await wait_until(lambda member=member: not member.is_healthy)
        completed_before = completed
        await wait_until(lambda before=completed_before: completed > before + 50)
        await processes[index].start()
        await wait_until(lambda member=member: member.is_healthy, 60)
        requests_before = member.total_requests
        clients += [asyncio.create_task(send_requests(f"sess-{index}-{i}")) for i in range(6)]
        await wait_until(lambda member=member, before=requests_before: member.total_requests > before + 5)
    stop.set()
    await asyncio.gather(*clients)
    assert all(count > 0 for count in aborted_chunk_counts), "a request without tokens was not retried"
    assert 1 <= len(aborted_chunk_counts) <= 30
    await wait_until_idle(pool)
    await pool.close()


async def test_pool_replace_adds_and_removes_engines(create_pool: CreatePool, tiny_model: Path) -> None:
    pool, (first, second) = await create_pool()
    first.hangs = second.hangs = True
    waiting_task = asyncio.create_task(collect(pool, PROMPT, max_tokens=8))
    await wait_until(lambda: first.request_count + second.request_count == 1)
    kept, removed = (first, second) if second.request_count else (second, first)
    kept.hangs = False
    added = FlakyEngine(tiny_model)
    added.is_reachable = False
    await pool.replace([kept, added])
    # The request that was waiting on the removed engine is retried.
    assert len(get_ids(await waiting_task)) == 8
    assert [member.engine for member in pool.members] == [kept, added]
    for _ in range(3):
        await collect(pool, PROMPT, max_tokens=2)
    assert added.request_count == 0
    added.is_reachable = True
    await wait_until(lambda: pool.members[1].is_healthy)
    await pool.replace([added])
    await collect(pool, PROMPT, max_tokens=2)
    assert (removed.request_count, added.request_count) == (1, 1)


async def read_all(stream: AsyncGenerator[TokenChunk, None]) -> None:
    async for _ in stream:
        pass


async def test_pool_replace_aborts_replies_of_removed_engines(tiny_model: Path) -> None:
    engine = ScriptedEngine(
        ModelConfig(name=str(tiny_model), max_context=256),
        ScriptedEngineConfig(replies=["a long reply " * 20], delay=0.05),
    )
    async with serve_engine(engine, "s") as url:
        pool = EnginePool([RemoteEngine(url, "s")])
        await pool.connect(10)
        stream = pool.generate(PROMPT, SamplingParams(max_tokens=100))
        await anext(stream)
        await pool.replace([])
        with pytest.raises(EngineUnavailable):
            await asyncio.wait_for(read_all(stream), 3)
        await pool.close()


async def test_pool_sends_named_policies_to_an_engine_that_has_them(create_pool: CreatePool) -> None:
    pool, engines = await create_pool(3)
    policy = Policy("p", 3, Artifact("base"))
    await engines[1].keep(policy)
    assert (await pool.status()).policies == (policy.ref,)
    for _ in range(4):
        assert set(get_versions(await collect(pool, PROMPT, policy=policy.ref))) == {3}
    routed = pool.for_session("s")
    await collect(routed, PROMPT, policy=policy.ref)
    request_counts = [engine.request_count for engine in engines]
    await collect(routed, PROMPT, policy=policy.ref)
    request_counts[1] += 1  # The session stays on the engine that has the policy.
    assert [engine.request_count for engine in engines] == request_counts
    with pytest.raises(PolicyNotFound, match="does not have p@4"):
        await collect(pool, PROMPT, policy=PolicyRef("p", 4))
    await pool.unload(policy.ref)
    with pytest.raises(PolicyNotFound):
        await pool.unload(policy.ref)
    assert all(member.is_healthy for member in pool.members)


async def test_pool_accepts_named_policies_older_than_the_loaded_one(create_pool: CreatePool) -> None:
    pool, _ = await create_pool(2)
    await pool.load(Policy("p", 4, Artifact("base")))
    await pool.load(Policy("p", 5, Artifact("base")))
    assert set(get_versions(await collect(pool, PROMPT, policy=PolicyRef("p", 4)))) == {4}


async def test_pool_keeps_a_policy_again_in_an_engine_that_lost_it(create_pool: CreatePool) -> None:
    pool, engines = await create_pool(2)
    policy = Policy("p", 3, Artifact("base"))
    await pool.keep(policy)
    await engines[0].unload(policy.ref)
    async with asyncio.timeout(10):
        while policy.ref not in (await engines[0].status()).policies:
            assert set(get_versions(await collect(pool, PROMPT, policy=policy.ref))) == {3}
    engines[1].is_reachable = False
    assert set(get_versions(await collect(pool, PROMPT, policy=policy.ref))) == {3}


async def test_pool_keep_skips_an_engine_that_is_unreachable(create_pool: CreatePool) -> None:
    pool, engines = await create_pool(2)
    engines[0].is_reachable = False
    policy = Policy("p", 3, Artifact("base"))
    await pool.keep(policy)
    assert policy.ref in (await pool.status()).policies
