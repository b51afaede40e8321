"""Tests for training with a real backend on tokens that other policies sampled."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from instar.backends.local.backend import LocalBackend
from instar.config import AdamConfig, LossConfig, OffPolicyConfig, RunConfig
from instar.data.batcher import Batcher, StepBatch
from instar.reference.base import Reference
from instar.reference.penalty import ReferencePenalty
from instar.store.sqlite import SqliteStore
from instar.trainer.monitor import read_steps
from instar.trainer.update import correct_off_policy
from instar.types import Floats, GroupStatus, Reward, RewardSource, SessionStatus
from tests.tiny import make_tiny_model
from tests.unit.data.builders import RUN, add_group, add_session, make_call, make_session
from tests.unit.trainer.harness import fill_store, make_config, open_trainer

RECOMPUTE = {"proximal": "recompute", "truncate": 1.5}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), hidden=32)


async def load_first_batch(config: RunConfig) -> StepBatch:
    store = SqliteStore(config.store_path)
    batch = await Batcher(store, RUN, config).next_batch(1, 0, 0)
    await store.close()
    assert batch is not None
    return batch


async def end_with_reward(store: SqliteStore, session_id: str, value: float) -> None:
    reward = Reward(session_id, value, RewardSource.RULE, "test")
    await store.end_session(session_id, SessionStatus.COMPLETED, None, [reward])


async def test_step_with_recomputed_logprobs_weights_off_policy_tokens(model: Path, tmp_path: Path) -> None:
    """The recorded logprobs are -0.01 × token id, far from the model's. With one update per batch, the
    ratio in the loss is 1, so the loss is the negative sum of the weighted advantages."""
    config = make_config(tmp_path, model, off_policy=RECOMPUTE, steps=1, tensorboard=True)
    await fill_store(config)
    batch = await load_first_batch(config)
    backend = LocalBackend(config.model, config.backend, seed=config.seed)  # pyright: ignore[reportArgumentType]
    proximal = await backend.forward(batch.samples)
    await backend.close()
    expected, ratios = 0.0, []
    for sample, logprobs in zip(batch.samples, proximal, strict=True):
        for i in np.flatnonzero(sample.mask):
            ratios.append(math.exp(float(logprobs[i]) + 0.01 * int(sample.token_ids[i])))
            expected -= min(ratios[-1], 1.5) * float(sample.advantages[i])
    async with open_trainer(config) as harness:
        await harness.trainer.run()
    (metrics,) = read_steps(config.run_dir)
    assert metrics["loss"] == pytest.approx(expected, rel=1e-4)
    assert metrics["ratio_max"] == pytest.approx(1.0, abs=1e-5), "the ratio is to the proximal policy"
    assert metrics["importance_mean"] == pytest.approx(np.mean(ratios), rel=1e-4)
    assert metrics["ess"] == pytest.approx(
        np.sum(ratios) ** 2 / np.sum(np.square(ratios)) / len(ratios), rel=1e-4
    )
    assert metrics["staleness_tokens"] == {"0": len(ratios)}
    assert metrics["age_seconds_max"] >= metrics["age_seconds_mean"] >= 0
    assert metrics["proximal_seconds"] > 0
    json.dumps(metrics, allow_nan=False)


async def test_reply_sampled_across_update_weights_only_old_tokens(model: Path, tmp_path: Path) -> None:
    """Tokens that the trained policy itself sampled have weight 1, regardless of the tokens before them."""
    config = make_config(tmp_path, model, off_policy=RECOMPUTE)
    backend = LocalBackend(config.model, config.backend, seed=0)  # pyright: ignore[reportArgumentType]
    await fill_store(config)
    batch = await load_first_batch(config)
    before = await backend.forward(batch.samples)
    await backend.forward_backward(batch.samples, LossConfig())
    await backend.optim_step(AdamConfig(lr=0.3))
    after = await backend.forward(batch.samples)
    mixed_samples, old_indices = [], []
    for sample, old_logprobs, new_logprobs in zip(batch.samples, before, after, strict=True):
        trained = np.flatnonzero(sample.mask)
        logprobs = np.where(sample.mask > 0, new_logprobs, np.nan).astype(np.float32)
        logprobs[trained[0]] = old_logprobs[trained[0]]
        versions = np.where(sample.mask > 0, 1, -1).astype(np.int32)
        versions[trained[0]] = 0
        mixed_samples.append(replace(sample, logprobs=logprobs, versions=versions))
        old_indices.append(trained[0])
    batch = replace(batch, samples=mixed_samples)
    corrected, _ = await correct_off_policy(
        batch, backend, OffPolicyConfig(proximal="recompute", truncate=1e9)
    )
    await backend.close()
    largest_change = 0.0
    for sample, corrected_sample, old_index, old_logprobs, new_logprobs in zip(
        mixed_samples, corrected.samples, old_indices, before, after, strict=True
    ):
        weights = corrected_sample.advantages[sample.mask > 0] / sample.advantages[sample.mask > 0]
        expected = [
            math.exp(new_logprobs[i] - old_logprobs[i]) if i == old_index else 1.0
            for i in np.flatnonzero(sample.mask)
        ]
        np.testing.assert_allclose(weights, expected, rtol=1e-4)
        largest_change = max(largest_change, abs(math.log(expected[0])))
    assert largest_change > 0.05, "the update changed the logprobs"


class ConstantReference(Reference):
    def __init__(self, value: float) -> None:
        self.value = value

    async def logprobs(self, samples: object) -> list[Floats]:
        return [np.full(len(sample), self.value, np.float32) for sample in samples]  # type: ignore[attr-defined]

    async def close(self) -> None:
        pass


async def test_reference_penalty_uses_proximal_policy_and_its_weights(model: Path, tmp_path: Path) -> None:
    config = make_config(tmp_path, model, off_policy=RECOMPUTE)
    await fill_store(config)
    batch = await load_first_batch(config)
    backend = LocalBackend(config.model, config.backend, seed=0)  # pyright: ignore[reportArgumentType]
    proximal = await backend.forward(batch.samples)
    corrected, _ = await correct_off_policy(batch, backend, config.trainer.off_policy)
    await backend.close()
    adjusted, metrics = await ReferencePenalty(ConstantReference(-2.0), 0.5).apply(
        corrected.samples, corrected.scales
    )
    log_ratios: list[float] = []
    for sample, adjusted_sample, logprobs, scale in zip(
        batch.samples, adjusted, proximal, batch.scales, strict=True
    ):
        for i in np.flatnonzero(sample.mask):
            weight = min(math.exp(float(logprobs[i]) - float(sample.logprobs[i])), 1.5)
            log_ratios.append(float(logprobs[i]) + 2.0)
            expected = weight * (float(sample.advantages[i]) - 0.5 * log_ratios[-1] * float(scale[i]))
            assert adjusted_sample.advantages[i] == pytest.approx(expected, rel=1e-4)
    assert metrics["reference_kl"] == pytest.approx(np.mean(log_ratios), rel=1e-4)


async def test_truncated_softmax_sampling_is_weighted_once(model: Path, tmp_path: Path) -> None:
    """The weight is the ratio of the proximal policy to the truncated softmax, not to the full softmax."""
    config = make_config(tmp_path, model, off_policy=RECOMPUTE, advantage={"normalize": "none"})
    await fill_store(config, groups=0)
    store = SqliteStore(config.store_path)
    group = await add_group(store, 0, [0.0], status=GroupStatus.OPEN)
    await store.open_session(make_session("truncated", group_id=group, slot=1))
    behavior = np.array([-0.5, -3.0], np.float32)
    await store.add_calls(
        [make_call("truncated#0", [1, 2], [8, 9], session_id="truncated", behavior_logprobs=behavior)]
    )
    await end_with_reward(store, "truncated", 1.0)
    await store.close_group(group, GroupStatus.READY)
    await store.close()
    batch = await load_first_batch(config)
    np.testing.assert_allclose(batch.samples[1].advantages, [0, 0, 1, 1], atol=1e-4)
    np.testing.assert_allclose(batch.scales[1], [0, 0, 1, 1])
    backend = LocalBackend(config.model, config.backend, seed=0)  # pyright: ignore[reportArgumentType]
    proximal = await backend.forward(batch.samples)
    corrected, _ = await correct_off_policy(batch, backend, config.trainer.off_policy)
    await backend.close()
    expected = [0.0, 0.0, *(min(math.exp(proximal[1][i + 2] - behavior[i]), 1.5) for i in range(2))]
    np.testing.assert_allclose(corrected.samples[1].advantages, expected, rtol=1e-4)


async def test_step_with_every_token_dropped_trains_nothing_and_continues(
    model: Path, tmp_path: Path
) -> None:
    off_policy = {"proximal": "recompute", "drop_above": 1.5, "truncate": 1.2}
    config = make_config(tmp_path, model, off_policy=off_policy, steps=2)
    await fill_store(config)
    async with open_trainer(config) as harness:
        await harness.trainer.run()
        assert "forward_backward" not in harness.faults.reached
        assert any("trainer.off_policy.drop_above" in line for line in harness.log)
        assert harness.trainer.step == 2
    first, _ = read_steps(config.run_dir)
    assert first["dropped_tokens"] == first["tokens"] > 0


async def test_importance_metrics_without_recompute_come_from_update(model: Path, tmp_path: Path) -> None:
    config = make_config(tmp_path, model, steps=1)
    await fill_store(config)
    async with open_trainer(config) as harness:
        await harness.trainer.run()
    (metrics,) = read_steps(config.run_dir)
    assert metrics["importance_mean"] == pytest.approx(metrics["ratio_mean"], rel=1e-4)
    assert 0 < metrics["ess"] <= 1
    assert "proximal_seconds" not in metrics


@pytest.mark.parametrize("stale", ["drop", "mask"])
async def test_stale_setting_drops_samples_or_masks_tokens(model: Path, tmp_path: Path, stale: str) -> None:
    config = make_config(tmp_path, model, stale=stale, max_staleness=1, advantage={"normalize": "none"})
    await fill_store(config, groups=0)
    store = SqliteStore(config.store_path)
    group = await add_group(store, 0, [0.0], version=3, status=GroupStatus.OPEN)
    await add_session(store, group, 1, 1.0, version=1)
    await store.open_session(make_session("turns", group_id=group, slot=2))
    first = make_call("t#0", [1, 2], [7, 8], version=1, session_id="turns")
    versions = np.array([1, 2, 3], np.int32)
    second = make_call("t#1", [3], [9, 10, 11], parent=first, versions=versions, session_id="turns")
    await store.add_calls([first, second])
    await end_with_reward(store, "turns", 1.0)
    await store.close_group(group, GroupStatus.READY)
    batch = await Batcher(store, RUN, config).next_batch(1, 0, 3)
    await store.close()
    assert batch is not None
    claims = {claim.sample_key: (claim.reason, claim.staleness) for claim in batch.claims}
    assert claims[f"{group}/1/0"] == ("stale", 2), "all its tokens are stale"
    if stale == "drop":
        assert claims[f"{group}/2/0"] == ("stale", 2)
        assert len(batch.samples) == 1
        assert batch.report["dropped"] == {"stale": 2}
    else:
        assert claims[f"{group}/2/0"] == (None, 1), "the staleness of the oldest trained token"
        sample = batch.samples[1]
        assert sample.mask.tolist() == [0, 0, 0, 0, 0, 0, 1, 1]
        assert (sample.advantages != 0).tolist() == [False] * 6 + [True] * 2
        assert sample.versions.tolist() == [-1, -1, 1, 1, -1, 1, 2, 3], "masked tokens keep their versions"
        report = batch.report
        assert report["dropped"] == {"stale": 1}
        assert report["staleness_tokens"] == {"0": 3, "1": 1}
        assert report["staleness_samples"] == {"0": 1, "1": 1}
        assert report["version_shares"] == {"3": 0.75, "2": 0.25}
