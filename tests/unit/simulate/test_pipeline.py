"""Tests that compare the simulated pipeline with results computed by hand and the rules of a real run."""

from __future__ import annotations

import random
import statistics
from dataclasses import replace
from typing import Any

import pytest

from instar.config import DistributionConfig, SimulateConfig
from instar.simulate.base import ClusterSpec, EngineSpeed, Workload
from instar.simulate.bound import compute_upper_bound
from instar.simulate.engines import SimulatedPool, SimulatedRequest, VirtualClock
from instar.simulate.pipeline import POLL_DELAY_SECONDS, simulate
from instar.simulate.recommend import recommend
from instar.simulate.sessions import (
    SimulatedSession,
    SimulatedTurn,
    compute_mean,
    draw_sessions,
    make_draw,
)

UNSHARED_SPEED = {1: 10.0, 100: 1000.0}
"""Each reply gets ten tokens per second, however many replies share the engine."""


def make_workload(
    sessions: list[SimulatedSession], speed: dict[int, float] | None = None, **overrides: Any
) -> Workload:
    settings: dict[str, Any] = {
        "latency": DistributionConfig(value=0),
        "speed": EngineSpeed(speed or UNSHARED_SPEED),
        "train_base": 4.0,
        "train_per_token": 0.0,
        "publish_seconds": DistributionConfig(value=1.0),
        **overrides,
    }
    return Workload(sessions, **settings)


def make_cluster(**overrides: Any) -> ClusterSpec:
    settings: dict[str, Any] = {
        "engines": 1,
        "max_batch": 100,
        "concurrency": 100,
        "group_size": 2,
        "groups_per_step": 2,
        "steps": 10,
        "max_staleness": 0,
        "timeout": 1e6,
        **overrides,
    }
    return ClusterSpec(**settings)


def make_session(tokens: int, tool_seconds: float = 0.0, turns: int = 1) -> SimulatedSession:
    """Return a session whose replies have ``tokens`` tokens after the first token."""
    return SimulatedSession(tuple(SimulatedTurn(0, 1 + tokens, tool_seconds) for _ in range(turns)))


LONG_TAIL = [make_session(10), make_session(10), make_session(10), make_session(300)]


def test_sync_waits_for_the_longest_session_of_every_step() -> None:
    result = simulate(make_workload(LONG_TAIL), make_cluster())
    assert result.seconds == pytest.approx(10 * (30 + 4 + 1), abs=10 * 2 * POLL_DELAY_SECONDS + 0.01)
    assert (result.samples, result.staleness) == (40, {0: 40})
    assert result.trainer_idle == pytest.approx(30 / 35, abs=0.01)


def test_async_overlaps_training_with_sessions() -> None:
    same_length = [make_session(50)]
    sync = simulate(make_workload(same_length), make_cluster())
    overlapped = simulate(make_workload(same_length), make_cluster(max_staleness=1))
    assert sync.seconds == pytest.approx(10 * (5 + 5), rel=0.02)
    assert overlapped.seconds == pytest.approx(5 + 10 * 5, rel=0.02)
    assert max(overlapped.staleness) == 1


def test_more_staleness_trains_other_groups_while_a_straggler_runs() -> None:
    result = simulate(make_workload(LONG_TAIL), make_cluster(max_staleness=8))
    assert result.seconds < 0.6 * simulate(make_workload(LONG_TAIL), make_cluster()).seconds
    assert result.samples == 40
    assert max(result.staleness) <= 8


def test_stale_groups_are_dropped_and_replaced() -> None:
    result = simulate(
        make_workload([*[make_session(5)] * 40, make_session(2000)]), make_cluster(max_staleness=1, steps=40)
    )
    assert result.finished
    assert result.steps == 40
    assert result.dropped["stale"] > 0
    assert result.samples + result.dropped["stale"] >= 160


def test_replies_share_an_engine_up_to_max_batch() -> None:
    shared_speed = {1: 10.0, 2: 10.0}
    cluster = make_cluster(steps=1, group_size=4, groups_per_step=1)
    shared = simulate(make_workload([make_session(10)], speed=shared_speed), cluster)
    assert shared.seconds == pytest.approx(4 + 5, abs=0.1), "four replies share ten tokens per second"
    queued = simulate(
        make_workload([make_session(10)]), make_cluster(steps=1, group_size=4, groups_per_step=1, max_batch=2)
    )
    assert queued.seconds == pytest.approx(2 + 5, abs=0.1), "two replies run at a time"
    spread = simulate(
        make_workload([make_session(10)], speed=shared_speed),
        make_cluster(steps=1, group_size=4, groups_per_step=1, engines=4),
    )
    assert spread.seconds == pytest.approx(1 + 5, abs=0.1)


