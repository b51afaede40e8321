"""A gateway finds the engines of its run also when they come after it."""

from __future__ import annotations

from pathlib import Path

import httpx

from instar.cluster.control import Action, ControlRequest
from instar.cluster.live_run import LiveRun
from instar.cluster.serving import serve_run
from tests.unit.cluster.test_engines import ask, config_in, until


async def test_a_gateway_that_began_while_an_engine_was_away_finds_it(tmp_path: Path) -> None:
    async with serve_run(config_in(tmp_path, count=2), log=print) as run:
        await do(run, "drain", "engine-1")
        await do(run, "restart", "gateway")
        await until(lambda: says(run, "gateway", "serving"))
        await do(run, "start", "engine-1")
        await until(lambda: says(run, "engine-1", "idle"))
        await do(run, "drain", "engine-0")
        headers = {"Authorization": f"Bearer {run.admin_key}"}
        async with httpx.AsyncClient(base_url=run.gateway_url, headers=headers, timeout=30) as http:
            await ask(http, "how are you?")


async def do(run: LiveRun, action: Action, name: str) -> None:
    await run.control.handle(ControlRequest(action, name, 60.0))


async def says(run: LiveRun, name: str, doing: str) -> bool:
    told = await run.store.endpoints(run.run_id)
    return any(entry.name == name and entry.doing == doing for entry in told)
