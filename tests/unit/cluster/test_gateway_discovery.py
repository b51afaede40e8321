"""Tests that a gateway finds engines that start after it."""

from __future__ import annotations

from pathlib import Path

import httpx

from instar.cluster.control import Action, ControlRequest
from instar.cluster.live_run import LiveRun, serve_run
from tests.unit.cluster.test_engines import make_config, send_chat, wait_until


async def test_gateway_started_before_an_engine_finds_it_later(tmp_path: Path) -> None:
    async with serve_run(make_config(tmp_path, count=2), log=print) as run:
        await send_request(run, "drain", "engine-1")
        await send_request(run, "restart", "gateway")
        await wait_until(lambda: has_status(run, "gateway", "serving"))
        await send_request(run, "start", "engine-1")
        await wait_until(lambda: has_status(run, "engine-1", "idle"))
        await send_request(run, "drain", "engine-0")
        headers = {"Authorization": f"Bearer {run.admin_key}"}
        async with httpx.AsyncClient(base_url=run.gateway_url, headers=headers, timeout=30) as http:
            await send_chat(http, "how are you?")


async def send_request(run: LiveRun, action: Action, name: str) -> None:
    await run.control.handle(ControlRequest(action, name, 60.0))


async def has_status(run: LiveRun, name: str, status: str) -> bool:
    endpoints = await run.store.endpoints(run.run_id)
    return any(endpoint.name == name and endpoint.doing == status for endpoint in endpoints)
