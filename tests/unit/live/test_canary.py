"""Tests for the decisions about shadow, canary and newly promoted versions."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import numpy as np
import pytest

from instar.config import RunConfig
from instar.live.canary import (
    ALPHA,
    MAX_SESSIONS,
    CanaryController,
    Outcome,
    choose_range,
    compare_by_time,
    compute_evidence,
    find_previous,
    is_broken,
)
from instar.live.gate import NEXT_STAGE
from instar.store.base import ShadowReply
from instar.store.sqlite import SqliteStore
from instar.types import (
    Channel,
    Message,
    PolicyStage,
    Reward,
    RewardSource,
    Score,
    Session,
    SessionStatus,
    new_id,
)
from tests.unit.store.factories import make_call
from tests.versions import publish_canary, publish_candidate, publish_serving

POLICY = "run/support"
DAY = 86400.0


def last_reward(rewards: Sequence[Reward], scores: Sequence[Score]) -> float | None:
    return rewards[-1].value if rewards else None


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[SqliteStore]:
    store = SqliteStore(tmp_path / "store.db")
    yield store
    await store.close()


def make_controller(store: SqliteStore, *, days_later: float = 0.0) -> CanaryController:
    config = RunConfig.model_validate(
        {
            "name": "run",
            "agents": {"support": {"mode": "learn"}},
            "data": "live",
            "gateway": {"reward_range": [0, 1]},
            "live": {"canary": {"sessions": 10, "shadow_replies": 3}},
        }
    )
    return CanaryController(store, config, POLICY, last_reward, lambda: time.time() + days_later * DAY)


async def add_session(
    store: SqliteStore, reward: float | None, canary: int | None = None, created_at: float | None = None
) -> str:
    session_id = new_id("sess")
    session = Session(
        *(session_id, "run", "support", POLICY, Channel.LIVE),
        created_at=created_at or time.time(),
        canary_version=canary,
    )
    await store.open_session(session)
    rewards = [] if reward is None else [Reward(session_id, reward, RewardSource.HUMAN)]
    await store.end_session(session_id, SessionStatus.COMPLETED, rewards=rewards)
    return session_id


class Decision(NamedTuple):
    action: str
    version: int
    reason: str


async def check(controller: CanaryController, store: SqliteStore) -> Decision | None:
    """Make and carry out the decision that is due, as the gate does."""
    if (rollback := await controller.check_serving()) is not None:
        return Decision("roll back", rollback.version, rollback.reason)
    staged = [row for row in await store.policy_versions(POLICY) if row.stage in NEXT_STAGE]
    for row in staged[-1:]:
        version = row.policy.version
        outcome = await controller.check_stage(POLICY, version, row.stage)
        if outcome.action != "wait":
            stage = NEXT_STAGE[row.stage] if outcome.action == "advance" else PolicyStage.REJECTED
            assert await store.move_version(POLICY, version, row.stage, stage, outcome.reason)
            return Decision(outcome.action, version, outcome.reason)
    return None


async def get_stages(store: SqliteStore) -> dict[int, str]:
    return {row.policy.version: row.stage.value for row in await store.policy_versions(POLICY)}


# --- statistics ---------------------------------------------------------------------------------


def test_evidence_rarely_exceeds_the_threshold_if_the_mean_is_not_negative() -> None:
    """The threshold is checked after each of 300 differences, for 400 sequences with the mean 0."""
    rng, alarms = Random(0), 0
    for _ in range(400):
        values: list[float] = []
        for _ in range(30):
            values += [rng.choice((-1.0, 0.0, 0.0, 1.0)) for _ in range(10)]
            if compute_evidence(values, 1.0) >= 1 / ALPHA:
                alarms += 1
                break
    assert alarms / 400 <= ALPHA + 0.02


def test_evidence_finds_a_lower_mean_after_few_differences() -> None:
    rng, counts = Random(1), []
    for _ in range(50):
        values: list[float] = []
        while compute_evidence(values, 1.0) < 1 / ALPHA and len(values) < 100:
            values.append(float(rng.random() < 0.2) - float(rng.random() < 0.8))
        counts.append(len(values))
    assert sorted(counts)[25] <= 20


def test_comparison_uses_each_reward_once_and_only_those_of_the_same_time() -> None:
    others = [Outcome(time, reward) for time, reward in ((1, 0.0), (2, 1.0), (5, 0.4), (9, 0.0))]
    canary = [Outcome(time, reward) for time, reward in ((3, 1.0), (4, 0.0), (6, 0.8), (7, 0.5))]
    assert compare_by_time(canary, others) == pytest.approx([0.5, 0.0])
    assert compare_by_time(canary, []) == []


def test_range_is_that_of_the_earlier_rewards_if_they_differ() -> None:
    assert choose_range([0.5, 0.9], (-10, 10)) == (0.5, 0.9)
    assert choose_range([0.5, 0.5], (-10, 10)) == (-10, 10)
    assert choose_range([], (-10, 10)) == (-10, 10)


def test_reply_is_broken_if_it_is_empty_or_cut_off() -> None:
    text = Message(role="assistant", content="hello")
    tool_call = {"id": "1", "name": "f", "arguments": "{}"}
    assert not is_broken(text, "stop")
    assert is_broken(text, "length")
    assert is_broken(Message(role="assistant", content=" "), "stop")
    assert not is_broken(Message(role="assistant", content="", tool_calls=[tool_call]), "tool_calls")


# --- canary -------------------------------------------------------------------------------------


async def test_canary_with_equal_rewards_is_promoted_after_enough_sessions(store: SqliteStore) -> None:
    canary, controller = await publish_canary(store, POLICY), make_controller(store)
    for number in range(9):
        await add_session(store, number % 2, canary)
        await add_session(store, number % 2)
    await add_session(store, None, canary)
    assert await check(controller, store) is None
    await add_session(store, 1.0, canary)
    decision = await check(controller, store)
    assert decision is not None
    assert (decision.action, decision.version) == ("advance", canary)
    assert await get_stages(store) == {canary: "serving"}


async def test_canary_with_lower_rewards_is_rejected_before_it_has_all_sessions(store: SqliteStore) -> None:
    for number in range(10):
        await add_session(store, number % 2)  # the range of rewards
    canary, controller = await publish_canary(store, POLICY), make_controller(store)
    count = 0
    while await check(controller, store) is None:
        await add_session(store, 1.0)
        await add_session(store, 0.0, canary)
        count += 1
        assert count < 10
    (row,) = await store.policy_versions(POLICY)
    assert row.stage is PolicyStage.REJECTED
    assert row.reason is not None
    assert row.reason.startswith("lower live rewards: a mean of 0 over")


async def test_canary_that_seems_worse_waits_and_is_rejected_when_its_time_is_over(
    store: SqliteStore,
) -> None:
    canary = await publish_canary(store, POLICY)
    for number in range(10):
        await add_session(store, 1.0 if number % 10 < 8 else 0.0)
        await add_session(store, 1.0 if number % 10 < 5 else 0.0, canary)
    assert await check(make_controller(store), store) is None
    decision = await check(make_controller(store, days_later=7), store)
    assert decision is not None
    assert decision.action == "reject"


async def test_canary_without_rewards_is_promoted_when_its_time_is_over(store: SqliteStore) -> None:
    canary = await publish_canary(store, POLICY)
    assert await check(make_controller(store, days_later=6.9), store) is None
    decision = await check(make_controller(store, days_later=7), store)
    assert decision is not None
    assert (decision.action, decision.version) == ("advance", canary)


async def test_rewards_on_calls_count_as_the_reward_of_their_session(store: SqliteStore) -> None:
    canary, controller = await publish_canary(store, POLICY), make_controller(store)
    for _ in range(10):
        for version in (canary, None):
            session_id = await add_session(store, None, version)
            await store.add_rewards([Reward(session_id, 1.0, RewardSource.HUMAN, call_id="c")])
    decision = await check(controller, store)
    assert decision is not None
    assert decision.action == "advance"


# --- rollback -----------------------------------------------------------------------------------


async def test_falling_rewards_after_a_promotion_cause_one_rollback(store: SqliteStore) -> None:
    first = await publish_serving(store, POLICY)
    for number in range(40):
        await add_session(store, 0.0 if number % 4 == 0 else 1.0)
    second = await publish_serving(store, POLICY)
    candidate = await publish_candidate(store, POLICY)
    controller, count = make_controller(store), 0
    assert await check(controller, store) is None
    while (decision := await check(controller, store)) is None:
        await add_session(store, 0.4)
        count += 1
        assert count < 35
    assert (decision.action, decision.version) == ("roll back", second)
    head = (await store.latest_policy(POLICY)).version
    assert await get_stages(store) == {
        first: "retired",
        second: "retired",
        candidate: "rejected",
        head: "serving",
    }
    rows = await store.policy_versions(POLICY)
    assert rows[-1].parent == first
    assert rows[-1].reason is not None
    assert rows[-1].reason.startswith(
        "rollback to version 1: live rewards fell after the promotion of version 2"
    )
    for _ in range(40):
        await add_session(store, 0.0)
    assert await check(controller, store) is None, "the version of a rollback is not rolled back"
    assert find_previous(rows, head) == second


class PromotingStore(SqliteStore):
    """A store in which a person promotes a version right before each automatic rollback."""

    promoted: int

    async def roll_back(self, *args: Any, **options: Any) -> int:
        await self.promote_version(POLICY, self.promoted)
        return await super().roll_back(*args, **options)


async def test_version_that_a_person_promotes_meanwhile_is_not_rolled_back(tmp_path: Path) -> None:
    store = PromotingStore(tmp_path / "store.db")
    for _ in range(40):
        await add_session(store, 1.0)
    await publish_serving(store, POLICY)
    store.promoted = await publish_candidate(store, POLICY)
    for _ in range(40):
        await add_session(store, 0.0)
    assert await make_controller(store).check_serving() is None
    assert (await store.latest_policy(POLICY)).version == store.promoted
    await store.close()


async def test_falling_rewards_long_after_a_promotion_are_ignored(store: SqliteStore) -> None:
    for number in range(40):
        await add_session(store, 0.0 if number % 4 == 0 else 1.0)
    await publish_serving(store, POLICY)
    for _ in range(20):
        await add_session(store, 0.0)
    assert await check(make_controller(store, days_later=8), store) is None


async def test_steady_rewards_after_a_promotion_cause_no_rollback(store: SqliteStore) -> None:
    rng = Random(0)
    for _ in range(60):
        await add_session(store, float(rng.random() < 0.7))
    await publish_serving(store, POLICY)
    for _ in range(60):
        await add_session(store, float(rng.random() < 0.7))
    assert await check(make_controller(store), store) is None


async def test_only_the_first_sessions_after_a_promotion_are_compared(store: SqliteStore) -> None:
    """If the compared sessions changed over time, the rollback would be wrong more often than documented."""
    for _ in range(MAX_SESSIONS):
        await add_session(store, 1.0)
    await publish_serving(store, POLICY)
    for _ in range(MAX_SESSIONS):
        await add_session(store, 1.0)
    for _ in range(40):
        await add_session(store, 0.0)
    assert await check(make_controller(store), store) is None


# --- shadow -------------------------------------------------------------------------------------


async def add_shadow_reply(store: SqliteStore, version: int, text: str) -> None:
    session_id = await add_session(store, None)
    call = make_call(new_id("call"), session_id)
    await store.add_calls([call])
    await store.add_shadow_reply(
        ShadowReply(
            session_id=session_id,
            call_id=call.call_id,
            policy_id=POLICY,
            version=version,
            reply=Message(role="assistant", content=text),
            sampled_ids=np.array([1], np.int32),
            logprobs=np.array([-1.0], np.float32),
            finish_reason="stop",
        )
    )


async def publish_shadow(store: SqliteStore) -> int:
    version = await publish_candidate(store, POLICY)
    await store.advance_version(POLICY, version, PolicyStage.SHADOW, "test")
    return version


async def test_shadow_becomes_a_canary_after_enough_replies_or_days(store: SqliteStore) -> None:
    version, controller = await publish_shadow(store), make_controller(store)
    for _ in range(3):
        assert await check(controller, store) is None
        await add_shadow_reply(store, version, "hello")
    decision = await check(controller, store)
    assert decision is not None
    assert (decision.action, decision.reason) == (
        "advance",
        "0 of 3 shadow replies are empty or did not end",
    )
    assert await get_stages(store) == {version: "canary"}
    await store.reject_version(POLICY, version, "test")
    later = await publish_shadow(store)
    assert await check(make_controller(store, days_later=1), store) is not None
    assert (await get_stages(store))[later] == "canary"


async def test_shadow_with_broken_replies_is_rejected(store: SqliteStore) -> None:
    version = await publish_shadow(store)
    for _ in range(10):
        await add_shadow_reply(store, version, "")
    decision = await check(make_controller(store), store)
    assert decision is not None
    assert decision.action == "reject"
    assert await get_stages(store) == {version: "rejected"}