def test_first_token_arrives_after_the_latency() -> None:
    workload = make_workload([make_session(0, turns=20)], latency=DistributionConfig(value=0.1))
    assert simulate(workload, make_cluster(steps=1)).seconds == pytest.approx(20 * 0.1 + 5, abs=0.1)


def test_latency_grows_with_the_calls_on_an_engine() -> None:
    """Four sessions start their calls at the same time, so each call shares the engine with zero to three
    others that started before it."""
    crowded = make_workload(
        [make_session(0, turns=20)], latency=DistributionConfig(value=0.1), latency_growth_per_call=0.5
    )
    single_session = make_cluster(steps=1, group_size=1, groups_per_step=1)
    assert simulate(crowded, single_session).seconds == pytest.approx(20 * 0.1 + 5, abs=0.1)
    assert simulate(crowded, make_cluster(steps=1)).seconds == pytest.approx(20 * 0.1 * 2.5 + 5, rel=0.05)
    assert simulate(crowded, make_cluster(steps=1, engines=4)).seconds == pytest.approx(20 * 0.1 + 5, abs=0.1)


def test_concurrent_sessions_stay_within_concurrency() -> None:
    result = simulate(
        make_workload([make_session(10, tool_seconds=9.0)]),
        make_cluster(concurrency=2, steps=5, max_staleness=4),
    )
    assert result.in_flight <= 2
    assert result.seconds == pytest.approx(5 * 2 * 10 + 5, rel=0.05)


def test_pauses_stop_generation() -> None:
    slow, fast = (
        simulate(
            make_workload([make_session(300)], pause=pause), make_cluster(concurrency=4, max_staleness=4)
        ).seconds
        for pause in (1.0, 0.0)
    )
    assert slow == pytest.approx(fast + 9 * 1.0, abs=0.1), (
        "the sessions of every step but the first are paused once"
    )


@pytest.mark.parametrize("policy", ["keep", "refill", "drop"])
def test_failed_sessions_follow_the_group_policy(policy: Any) -> None:
    result = simulate(
        make_workload([make_session(10)], failures=0.3),
        make_cluster(group_policy=policy, max_staleness=2, steps=50),
    )
    assert result.finished
    if policy == "keep":
        assert result.samples + result.dropped["failed"] == 200
    elif policy == "drop":
        assert result.samples == 200
        assert result.dropped["session_failed"] > 0
    else:
        assert result.dropped["superseded"] > result.dropped["failed"]


def test_crashed_engine_loses_running_replies_and_restarts() -> None:
    result = simulate(
        make_workload([make_session(100)], crashes_per_hour=60.0, restart_seconds=20.0),
        make_cluster(engines=2, steps=50, retries=20),
    )
    assert result.finished
    assert result.crashes > 5
    assert result.dropped["abandoned"] > 0
    assert result.samples == 200


def test_session_past_its_timeout_fails_and_frees_its_slot() -> None:
    result = simulate(
        make_workload([make_session(10), make_session(10_000)]), make_cluster(timeout=20.0, steps=3)
    )
    assert result.finished
    assert result.dropped["failed"] == 6
    assert result.seconds == pytest.approx(3 * (20 + 5), rel=0.02)


def test_groups_without_signal_are_not_trained_on() -> None:
    result = simulate(make_workload([make_session(10)], zero_signal=0.5), make_cluster(steps=50))
    assert result.samples + result.dropped["zero_signal"] == 200
    assert 60 < result.samples < 140


@pytest.mark.parametrize("policy", ["keep", "refill", "drop"])
def test_run_stops_if_all_sessions_fail(policy: Any) -> None:
    result = simulate(make_workload([make_session(10)], failures=1.0), make_cluster(group_policy=policy))
    assert result.given_up
    assert not result.finished
    assert result.samples == 0
    rewarded = simulate(make_workload([make_session(10)], failures=1.0), make_cluster(trains_on_failed=True))
    assert (rewarded.finished, rewarded.samples) == (True, 40)


def test_recommend_returns_none_if_nothing_is_trained() -> None:
    untrainable = make_workload([make_session(10)], zero_signal=1.0)
    assert recommend(untrainable, make_cluster(), max_engines=2, max_staleness=1) is None
    assert compute_upper_bound(untrainable, make_cluster()).samples_per_hour == 0
    assert (
        compute_upper_bound(
            make_workload([make_session(10)], failures=1.0), make_cluster(group_policy="drop")
        ).samples_per_hour
        == 0
    )


