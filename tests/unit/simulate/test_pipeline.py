"""The virtual run: its queueing against what can be computed by hand, and the rules of the real one."""

from __future__ import annotations

import random
import statistics
from dataclasses import replace
from typing import Any

import pytest

from instar.config import DistributionConfig, SimulateConfig
from instar.simulate.base import ClusterSpec, EngineSpeed, Workload
from instar.simulate.bound import upper_bound
from instar.simulate.engines import SimulatedPool, SimulatedRequest, VirtualClock
from instar.simulate.pipeline import POLL_DELAY, simulate
from instar.simulate.recommend import recommend
from instar.simulate.sessions import (
    SimulatedSession,
    SimulatedTurn,
    distribution_mean,
    draw_sessions,
    make_draw,
)

ALONE = {1: 10.0, 100: 1000.0}
"""Ten tokens a second each, however many there are."""


def work(sessions: list[SimulatedSession], speed: dict[int, float] | None = None, **more: Any) -> Workload:
    settings: dict[str, Any] = {
        "latency": DistributionConfig(value=0),
        "speed": EngineSpeed(speed or ALONE),
        "train_base": 4.0,
        "train_per_token": 0.0,
        "publish": DistributionConfig(value=1.0),
        **more,
    }
    return Workload(sessions, **settings)


def plant(**more: Any) -> ClusterSpec:
    settings: dict[str, Any] = {
        "engines": 1,
        "max_batch": 100,
        "concurrency": 100,
        "group_size": 2,
        "groups_per_step": 2,
        "steps": 10,
        "max_staleness": 0,
        "timeout": 1e6,
        **more,
    }
    return ClusterSpec(**settings)


def session(tokens: int, tool: float = 0.0, turns: int = 1) -> SimulatedSession:
    """Of so many tokens behind the first one of each reply, which comes with the call's latency."""
    return SimulatedSession(tuple(SimulatedTurn(0, 1 + tokens, tool) for _ in range(turns)))


LONG_TAIL = [session(10), session(10), session(10), session(300)]


def test_sync_waits_for_the_longest_session_of_every_step() -> None:
    outcome = simulate(work(LONG_TAIL), plant())
    assert outcome.seconds == pytest.approx(10 * (30 + 4 + 1), abs=10 * 2 * POLL_DELAY + 0.01)
    assert (outcome.samples, outcome.staleness) == (40, {0: 40})
    assert outcome.trainer_idle == pytest.approx(30 / 35, abs=0.01)


def test_async_hides_training_behind_the_sessions() -> None:
    even = [session(50)]
    sync = simulate(work(even), plant())
    ahead = simulate(work(even), plant(max_staleness=1))
    assert sync.seconds == pytest.approx(10 * (5 + 5), rel=0.02)
    assert ahead.seconds == pytest.approx(5 + 10 * 5, rel=0.02)
    assert max(ahead.staleness) == 1


def test_with_more_staleness_others_are_trained_while_a_straggler_runs() -> None:
    tail = simulate(work(LONG_TAIL), plant(max_staleness=8))
    assert tail.seconds < 0.6 * simulate(work(LONG_TAIL), plant()).seconds
    assert tail.samples == 40
    assert max(tail.staleness) <= 8


def test_stale_groups_are_dropped_and_replaced() -> None:
    outcome = simulate(work([*[session(5)] * 40, session(2000)]), plant(max_staleness=1, steps=40))
    assert outcome.finished
    assert outcome.steps == 40
    assert outcome.dropped["stale"] > 0
    assert outcome.samples + outcome.dropped["stale"] >= 160


def test_replies_share_an_engine_up_to_max_batch() -> None:
    flat = {1: 10.0, 2: 10.0}
    one = plant(steps=1, group_size=4, groups_per_step=1)
    shared = simulate(work([session(10)], speed=flat), one)
    assert shared.seconds == pytest.approx(4 + 5, abs=0.1), "four replies share ten tokens a second"
    queued = simulate(work([session(10)]), plant(steps=1, group_size=4, groups_per_step=1, max_batch=2))
    assert queued.seconds == pytest.approx(2 + 5, abs=0.1), "two at once, then the other two"
    spread = simulate(
        work([session(10)], speed=flat), plant(steps=1, group_size=4, groups_per_step=1, engines=4)
    )
    assert spread.seconds == pytest.approx(1 + 5, abs=0.1)


