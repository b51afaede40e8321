"""Tests that earlier data is replayed with live data, within its limits and exactly once."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from instar.backends.base import BackendCapabilities
from instar.backends.factory import apply_capabilities
from instar.config import RunConfig
from instar.data.batcher import Batcher, StepBatch
from instar.engines.scripted import ScriptedEngine
from instar.errors import ConfigError, EngineUnavailable
from instar.live.base import may_always_run
from instar.live.reference_prompts import REFERENCE_PROMPTS
from instar.live.reference_set import sample_reference_set
from instar.record.base import Renderer
from instar.store.base import SessionRecord, Store
from instar.trainer.monitor import read_steps
from instar.types import (
    UNTRAINABLE,
    Artifact,
    Channel,
    Group,
    GroupStatus,
    Policy,
    Reward,
    RewardSource,
    Sample,
    SessionStatus,
    StepState,
    Tag,
    Task,
    TokenChunk,
)
from tests.tiny import make_tiny_model
from tests.unit.data.builders import RUN, make_call, make_session
from tests.unit.data.test_live import POLICY, add_live, take_batch
from tests.unit.trainer.harness import make_config, open_live_trainer
from tests.unit.trainer.test_live_feedback import OTHER_IDS, add_feedback, add_reply, open_store

ABILITY_PROMPT, ABILITY_REPLY = [4, 5, 6], [21, 22, 23, 9]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), hidden=32)


def make_replay_config(folder: Path, model: Path, replay: Any, **trainer: Any) -> RunConfig:
    settings = make_config(folder, model, **trainer).model_dump(exclude_unset=True)
    changes = {"data": "live", "agents": {"default": {"mode": "learn"}}, "live": {"replay": replay}}
    return RunConfig.model_validate({**settings, "gateway": {"reward_range": [0, 1]}, **changes})


async def add_reference(store: Store, count: int, rewards: dict[int, float] | None = None) -> None:
    for index in range(count):
        group_id, session_id = f"{RUN}/data/base/{index:06d}", f"ref{index}"
        group = Group(group_id, RUN, Channel.DATA, index, 1, Task(str(index), {}), GroupStatus.READY)
        session = make_session(
            session_id, channel=Channel.DATA, group_id=group_id, status=SessionStatus.COMPLETED
        )
        call = make_call(f"{session_id}#0", ABILITY_PROMPT, ABILITY_REPLY, session_id=session_id)
        value = (rewards or {}).get(index)
        reward = [] if value is None else [Reward(session_id, value, RewardSource.RULE, "test")]
        await store.put_records([group], [SessionRecord(session, (call,), tuple(reward))])


async def promote(store: Store, step: int, parent: int = 0) -> int:
    """Publish and promote a version of a claimed step, as a trainer and a person would."""
    version = await store.reserve_version(POLICY, RUN, step, parent=parent, is_candidate=True)
    await store.publish(Policy(POLICY, version, Artifact("adapter", "x")))
    await store.advance_step(POLICY, step, StepState.COMMITTED, version=version)
    await store.promote_version(POLICY, version)
    return version


def list_replayed(batch: StepBatch | None) -> list[str]:
    assert batch is not None
    return [sample.session_id for sample in batch.supervised.replayed]


# --- selection ----------------------------------------------------------------------------------


async def test_share_of_replay_determines_its_number_and_weight(tmp_path: Path, model: Path) -> None:
    config = make_replay_config(tmp_path, model, {"share": 0.5}, groups_per_step=2)
    store = await open_store(config)
    await add_reference(store, 3)
    for name in "abcdef":
        await add_live(store, name)
    batcher = Batcher(store, RUN, config)
    first = await batcher.next_batch(1, 0, 0, timeout=0.0)
    assert first is not None
    assert list_replayed(first) == ["ref0", "ref1"]
    total = sum(float(sample.advantages[-1]) for sample in first.supervised.replayed)
    assert total == pytest.approx(1.0), "as much as live sessions with advantage 1"
    await store.claim_step(POLICY, 1, [*first.claims, *first.supervised.claims], run_id=RUN)
    second = await batcher.next_batch(2, 0, 0, timeout=0.0)
    assert list_replayed(second) == ["ref2", "ref0"], "the set is repeated"
    assert second is not None
    assert [claim.epoch for claim in second.supervised.claims] == [0, 1]
    await store.close()


async def test_only_good_sessions_of_accepted_versions_are_replayed(tmp_path: Path, model: Path) -> None:
    replay = {"share": 0.5, "reference": None, "max_repeats": 1}
    config = make_replay_config(tmp_path, model, replay, groups_per_step=3)
    store = await open_store(config)
    await add_live(store, "good", 1.0)
    await add_live(store, "bad", 0.0)
    await add_live(store, "tagged", 1.0)
    batcher = Batcher(store, RUN, config)
    assert list_replayed(await take_batch(batcher)) == []
    for name in "abc":
        await add_live(store, name, 1.0, ended=1)
    assert list_replayed(await batcher.preview(2, 0, 0)) == [], "no version was accepted yet"
    await promote(store, 1)
    await store.add_tags([Tag("tagged", UNTRAINABLE)])
    batch = await Batcher(store, RUN, config).next_batch(2, 0, 1, timeout=0.0)
    assert list_replayed(batch) == ["good"]
    assert batch is not None
    await store.claim_step(POLICY, 2, [*batch.claims, *batch.supervised.claims], run_id=RUN)
    for name in "def":
        await add_live(store, name, 1.0, ended=2)
    third = await Batcher(store, RUN, config).next_batch(3, 0, 1, timeout=0.0)
    assert list_replayed(third) == [], "max_repeats is reached, and step 2 is not accepted"
    await store.close()


async def test_only_the_best_rewarded_call_of_a_session_is_replayed(tmp_path: Path, model: Path) -> None:
    config = make_replay_config(tmp_path, model, {"share": 0.5, "reference": None}, groups_per_step=1)
    store = await open_store(config)
    await add_live(store, "s", None)
    await store.add_calls([make_call("s#1", [3], [8, 9], session_id="s")])
    await store.add_rewards(
        [
            Reward("s", 1.0, RewardSource.HUMAN, "feedback", call_id="s#0"),
            Reward("s", 0.2, RewardSource.HUMAN, "feedback", call_id="s#1"),
        ]
    )
    batcher = Batcher(store, RUN, config)
    await take_batch(batcher)
    await promote(store, 1)
    await add_live(store, "next", ended=1)
    batch = await batcher.next_batch(2, 0, 1, timeout=0.0)
    assert batch is not None
    assert [sample.spans[0].call_id for sample in batch.supervised.replayed] == ["s#0"]
    await store.close()


async def test_reference_sessions_with_a_bad_reward_are_dropped(tmp_path: Path, model: Path) -> None:
    config = make_replay_config(tmp_path, model, {"share": 0.5}, groups_per_step=2)
    store = await open_store(config)
    await add_reference(store, 2, {0: -1.0})
    for name in "ab":
        await add_live(store, name)
    batch = await Batcher(store, RUN, config).next_batch(1, 0, 0, timeout=0.0)
    assert batch is not None
    assert [(c.sample_key, c.reason) for c in batch.supervised.claims] == [
        (f"{RUN}/data/base/000000/0", "no_tokens"),
        (f"{RUN}/data/base/000001/0/0", None),
    ]
    await store.close()


async def test_reference_set_is_sampled_once_from_version_0(tmp_path: Path, model: Path) -> None:
    config = make_replay_config(tmp_path, model, {})
    store = await open_store(config)
    engine = ScriptedEngine(config.model, config.engine)  # pyright: ignore[reportArgumentType]
    renderer = Renderer.load(model, config.model)
    for _ in range(2):
        await sample_reference_set(store, config, engine, renderer, may_always_run)
    groups = await store.groups(RUN, Channel.DATA, GroupStatus.READY)
    assert [group.index for group in groups] == list(range(len(REFERENCE_PROMPTS)))
    assert await store.session_ids(RUN, agent_id=config.agent_id) == [], "forgetting the agent keeps the set"
    sessions = await store.group_sessions(groups, config.agent_id)
    (session,) = sessions[groups[3].group_id]
    (call,) = await store.calls(session.session_id)
    assert call.messages[0]["content"] == REFERENCE_PROMPTS[3]
    assert set(call.versions.tolist()) == {0}
    await add_live(store, "s")
    batch = await Batcher(store, RUN, config).next_batch(2, 0, 0, timeout=0.0)
    assert len(list_replayed(batch)) == 1
    await engine.close()
    await store.close()


class RestartingEngine(ScriptedEngine):
    """An engine that is not available for the second reply."""

    calls = 0

    async def generate(self, *args: Any, **options: Any) -> AsyncGenerator[TokenChunk]:
        self.calls += 1
        if self.calls == 2:
            raise EngineUnavailable("the engine is restarting")
        async for chunk in super().generate(*args, **options):
            yield chunk


async def test_reference_set_is_complete_although_the_engine_restarts(tmp_path: Path, model: Path) -> None:
    config = make_replay_config(tmp_path, model, {})
    store = await open_store(config)
    engine = RestartingEngine(config.model, config.engine)  # pyright: ignore[reportArgumentType]
    renderer = Renderer.load(model, config.model)
    await sample_reference_set(store, config, engine, renderer, may_always_run)
    assert len(await store.groups(RUN, Channel.DATA)) == len(REFERENCE_PROMPTS)
    await engine.close()
    await store.close()


# --- training -----------------------------------------------------------------------------------


async def measure(harness: Any, prompt: list[int], reply: list[int]) -> float:
    """Return the mean logprob of the reply's tokens."""
    tokens = np.asarray([*prompt, *reply], np.int32)
    mask = np.asarray([0.0] * len(prompt) + [1.0] * len(reply), np.float32)
    nan = np.full(len(tokens), np.nan, np.float32)
    sample = Sample("m", "m", tokens, mask, nan, mask, np.zeros(len(tokens), np.int32))
    (values,) = await harness.backend.forward([sample])
    return float(values[mask > 0].mean())


