"""Tests for the vLLM engine with an external server that goes down and comes back."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from instar.config import ModelConfig, VllmEngineConfig
from instar.engines.base import WeightTransfer
from instar.engines.vllm.engine import VllmEngine
from instar.engines.vllm.servers import ExternalVllm, ServerCallbacks
from instar.engines.vllm.wire import encode_constraint
from instar.errors import ConstraintError, EngineUnavailable
from instar.types import Artifact, CallForm, OutputConstraint, Policy, SamplingParams
from tests.unit.engines.conformance import collect
from tests.unit.engines.fake_vllm import END_EVENT, GENERATE_PATH, FakeVllm, StatefulFakeVllm, make_event


@asynccontextmanager
async def connect_engine(server: FakeVllm, tiny_model: Path, **settings: Any) -> AsyncIterator[VllmEngine]:
    device, adapter = settings.pop("device", "auto"), settings.pop("adapter", None)
    model = ModelConfig(name=str(tiny_model), max_context=64, device=device, adapter=adapter)
    config = VllmEngineConfig.model_validate({"servers": [server.url], "start_timeout": 10, **settings})
    engine = VllmEngine(model, config, check_interval=0.02)
    await engine.start(Path("unused.log"), lambda _: None)
    try:
        yield engine
    finally:
        await engine.close()


def make_adapter_policy(folder: Path, version: int) -> Policy:
    path = folder / f"v{version}"
    path.mkdir(exist_ok=True)
    (path / "adapter_config.json").write_text('{"r": 4}')
    return Policy("run", version, Artifact("adapter", str(path)))


def make_live_policy(version: int) -> Policy:
    return Policy("run", version, Artifact("live"))


async def push_live(engine: VllmEngine, policy: Policy) -> None:
    await engine.stage(WeightTransfer(policy, "ipc", {"buffer": "b"}))
    await engine.commit(policy)


async def wait_until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 - there is no event
            await asyncio.sleep(0.01)


@asynccontextmanager
async def server_down(server: FakeVllm, engine: VllmEngine) -> AsyncIterator[None]:
    """Make health checks fail during the block, then wait until the engine has reconnected."""
    server.failing_paths.add("/health")
    await wait_until(lambda: not engine._ready.is_set())
    yield
    server.failing_paths.clear()
    await wait_until(engine._ready.is_set)


async def get_served_version(engine: VllmEngine) -> int:
    return (await engine.status()).version


async def test_engine_unloads_its_adapters_when_closed(tiny_model: Path, tmp_path: Path) -> None:
    async with StatefulFakeVllm(tiny_model, supports_adapters=True).serving() as server:
        for _ in range(2):
            async with connect_engine(server, tiny_model) as engine:
                await engine.load(make_adapter_policy(tmp_path, 1))
                assert await get_served_version(engine) == 1
                assert len(server.adapters) == 1
            assert not server.adapters
        # Two engines can use the same server and adapter.
        async with connect_engine(server, tiny_model) as first_engine:
            await first_engine.load(make_adapter_policy(tmp_path, 1))
            async with connect_engine(server, tiny_model) as engine:
                await engine.load(make_adapter_policy(tmp_path, 1))
                assert await get_served_version(engine) == 1


@pytest.mark.parametrize("reports_start_time", [True, False])
async def test_old_adapters_are_unloaded_even_after_missed_health_checks(
    reports_start_time: bool, tiny_model: Path, tmp_path: Path
) -> None:
    async with StatefulFakeVllm(tiny_model, supports_adapters=True).serving() as server:
        server.reports_start_time = reports_start_time
        async with connect_engine(server, tiny_model, max_adapters=1) as engine:
            await engine.load(make_adapter_policy(tmp_path, 1))
            for _ in range(2):
                async with server_down(server, engine):
                    pass
                assert await get_served_version(engine) == 1
            await engine.load(make_adapter_policy(tmp_path, 2))
            await wait_until(lambda: len(server.adapters) == 1)


async def test_restarted_server_reloads_its_adapter(tiny_model: Path, tmp_path: Path) -> None:
    async with (
        StatefulFakeVllm(tiny_model, supports_adapters=True).serving() as server,
        connect_engine(server, tiny_model) as engine,
    ):
        await engine.load(make_adapter_policy(tmp_path, 3))
        async with server_down(server, engine):
            server.restart()
        assert await get_served_version(engine) == 3
        assert list(server.adapters.values()) == [str(tmp_path / "v3")]


async def test_restarted_server_without_the_initial_adapter_serves_no_policy(
    tiny_model: Path, tmp_path: Path
) -> None:
    async with (
        StatefulFakeVllm(tiny_model, supports_adapters=True).serving() as server,
        connect_engine(server, tiny_model, adapter="run:first") as engine,
    ):
        initial = make_adapter_policy(tmp_path, 0)
        await engine.load(initial)
        (tmp_path / "v0" / "adapter_config.json").unlink()
        async with server_down(server, engine):
            server.restart()
        assert await get_served_version(engine) == -1
        with pytest.raises(EngineUnavailable, match="serves no policy"):
            await anext(engine.generate([1, 2], SamplingParams(max_tokens=1)))
        await engine.load(make_adapter_policy(tmp_path, 0))
        assert await get_served_version(engine) == 0


async def test_missed_health_checks_without_restart_keep_version_and_replies(tiny_model: Path) -> None:
    async with (
        StatefulFakeVllm(tiny_model).serving() as server,
        connect_engine(server, tiny_model, policy="merged") as engine,
    ):
        await push_live(engine, make_live_policy(5))
        server.events.put_nowait(make_event(7))
        chunks = engine.generate([1, 2, 3], SamplingParams(max_tokens=9))
        assert (await anext(chunks)).versions == [5]
        async with server_down(server, engine):
            pass
        server.events.put_nowait(make_event(8, finish="length") + END_EVENT)
        server.events.put_nowait(None)
        assert [v async for chunk in chunks for v in chunk.versions] == [5]
        assert (server.weights, await get_served_version(engine)) == ("run:5", 5)


@pytest.mark.parametrize("reports_start_time", [True, False])
async def test_restarted_server_does_not_keep_the_old_version(
    reports_start_time: bool, tiny_model: Path
) -> None:
    """Weights from the trainer's memory are lost, so the engine serves the base model and reports version 0.
    Weights from files are loaded again."""
    async with (
        StatefulFakeVllm(tiny_model).serving() as server,
        connect_engine(server, tiny_model, policy="merged") as engine,
    ):
        server.reports_start_time = reports_start_time
        await push_live(engine, make_live_policy(5))
        async with server_down(server, engine):
            server.restart()
        assert (server.weights, await get_served_version(engine)) == (str(tiny_model), 0)
        assert not server.paused
        weights_policy = Policy("run", 6, Artifact("weights", str(tiny_model)))
        await engine.load(weights_policy)
        async with server_down(server, engine):
            server.restart()
        assert (server.weights, await get_served_version(engine)) == (str(tiny_model), 6)


async def test_replies_are_split_by_version_if_the_server_may_have_restarted(tiny_model: Path) -> None:
    async with (
        StatefulFakeVllm(tiny_model).serving() as server,
        connect_engine(server, tiny_model, policy="merged") as engine,
    ):
        server.reports_start_time = False
        await push_live(engine, make_live_policy(5))
        server.events.put_nowait(make_event(7))
        chunks = engine.generate([1, 2, 3], SamplingParams(max_tokens=9))
        assert (await anext(chunks)).versions == [5]
        async with server_down(server, engine):
            request_count = len(server.paths)
            server.events.put_nowait(make_event(8))
            assert (await anext(chunks)).versions == [5]
        assert {"/pause", "/resume"} <= set(server.paths[request_count:])
        server.events.put_nowait(make_event(9, finish="length") + END_EVENT)
        server.events.put_nowait(None)
        assert [v async for chunk in chunks for v in chunk.versions] == [0]


async def test_policy_loaded_while_the_server_is_down_is_served_afterwards(tiny_model: Path) -> None:
    async with (
        StatefulFakeVllm(tiny_model).serving() as server,
        connect_engine(server, tiny_model, policy="merged") as engine,
    ):
        async with server_down(server, engine):
            with pytest.raises(EngineUnavailable):
                await engine.load(Policy("run", 6, Artifact("weights", str(tiny_model))))
        assert await get_served_version(engine) == 6


async def test_weights_from_an_earlier_run_are_replaced_at_start(tiny_model: Path) -> None:
    async with StatefulFakeVllm(tiny_model, has_extension=False).serving() as server:
        server.weights = "version 7"
        async with connect_engine(server, tiny_model, policy="merged", device="cpu") as engine:
            assert (server.weights, await get_served_version(engine)) == (str(tiny_model), 0)


async def test_watcher_retries_after_an_os_error() -> None:
    ready_count = 0

    async def on_ready() -> None:
        nonlocal ready_count
        ready_count += 1
        if ready_count == 2:
            raise OSError(28, "No space left on device")

    async with FakeVllm().serving() as server:
        config = VllmEngineConfig(servers=[server.url])
        # The server recovers as soon as the watcher has noticed that it is down.
        callbacks = ServerCallbacks(on_ready, lambda _: server.failing_paths.clear(), lambda _: None)
        external = ExternalVllm(config, callbacks, check_interval=0.02)
        await external.start()
        server.failing_paths.add("/health")
        try:
            await wait_until(lambda: ready_count == 3)
        finally:
            await external.close()


async def test_start_raises_unavailable_after_start_timeout() -> None:
    async def on_ready() -> None: ...

    config = VllmEngineConfig(servers=["http://127.0.0.1:9"], start_timeout=0.1)
    external = ExternalVllm(
        config, ServerCallbacks(on_ready, lambda _: None, lambda _: None), check_interval=0.02
    )
    with pytest.raises(EngineUnavailable, match=r"0\.1 s"):
        await external.start()
    await external.close()


def queue_constrained_reply(server: FakeVllm, prompt: list[int]) -> None:
    """Queue a reply with the tokens 5 and 6, and their full logprobs -3 and -4."""
    server.events.put_nowait(make_event(5) + make_event(6, finish="stop") + END_EVENT)
    server.events.put_nowait(None)
    entries: list[Any] = [{str(token): {"logprob": -2.0}} for token in prompt]
    scores = {
        "prompt_logprobs": [None, *entries[1:], {"5": {"logprob": -3.0}}],
        "choices": [{"token_ids": [6], "logprobs": {"content": [{"logprob": -4.0}]}}],
    }
    server.events.put_nowait(json.dumps(scores).encode())
    server.events.put_nowait(None)


async def test_constrained_reply_has_logprobs_of_both_distributions(tiny_model: Path) -> None:
    """vLLM returns the logprobs of the constrained distribution. The others need a second request."""
    constraint, prompt = OutputConstraint(schema='{"type": "object"}'), [1, 9, 10]
    settings: list[tuple[dict[str, Any], list[float]]] = [
        ({}, [-1.0, -1.0]),
        ({"temperature": 0.0}, [0.0, 0.0]),
        ({"temperature": 0.5}, [math.nan, math.nan]),
    ]
    async with StatefulFakeVllm(tiny_model).serving() as server, connect_engine(server, tiny_model) as engine:
        for params, behavior in settings:
            queue_constrained_reply(server, prompt)
            (chunk,) = await collect(engine, prompt, constraint=constraint, **params)
            assert server.sampling_params[-2]["structured_outputs"] == {"json": '{"type": "object"}'}
            assert server.sampling_params[-1]["prompt_logprobs"] == 0
            assert (chunk.token_ids, chunk.logprobs) == ([5, 6], [-3.0, -4.0])
            assert chunk.behavior_logprobs == pytest.approx(behavior, nan_ok=True)
            assert chunk.finish_reason == "stop"


async def test_schema_that_the_server_rejects_is_a_constraint_error(tiny_model: Path) -> None:
    async with StatefulFakeVllm(tiny_model).serving() as server, connect_engine(server, tiny_model) as engine:
        server.failing_paths.add(GENERATE_PATH)
        with pytest.raises(ConstraintError, match="requested by the test"):
            await collect(engine, [1, 9], constraint=OutputConstraint(schema='{"type": "x"}'))


def test_constraint_with_calls_and_reasoning_becomes_a_structural_tag() -> None:
    """xgrammar 0.2.8 accepts this format. The reasoning is optional."""
    call = CallForm("<call>", '{"type": "object"}', "</call>")
    constraint = OutputConstraint(calls=(call,), separator="\n", reasoning=("<think>", "</think>"))
    value = json.loads(encode_constraint(constraint)["structural_tag"])
    calls, reasoned = value["format"]["elements"]
    assert (calls["type"], calls["separator"], calls["at_least_one"]) == ("tags_with_separator", "\n", True)
    assert calls["tags"][0]["content"] == {"type": "json_schema", "json_schema": {"type": "object"}}
    assert [element["type"] for element in reasoned["elements"]] == ["tag", "or"]
    required = json.loads(
        encode_constraint(OutputConstraint(schema="{}", reasoning=("", "</think>")))["structural_tag"]
    )
    assert [element["type"] for element in required["format"]["elements"]] == ["sequence"]