def test_failed_session_is_trained_up_to_its_failure() -> None:
    """Every session fails in its first or second turn. Training takes one second per ten tokens."""
    workload = make_workload(
        [make_session(49, turns=2)],
        failures=1.0,
        train_per_token=0.1,
        train_base=0.0,
        publish_seconds=DistributionConfig(value=0),
    )
    result = simulate(workload, make_cluster(trains_on_failed=True, steps=40, max_staleness=8))
    assert (1 - result.trainer_idle) * result.seconds == pytest.approx(160 * 1.5 * 50 * 0.1, rel=0.1)


STRAGGLER = [*[make_session(5)] * 40, make_session(2000)]
"""The last session's reply takes as long as dozens of training steps."""


def test_reply_in_progress_continues_under_the_next_version() -> None:
    """With masking, the last tokens of a long reply are fresh, unless the reply keeps its first version."""
    cluster = make_cluster(max_staleness=1, steps=40, masks_stale=True)
    switching = simulate(make_workload(STRAGGLER), cluster)
    keeping = simulate(make_workload(STRAGGLER), replace(cluster, versions_per_token=False))
    dropped = simulate(make_workload(STRAGGLER), replace(cluster, masks_stale=False))
    assert switching.dropped["stale"] < keeping.dropped["stale"] == dropped.dropped["stale"]
    assert switching.samples > 0


def count_one_group_per_step(steps: int) -> int:
    return steps


def count_one_group_per_two_steps(steps: int) -> int:
    return steps // 2


def test_exported_groups_are_not_rolled_out() -> None:
    """One group in four is live in the first run. In the second run, it is one in eight, so every other step
    has only exported data."""
    quarter = simulate(
        make_workload([make_session(10)]),
        make_cluster(groups_per_step=4, rollout_group_counter=count_one_group_per_step),
    )
    assert (quarter.samples, quarter.data_samples, quarter.staleness) == (80, 60, {0: 20})
    assert quarter.in_flight <= 2
    eighth = simulate(
        make_workload([make_session(10)]),
        make_cluster(groups_per_step=4, rollout_group_counter=count_one_group_per_two_steps),
    )
    assert eighth.finished
    assert (eighth.samples, eighth.staleness.total()) == (80, 10)
    assert eighth.seconds == pytest.approx(5 * 1 + 10 * 5, abs=1)


def test_exported_tokens_are_trained() -> None:
    heavy = make_workload([make_session(9)], train_per_token=0.1)
    mixed = simulate(heavy, make_cluster(rollout_group_counter=count_one_group_per_step))
    live_only = simulate(heavy, make_cluster())
    assert mixed.seconds == pytest.approx(live_only.seconds)


def test_moved_request_can_be_cancelled() -> None:
    clock = VirtualClock()
    pool = SimulatedPool(clock, 2, 1, EngineSpeed({1: 10.0}))
    first, short, moved = (
        SimulatedRequest(tokens, on_begin=lambda: None, on_done=lambda: None, on_crash=lambda: None)
        for tokens in (1000, 10, 1000)
    )
    pool.send(first, None)
    pool.send(short, None)
    pool.send(moved, first.engine)
    assert moved.engine is first.engine, "the request waits for the engine of its session"
    clock.step()
    pool.crash(pool.engines[0], 1e9)
    assert moved.engine is pool.engines[1], "the other engine is idle"
    pool.cancel(moved)
    assert (len(pool.engines[1].running), pool.engines[1].load) == (0, 0)


@pytest.mark.parametrize("seed", range(6))
def test_simulation_stays_below_the_bound(seed: int) -> None:
    rng = random.Random(seed)
    config = SimulateConfig()
    sessions = draw_sessions(config, rng, 400)
    speed = {1: 50.0, 8: rng.uniform(100, 400), 64: rng.uniform(400, 900)}
    workload = make_workload(
        sessions,
        speed=speed,
        latency=DistributionConfig(median=0.3, sigma=1.0, max=5),
        latency_growth_per_call=rng.choice([0.0, 0.1, 0.5]),
        train_base=rng.uniform(0.1, 20),
        train_per_token=1e-5,
    )
    cluster = make_cluster(
        engines=rng.choice([1, 3]),
        concurrency=rng.choice([16, 64, 256]),
        group_size=4,
        groups_per_step=rng.choice([2, 8]),
        max_staleness=rng.choice([0, 1, 4, 16]),
        steps=40,
    )
    result = simulate(workload, cluster, seed=seed)
    assert 0 < result.samples_per_hour <= 1.02 * compute_upper_bound(workload, cluster).samples_per_hour


