"""The role that scores a run's sessions in the background."""

from __future__ import annotations

import asyncio
import os

from instar.cluster.context import ADMIN_KEY_ENV, ENGINE_TOKEN_ENV, RoleContext
from instar.cluster.endpoints import EndpointDirectory
from instar.cluster.tasks import background_tasks, call_when_set, run_until_first
from instar.rewards.base import ScoringContext
from instar.rewards.factory import create_background_scorers
from instar.rewards.runner import ScoringRunner

STOP_GRACE_SECONDS = 5.0
"""Seconds that scores in progress have to finish when the role is stopped."""


async def run_rewards(context: RoleContext) -> None:
    store = await context.open_store()
    await context.announce(store, "starting")
    # Removed before a rule's code runs, because processes that the rule starts inherit the environment.
    os.environ.pop(ENGINE_TOKEN_ENV)
    admin_key = os.environ.pop(ADMIN_KEY_ENV)
    directory = EndpointDirectory(store, context.run_id)
    (url,) = await directory.wait_for_urls("gateway")
    configured = create_background_scorers(context.config)
    scorers = [s for s in configured.scorers if s in (*configured.rollout_scorers, *configured.live_scorers)]
    runner = ScoringRunner(
        store,
        context.run_id,
        configured.rollout_scorers,
        context.config.scoring,
        agent_id=context.config.agent_id,
        live_scorers=configured.live_scorers,
    )
    scoring_context = ScoringContext(context.run_id, store, api_key=admin_key)
    scoring_context.set_gateway_url(url)
    for scorer in scorers:
        await scorer.start(scoring_context)
    context.is_started = True
    try:
        async with background_tasks(
            directory.watch_url("gateway", scoring_context.set_gateway_url),
            context.heartbeat(store, lambda: runner.status_text),
            call_when_set(runner.drain, context.drain, context.stop),
        ):
            await run_until_first(runner.run(), _wait_for_stop_and_grace_period(context))
    finally:
        for scorer in scorers:
            await scorer.close()
    await context.announce(store, runner.status_text)
    await store.close()


async def _wait_for_stop_and_grace_period(context: RoleContext) -> None:
    await context.stop.wait()
    await asyncio.sleep(STOP_GRACE_SECONDS)  # attempts that take longer are repeated after a restart