def test_first_token_arrives_after_the_latency() -> None:
    quick = work([session(0, turns=20)], latency=DistributionConfig(value=0.1))
    assert simulate(quick, plant(steps=1)).seconds == pytest.approx(20 * 0.1 + 5, abs=0.1)


def test_latency_grows_with_the_calls_at_an_engine() -> None:
    """Four sessions at once, whose calls all begin together: none, one, two and three others are there."""
    crowded = work([session(0, turns=20)], latency=DistributionConfig(value=0.1), crowding=0.5)
    alone = plant(steps=1, group_size=1, groups_per_step=1)
    assert simulate(crowded, alone).seconds == pytest.approx(20 * 0.1 + 5, abs=0.1)
    assert simulate(crowded, plant(steps=1)).seconds == pytest.approx(20 * 0.1 * 2.5 + 5, rel=0.05)
    assert simulate(crowded, plant(steps=1, engines=4)).seconds == pytest.approx(20 * 0.1 + 5, abs=0.1)


def test_concurrent_sessions_stay_within_concurrency() -> None:
    outcome = simulate(work([session(10, tool=9.0)]), plant(concurrency=2, steps=5, max_staleness=4))
    assert outcome.in_flight <= 2
    assert outcome.seconds == pytest.approx(5 * 2 * 10 + 5, rel=0.05)


def test_pauses_stop_generation() -> None:
    slow, fast = (
        simulate(work([session(300)], pause=pause), plant(concurrency=4, max_staleness=4)).seconds
        for pause in (1.0, 0.0)
    )
    assert slow == pytest.approx(fast + 9 * 1.0, abs=0.1), "one pause in each step's sessions but the first"


@pytest.mark.parametrize("policy", ["keep", "refill", "drop"])
def test_failed_sessions_follow_the_group_policy(policy: Any) -> None:
    outcome = simulate(
        work([session(10)], failures=0.3), plant(group_policy=policy, max_staleness=2, steps=50)
    )
    assert outcome.finished
    if policy == "keep":
        assert outcome.samples + outcome.dropped["failed"] == 200
    elif policy == "drop":
        assert outcome.samples == 200
        assert outcome.dropped["session_failed"] > 0
    else:
        assert outcome.dropped["superseded"] > outcome.dropped["failed"]


def test_crashed_engine_loses_running_replies_and_restarts() -> None:
    outcome = simulate(
        work([session(100)], crashes_per_hour=60.0, restart=20.0), plant(engines=2, steps=50, retries=20)
    )
    assert outcome.finished
    assert outcome.crashes > 5
    assert outcome.dropped["abandoned"] > 0
    assert outcome.samples == 200


def test_session_past_its_timeout_fails_and_frees_its_slot() -> None:
    outcome = simulate(work([session(10), session(10_000)]), plant(timeout=20.0, steps=3))
    assert outcome.finished
    assert outcome.dropped["failed"] == 6
    assert outcome.seconds == pytest.approx(3 * (20 + 5), rel=0.02)


def test_groups_without_signal_are_not_trained_on() -> None:
    outcome = simulate(work([session(10)], zero_signal=0.5), plant(steps=50))
    assert outcome.samples + outcome.dropped["zero_signal"] == 200
    assert 60 < outcome.samples < 140


@pytest.mark.parametrize("policy", ["keep", "refill", "drop"])
def test_run_stops_if_all_sessions_fail(policy: Any) -> None:
    outcome = simulate(work([session(10)], failures=1.0), plant(group_policy=policy))
    assert outcome.given_up
    assert not outcome.finished
    assert outcome.samples == 0
    rewarded = simulate(work([session(10)], failures=1.0), plant(trains_on_failed=True))
    assert (rewarded.finished, rewarded.samples) == (True, 40)


def test_recommend_returns_none_if_nothing_is_trained() -> None:
    nothing = work([session(10)], zero_signal=1.0)
    assert recommend(nothing, plant(), most_engines=2, most_staleness=1) is None
    assert upper_bound(nothing, plant()).samples_per_hour == 0
    assert upper_bound(work([session(10)], failures=1.0), plant(group_policy="drop")).samples_per_hour == 0


