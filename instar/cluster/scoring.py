"""The role that scores a run's sessions in the background."""

from __future__ import annotations

import asyncio
import os

from instar.cluster.context import ADMIN_KEY_ENV, ENGINE_TOKEN_ENV, RoleContext, call_when_set
from instar.cluster.endpoints import EndpointDirectory
from instar.config import RunConfig
from instar.rewards.base import ScoringContext
from instar.rewards.factory import TextScorerSource, create_background_scorers, create_scoring
from instar.rewards.runner import ScoringRunner
from instar.rewards.scoring import InlineScoring
from instar.store.base import Store

ROLE = "rewards"
GRACE = 5.0
"""Seconds that what is under way has when the role is to end soon."""


def judge_key_variables(config: RunConfig) -> set[str]:
    """The variables that hold keys of judges: for this role, and for no agent."""
    named = (getattr(section, "api_key_env", None) for section in config.reward)
    return {name for name in named if name}


class RolloutScorers:
    """What a rollout has its sessions scored by, for one set of tasks or another."""

    def __init__(self, context: RoleContext, store: Store) -> None:
        self._context = context
        self._store = store
        self._started: list[InlineScoring] = []

    async def start(self, tasks: TextScorerSource) -> InlineScoring:
        made = create_scoring(self._context.config, tasks)
        self._started.append(made)
        await made.start(ScoringContext(self._context.run_id, self._store))
        return made

    async def close(self) -> None:
        for made in self._started:
            await made.close()


async def rewards(context: RoleContext) -> None:
    store = await context.open_store()
    await context.announce(store, "starting")
    # Out of the environment before any rule's code runs: what that starts inherits the rest.
    os.environ.pop(ENGINE_TOKEN_ENV)
    admin_key = os.environ.pop(ADMIN_KEY_ENV)
    directory = EndpointDirectory(store, context.run_id)
    (url,) = (await directory.wait_for_urls("gateway")).values()
    found = create_background_scorers(context.config)
    used = [scorer for scorer in found.scorers if scorer.background or scorer in found.live]
    runner = ScoringRunner(store, context.run_id, used, context.config.scoring, live_scorers=found.live)
    around = ScoringContext(context.run_id, store, api_key=admin_key)
    around.set_gateway_url(url)
    for scorer in used:
        await scorer.start(around)
    following = asyncio.create_task(directory.watch_url("gateway", around.set_gateway_url))
    beating = asyncio.create_task(context.heartbeat(store, lambda: runner.doing))
    draining = asyncio.create_task(call_when_set(runner.drain, context.drain, context.stop))
    try:
        await _run(context, runner)
    finally:
        following.cancel()
        beating.cancel()
        draining.cancel()
        for scorer in used:
            await scorer.close()
    await context.announce(store, runner.doing)
    await store.close()


async def _run(context: RoleContext, runner: ScoringRunner) -> None:
    """Until it is drained; told to stop, what is under way has a moment, and is scored anew another time."""
    running = asyncio.create_task(runner.run())
    stopping = asyncio.create_task(context.stop.wait())
    try:
        await asyncio.wait({running, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if not running.done():
            await asyncio.wait({running}, timeout=GRACE)
        if running.done():
            running.result()
    finally:
        stopping.cancel()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
