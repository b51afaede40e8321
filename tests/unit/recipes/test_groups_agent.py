"""Tests that recipes/groups_agent.py runs the slots of groups until the run is finished."""

from __future__ import annotations

import asyncio
import runpy
from pathlib import Path

from instar.config import RunConfig
from instar.engines.factory import create_engine
from instar.store.base import Run
from instar.store.sqlite import SqliteStore
from instar.types import Channel, GroupStatus, SessionStatus, StepState
from tests.serving import ADMIN_KEY, running_gateway
from tests.tiny import make_tiny_model

RECIPE = Path(__file__).parents[3] / "recipes" / "groups_agent.py"


async def test_groups_agent_runs_every_admitted_group_until_the_run_is_finished(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model", hidden=16, context=1024)
    config = RunConfig.model_validate(
        {
            "name": "groups",
            "model": {"name": str(model), "max_context": 1024},
            "engine": {"type": "scripted", "function": "tests.unit.gateway.scripts:reply"},
            "trainer": {"mode": "sync", "groups_per_step": 2, "steps": 1},
            "groups": {},
        }
    )
    store = SqliteStore(tmp_path / "store.db")
    await store.put_run(Run("groups", "groups", {}))
    async with running_gateway(config, store, create_engine(config)) as url:
        agents = asyncio.create_task(runpy.run_path(str(RECIPE))["main"](url, ADMIN_KEY, 2))
        async with asyncio.timeout(60):
            while len(await store.groups("groups", Channel.TRAIN, GroupStatus.READY)) < 2:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        await store.claim_step("groups", 1, [])
        await store.advance_step("groups", 1, StepState.COMMITTED, version=1)
        assert await asyncio.wait_for(agents, 60) == 2
    sessions = await store.sessions("groups")
    await store.close()
    assert [row.session.status for row in sessions] == [SessionStatus.COMPLETED] * 4
    assert all(row.call_count for row in sessions)
