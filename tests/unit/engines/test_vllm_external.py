"""The vLLM engine at a server that runs already: which policy it serves, as the server comes and goes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from instar.config import ModelConfig, VllmEngineConfig
from instar.engines.base import WeightTransfer
from instar.engines.vllm import external
from instar.engines.vllm.engine import VllmEngine
from instar.engines.vllm.external import ExternalVllm
from instar.errors import EngineUnavailable
from instar.types import Artifact, Policy, SamplingParams
from tests.unit.engines.fake_vllm import END, FakeVllm, StatefulFakeVllm, event


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(external, "PERIOD", 0.02)


@asynccontextmanager
async def engine_at(server: FakeVllm, tiny: Path, **settings: Any) -> AsyncIterator[VllmEngine]:
    model = ModelConfig(name=str(tiny), max_context=64, device=settings.pop("device", "auto"))
    config = VllmEngineConfig.model_validate({"servers": [server.url], "start_timeout": 10, **settings})
    engine = VllmEngine(model, config)
    await engine.bring_up(Path("unused.log"), lambda _: None)
    try:
        yield engine
    finally:
        await engine.close()


def lora(folder: Path, version: int) -> Policy:
    path = folder / f"v{version}"
    path.mkdir(exist_ok=True)
    (path / "adapter_config.json").write_text('{"r": 4}')
    return Policy("run", version, Artifact("adapter", str(path)))


def live(version: int) -> Policy:
    return Policy("run", version, Artifact("live"))


async def bring(engine: VllmEngine, policy: Policy) -> None:
    await engine.stage(WeightTransfer(policy, "ipc", {"buffer": "b"}))
    await engine.commit(policy)


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not true():  # noqa: ASYNC110 - of another's
            await asyncio.sleep(0.01)


@asynccontextmanager
async def away(server: FakeVllm, engine: VllmEngine) -> AsyncIterator[None]:
    """Health checks are missed within, and the engine has found the server again after."""
    server.failing.add("/health")
    await until(lambda: not engine._ready.is_set())
    yield
    server.failing.clear()
    await until(engine._ready.is_set)


async def version(engine: VllmEngine) -> int:
    return (await engine.status()).version


# --- adapters ---------------------------------------------------------------------------------------


async def test_a_second_process_loads_the_same_version_and_leaves_nothing(tiny: Path, tmp_path: Path) -> None:
    async with StatefulFakeVllm(tiny, adapters=True).serving() as server:
        for _ in range(2):
            async with engine_at(server, tiny) as engine:
                await engine.load(lora(tmp_path, 1))
                assert await version(engine) == 1
                assert len(server.adapters) == 1
            assert not server.adapters
        async with engine_at(server, tiny) as killed:
            await killed.load(lora(tmp_path, 1))
            async with engine_at(server, tiny) as engine:
                await engine.load(lora(tmp_path, 1))
                assert await version(engine) == 1


@pytest.mark.parametrize("tells", [True, False])
async def test_adapters_do_not_pile_up_where_checks_are_missed(
    tells: bool, tiny: Path, tmp_path: Path
) -> None:
    async with StatefulFakeVllm(tiny, adapters=True).serving() as server:
        server.reports_start = tells
        async with engine_at(server, tiny) as engine:
            await engine.load(lora(tmp_path, 1))
            for _ in range(2):
                async with away(server, engine):
                    pass
                assert await version(engine) == 1
            await engine.load(lora(tmp_path, 2))
            await until(lambda: len(server.adapters) == 1)


async def test_a_server_that_was_started_again_is_given_its_adapter(tiny: Path, tmp_path: Path) -> None:
    async with StatefulFakeVllm(tiny, adapters=True).serving() as server, engine_at(server, tiny) as engine:
        await engine.load(lora(tmp_path, 3))
        async with away(server, engine):
            server.restart()
        assert await version(engine) == 3
        assert list(server.adapters.values()) == [str(tmp_path / "v3")]


# --- merged -----------------------------------------------------------------------------------------


async def test_a_missed_check_changes_nothing(tiny: Path) -> None:
    """The process is the same, and a reply goes on."""
    async with StatefulFakeVllm(tiny).serving() as server, engine_at(server, tiny, policy="merged") as engine:
        await bring(engine, live(5))
        server.events.put_nowait(event(7))
        chunks = engine.generate([1, 2, 3], SamplingParams(max_tokens=9))
        assert (await anext(chunks)).versions == [5]
        async with away(server, engine):
            pass
        server.events.put_nowait(event(8, finish="length") + END)
        server.events.put_nowait(None)
        assert [v async for chunk in chunks for v in chunk.versions] == [5]
        assert (server.weights, await version(engine)) == ("run:5", 5)


@pytest.mark.parametrize("tells", [True, False])
async def test_a_server_that_was_started_again_is_not_taken_for_the_one_before(
    tells: bool, tiny: Path
) -> None:
    """What came from the trainer's memory cannot be loaded again: it serves the base model, and says so."""
    async with StatefulFakeVllm(tiny).serving() as server, engine_at(server, tiny, policy="merged") as engine:
        server.reports_start = tells
        await bring(engine, live(5))
        async with away(server, engine):
            server.restart()
        assert (server.weights, await version(engine)) == (str(tiny), 0)
        assert not server.paused
        weights = Policy("run", 6, Artifact("weights", str(tiny)))
        await engine.load(weights)
        async with away(server, engine):
            server.restart()
        assert (server.weights, await version(engine)) == (str(tiny), 6)


