"""The role that runs agents on tasks, for training or evaluation."""

from __future__ import annotations

import os

from instar.cluster.context import ADMIN_KEY_ENV, ENGINE_TOKEN_ENV, ROLLOUT_FINISHED, RoleContext
from instar.cluster.endpoints import EndpointDirectory
from instar.cluster.tasks import background_tasks, call_when_set, run_until_first, wait_any
from instar.data.combine import RewardCombiner
from instar.rewards.base import ScoringContext
from instar.rewards.factory import TextScorerSource, create_scoring
from instar.rewards.scoring import InlineScoring
from instar.rollout.agents import create_agent
from instar.rollout.evaluate import Evaluator
from instar.rollout.gateway_client import GatewayClient
from instar.rollout.runner import RolloutRunner
from instar.rollout.slots import RolloutServices
from instar.rollout.tasks import load_tasks
from instar.store.base import Store
from instar.trainer.monitor import Monitor


async def run_rollout(context: RoleContext) -> None:
    config = context.config
    assert config.rollout is not None
    store = await context.open_store()
    await context.announce(store, "loading tasks")
    # Removed before an agent's code runs, because processes that the agent starts inherit the environment.
    os.environ.pop(ENGINE_TOKEN_ENV)
    directory = EndpointDirectory(store, context.run_id)
    (url,) = (await directory.wait_for_urls("gateway")).values()
    client = GatewayClient(url, os.environ.pop(ADMIN_KEY_ENV))
    agent = create_agent(config.rollout.agent)
    monitor = Monitor(config.run_dir)
    scorers = RolloutScorers(context, store)
    try:
        async with background_tasks(directory.watch_url("gateway", client.set_url)):
            evaluator = None
            if config.eval is not None:
                tasks = load_tasks(config.eval.tasks)
                services = RolloutServices(store, client, agent, await scorers.start(tasks))
                evaluator = Evaluator(config, tasks, services, monitor.record, combine=RewardCombiner(config))
            if context.arguments.evaluate:
                assert evaluator is not None
                await _evaluate(context, store, evaluator)
            else:
                tasks = load_tasks(config.rollout.tasks)
                services = RolloutServices(store, client, agent, await scorers.start(tasks))
                runner = RolloutRunner(config, tasks, services)
                runner.evaluator = evaluator
                await _run_tasks(context, store, runner)
    finally:
        await scorers.close()
        await agent.close()
        await client.close()
        monitor.close()
    if not (context.stop.is_set() or context.drain.is_set() or context.arguments.evaluate):
        await context.announce(store, ROLLOUT_FINISHED)
    await store.close()


async def _evaluate(context: RoleContext, store: Store, evaluator: Evaluator) -> None:
    async with background_tasks(context.heartbeat(store, lambda: evaluator.doing)):
        await run_until_first(
            evaluator.try_evaluate_all(context.arguments.evaluate), wait_any(context.stop, context.drain)
        )


async def _run_tasks(context: RoleContext, store: Store, runner: RolloutRunner) -> None:
    async with background_tasks(
        context.heartbeat(store, lambda: runner.doing), call_when_set(runner.drain, context.drain)
    ):
        await run_until_first(runner.run(), context.stop.wait())


class RolloutScorers:
    """The scorers that a rollout has started, for each set of tasks."""

    def __init__(self, context: RoleContext, store: Store) -> None:
        self._context = context
        self._store = store
        self._started: list[InlineScoring] = []

    async def start(self, tasks: TextScorerSource) -> InlineScoring:
        scoring = create_scoring(self._context.config, tasks)
        self._started.append(scoring)
        await scoring.start(ScoringContext(self._context.run_id, self._store))
        return scoring

    async def close(self) -> None:
        for scoring in self._started:
            await scoring.close()
