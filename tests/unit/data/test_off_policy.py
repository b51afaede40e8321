from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from instar.cli.config_errors import explain
from instar.config import OffPolicyConfig, RunConfig
from instar.data.off_policy import apply_decoupled_ppo, compute_importance_metrics
from instar.errors import BackendError
from instar.types import Floats, Sample

RECOMPUTE = OffPolicyConfig(proximal="recompute")


def make_random_sample(rng: np.random.Generator, *, truncated_softmax: bool) -> tuple[Sample, Floats, Floats]:
    """Return a sample with tokens from several versions, its scales and its proximal logprobs."""
    length = 40
    mask = (rng.random(length) < 0.6).astype(np.float32)
    mask[0] = 0
    logprobs = np.where(mask > 0, -3 * rng.random(length), np.nan).astype(np.float32)
    behavior = (logprobs + rng.normal(0, 0.5, length)).astype(np.float32) if truncated_softmax else None
    sample = Sample(
        sample_key="k",
        session_id="s",
        token_ids=np.arange(length, dtype=np.int32),
        mask=mask,
        logprobs=logprobs,
        advantages=(mask * rng.normal(0, 1, length)).astype(np.float32),
        versions=np.where(mask > 0, rng.integers(3, 6, length), -1).astype(np.int32),
        behavior_logprobs=behavior,
    )
    proximal = (-3 * rng.random(length)).astype(np.float32)
    proximal[0] = np.nan
    return sample, (mask * 0.25).astype(np.float32), proximal


@pytest.mark.parametrize("truncated_softmax", [False, True])
@pytest.mark.parametrize(
    ("truncate", "drop_above"), [(None, None), (1.3, None), (None, 3.0), (1.1, 1.5), (0.5, None)]
)
def test_decoupled_ppo_matches_pure_python(
    truncated_softmax: bool, truncate: float | None, drop_above: float | None
) -> None:
    config = OffPolicyConfig(proximal="recompute", truncate=truncate, drop_above=drop_above)
    max_weight = truncate or 2.0  # the default
    rng = np.random.default_rng(7)
    random_samples = [make_random_sample(rng, truncated_softmax=truncated_softmax) for _ in range(3)]
    samples, scales, proximal = (list(column) for column in zip(*random_samples, strict=True))
    corrected, weighted_scales, metrics = apply_decoupled_ppo(samples, scales, proximal, config)
    truncated_count = dropped_count = trained_count = 0
    for sample, scale, logprobs, corrected_sample, weights in zip(
        samples, scales, proximal, corrected, weighted_scales, strict=True
    ):
        for i in range(len(sample)):
            if sample.mask[i] == 0:
                assert (corrected_sample.mask[i], corrected_sample.advantages[i], weights[i]) == (0, 0, 0)
                assert math.isnan(corrected_sample.logprobs[i]), "an untrained token has no logprob"
                continue
            trained_count += 1
            behavior = sample.logprobs if sample.behavior_logprobs is None else sample.behavior_logprobs
            ratio = math.exp(float(logprobs[i]) - float(behavior[i]))
            is_kept = drop_above is None or 1 / drop_above <= ratio <= drop_above
            weight = min(ratio, max_weight) if is_kept else 0.0
            dropped_count += not is_kept
            truncated_count += is_kept and ratio > max_weight
            assert corrected_sample.mask[i] == float(is_kept)
            assert corrected_sample.logprobs[i] == logprobs[i]
            assert corrected_sample.advantages[i] == pytest.approx(
                weight * float(sample.advantages[i]), rel=1e-6
            )
            assert weights[i] == pytest.approx(weight * float(scale[i]), rel=1e-6)
    assert metrics == {
        "truncated": pytest.approx(truncated_count / trained_count),
        "dropped_tokens": dropped_count,
    }
    assert truncated_count > 0
    assert (dropped_count > 0) == (drop_above is not None)


def test_decoupled_ppo_on_policy_changes_nothing() -> None:
    sample, scale, _ = make_random_sample(np.random.default_rng(1), truncated_softmax=False)
    (unchanged,), (weights,), metrics = apply_decoupled_ppo([sample], [scale], [sample.logprobs], RECOMPUTE)
    for name in ("mask", "logprobs", "advantages"):
        np.testing.assert_array_equal(getattr(unchanged, name), getattr(sample, name))
    np.testing.assert_array_equal(weights, scale)
    assert metrics == {"truncated": 0.0, "dropped_tokens": 0}


