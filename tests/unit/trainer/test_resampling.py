"""Tests that further replies to live prompts are sampled, scored and trained once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from instar.config import RunConfig, ScriptedEngineConfig
from instar.data.batcher import Batcher
from instar.data.resampled import ResampledLoader
from instar.engines.base import Engine
from instar.engines.factory import create_engine
from instar.engines.scripted import ScriptedEngine
from instar.live.base import may_always_run
from instar.live.resample import Resampler, sample_reply
from instar.record.base import Renderer
from instar.rewards.base import Transcript
from instar.rewards.factory import create_background_scorers
from instar.rewards.runner import ScoringRunner
from instar.store.base import Store
from instar.types import (
    UNTRAINABLE,
    Channel,
    GroupStatus,
    OutputConstraint,
    Reward,
    RewardSource,
    SamplingParams,
    SessionStatus,
    StepState,
    Tag,
    TokenChunk,
)
from tests.tiny import make_tiny_model
from tests.unit.data.builders import RUN, insert_session, make_call, make_session
from tests.unit.trainer.harness import make_config, open_live_trainer
from tests.unit.trainer.test_live_feedback import HELD_OUT, open_store

PROMPT = [4, 5, 6]
SIZE = 9


def score_even_tokens(task: dict[str, Any], transcript: Transcript) -> float:
    """Return the fraction of sampled token ids that are even."""
    ids = transcript.calls[-1].sampled_ids
    return float((ids % 2 == 0).mean())


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), hidden=32)


@pytest.fixture
def config(tmp_path: Path, model: Path) -> RunConfig:
    changes = {"steps": 4, "groups_per_step": 2, "updates_per_step": 6, "max_kl": None}
    settings = make_config(tmp_path / "run", model, **changes)
    changes = {
        "data": "live",
        "agents": {"default": {"mode": "learn"}},
        "live": {"resample": SIZE, "replay": {"share": 0}},
        "reward": {"type": "rule", "function": f"{__name__}:score_even_tokens"},
        "engine": {"type": "local", "threads": 1},
    }
    return RunConfig.model_validate({**settings.model_dump(exclude_unset=True), **changes})


@pytest.fixture
async def engine(config: RunConfig) -> AsyncIterator[Engine]:
    engine = create_engine(config)
    yield engine
    await engine.close()


async def add_greedy(store: Store, session_id: str, agent_id: str = "default", **call: Any) -> None:
    session = make_session(
        session_id, channel=Channel.LIVE, agent_id=agent_id, status=SessionStatus.COMPLETED, ended_at=1.0
    )
    await insert_session(store, session)
    params = SamplingParams(temperature=0.0, max_tokens=4)
    fields: dict[str, Any] = {"params": params, "session_id": session_id, **call}
    await store.add_calls([make_call(f"{session_id}#0", PROMPT, [7, 9], **fields)])


def make_resampler(store: Store, config: RunConfig, model: Path, engine: Engine) -> Resampler:
    return Resampler(store, config, Renderer.load(model, config.model), engine, may_always_run)


async def score_all(store: Store, config: RunConfig) -> None:
    """Run the background scorers until the live and resampled sessions have rewards."""
    scorers = create_background_scorers(config).live_scorers
    runner = ScoringRunner(store, RUN, [], config.scoring, agent_id=config.agent_id, live_scorers=scorers)

    async def drain() -> None:
        ids = [row.session.session_id for row in await store.sessions(RUN, limit=1000)]
        async with asyncio.timeout(60):
            while not all((await store.scores(ids)).values()):  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        runner.drain()

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(runner.run())
        tasks.create_task(drain())


async def test_greedy_session_is_resampled_once_and_its_group_trained(
    config: RunConfig, model: Path, engine: Engine
) -> None:
    store = await open_store(config)
    await add_greedy(store, "s")
    resampler = make_resampler(store, config, model, engine)
    assert await resampler.resample_next()
    assert not await resampler.resample_next()
    (group,) = await store.groups(RUN, Channel.RESAMPLED, GroupStatus.SCORING)
    sessions = (await store.sessions_by_group([group.group_id]))[group.group_id]
    assert len(sessions) == SIZE - 1
    (call,) = await store.calls(sessions[0].session_id)
    assert call.prompt_ids.tolist() == PROMPT
    assert (call.params.temperature, set(call.versions.tolist())) == (1.0, {0})
    assert np.isfinite(call.logprobs).all()
    batcher = Batcher(store, RUN, config)
    assert await batcher.next_batch(1, 0, 0, timeout=0.0) is None, "it waits for rewards"
    await score_all(store, config)
    batch = await batcher.preview(1, 0, 0)
    assert len(batch.samples) == SIZE - 1
    rewards = [claim.reward for claim in batch.claims if claim.group_id == group.group_id]
    advantages = [claim.advantage for claim in batch.claims if claim.group_id == group.group_id]
    everyone = np.array([*rewards, 0.0], np.float64)
    expected = (everyone - everyone.mean()) / (everyone.std() + 1e-6)
    assert advantages == pytest.approx(expected[:-1].tolist()), "the original reply has reward 0"
    assert [(drop.session_id, drop.reason) for drop in batch.drops] == [("s", "greedy")]
    await store.close()


async def test_constrained_reply_is_resampled_with_its_constraint_and_both_logprobs(
    config: RunConfig, model: Path, engine: Engine
) -> None:
    prompt = make_call("s#0", PROMPT, [7, 9])
    constraint = OutputConstraint(schema='{"enum": [12, 345]}')
    params = SamplingParams(temperature=0.0, max_tokens=20, constraint=constraint)
    call = await sample_reply(
        engine, replace(prompt, params=params), None, Renderer.load(model, config.model)
    )
    assert call.reply["content"] in ("12", "345")
    assert call.behavior_logprobs is not None
    assert (call.behavior_logprobs >= call.logprobs).all()
    assert call.behavior_logprobs.sum() > call.logprobs.sum()


async def test_reply_is_resampled_without_penalties_and_with_its_bias(
    config: RunConfig, model: Path, engine: Engine
) -> None:
    prompt = make_call("s#0", PROMPT, [7, 9])
    params = SamplingParams(
        min_p=0.9, presence_penalty=2.0, repetition_penalty=3.0, logit_bias={77: 100.0}, max_tokens=4
    )
    call = await sample_reply(
        engine, replace(prompt, params=params), None, Renderer.load(model, config.model)
    )
    expected = SamplingParams(logit_bias={77: 100.0}, max_tokens=4, seed=call.params.seed)
    assert call.params == expected
    assert set(call.sampled_ids.tolist()) == {77}


async def test_held_out_untrainable_and_observed_sessions_are_not_resampled(
    config: RunConfig, model: Path, engine: Engine
) -> None:
    store = await open_store(config)
    await add_greedy(store, "held", messages=HELD_OUT)
    await add_greedy(store, "tagged")
    await store.add_tags([Tag("tagged", UNTRAINABLE)])
    await add_greedy(store, "other", agent_id="other")
    await add_greedy(store, "broken", trainable=False)
    assert not await make_resampler(store, config, model, engine).resample_next()
    await store.close()


async def test_resampling_waits_until_it_may_run(config: RunConfig, model: Path, engine: Engine) -> None:
    store = await open_store(config)
    await add_greedy(store, "s")

    async def may_run() -> bool:
        return False

    resampler = Resampler(store, config, Renderer.load(model, config.model), engine, may_run)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.5):
            await resampler.run()
    assert await store.groups(RUN, Channel.RESAMPLED) == []
    await store.close()


async def test_resampled_sessions_are_forgotten_with_their_session(
    config: RunConfig, model: Path, engine: Engine
) -> None:
    store = await open_store(config)
    await add_greedy(store, "s")
    await make_resampler(store, config, model, engine).resample_next()
    assert await store.forget_sessions(RUN, ["s"]) == ["s"]
    assert await store.sessions(RUN) == []
    await store.close()


async def test_session_that_is_forgotten_while_it_is_resampled_leaves_no_copies(
    config: RunConfig, model: Path, engine: Engine
) -> None:
    store = await open_store(config)
    await add_greedy(store, "s")
    await add_greedy(store, "t")

    async def forget() -> bool:
        await store.forget_sessions(RUN, ["s"])
        return True

    resampler = Resampler(store, config, Renderer.load(model, config.model), engine, forget)
    assert await resampler.resample_next()
    assert [row.session.session_id for row in await store.sessions(RUN)] == ["t"]
    assert await resampler.resample_next(), "others are resampled"
    assert len(await store.groups(RUN, Channel.RESAMPLED)) == 1
    await store.close()


async def test_prompt_that_is_too_long_for_the_engine_does_not_delay_others(
    config: RunConfig, model: Path, engine: Engine
) -> None:
    store = await open_store(config)
    await insert_session(store, make_session("long", channel=Channel.LIVE, status=SessionStatus.COMPLETED))
    await store.add_calls([make_call("long#0", [4] * 100_000, [7], session_id="long")])
    await add_greedy(store, "s")
    resampler = make_resampler(store, config, model, engine)
    assert await resampler.resample_next()
    assert await resampler.resample_next()
    assert [group.group_id for group in await store.groups(RUN, Channel.RESAMPLED)] == ["resampled/s"]
    await store.close()


async def test_constraint_that_the_engine_does_not_support_does_not_delay_other_sessions(
    config: RunConfig, model: Path, engine: Engine
) -> None:
    store = await open_store(config)
    constraint = OutputConstraint(schema='{"pattern": "[REDACTED"}')
    params = SamplingParams(temperature=0.0, max_tokens=4, constraint=constraint)
    await add_greedy(store, "constrained", params=params)
    await add_greedy(store, "s")
    resampler = make_resampler(store, config, model, engine)
    assert await resampler.resample_next()
    assert await resampler.resample_next()
    assert [group.group_id for group in await store.groups(RUN, Channel.RESAMPLED)] == ["resampled/s"]
    await store.close()


class StoppingEngine(ScriptedEngine):
    """An engine that is stopped after the first token of a reply."""

    async def generate(self, *args: Any, **options: Any) -> AsyncGenerator[TokenChunk]:
        yield TokenChunk([5], [-1.0], [0])
        yield TokenChunk([], [], [], finish_reason="aborted")


async def test_reply_that_the_engine_did_not_finish_is_not_stored(config: RunConfig, model: Path) -> None:
    store = await open_store(config)
    await add_greedy(store, "s")
    engine = StoppingEngine(config.model, ScriptedEngineConfig())
    assert not await make_resampler(store, config, model, engine).resample_next()
    assert await store.groups(RUN, Channel.RESAMPLED) == []
    await engine.close()
    await store.close()


async def test_resampled_replies_wait_while_their_session_is_tagged_untrainable(
    config: RunConfig, model: Path, engine: Engine
) -> None:
    store = await open_store(config)
    await add_greedy(store, "s")
    await make_resampler(store, config, model, engine).resample_next()
    await score_all(store, config)
    loader = ResampledLoader(store, config)
    await store.add_tags([Tag("s", UNTRAINABLE)])
    assert await loader.load_ready(0, 8) == []
    await store.remove_tags(["s"], UNTRAINABLE)
    assert len(await loader.load_ready(0, 8)) == 1
    await store.close()


async def test_reward_of_a_person_is_not_compared_with_those_of_a_rule(
    config: RunConfig, model: Path, engine: Engine
) -> None:
    store = await open_store(config)
    await add_greedy(store, "s")
    await make_resampler(store, config, model, engine).resample_next()
    await store.add_rewards([Reward("s", 1.0, RewardSource.HUMAN, "feedback")])
    for session in (await store.sessions_by_group(["resampled/s"]))["resampled/s"]:
        await store.add_rewards([Reward(session.session_id, 0.5, RewardSource.RULE, "rule")])
    batch = await Batcher(store, RUN, config).preview(1, 0, 0)
    assert batch.samples == [], "all comparable rewards are equal"
    await store.close()


async def test_greedy_session_is_learned_from_through_resampling(
    config: RunConfig, model: Path, engine: Engine
) -> None:
    """The model learns to write tokens that the rule rewards, although the agent samples greedily."""
    store = await open_store(config)
    for number in range(8):
        await add_greedy(store, f"s{number}")
    resampler = make_resampler(store, config, model, engine)
    while await resampler.resample_next():
        pass
    await score_all(store, config)
    await store.close()
    scripted = config.model_copy(update={"engine": ScriptedEngineConfig()})
    async with open_live_trainer(scripted) as harness:
        samples = [
            sample
            for group in await ResampledLoader(harness.store, config).load_ready(0, 8)
            for sample in group.samples
        ]
        before = await harness.backend.forward(samples)
        await harness.trainer.run()
        after = await harness.backend.forward(samples)
        rewards, gains = [], []
        for sample, old, new in zip(samples, before, after, strict=True):
            sampled = sample.mask > 0
            rewards.append((sample.token_ids[sampled] % 2 == 0).mean())
            gains.append((new - old)[sampled].mean())
        assert np.corrcoef(rewards, gains)[0, 1] > 0.25, "replies with a higher reward gain more"
        claims = [c for c in await harness.store.claims(RUN) if c.group_id is not None]
        assert len(claims) == len({c.sample_key for c in claims}) == 8 * (SIZE - 1)
        assert {step.state for step in await harness.store.steps(f"{RUN}/default")} == {StepState.COMMITTED}