async def learn(folder: Path, model: Path, replay: Any) -> tuple[float, float, list[dict[str, Any]]]:
    """Train on eight corrections. Return the changes of the logprobs of the correction and of the ability in
    the reference set, and the metrics of each step."""
    config = make_replay_config(
        folder, model, replay, steps=8, groups_per_step=1, corrections={"per_step": 1}, max_kl=None
    )
    store = await open_store(config)
    await add_reference(store, 2)
    for number in range(8):
        await add_reply(store, f"c{number}")
        await add_feedback(store, f"c{number}", correction="better", correction_ids=OTHER_IDS)
    await store.close()
    async with open_live_trainer(config) as harness:
        before = [
            await measure(harness, [1, 2, 3], OTHER_IDS),
            await measure(harness, ABILITY_PROMPT, ABILITY_REPLY),
        ]
        await harness.trainer.run()
        after = [
            await measure(harness, [1, 2, 3], OTHER_IDS),
            await measure(harness, ABILITY_PROMPT, ABILITY_REPLY),
        ]
    return after[0] - before[0], after[1] - before[1], read_steps(config.run_dir)


async def test_replay_keeps_a_reference_ability_while_a_correction_is_learned(
    tmp_path: Path, model: Path
) -> None:
    limits = {"max_base_kl": None}
    learned, forgotten, _ = await learn(tmp_path / "without", model, {"share": 0, **limits})
    assert learned > 0.5
    assert forgotten < -0.1, "without replay, the ability is lost"
    relearned, kept, steps = await learn(tmp_path / "with", model, {"share": 0.5, **limits})
    assert relearned > 0.5
    assert kept > forgotten + 0.3
    assert [step["replayed"] for step in steps] == [1] * 8