def test_compute_importance_matches_pure_python() -> None:
    rng = np.random.default_rng(3)
    sample, _, proximal = make_random_sample(rng, truncated_softmax=True)
    other, _, other_proximal = make_random_sample(rng, truncated_softmax=False)
    ratios: list[float] = []
    assert sample.behavior_logprobs is not None
    for new, old, mask in (
        (proximal, sample.behavior_logprobs, sample.mask),
        (other_proximal, other.logprobs, other.mask),
    ):
        ratios += [math.exp(float(a) - float(b)) for a, b, m in zip(new, old, mask, strict=True) if m]
    metrics = compute_importance_metrics([sample, other], [proximal, other_proximal])
    assert metrics["importance_mean"] == pytest.approx(sum(ratios) / len(ratios))
    assert metrics["importance_max"] == pytest.approx(max(ratios))
    ordered = sorted(ratios)
    position = 0.99 * (len(ratios) - 1)
    below = ordered[int(position)]
    assert metrics["importance_p99"] == pytest.approx(
        below + (position - int(position)) * (ordered[int(position) + 1] - below)
    )
    effective_count = sum(ratios) ** 2 / sum(ratio**2 for ratio in ratios)
    assert metrics["ess"] == pytest.approx(effective_count / len(ratios))
    on_policy = compute_importance_metrics([other], [other.logprobs])
    assert on_policy["ess"] == on_policy["importance_max"] == 1.0
    assert compute_importance_metrics([], []) == {}


def test_compute_importance_with_tiny_logprobs_stays_finite() -> None:
    sample, _, proximal = make_random_sample(np.random.default_rng(3), truncated_softmax=False)
    unlikely = replace(sample, logprobs=np.where(sample.mask > 0, -1e4, np.nan).astype(np.float32))
    assert all(math.isfinite(value) for value in compute_importance_metrics([unlikely], [proximal]).values())


def test_decoupled_ppo_with_missing_proximal_logprob_raises() -> None:
    sample, scale, proximal = make_random_sample(np.random.default_rng(1), truncated_softmax=False)
    missing_index = int(np.flatnonzero(sample.mask)[2])
    proximal[missing_index] = np.nan
    with pytest.raises(BackendError, match=f"sample k: .* token at index {missing_index}"):
        apply_decoupled_ppo([sample], [scale], [proximal], RECOMPUTE)


@pytest.mark.parametrize(
    ("section", "message"),
    [
        (
            {"truncate": 3},
            "trainer.off_policy: truncate: needs proximal 'recompute', because 'behavior' has no importance "
            "weights",
        ),
        ({"drop_above": 3, "proximal": "behavior"}, "drop_above: needs proximal 'recompute'"),
        (
            {"proximal": "recompute", "truncate": 4, "drop_above": 3},
            "truncate: must be below drop_above (3), got 4",
        ),
        ({"proximal": "recompute", "drop_above": 1}, "trainer.off_policy.drop_above: must be greater"),
        ({"proximal": "recompute", "truncate": 0}, "trainer.off_policy.truncate: must be greater"),
    ],
)
def test_off_policy_config_rejects_invalid_settings(section: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError) as raised:
        RunConfig.model_validate({"trainer": {"off_policy": section}})
    assert message in "; ".join(explain(raised.value))


@pytest.mark.parametrize(
    ("section", "message"),
    [
        (
            {"loss": {"name": "cross_entropy"}, "off_policy": {"proximal": "recompute"}},
            "trainer: off_policy.proximal: 'recompute' cannot be used with cross_entropy, which has no",
        ),
        (
            {"loss_fallback": "dro", "advantage": {"normalize": "session_tokens"}},
            "trainer: advantage.normalize: 'session_tokens' cannot be used with dro",
        ),
    ],
)
def test_trainer_config_rejects_incompatible_loss_settings(section: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError) as raised:
        RunConfig.model_validate({"trainer": section})
    assert message in "; ".join(explain(raised.value))