@pytest.mark.parametrize("policy", ["keep", "refill", "drop"])
@pytest.mark.parametrize("trains_on_failed", [False, True])
@pytest.mark.parametrize("bottleneck", ["trainer", "rollout"])
def test_throughput_with_failures_stays_below_the_bound(
    policy: Any, trains_on_failed: bool, bottleneck: str
) -> None:
    """The bound is also tight: the mean throughput over several seeds comes close to it."""
    truncated = DistributionConfig(median=1.0, sigma=1.5, max=1.5)
    workload = make_workload(
        [make_session(20, turns=6, tool_seconds=0.5), make_session(60), make_session(5, turns=3)],
        failures=0.3,
        latency=truncated,
        publish_seconds=truncated,
        train_base=30.0 if bottleneck == "trainer" else 0.1,
        train_per_token=1e-3,
    )
    cluster = make_cluster(
        max_staleness=1000, steps=100, concurrency=16, group_policy=policy, trains_on_failed=trains_on_failed
    )
    bound = compute_upper_bound(workload, cluster)
    assert bound.bottleneck == bottleneck
    rates = [simulate(workload, cluster, seed=seed).samples_per_hour for seed in range(4)]
    assert 0.8 < statistics.mean(rates) / bound.samples_per_hour <= 1.02


@pytest.mark.parametrize(
    ("sigma", "maximum"), [(0.0, None), (0.0, 1.0), (0.0, 5.0), (1.5, None), (1.5, 3.0), (1.5, 0.5)]
)
def test_distribution_mean_matches_the_draws(sigma: float, maximum: float | None) -> None:
    config = DistributionConfig(median=2.0, sigma=sigma, max=maximum)
    draw = make_draw(config, random.Random(0))
    tolerance = 0.05 if maximum is None else 0.01
    assert statistics.mean(draw() for _ in range(20_000)) == pytest.approx(
        compute_mean(config), rel=tolerance
    )


def test_saturated_trainer_reaches_the_bound() -> None:
    workload = make_workload([make_session(50)], train_base=30.0)
    cluster = make_cluster(max_staleness=2, steps=50)
    bound = compute_upper_bound(workload, cluster)
    assert bound.bottleneck == "trainer"
    assert bound.samples_per_hour == pytest.approx(3600 * 4 / 31)
    assert simulate(workload, cluster).samples_per_hour > 0.97 * bound.samples_per_hour
    half_live = replace(cluster, rollout_group_counter=count_one_group_per_step)
    assert compute_upper_bound(workload, half_live).samples_per_hour == bound.samples_per_hour
    assert compute_upper_bound(workload, half_live).rollout > bound.rollout


def test_seed_makes_a_simulation_reproducible() -> None:
    sessions = draw_sessions(SimulateConfig(), random.Random(0), 50)
    noisy = make_workload(sessions, latency=DistributionConfig(values=[0.1, 1.0, 3.0]))
    first, repeated, other = (
        simulate(noisy, make_cluster(max_staleness=2), seed=seed).seconds for seed in (1, 1, 2)
    )
    assert first == repeated != other


def test_recommendation_stops_when_more_engines_do_not_help() -> None:
    workload = make_workload(LONG_TAIL, speed={1: 10.0, 4: 10.0}, train_base=1.0)
    recommendation = recommend(
        workload, make_cluster(steps=60, concurrency=16), max_engines=32, max_staleness=16
    )
    assert recommendation is not None
    rates = {
        (trial.engines, trial.max_staleness): trial.result.samples_per_hour for trial in recommendation.trials
    }
    assert 1 < recommendation.engines < 32
    assert recommendation.max_staleness > 0
    assert rates[recommendation.engines, recommendation.max_staleness] > 2 * rates[1, 0]
    sync = recommend(workload, make_cluster(steps=20), max_engines=4, max_staleness=8, sync=True)
    assert sync is not None
    assert sync.max_staleness == 0
    assert "of the best throughput" in recommendation.reason


def test_requests_spread_over_thousands_of_engines() -> None:
    workload = make_workload([make_session(20, tool_seconds=1.0, turns=3)], train_base=0.1)
    result = simulate(
        workload, make_cluster(engines=2000, concurrency=4000, groups_per_step=200, steps=5, max_staleness=4)
    )
    assert result.finished
    assert result.samples == 2000


def test_engine_choice_stays_fast_after_many_requests() -> None:
    """Searching through outdated entries on every request would take minutes."""
    clock = VirtualClock()
    pool = SimulatedPool(clock, 2, 4, EngineSpeed({1: 10.0}))
    for _ in range(20_000):
        pool.send(
            SimulatedRequest(1, on_begin=lambda: None, on_done=lambda: None, on_crash=lambda: None), None
        )
        while clock.step():
            pass
    assert [engine.served for engine in pool.engines] == [10_000, 10_000]