def test_failed_session_is_trained_up_to_its_failure() -> None:
    """Every session fails, in its first or second turn of five seconds; ten tokens take a second to train."""
    sent = work(
        [session(49, turns=2)],
        failures=1.0,
        train_per_token=0.1,
        train_base=0.0,
        publish=DistributionConfig(value=0),
    )
    outcome = simulate(sent, plant(trains_on_failed=True, steps=40, max_staleness=8))
    assert (1 - outcome.trainer_idle) * outcome.seconds == pytest.approx(160 * 1.5 * 50 * 0.1, rel=0.1)


STRAGGLER = [*[session(5)] * 40, session(2000)]
"""The last one's reply goes on while dozens of steps are trained."""


def test_reply_in_progress_continues_under_the_next_version() -> None:
    """Where stale tokens are masked, its last ones are fresh; not where it ends under the version that it
    began with."""
    site = plant(max_staleness=1, steps=40, masks_stale=True)
    goes_on = simulate(work(STRAGGLER), site)
    held = simulate(work(STRAGGLER), replace(site, versions_per_token=False))
    dropped = simulate(work(STRAGGLER), replace(site, masks_stale=False))
    assert goes_on.dropped["stale"] < held.dropped["stale"] == dropped.dropped["stale"]
    assert goes_on.samples > 0


def one_a_step(steps: int) -> int:
    return steps


def one_in_two_steps(steps: int) -> int:
    return steps // 2


def test_groups_of_exported_data_are_not_rolled_out() -> None:
    """One group in four is live, then one in eight: every other step is of data alone."""
    quarter = simulate(work([session(10)]), plant(groups_per_step=4, live_groups=one_a_step))
    assert (quarter.samples, quarter.data_samples, quarter.staleness) == (80, 60, {0: 20})
    assert quarter.in_flight <= 2
    eighth = simulate(work([session(10)]), plant(groups_per_step=4, live_groups=one_in_two_steps))
    assert eighth.finished
    assert (eighth.samples, eighth.staleness.total()) == (80, 10)
    assert eighth.seconds == pytest.approx(5 * 1 + 10 * 5, abs=1)


def test_tokens_of_exported_data_are_trained() -> None:
    heavy = work([session(9)], train_per_token=0.1)
    mixed = simulate(heavy, plant(live_groups=one_a_step))
    alone = simulate(heavy, plant())
    assert mixed.seconds == pytest.approx(alone.seconds)


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
    assert moved.engine is first.engine, "it waits there"
    clock.step()
    pool.crash(pool.engines[0], 1e9)
    assert moved.engine is pool.engines[1], "the other one is free by now"
    pool.cancel(moved)
    assert (pool.engines[1].active, pool.engines[1].load) == (0, 0)


@pytest.mark.parametrize("seed", range(6))
def test_simulation_stays_below_the_bound(seed: int) -> None:
    rng = random.Random(seed)
    config = SimulateConfig()
    sessions = draw_sessions(config, rng, 400)
    speed = {1: 50.0, 8: rng.uniform(100, 400), 64: rng.uniform(400, 900)}
    sent = work(
        sessions,
        speed=speed,
        latency=DistributionConfig(median=0.3, sigma=1.0, most=5),
        crowding=rng.choice([0.0, 0.1, 0.5]),
        train_base=rng.uniform(0.1, 20),
        train_per_token=1e-5,
    )
    site = plant(
        engines=rng.choice([1, 3]),
        concurrency=rng.choice([16, 64, 256]),
        group_size=4,
        groups_per_step=rng.choice([2, 8]),
        max_staleness=rng.choice([0, 1, 4, 16]),
        steps=40,
    )
    outcome = simulate(sent, site, seed=seed)
    assert 0 < outcome.samples_per_hour <= 1.02 * upper_bound(sent, site).samples_per_hour


