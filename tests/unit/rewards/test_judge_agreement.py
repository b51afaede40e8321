from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from instar.rewards.judge.agreement import JudgeAgreement, measure_run_agreement
from instar.store.sqlite import SqliteStore
from instar.types import Reward, RewardSource
from tests.unit.data.builders import RUN, make_session, put_test_run


async def measure_agreement(path: Path, sessions: list[list[Reward]]) -> list[JudgeAgreement]:
    """Return the agreement for a run whose sessions have these rewards."""
    store = SqliteStore(path / f"{uuid4()}.db")
    await put_test_run(store)
    for i, rewards in enumerate(sessions):
        await store.open_session(make_session(f"s{i}"), None)
        await store.add_rewards([replace(reward, session_id=f"s{i}") for reward in rewards])
    result = await measure_run_agreement(store, RUN)
    await store.close()
    return result


def make_judge_reward(
    value: float, scorer: str = "judge:outcome", call_id: str | None = None, **detail: Any
) -> Reward:
    return Reward(
        "s", value, RewardSource.JUDGE, scorer, call_id, detail=detail, scorer_version="v", cost=0.25
    )


def make_rule_reward(value: float) -> Reward:
    return Reward("s", value, RewardSource.RULE, "math")


async def test_vote_agreement_is_one_minus_mean_difference(tmp_path: Path) -> None:
    (result,) = await measure_agreement(
        tmp_path, [[make_judge_reward(0.5, votes=[0.5, 0.5])], [make_judge_reward(0.5, votes=[0.0, 1.0])]]
    )
    assert (result.judge, result.reward_count, result.mean_reward, result.dollars) == (
        "judge:outcome@v",
        2,
        0.5,
        0.5,
    )
    assert result.vote_agreement == 0.5
    assert (result.order_agreement, result.rule_same_side, result.rule_correlation) == (None, None, None)
    (result,) = await measure_agreement(
        tmp_path, [[make_judge_reward(1, call_id="a", votes=["accepted", "accepted", "corrected"])]]
    )
    assert result.vote_agreement == pytest.approx(1 / 3)
    (result,) = await measure_agreement(tmp_path, [[make_judge_reward(1, votes=[1.0])]])
    assert result.vote_agreement is None


async def test_order_agreement_is_fraction_of_agreeing_pairs(tmp_path: Path) -> None:
    (result,) = await measure_agreement(
        tmp_path,
        [
            [make_judge_reward(0.5, orders=4, orders_agreed=1)],
            [make_judge_reward(0.5, orders=4, orders_agreed=3)],
        ],
    )
    assert result.order_agreement == 0.5


async def test_agreement_compares_judge_with_rules(tmp_path: Path) -> None:
    sessions = [
        [make_rule_reward(1.0), make_judge_reward(0.9)],
        [make_rule_reward(0.0), make_judge_reward(0.2)],
        [make_judge_reward(0.1), make_rule_reward(0.0), make_judge_reward(0.7)],
        [make_judge_reward(0.3)],
        [make_rule_reward(1.0)],
        [make_rule_reward(1.0), make_judge_reward(0.4, call_id="a", scorer="judge:process")],
    ]
    outcome, process = await measure_agreement(tmp_path, sessions)
    assert outcome.rule_sessions == 3
    assert outcome.rule_same_side == pytest.approx(2 / 3)
    assert outcome.rule_correlation is not None
    assert 0.5 < outcome.rule_correlation < 1
    assert process.rule_sessions == 0  # call rewards are not session rewards


async def test_run_agreement_reads_sessions_in_pages(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "store.db")
    await put_test_run(store)
    for i in range(5):
        await store.open_session(make_session(f"s{i}"), None)
        rewards = [
            Reward(f"s{i}", i / 4, RewardSource.JUDGE, "judge:outcome", scorer_version="v"),
            Reward(f"s{i}", i / 4, RewardSource.RULE, "math"),
        ]
        await store.add_rewards(rewards)
    (result,) = await measure_run_agreement(store, RUN, page_size=2)
    await store.close()
    assert (result.reward_count, result.rule_sessions, result.rule_same_side) == (5, 5, 1.0)
    assert result.rule_correlation == pytest.approx(1)
