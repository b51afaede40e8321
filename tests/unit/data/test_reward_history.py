from __future__ import annotations

import json

import pytest

from instar.config import AdvantageConfig
from instar.data.advantages import AdvantageEstimator
from instar.data.reward_history import WINDOW_SIZE, RewardHistory
from tests.unit.data.builders import make_session


def test_baseline_without_history_is_the_middle_of_the_reward_range() -> None:
    baseline = RewardHistory(prior_mean=0.5).estimate("agent", "kind", 100.0)
    assert (baseline.mean, baseline.std) == (0.5, 0.5)


def test_baseline_is_shrunk_from_the_kind_to_the_agent_to_the_prior() -> None:
    history = RewardHistory(prior_mean=0.0)
    for time, kind, reward in ((1, "a", 1.0), (2, "a", 0.0), (3, "b", 1.0), (4, "b", 1.0)):
        history.add("agent", kind, time, reward)
    history.add("other", "a", 1.0, -5.0)
    mean_agent = (3.0 + 4 * 0.0) / (4 + 4)
    assert history.estimate("agent", "a", 9.0).mean == pytest.approx((1.0 + 4 * mean_agent) / (2 + 4))
    assert history.estimate("agent", "b", 9.0).mean == pytest.approx((2.0 + 4 * mean_agent) / (2 + 4))
    assert history.estimate("agent", "new", 9.0).mean == pytest.approx(mean_agent)
    variance = (3 * 0.25**2 + 0.75**2 + 4 * 0.5**2) / (4 + 4)
    assert history.estimate("agent", "a", 9.0).std == pytest.approx(variance**0.5)


def test_baseline_counts_only_sessions_that_ended_before_the_start() -> None:
    history = RewardHistory(prior_mean=0.0)
    history.add("agent", "a", 5.0, 1.0)  # rewarded before the session that ended earlier
    history.add("agent", "a", 3.0, 0.0)
    assert history.estimate("agent", "a", 3.0).mean == 0.0
    assert history.estimate("agent", "a", 4.0) == history.estimate("agent", "a", 5.0)
    assert history.estimate("agent", "a", 6.0).mean > 0.0


def test_advantage_is_scaled_and_clipped() -> None:
    history = RewardHistory(prior_mean=0.0)
    for time in range(200):
        history.add("agent", "a", time, 0.5)
    baseline = history.estimate("agent", "a", 1000.0)
    assert baseline.std == 0.1, "equal rewards must not give huge advantages"
    assert baseline.compute_advantage(baseline.mean + 0.05) == pytest.approx(0.5)
    assert baseline.compute_advantage(10.0) == 2.0
    assert baseline.compute_advantage(-10.0) == -2.0


def test_history_keeps_the_newest_rewards_and_restores_its_state() -> None:
    history = RewardHistory(prior_mean=0.0)
    for time in range(WINDOW_SIZE + 10):
        history.add("agent", "a", time, 1.0 if time < 10 else 0.0)
    baseline = history.estimate("agent", "a", 1e9)
    assert baseline.mean == 0.0
    restored = RewardHistory(prior_mean=0.0)
    restored.load_json(json.loads(json.dumps(history.to_json())))
    restored.add("agent", "a", 1e6, 1.0)
    history.add("agent", "a", 1e6, 1.0)
    assert restored.estimate("agent", "a", 1e9) == history.estimate("agent", "a", 1e9)


def test_live_estimate_with_call_rewards_centers_and_limits_them() -> None:
    estimator = AdvantageEstimator(AdvantageConfig(weight=0.5), (0.0, 1.0))
    first = make_session("first", created_at=1.0, ended_at=2.0)
    advantage, by_call = estimator.estimate_live(first, "a", None, {"good": 1.0, "bad": 0.0})
    assert advantage == 0.0
    assert by_call == {"good": 0.5, "bad": -0.5}, "0.5 × (reward - 0.5) / 0.5"
    advantage, by_call = estimator.estimate_live(first, "a", 1.3, {"good": 1.0})
    assert advantage == pytest.approx(0.8)
    assert advantage + by_call["good"] == pytest.approx(1.0), "the sum is limited to 2 before the weight"


def test_live_state_is_saved_with_the_running_baseline() -> None:
    estimator = AdvantageEstimator(AdvantageConfig(estimator="running"), (0.0, 1.0))
    estimator([1.0])
    estimator.estimate_live(make_session(created_at=1.0, ended_at=2.0), "a", 1.0, {})
    restored = AdvantageEstimator(AdvantageConfig(estimator="running"), (0.0, 1.0))
    restored.load_json(json.loads(json.dumps(estimator.to_json())))
    later = make_session(created_at=3.0, ended_at=4.0)
    assert restored.estimate_live(later, "a", 1.0, {}) == estimator.estimate_live(later, "a", 1.0, {})
    assert restored([0.0]) == estimator([0.0])
    restored.load_json({})
    assert restored.history.estimate("default", "a", 9.0).mean == 0.5
