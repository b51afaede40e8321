"""Tests for runs with several engines: restarts, names, rejected types and shared cores."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import httpx
import pytest
from transformers import LlamaConfig

from instar.cli.display import roles_table
from instar.cluster.cores import share_cores
from instar.cluster.layout import engine_names
from instar.cluster.live_run import LiveRun, fetch_engine_status, serve_run
from instar.cluster.run import train
from instar.cluster.supervisor import ChildProcess
from instar.config import RolloutConfig, RunConfig
from instar.engines.remote import RemoteEngine
from instar.errors import ConfigError
from instar.store.factory import open_store
from instar.types import Endpoint
from tests.tiny import make_tiny_tokenizer


def make_config(folder: Path, **engine: object) -> RunConfig:
    make_tiny_tokenizer().save_pretrained(folder / "model")
    LlamaConfig().save_pretrained(folder / "model")
    return RunConfig.model_validate(
        {
            "name": "two",
            "dir": str(folder / "run"),
            "model": {"name": str(folder / "model"), "max_context": 1024},
            "gateway": {"port": 0},
            "engine": {"type": "scripted", "replies": ["fine, thank you"], **engine},
        }
    )


@pytest.fixture
async def run(tmp_path: Path) -> AsyncIterator[LiveRun]:
    async with serve_run(make_config(tmp_path, count=2), log=lambda _: None) as live:
        yield live


async def send_chat(http: httpx.AsyncClient, text: str) -> None:
    body = {"model": "any", "messages": [{"role": "user", "content": text}]}
    response = await http.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    assert response.json()["choices"][0]["message"]["content"] == "fine, thank you"


async def wait_until(condition: Callable[[], Awaitable[bool]], timeout_seconds: float = 90) -> None:
    async with asyncio.timeout(timeout_seconds):
        while not await condition():  # noqa: ASYNC110 - waits for another process
            await asyncio.sleep(0.05)


async def test_gateway_keeps_serving_while_a_killed_engine_restarts(run: LiveRun) -> None:
    first, second = [await RemoteEngine.connect(url, run.engine_token) for url in run.engine_urls]
    request_count = 0

    async def reach_both_engines() -> bool:
        """Send four requests, and return True if both engines have generated tokens."""
        nonlocal request_count
        for _ in range(4):
            request_count += 1
            await send_chat(http, f"how are you, {request_count}?")
        statuses = [await first.status(), await second.status()]
        return all(status.generated_tokens > 0 for status in statuses)

    headers = {"Authorization": f"Bearer {run.admin_key}"}
    async with httpx.AsyncClient(base_url=run.gateway_url, headers=headers, timeout=60) as http:
        await wait_until(reach_both_engines)
        role = run.cluster.roles["engine-0"]
        assert isinstance(role, ChildProcess)
        assert role.process is not None
        os.kill(role.process.pid, signal.SIGKILL)
        for n in range(20):
            await send_chat(http, f"and you, {n}?")
        await wait_until(reach_both_engines)  # the new process starts without generated tokens
        assert role.restarts == 1
    endpoints = await run.store.endpoints(run.run_id)
    urls = {(endpoint.role, endpoint.name): endpoint.url for endpoint in endpoints}
    assert [urls["engine", name] for name in ("engine-0", "engine-1")] == run.engine_urls
    assert roles_table(endpoints).row_count == 3
    status = await fetch_engine_status(run)
    assert status is not None
    statuses = [await first.status(), await second.status()]
    assert status.generated_tokens == sum(engine.generated_tokens for engine in statuses)
    await first.close()
    await second.close()


def test_engine_names_are_numbered_if_there_are_several(tmp_path: Path) -> None:
    assert engine_names(make_config(tmp_path)) == ["engine"]
    assert engine_names(make_config(tmp_path, count=3)) == ["engine-0", "engine-1", "engine-2"]


async def test_train_with_an_upstream_engine_is_rejected(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    upstream = {"type": "upstream", "base_url": "http://127.0.0.1:9/v1"}
    rollout = RolloutConfig.model_validate(
        {"tasks": {"type": "python", "function": "a:b"}, "agent": {"type": "function", "function": "a:b"}}
    )
    config = RunConfig.model_validate({**config.model_dump(), "engine": upstream, "rollout": rollout})
    assert engine_names(config) == []
    with pytest.raises(ConfigError, match=r"engine\.type: the model of an upstream"):
        await train(config)


@pytest.mark.parametrize("mode", ["sync", "async"])
async def test_share_cores_divides_the_cores_among_engines(tmp_path: Path, mode: str) -> None:
    config = RunConfig.model_validate({"trainer": {"mode": mode}, "store": {"path": str(tmp_path / "s.db")}})
    store = open_store(config)
    cores = len(os.sched_getaffinity(0))

    async def get_core_count() -> int:
        core_counts = asyncio.Queue[int]()
        task = asyncio.create_task(
            share_cores(config, store, "trainer", core_counts.put_nowait, process_count=2)
        )
        try:
            return await asyncio.wait_for(core_counts.get(), 30)
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    assert await get_core_count() == max(1, cores // 2)
    trainer = Endpoint(config.name, "trainer", "trainer", "", 1, "training", heartbeat=time.time() + 60)
    await store.put_endpoint(trainer)
    assert await get_core_count() == max(1, (cores // 2 if mode == "async" else cores) // 2)
    await store.close()