async def test_replies_are_divided_where_it_is_not_known_whether_it_was_started_again(tiny: Path) -> None:
    async with StatefulFakeVllm(tiny).serving() as server, engine_at(server, tiny, policy="merged") as engine:
        server.reports_start = False
        await bring(engine, live(5))
        server.events.put_nowait(event(7))
        chunks = engine.generate([1, 2, 3], SamplingParams(max_tokens=9))
        assert (await anext(chunks)).versions == [5]
        async with away(server, engine):
            before = len(server.paths)
            server.events.put_nowait(event(8))
            assert (await anext(chunks)).versions == [5]
        assert {"/pause", "/resume"} <= set(server.paths[before:])
        server.events.put_nowait(event(9, finish="length") + END)
        server.events.put_nowait(None)
        assert [v async for chunk in chunks for v in chunk.versions] == [0]


async def test_what_was_brought_while_it_was_away_is_served_after(tiny: Path) -> None:
    async with StatefulFakeVllm(tiny).serving() as server, engine_at(server, tiny, policy="merged") as engine:
        async with away(server, engine):
            with pytest.raises(EngineUnavailable):
                await engine.load(Policy("run", 6, Artifact("weights", str(tiny))))
        assert await version(engine) == 6


async def test_weights_that_another_run_has_left_are_replaced(tiny: Path) -> None:
    async with StatefulFakeVllm(tiny, extended=False).serving() as server:
        server.weights = "those of version 7"
        async with engine_at(server, tiny, policy="merged", device="cpu") as engine:
            assert (server.weights, await version(engine)) == (str(tiny), 0)


# --- the address ------------------------------------------------------------------------------------


async def test_the_watcher_goes_on_when_the_disk_is_full() -> None:
    ups: list[int] = []

    async def up() -> None:
        ups.append(1)
        if len(ups) == 2:
            raise OSError(28, "No space left on device")

    async with FakeVllm().serving() as server:
        config = VllmEngineConfig(servers=[server.url])
        given = ExternalVllm(config, up=up, down=lambda _: server.failing.clear(), say=lambda _: None)
        await given.start()
        server.failing.add("/health")
        try:
            await until(lambda: len(ups) == 3)
        finally:
            await given.close()


async def test_a_server_that_does_not_answer_is_unavailable() -> None:
    async def up() -> None: ...

    config = VllmEngineConfig(servers=["http://127.0.0.1:9"], start_timeout=0.1)
    given = ExternalVllm(config, up=up, down=lambda _: None, say=lambda _: None)
    with pytest.raises(EngineUnavailable, match=r"0\.1 s"):
        await given.start()
    await given.close()
