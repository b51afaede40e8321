from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from instar.config import AdvantageConfig
from instar.data.advantages import (
    MAX_SAMPLING_WEIGHT,
    AdvantageEstimator,
    Advantages,
    grpo,
    grpo_no_std,
    has_signal,
    normalize,
    reweight_truncated_sampling,
    rloo,
)
from instar.data.linearize import linearize, with_advantage
from instar.types import Sample
from tests.unit.data.builders import make_call, make_session

REWARDS = [1.0, 0.0, 0.25, 0.5]
Estimate = Callable[[list[float | None]], Advantages]


def test_estimators_agree_with_numpy() -> None:
    r = np.array(REWARDS)
    np.testing.assert_allclose(np.array(grpo(REWARDS), float), (r - r.mean()) / r.std(), atol=1e-4)
    np.testing.assert_allclose(np.array(grpo_no_std(REWARDS), float), r - r.mean())
    leave_one_out = [r[i] - np.delete(r, i).mean() for i in range(len(r))]
    np.testing.assert_allclose(np.array(rloo(REWARDS), float), leave_one_out)


@pytest.mark.parametrize("estimate", [grpo, grpo_no_std, rloo])
def test_missing_rewards_are_excluded_from_the_mean(estimate: Estimate) -> None:
    advantages = estimate([1.0, None, 0.0])
    assert advantages[1] is None
    assert [advantages[0], advantages[2]] == estimate([1.0, 0.0])
    assert estimate([None, None]) == [None, None]


@pytest.mark.parametrize("estimate", [grpo, grpo_no_std, rloo])
@pytest.mark.parametrize("rewards", [[1.0, 1.0, 1.0], [0.1, 0.1, 0.1], [0.7], [0.5, None]])
def test_equal_rewards_have_no_signal(estimate: Estimate, rewards: list[float | None]) -> None:
    assert not has_signal(estimate(rewards))
    assert has_signal(estimate([0.0, 1.0, 1.0]))


def test_running_baseline_follows_rewards_and_is_restored_from_json() -> None:
    config = AdvantageConfig(estimator="running", decay=0.5)
    uninterrupted = AdvantageEstimator(config)
    assert uninterrupted([1.0]) == [0.0], "the first reward is its own baseline"
    assert uninterrupted([0.0]) == [-1.0]
    assert uninterrupted([None]) == [None]
    resumed = AdvantageEstimator(config)
    resumed.load_json(json.loads(json.dumps(uninterrupted.to_json())))
    assert resumed([1.0]) == uninterrupted([1.0]) == [0.5]
    assert resumed([1.0, 0.0]) == [0.25, -0.75]


def make_samples() -> list[Sample]:
    """Return two samples of session x (3 trained tokens) and one of session y (1), with advantages of 1."""
    x = linearize(make_session("x"), [make_call("a", [1], [5, 6]), make_call("b", [2], [7])])
    y = linearize(make_session("y"), [make_call("c", [1], [8])])
    return [with_advantage(sample, 1.0) for sample in [*x, *y]]


@pytest.mark.parametrize(
    ("normalization", "weights"),
    [
        ("batch_tokens", [1 / 4, 1 / 4, 1 / 4]),
        ("batch_sessions", [1 / 2, 1 / 2, 1 / 2]),
        ("session_tokens", [1 / 6, 1 / 6, 1 / 2]),
        ("none", [1.0, 1.0, 1.0]),
    ],
)
def test_normalize_divides_advantages(normalization: str, weights: list[float]) -> None:
    samples = normalize(make_samples(), normalization)  # type: ignore[arg-type]
    for sample, weight in zip(samples, weights, strict=True):
        np.testing.assert_allclose(sample.advantages, sample.mask * weight)
        assert sample.advantages.dtype == np.float32


def test_truncated_sampling_is_reweighted() -> None:
    behavior = np.array([-0.05 + np.log(0.5), -3.0], np.float32)
    call = make_call("a", [1], [5, 6], behavior_logprobs=behavior)
    (sample,) = linearize(make_session(), [call])
    corrected = reweight_truncated_sampling(with_advantage(sample, 1.0))
    np.testing.assert_allclose(corrected.advantages, [0, 2.0, MAX_SAMPLING_WEIGHT], rtol=1e-5)
    oversampled = replace(sample, behavior_logprobs=np.array([np.nan, -0.05 + np.log(2), -0.06], np.float32))
    np.testing.assert_allclose(
        reweight_truncated_sampling(with_advantage(oversampled, 1.0)).advantages, [0, 0.5, 1.0], rtol=1e-5
    )


def test_tokens_without_logprobs_are_not_reweighted() -> None:
    truncated = make_call("a", [1], [2], behavior_logprobs=np.array([-0.02 + np.log(0.5)], np.float32))
    without_logprob = make_call("b", [4], [5], parent=truncated, logprobs=np.array([np.nan], np.float32))
    (sample,) = linearize(make_session(), [truncated, without_logprob], requires_logprobs=False)
    corrected = reweight_truncated_sampling(with_advantage(sample, 1.0))
    np.testing.assert_allclose(corrected.advantages, [0, 2.0, 0, 1.0], rtol=1e-5)