async def test_kl_to_the_base_is_reported_and_limited(tmp_path: Path, model: Path) -> None:
    _, _, free = await learn(tmp_path / "free", model, {"share": 0, "max_base_kl": 1e6})
    limit = free[-1]["base_kl"] / 20
    _, _, limited = await learn(tmp_path / "limited", model, {"share": 0, "max_base_kl": limit})
    assert free[0]["base_kl"] == 0.0
    assert free[-1]["base_kl_weight"] == 0.0
    assert max(step["base_kl_weight"] for step in limited) >= 1.0
    assert limited[-1]["base_kl"] < free[-1]["base_kl"] / 2


def test_backend_without_reference_disables_or_rejects_the_kl_limit(tmp_path: Path, model: Path) -> None:
    capabilities = BackendCapabilities(
        losses=frozenset({"importance_sampling", "cross_entropy"}), artifacts=frozenset({"adapter"})
    )
    config, warnings = apply_capabilities(make_replay_config(tmp_path, model, {}), capabilities)
    assert config.max_base_kl is None
    assert any("live.replay.max_base_kl" in warning for warning in warnings)
    with pytest.raises(ConfigError, match=r"live\.replay\.max_base_kl: must be null, got 1"):
        apply_capabilities(make_replay_config(tmp_path, model, {"max_base_kl": 1.0}), capabilities)


async def test_live_data_older_than_a_day_is_weighted_with_recomputed_logprobs(
    tmp_path: Path, model: Path
) -> None:
    """The stored logprobs of a session, which are far from the policy's, count only in the weights of its
    tokens. The loss is relative to the recomputed ones."""
    ratios: list[tuple[bool, float]] = []
    for ended in (0.0, -2 * 86400.0):
        config = make_replay_config(tmp_path / str(ended), model, {"share": 0}, steps=1, groups_per_step=1)
        store = await open_store(config)
        await add_live(store, "s", 1.0, ended=ended)
        await store.close()
        async with open_live_trainer(config) as harness:
            await harness.trainer.run()
        (step,) = read_steps(config.run_dir)
        ratios.append(("proximal_seconds" in step, step["ratio_mean"]))
    assert ratios[1] == (True, pytest.approx(1.0))
    assert ratios[0][0] is False
    assert ratios[0][1] < 0.5, "the recorded logprobs are too high"
