"""The role that runs agents on tasks, for training or evaluation."""

from __future__ import annotations

import os
from contextlib import AsyncExitStack

from instar.cluster.context import ADMIN_KEY_ENV, ENGINE_TOKEN_ENV, ROLLOUT_FINISHED, RoleContext
from instar.cluster.endpoints import EndpointDirectory
from instar.cluster.tasks import background_tasks, call_when_set, run_until_first, wait_any
from instar.data.combine import RewardCombiner
from instar.rewards.base import ScoringContext
from instar.rewards.factory import create_scoring
from instar.rollout.agents import create_agent
from instar.rollout.evaluate import Evaluator
from instar.rollout.gateway_client import GatewayClient
from instar.rollout.runner import RolloutRunner
from instar.rollout.slots import RolloutServices
from instar.rollout.tasks import TaskSet, load_tasks
from instar.trainer.monitor import Monitor


async def run_rollout(context: RoleContext) -> None:
    config = context.config
    assert config.rollout is not None
    store = await context.open_store()
    await context.announce(store, "loading tasks")
    # Removed before the agent's code runs, because processes that the agent starts inherit the environment.
    os.environ.pop(ENGINE_TOKEN_ENV)
    directory = EndpointDirectory(store, context.run_id)
    (url,) = await directory.wait_for_urls("gateway")
    async with AsyncExitStack() as resources:
        monitor = Monitor(config.run_dir)
        resources.callback(monitor.close)
        client = GatewayClient(url, os.environ.pop(ADMIN_KEY_ENV))
        resources.push_async_callback(client.close)
        agent = create_agent(config.rollout.agent)
        resources.push_async_callback(agent.close)

        async def create_services(tasks: TaskSet) -> RolloutServices:
            scoring = create_scoring(config, tasks)
            resources.push_async_callback(scoring.close)
            await scoring.start(ScoringContext(context.run_id, store))
            return RolloutServices(store, client, agent, scoring)

        async with background_tasks(directory.watch_url("gateway", client.set_url)):
            evaluator = None
            if config.eval is not None:
                tasks = load_tasks(config.eval.tasks)
                services = await create_services(tasks)
                evaluator = Evaluator(config, tasks, services, monitor.record, combine=RewardCombiner(config))
            if context.arguments.evaluate:
                assert evaluator is not None
                context.is_started = True
                async with background_tasks(context.heartbeat(store, lambda: evaluator.activity)):
                    await run_until_first(
                        evaluator.try_evaluate_all(context.arguments.evaluate),
                        wait_any(context.stop, context.drain),
                    )
            else:
                tasks = load_tasks(config.rollout.tasks)
                runner = RolloutRunner(config, tasks, await create_services(tasks))
                runner.evaluator = evaluator
                context.is_started = True
                async with background_tasks(
                    context.heartbeat(store, lambda: runner.activity),
                    call_when_set(runner.drain, context.drain),
                ):
                    await run_until_first(runner.run(), context.stop.wait())
    if not (context.stop.is_set() or context.drain.is_set() or context.arguments.evaluate):
        await context.announce(store, ROLLOUT_FINISHED)
    await store.close()
