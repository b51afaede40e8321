"""Tests that versions are swapped, and engines restarted, under live streams."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import uvicorn
from peft import LoraConfig

from instar.config import GatewayConfig, LocalEngineConfig, ModelConfig, ScriptedEngineConfig
from instar.engines.base import Engine
from instar.engines.local.engine import LocalEngine
from instar.engines.pool import EnginePool
from instar.engines.remote import RemoteEngine
from instar.engines.scripted import ScriptedEngine
from instar.engines.server import create_engine_app
from instar.gateway.live_policies import LiveOptions
from instar.types import Artifact, Policy
from tests.tiny import make_tiny_model
from tests.unit.engines.conftest import save_adapter
from tests.unit.gateway.conftest import ADMIN_KEY, RunningGateway, StartGateway
from tests.unit.gateway.test_live_policies import (
    POLICY,
    chat,
    get_versions,
    make_engine,
    wait_for_version,
    wait_until,
)
from tests.versions import publish_serving

STREAMS = 32
SWAPS = 3


@dataclass
class Stream:
    """A client that sends one streamed call after another in one session."""

    gateway: RunningGateway
    number: int
    call_ids: list[str] = field(default_factory=list[str])
    problems: list[str] = field(default_factory=list[str])

    async def run(self, stop: asyncio.Event) -> None:
        messages = [{"role": "user", "content": f"question {self.number}"}]
        body = {"model": "m", "messages": messages, "max_tokens": 16, "stream": True, "seed": self.number}
        headers = {"Authorization": f"Bearer {ADMIN_KEY}"}
        session = await self.gateway.open_session()
        path = f"/s/{session.session_id}/v1/chat/completions"
        while not stop.is_set():
            async with self.gateway.http.stream("POST", path, json=body, headers=headers) as response:
                lines = [line async for line in response.aiter_lines() if line.startswith("data: ")]
            if response.status_code != 200 or lines[-1] != "data: [DONE]":
                self.problems.append(f"{response.status_code}: {lines}")
            else:
                self.call_ids.append(json.loads(lines[0].removeprefix("data: "))["id"])


async def test_swaps_under_32_streams_fail_no_request_and_every_token_has_its_version(
    start_gateway: StartGateway, tmp_path: Path
) -> None:
    folder = make_tiny_model(tmp_path / "tiny")
    artifacts = [Artifact("adapter", str(tmp_path / f"adapter-{seed}")) for seed in range(SWAPS)]
    lora = LoraConfig(r=4, lora_alpha=16, target_modules="all-linear")
    for seed, artifact in enumerate(artifacts):
        save_adapter(folder, Path(artifact.path), lora, seed=seed)
    model = ModelConfig(name=str(folder), dtype="fp32", device="cpu", max_context=256)
    engine = LocalEngine(model, LocalEngineConfig(threads=1))
    gateway = await start_gateway(engine, GatewayConfig(max_in_flight=64), live=LiveOptions())
    gateway.http.timeout = 120.0
    stop, streams = asyncio.Event(), [Stream(gateway, number) for number in range(STREAMS)]
    async with asyncio.TaskGroup() as tasks:
        for stream in streams:
            tasks.create_task(stream.run(stop))
        for number, artifact in enumerate(artifacts):
            await asyncio.sleep(0.5)
            assert await publish_serving(gateway.store, POLICY, artifact=artifact) == number + 1
            await wait_for_version(gateway, number + 1)
        await asyncio.sleep(0.5)
        stop.set()
    assert [problem for stream in streams for problem in stream.problems] == []
    calls = [
        (await gateway.store.calls_by_request(call_id))[0]
        for stream in streams
        for call_id in stream.call_ids
    ]
    assert all(len(set(call.versions.tolist())) == 1 for call in calls)
    assert all(len(call.versions) == len(call.sampled_ids) > 0 for call in calls)
    assert {int(call.versions[0]) for call in calls} == set(range(SWAPS + 1))
    # The logprobs are those of the recorded version, so no keys and values of another one were used.
    for version in range(1, SWAPS + 1):
        await engine.load(Policy(POLICY, version, artifacts[version - 1]))
        for call in [call for call in calls if call.versions[0] == version][:4]:
            scores = await engine.logprobs(call.sequence)
            expected = scores[len(call.prompt_ids) :]
            assert call.logprobs.tolist() == pytest.approx(expected.tolist(), abs=1e-3)
    await engine.close()


@asynccontextmanager
async def serving(engine: Engine, listener: socket.socket) -> AsyncGenerator[None]:
    """Serve the engine on a copy of a listening socket, which another engine can use afterwards."""
    config = uvicorn.Config(create_engine_app(engine), log_level="warning", lifespan="off", ws="none")
    server = uvicorn.Server(config)
    task = asyncio.create_task(server.serve([listener.dup()]))
    try:
        yield
    finally:
        server.should_exit = True
        await task


async def test_engine_that_restarts_serves_the_promoted_version_again(
    start_gateway: StartGateway, model: ModelConfig
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        remote = RemoteEngine(f"http://127.0.0.1:{listener.getsockname()[1]}")
        async with serving(make_engine(model), listener):
            await remote.refresh()
            gateway = await start_gateway(remote, live=LiveOptions())
            version = await publish_serving(gateway.store, POLICY)
            await wait_for_version(gateway, version)
        async with serving(make_engine(model), listener):
            assert (await remote.status()).policies == ()
            assert await get_versions(gateway, await chat(gateway)) == {version}
        await remote.close()


async def test_engine_of_a_pool_that_restarts_gets_the_promoted_version_back(
    start_gateway: StartGateway, model: ModelConfig
) -> None:
    config = ScriptedEngineConfig(replies=["hello"])
    engines = [ScriptedEngine(model, config) for _ in range(2)]
    pool = EnginePool(engines, check_interval=0.1)
    await pool.connect(5)
    gateway = await start_gateway(pool, live=LiveOptions())
    version = await publish_serving(gateway.store, POLICY)
    await wait_for_version(gateway, version)
    lost = Policy(POLICY, version, Artifact("adapter", "x")).ref
    await engines[0].unload(lost)  # as a restarted engine, which has no policies

    async def has_version() -> bool:
        assert await get_versions(gateway, await chat(gateway)) == {version}
        return lost in (await engines[0].status()).policies

    await wait_until(has_version)
    await pool.close()