@pytest.mark.parametrize("policy", ["keep", "refill", "drop"])
@pytest.mark.parametrize("trains_on_failed", [False, True])
@pytest.mark.parametrize("limit", ["trainer", "rollout"])
def test_throughput_with_failures_stays_below_the_bound(
    policy: Any, trains_on_failed: bool, limit: str
) -> None:
    """Nor is the bound far away. What a run gets is partly luck, so it is the mean of some."""
    cut = DistributionConfig(median=1.0, sigma=1.5, most=1.5)
    sent = work(
        [session(20, turns=6, tool=0.5), session(60), session(5, turns=3)],
        failures=0.3,
        latency=cut,
        publish=cut,
        train_base=30.0 if limit == "trainer" else 0.1,
        train_per_token=1e-3,
    )
    site = plant(
        max_staleness=1000, steps=100, concurrency=16, group_policy=policy, trains_on_failed=trains_on_failed
    )
    most = upper_bound(sent, site)
    assert most.limit == limit
    rates = [simulate(sent, site, seed=seed).samples_per_hour for seed in range(4)]
    assert 0.8 < statistics.mean(rates) / most.samples_per_hour <= 1.02


@pytest.mark.parametrize(
    ("sigma", "most"), [(0.0, None), (0.0, 1.0), (0.0, 5.0), (1.5, None), (1.5, 3.0), (1.5, 0.5)]
)
def test_distribution_mean_matches_the_draws(sigma: float, most: float | None) -> None:
    sent = DistributionConfig(median=2.0, sigma=sigma, most=most)
    drawn = make_draw(sent, random.Random(0))
    tolerance = 0.05 if most is None else 0.01
    assert statistics.mean(drawn() for _ in range(20_000)) == pytest.approx(
        distribution_mean(sent), rel=tolerance
    )


def test_saturated_trainer_reaches_the_bound() -> None:
    sent = work([session(50)], train_base=30.0)
    site = plant(max_staleness=2, steps=50)
    limit = upper_bound(sent, site)
    assert limit.limit == "trainer"
    assert limit.samples_per_hour == pytest.approx(3600 * 4 / 31)
    assert simulate(sent, site).samples_per_hour > 0.97 * limit.samples_per_hour
    half = replace(site, live_groups=one_a_step)
    assert upper_bound(sent, half).samples_per_hour == limit.samples_per_hour
    assert upper_bound(sent, half).rollout > limit.rollout


def test_seed_makes_a_simulation_reproducible() -> None:
    sessions = draw_sessions(SimulateConfig(), random.Random(0), 50)
    noisy = work(sessions, latency=DistributionConfig(values=[0.1, 1.0, 3.0]))
    first, again, other = (simulate(noisy, plant(max_staleness=2), seed=seed).seconds for seed in (1, 1, 2))
    assert first == again != other


def test_recommendation_stops_where_more_engines_do_not_help() -> None:
    sent = work(LONG_TAIL, speed={1: 10.0, 4: 10.0}, train_base=1.0)
    advice = recommend(sent, plant(steps=60, concurrency=16), most_engines=32, most_staleness=16)
    assert advice is not None
    rates = {(one.engines, one.max_staleness): one.result.samples_per_hour for one in advice.trials}
    assert 1 < advice.engines < 32
    assert advice.max_staleness > 0
    assert rates[advice.engines, advice.max_staleness] > 2 * rates[1, 0]
    sync = recommend(sent, plant(steps=20), most_engines=4, most_staleness=8, sync=True)
    assert sync is not None
    assert sync.max_staleness == 0
    assert "of the best throughput" in advice.reason


def test_requests_spread_over_thousands_of_engines() -> None:
    sent = work([session(20, tool=1.0, turns=3)], train_base=0.1)
    outcome = simulate(
        sent, plant(engines=2000, concurrency=4000, groups_per_step=200, steps=5, max_staleness=4)
    )
    assert outcome.finished
    assert outcome.samples == 2000


def test_engine_choice_stays_fast_after_many_requests() -> None:
    """Were what is void looked through every time, this would take minutes."""
    clock = VirtualClock()
    pool = SimulatedPool(clock, 2, 4, EngineSpeed({1: 10.0}))
    for _ in range(20_000):
        pool.send(
            SimulatedRequest(1, on_begin=lambda: None, on_done=lambda: None, on_crash=lambda: None), None
        )
        while clock.step():
            pass
    assert [server.served for server in pool.engines] == [10_000, 10_000]
