"""Run the conformance tests on the local and scripted engines, in this process and over HTTP."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import uvicorn

from instar.config import LocalEngineConfig, ModelConfig, RunConfig, ScriptedEngineConfig
from instar.engines.base import Engine
from instar.engines.factory import create_engine
from instar.engines.remote import RemoteEngine
from instar.engines.server import DrainGate, create_engine_app
from tests.unit.engines.conformance import MultiPolicyConformance

LONG_REPLY = "The answer is 893, and here is a long story about it: " + "tell me more. " * 40


def create_local_engine(tiny_model: Path) -> Engine:
    model = ModelConfig(name=str(tiny_model), dtype="fp32", device="cpu", max_context=256)
    return create_engine(RunConfig(model=model, engine=LocalEngineConfig(threads=1, prefill_tokens=64)))


def create_scripted_engine(tiny_model: Path, *, delay: float = 0.001, max_context: int = 256) -> Engine:
    model = ModelConfig(name=str(tiny_model), max_context=max_context)
    return create_engine(
        RunConfig(model=model, engine=ScriptedEngineConfig(replies=[LONG_REPLY], delay=delay))
    )


@asynccontextmanager
async def serve_engine(
    engine: Engine, token: str | None, gate: DrainGate | None = None
) -> AsyncIterator[str]:
    """Serve the engine on a real socket and yield its URL."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        config = uvicorn.Config(
            create_engine_app(engine, token, gate), log_level="warning", lifespan="off", ws="none"
        )
        server = uvicorn.Server(config)
        server_task = asyncio.create_task(server.serve([listener]))
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            await server_task


class TestLocal(MultiPolicyConformance):
    @pytest.fixture
    async def engine(self, tiny_model: Path) -> AsyncIterator[Engine]:
        engine = create_local_engine(tiny_model)
        yield engine
        await engine.close()


class TestScripted(MultiPolicyConformance):
    seeds_matter = False

    @pytest.fixture
    async def engine(self, tiny_model: Path) -> AsyncIterator[Engine]:
        engine = create_scripted_engine(tiny_model)
        yield engine
        await engine.close()


class TestRemoteLocal(MultiPolicyConformance):
    @pytest.fixture
    async def engine(self, tiny_model: Path) -> AsyncIterator[Engine]:
        local = create_local_engine(tiny_model)
        async with serve_engine(local, "secret") as url:
            remote = await RemoteEngine.connect(url, "secret", timeout=10)
            yield remote
            await remote.close()
        await local.close()


class TestRemoteScripted(MultiPolicyConformance):
    seeds_matter = False

    @pytest.fixture
    async def engine(self, tiny_model: Path) -> AsyncIterator[Engine]:
        scripted = create_scripted_engine(tiny_model)
        async with serve_engine(scripted, None) as url:
            remote = await RemoteEngine.connect(url, timeout=10)
            yield remote
            await remote.close()
        await scripted.close()
