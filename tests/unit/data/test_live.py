"""Tests of the live sessions that a step trains on, with a real store."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from instar.config import RunConfig
from instar.data.batcher import Batcher, StepBatch
from instar.data.live import LiveLoader, compute_kind
from instar.live.base import is_held_out
from instar.store.base import Store
from instar.store.sqlite import SqliteStore
from instar.types import (
    UNTRAINABLE,
    Channel,
    Claim,
    ClaimOutcome,
    Feedback,
    Message,
    Reward,
    RewardSource,
    SamplingParams,
    SessionStatus,
    StepState,
    Tag,
)
from tests.unit.data.builders import RUN, insert_session, make_call, make_session, put_test_run
from tests.unit.live.prompts import list_prompts

NOW = time.time()
POLICY = f"{RUN}/default"


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[Store]:
    store = SqliteStore(tmp_path / "store.db")
    await put_test_run(store)
    yield store
    await store.close()


def make_live_config(**trainer: Any) -> RunConfig:
    return RunConfig.model_validate(
        {
            "name": RUN,
            "agents": {"default": {"mode": "learn"}, "watched": {"mode": "observe"}},
            "data": "live",
            "gateway": {"reward_range": [0, 1]},
            "trainer": {"groups_per_step": 2, **trainer},
        }
    )


async def add_live(
    store: Store,
    session_id: str,
    reward: float | None = 1.0,
    *,
    agent_id: str = "default",
    ended: float = 0.0,
    source: RewardSource = RewardSource.HUMAN,
    call: dict[str, Any] | None = None,
    status: SessionStatus = SessionStatus.COMPLETED,
    **fields: Any,
) -> None:
    """Add a live session with one call that started 10 seconds before ``NOW + ended``, when it ended."""
    end_time = NOW + ended
    defaults = {"channel": Channel.LIVE, "agent_id": agent_id, "created_at": end_time - 10}
    ended_at = None if status is SessionStatus.OPEN else end_time
    await insert_session(
        store, make_session(session_id, **{**defaults, "status": status, "ended_at": ended_at, **fields})
    )
    await store.add_calls(
        [make_call(f"{session_id}#0", [1, 2], [7, 9], session_id=session_id, **(call or {}))]
    )
    if reward is not None:
        await store.add_rewards([Reward(session_id, reward, source, "user")])


async def take_batch(batcher: Batcher, step: int = 1, version: int = 0) -> StepBatch | None:
    batch = await batcher.next_batch(step, 0, version, timeout=0.0)
    if batch is not None:
        await batcher.store.drop_samples(batch.drops)
        await batcher.store.claim_step(POLICY, step, batch.claims, run_id=RUN)
    return batch


async def test_batch_contains_rewarded_sessions_of_learning_agents_in_order(store: Store) -> None:
    await add_live(store, "second", 0.0, ended=2)
    await add_live(store, "first", 1.0, ended=1)
    await add_live(store, "watched", agent_id="watched")
    await add_live(store, "unlisted", agent_id="unlisted")
    batch = await take_batch(Batcher(store, RUN, make_live_config()))
    assert batch is not None
    assert [sample.sample_key for sample in batch.samples] == ["first/0", "second/0"]
    assert [(claim.outcome, claim.group_id, claim.reward, claim.advantage) for claim in batch.claims] == [
        (ClaimOutcome.TRAINED, None, 1.0, 1.0),
        (ClaimOutcome.TRAINED, None, 0.0, -1.0),
    ]
    np.testing.assert_allclose(batch.samples[0].advantages, batch.samples[0].mask / 2)
    assert (batch.report["sessions"], batch.report["reward_mean"], batch.is_full) == (2, 0.5, True)
    assert await take_batch(Batcher(store, RUN, make_live_config()), step=2) is None, "nothing is left"


async def test_next_batch_waits_for_a_reward_and_the_end_of_the_session(store: Store) -> None:
    await add_live(store, "open", status=SessionStatus.OPEN)
    await add_live(store, "unrewarded", None)
    batcher = Batcher(store, RUN, make_live_config())
    assert await take_batch(batcher) is None
    assert await store.claims(RUN) == [], "the sessions can still become trainable"
    await store.end_session("open", SessionStatus.COMPLETED)
    assert await take_batch(batcher) is None
    await store.add_rewards([Reward("unrewarded", 0.0, RewardSource.HUMAN)])
    batch = await take_batch(batcher)
    assert batch is not None
    assert {sample.session_id for sample in batch.samples} == {"open", "unrewarded"}


async def test_session_with_only_a_fallback_reward_waits_for_another(store: Store) -> None:
    batcher = Batcher(store, RUN, make_live_config(groups_per_step=1))
    await add_live(store, "s", source=RewardSource.FALLBACK)
    assert await take_batch(batcher) is None
    await store.add_rewards([Reward("s", 0.0, RewardSource.JUDGE, "judge")])
    batch = await take_batch(batcher)
    assert batch is not None
    assert [claim.reward for claim in batch.claims] == [0.0]


async def test_sessions_that_can_never_be_trained_on_are_dropped_with_the_reason(store: Store) -> None:
    await add_live(store, "greedy", call={"params": SamplingParams(temperature=0.0)}, ended=1)
    await add_live(store, "text", call={"trainable": False, "reason": "logprobs are missing"}, ended=2)
    await add_live(store, "failed", status=SessionStatus.FAILED)
    batcher = Batcher(store, RUN, make_live_config(groups_per_step=1))
    assert await take_batch(batcher) is None
    claims = await store.claims(RUN)
    assert [(claim.session_id, claim.step, claim.reason) for claim in claims] == [
        ("greedy", None, "greedy"),
        ("text", None, "no_tokens"),
    ]
    assert await take_batch(batcher) is None
    assert len(await store.claims(RUN)) == 2


@pytest.mark.parametrize(
    ("mode", "outcome"), [("auto", "dropped"), ("manual", "dropped"), ("off", "trained")]
)
async def test_held_out_session_is_never_trained_on_unless_the_gate_is_off(
    store: Store, mode: str, outcome: str
) -> None:
    await add_live(store, "held", call={"messages": tuple(next(list_prompts()))}, ended=0)
    for name in ("a", "b"):
        await add_live(store, name, ended=1)
    settings = make_live_config().model_dump(exclude_unset=True)
    config = RunConfig.model_validate({**settings, "live": {"gate": {"mode": mode}}})
    await take_batch(Batcher(store, RUN, config))
    (claim,) = await store.claims(RUN, session_id="held")
    assert claim.outcome.value == outcome
    assert claim.reason == (None if mode == "off" else "held_out")


async def test_greedy_calls_of_a_sampled_session_are_not_trained(store: Store) -> None:
    await add_live(store, "s", None)
    greedy = make_call("s#1", [3], [8], session_id="s", params=SamplingParams(temperature=0.0))
    await store.add_calls([greedy])
    await store.add_rewards([Reward("s", 1.0, RewardSource.HUMAN)])
    batch = await take_batch(Batcher(store, RUN, make_live_config(groups_per_step=1)))
    assert batch is not None
    assert [span.call_id for sample in batch.samples for span in sample.spans] == ["s#0"]


async def test_released_step_makes_its_live_sessions_available_again(store: Store) -> None:
    for name in ("a", "b"):
        await add_live(store, name)
    batcher = Batcher(store, RUN, make_live_config())
    first = await take_batch(batcher)
    await store.advance_step(POLICY, 1, StepState.SUBMITTED)
    await store.release_steps(POLICY, after=0)
    batcher.reset()
    again = await take_batch(batcher)
    assert first is not None
    assert again is not None
    assert again.claims == first.claims


async def test_correction_claim_does_not_hide_the_session(store: Store) -> None:
    await add_live(store, "s")
    ids = np.array([5], np.int32)
    await store.add_feedback(Feedback("f", "s", "s#0", correction="x", correction_ids=ids))
    correction = Claim(RUN, 0, "feedback:f", "s", None, ClaimOutcome.TRAINED, step=7)
    await store.claim_step(POLICY, 7, [correction], run_id=RUN)
    assert await take_batch(Batcher(store, RUN, make_live_config(groups_per_step=1))) is not None


async def test_call_rewards_are_relative_to_the_baseline(store: Store) -> None:
    await add_live(store, "s", None)
    await store.add_rewards([Reward("s", 0.0, RewardSource.HUMAN, "feedback", call_id="s#0")])
    batch = await take_batch(Batcher(store, RUN, make_live_config(groups_per_step=1)))
    assert batch is not None
    np.testing.assert_allclose(batch.samples[0].advantages, [0, 0, -1, -1])


async def test_baseline_excludes_sessions_that_ended_after_the_start(store: Store) -> None:
    await add_live(store, "earlier", 1.0, ended=-20)
    await add_live(store, "parallel", 1.0, ended=-1)
    await add_live(store, "later", 1.0, ended=0)
    batch = await take_batch(Batcher(store, RUN, make_live_config(groups_per_step=3)))
    assert batch is not None
    first, second, third = [claim.advantage for claim in batch.claims]
    assert first == 1.0
    assert second == third, "the parallel session had not ended when the last one started"
    assert second is not None
    assert 0 < second < 1


async def test_old_and_stale_sessions_get_recomputed_logprobs(store: Store) -> None:
    await add_live(store, "old", ended=-2 * 86400)
    await add_live(store, "stale", call={"version": 0}, ended=1)
    await add_live(store, "fresh", call={"version": 5}, ended=2)
    batcher = Batcher(store, RUN, make_live_config(groups_per_step=3, max_staleness=2))
    batch = await take_batch(batcher, version=5)
    assert batch is not None
    assert len(batch.samples) == 3, "live samples are never stale"
    assert batch.recomputed == {"old/0", "stale/0"}


async def test_live_session_with_a_group_id_has_sample_keys_of_its_own(store: Store) -> None:
    await add_live(store, "s", group_id="run/train/000000")
    batch = await take_batch(Batcher(store, RUN, make_live_config(groups_per_step=1)))
    assert batch is not None
    assert [(claim.sample_key, claim.group_id) for claim in batch.claims] == [("s/0", None)]


async def test_describe_names_the_reason_of_every_excluded_session(store: Store) -> None:
    await add_live(store, "ready")
    await add_live(store, "observe", agent_id="watched")
    await add_live(store, "open", status=SessionStatus.OPEN)
    await add_live(store, "failed", status=SessionStatus.FAILED)
    await add_live(store, "no_reward", None)
    await add_live(store, "fallback", source=RewardSource.FALLBACK)
    await add_live(store, "greedy", call={"params": SamplingParams(temperature=0.0)})
    await add_live(store, "no_tokens", call={"trainable": False})
    await add_live(store, "untrainable")
    await store.add_tags([Tag("untrainable", UNTRAINABLE)])
    sessions = [row.session for row in await store.sessions(RUN)]
    described = await LiveLoader(store, make_live_config()).describe(sessions)
    assert {live.session.session_id: live.exclusion for live in described} == {
        "ready": None,
        **{name: name for name in ("observe", "open", "failed", "no_reward", "fallback", "greedy")},
        **{name: name for name in ("no_tokens", "untrainable")},
    }


def test_kind_depends_on_the_system_prompt_and_the_tools_unless_declared() -> None:
    def kind(system: str, user: str, **metadata: Any) -> str:
        messages = (Message(role="system", content=system), Message(role="user", content=user))
        return compute_kind(metadata, [make_call("c", [1], [2], messages=messages)])

    assert kind("sort", "a") == kind("sort", "b") != kind("search", "a")
    assert kind("sort", "a", kind="sorting") == "sorting"


async def test_call_reward_of_an_open_session_is_trained_once_it_is_complete(store: Store) -> None:
    await add_live(store, "s", None, status=SessionStatus.OPEN)
    await store.add_rewards([Reward("s", 1.0, RewardSource.JUDGE, "judge:followup", call_id="s#0")])
    batcher = Batcher(store, RUN, make_live_config(groups_per_step=1))
    assert await take_batch(batcher) is None
    await store.end_session("s", SessionStatus.COMPLETED)
    batch = await take_batch(batcher)
    assert batch is not None
    np.testing.assert_allclose(batch.samples[0].advantages, [0, 0, 1, 1])
    assert [claim.advantage for claim in batch.claims] == [1.0]


async def test_held_out_session_is_dropped(store: Store) -> None:
    messages = (Message(role="user", content="question 9"),)
    number = 0
    while not is_held_out(messages):
        messages, number = (Message(role="user", content=f"question {number}"),), number + 1
    await add_live(store, "held", call={"messages": messages})
    batcher = Batcher(store, RUN, make_live_config(groups_per_step=1))
    assert await take_batch(batcher) is None
    assert [(c.session_id, c.reason) for c in await store.claims(RUN)] == [("held", "held_out")]
