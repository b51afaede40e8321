"""The role that evaluates candidates, and promotes or rejects them."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack

from instar.cluster.context import ADMIN_KEY_ENV, ENGINE_TOKEN_ENV, RoleContext
from instar.cluster.endpoints import EndpointDirectory, connect_to_engines
from instar.cluster.tasks import background_tasks, run_until_first
from instar.config import RunConfig
from instar.data.combine import RewardCombiner
from instar.engines.base import Engine
from instar.errors import ConfigError
from instar.live.base import StageCheck, StageOutcome, skip_stage
from instar.live.canary import CanaryController, repeat_waits
from instar.live.decision import HELD_OUT, SANITY
from instar.live.gate import Gate
from instar.live.learning_window import LearningWindow
from instar.live.runner import GateRunner
from instar.live.sampling import ReplySampler
from instar.live.sets import (
    EvaluationSet,
    FeedbackPairs,
    HeldOutSessions,
    NoItems,
    RateSession,
    ReplayedPrompts,
    SanitySet,
    ScoreReply,
)
from instar.models import resolve_tokenizer
from instar.record.base import Renderer
from instar.rewards.base import Scorer, ScoringContext, Transcript, get_task
from instar.rewards.factory import create_background_scorers
from instar.rewards.scoring import score_sessions
from instar.store.base import Store
from instar.types import Call, PolicyStage, Session

logger = logging.getLogger(__name__)

CHECK_SECONDS = 10.0
"""How often the live rewards of a policy are compared."""


async def run_gate(context: RoleContext) -> None:
    config, store = context.config, await context.open_store()
    await context.announce(store, "waiting for the engine")
    engine, watch_endpoints = await connect_to_engines(context, store, "engine")
    assert engine is not None
    # Removed before a rule's code runs, because processes that the rule starts inherit the environment.
    os.environ.pop(ENGINE_TOKEN_ENV)
    admin_key = os.environ.pop(ADMIN_KEY_ENV)
    async with AsyncExitStack() as resources:
        resources.push_async_callback(engine.close)
        await context.announce(store, "loading the tokenizer")
        folder = await asyncio.to_thread(resolve_tokenizer, config.model.name)
        renderer = await asyncio.to_thread(Renderer.load, folder, config.model)
        scorers = create_background_scorers(config).live_scorers
        directory = EndpointDirectory(store, context.run_id)
        scoring_context = ScoringContext(context.run_id, store, api_key=admin_key)
        for url in await directory.wait_for_urls("gateway"):
            scoring_context.set_gateway_url(url)
        for scorer in scorers:
            resources.push_async_callback(scorer.close)
            await scorer.start(scoring_context)
        window = LearningWindow(config, store)
        resources.callback(window.close)
        controllers = {
            policy_id: CanaryController(store, config, policy_id, RewardCombiner(config))
            for policy_id in config.policy_ids
        }

        async def check_stage(policy_id: str, version: int, stage: PolicyStage) -> StageOutcome:
            return await controllers[policy_id].check_stage(policy_id, version, stage)

        check = repeat_waits(check_stage, CHECK_SECONDS)
        gates = create_gates(config, store, engine, renderer, scorers, check_stage=check)
        runner = GateRunner(gates, may_run=window.may_run_now)
        context.is_started = True
        async with background_tasks(
            directory.watch_url("gateway", scoring_context.set_gateway_url),
            watch_endpoints(),
            _watch_serving(controllers),
            context.heartbeat(store, lambda: runner.activity),
        ):
            await run_until_first(runner.run(), context.stop.wait(), context.drain.wait())
    await store.close()


async def _watch_serving(controllers: Mapping[str, CanaryController]) -> None:
    """Roll back versions after whose promotion the live rewards fell, also while no evaluation may run."""
    while True:
        for policy_id, controller in controllers.items():
            rollback = await controller.check_serving()
            if rollback is not None:
                logger.warning("%s: %s", policy_id, rollback.reason)
        await asyncio.sleep(CHECK_SECONDS)


def create_gates(
    config: RunConfig,
    store: Store,
    engine: Engine,
    renderer: Renderer,
    scorers: Sequence[Scorer],
    *,
    check_stage: StageCheck = skip_stage,
) -> dict[str, Gate]:
    """Return the gate of each lineage, by its policy id. ``scorers`` are those of live sessions."""
    if not engine.info.serves_several_policies:
        raise ConfigError(
            f"live.gate.mode: {config.live.gate.mode!r} compares versions, but the {engine.info.kind} engine "
            "serves only one at a time; use local, or vllm with engine.policy adapter"
        )
    section = config.live.gate
    sampler = ReplySampler(engine, renderer, section.max_tokens)
    sanity = SanitySet(sampler)
    gates: dict[str, Gate] = {}
    for policy_id in config.policy_ids:
        agents = [agent for agent in config.learning_agents if config.get_policy_id(agent) == policy_id]
        sessions = HeldOutSessions(store, config.name, agents, section.max_items)
        held_out: EvaluationSet = NoItems()
        method = "none"
        if scorers:
            held_out = ReplayedPrompts(sessions, sampler, _make_reply_scorer(config, store, scorers))
            method = "rewards"
        elif sampler.can_score:
            held_out, method = FeedbackPairs(sessions, sampler, _make_rater(config, store)), "feedback"
        sets = {HELD_OUT: held_out, SANITY: sanity}
        gates[policy_id] = Gate(
            policy_id, section, store, sampler, sets, method=method, check_stage=check_stage
        )
    return gates


def _make_reply_scorer(config: RunConfig, store: Store, scorers: Sequence[Scorer]) -> ScoreReply:
    """Return a function that scores a session with the run's rules and judges. Nothing is recorded."""
    combine = RewardCombiner(config)

    async def score(session: Session, calls: Sequence[Call]) -> float | None:
        group = None if session.group_id is None else await store.group(session.group_id)
        task = get_task(session, group)
        transcript = Transcript(session.session_id, calls, None)

        async def load() -> list[Transcript]:
            return [transcript]

        results = [
            await score_sessions(scorer, task, [session.session_id], load, config.scoring)
            for scorer in scorers
        ]
        rewards = [reward for result in results for reward in result.rewards]
        scores = [score for result in results for score in result.scores]
        value = combine(rewards, scores)
        return combine.combine_calls(rewards, scores).get(calls[-1].call_id) if value is None else value

    return score


def _make_rater(config: RunConfig, store: Store) -> RateSession:
    """Return a function that returns how much people or the agent liked a session."""
    combine = RewardCombiner(config)
    middle = sum(config.gateway.reward_range) / 2

    async def rate(session_id: str) -> tuple[float, str | None] | None:
        rewards = await store.rewards(session_id)
        value = combine(rewards)
        if value is not None:
            return value - middle, None
        rated = combine.combine_calls(rewards)
        return next(((value - middle, call_id) for call_id, value in rated.items()), None)

    return rate
