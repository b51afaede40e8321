from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from instar.rewards.judge.agreement import measure_agreement, measure_run_agreement
from instar.store.sqlite import SqliteStore
from instar.types import Reward, RewardSource
from tests.unit.data.builders import RUN, begin, make_session


def judged(value: float, name: str = "judge:outcome", call_id: str | None = None, **detail: Any) -> Reward:
    return Reward("s", value, RewardSource.JUDGE, name, call_id, detail=detail, scorer_version="v", cost=0.25)


def ruled(value: float) -> Reward:
    return Reward("s", value, RewardSource.RULE, "math")


def test_agreement_of_votes_is_one_minus_mean_difference() -> None:
    (result,) = measure_agreement([[judged(0.5, votes=[0.5, 0.5])], [judged(0.5, votes=[0.0, 1.0])]])
    assert (result.judge, result.rewards, result.mean, result.dollars) == ("judge:outcome@v", 2, 0.5, 0.5)
    assert result.votes == 0.5
    assert (result.orders, result.rule_same_side, result.rule_correlation) == (None, None, None)
    (result,) = measure_agreement([[judged(1, call_id="a", votes=["accepted", "accepted", "corrected"])]])
    assert result.votes == pytest.approx(1 / 3)
    assert measure_agreement([[judged(1, votes=[1.0])]])[0].votes is None


def test_agreement_of_orders_is_share_of_agreeing_pairs() -> None:
    (result,) = measure_agreement(
        [[judged(0.5, orders=4, orders_agreed=1)], [judged(0.5, orders=4, orders_agreed=3)]]
    )
    assert result.orders == 0.5


def test_agreement_compares_judge_with_rules() -> None:
    sessions = [
        [ruled(1.0), judged(0.9)],
        [ruled(0.0), judged(0.2)],
        [judged(0.1), ruled(0.0), judged(0.7)],
        [judged(0.3)],
        [ruled(1.0)],
        [ruled(1.0), judged(0.4, call_id="a", name="judge:process")],
    ]
    outcome, process = measure_agreement(sessions)
    assert outcome.rule_sessions == 3
    assert outcome.rule_same_side == pytest.approx(2 / 3)
    assert outcome.rule_correlation is not None
    assert 0.5 < outcome.rule_correlation < 1
    assert process.rule_sessions == 0  # a step is no session


async def test_run_agreement_reads_sessions_in_pages(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "store.db")
    await begin(store)
    for i in range(5):
        await store.open_session(make_session(f"s{i}"), None)
        rewards = [
            Reward(f"s{i}", i / 4, RewardSource.JUDGE, "judge:outcome", scorer_version="v"),
            Reward(f"s{i}", i / 4, RewardSource.RULE, "math"),
        ]
        await store.add_rewards(rewards)
    (result,) = await measure_run_agreement(store, RUN, page=2)
    await store.close()
    assert (result.rewards, result.rule_sessions, result.rule_same_side) == (5, 5, 1.0)
    assert result.rule_correlation == pytest.approx(1)
