"""Conformance tests for deleting the data of sessions, on request and after the retention time."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from instar.errors import ConflictError, SessionNotFound, StoreError
from instar.store.base import (
    JUDGED_TAG,
    RESAMPLED_TAG,
    Run,
    SessionRecord,
    Store,
    make_resampled_group_id,
)
from instar.types import (
    Channel,
    Claim,
    ClaimOutcome,
    Feedback,
    GroupStatus,
    Reward,
    RewardSource,
    Score,
    ScoreState,
    SessionStatus,
    StepState,
    Tag,
    Task,
)

from .conformance_live import make_shadow_reply
from .factories import (
    AGENT_ID,
    CALCULATOR,
    POLICY_ID,
    RUN_ID,
    assistant,
    ids,
    make_call,
    make_claim,
    make_dropped_claim,
    make_group,
    make_next_call,
    make_session,
    user,
)

HOUR = 3600.0


async def add_live_session(store: Store, session_id: str, text: str, **overrides: Any) -> None:
    """Add a completed session with two calls. Every stored text contains ``text``."""
    fields = {
        "channel": Channel.LIVE,
        "task_id": f"task {text}",
        "external_id": f"user:{text}",
        "metadata": {"note": text},
    }
    tool = {**CALCULATOR, "description": f"Computes {text}."}
    call = make_call(
        f"{session_id}-1", session_id, messages=(user(text),), reply=assistant(text), tools=(tool, CALCULATOR)
    )
    second = make_next_call(call, f"{session_id}-2", ids(9), user(text), client_key=f"key {text}", model=text)
    session = make_session(session_id, **(fields | overrides))
    await store.add_calls(
        [call, second], new_session=session, key_hash=f"hash {text}", users=[f"user {text}"]
    )
    await store.add_feedback(
        Feedback(
            f"fb-{session_id}", session_id, text=text, correction=text, correction_ids=ids(5), author=text
        ),
        [Reward(session_id, 1.0, RewardSource.HUMAN, detail={"author": text})],
    )
    await store.add_tags([Tag(session_id, f"tag {text}", text, text, text)])
    score = Score(session_id, "judge@1", ScoreState.FALLBACK, reason=text)
    reward = Reward(session_id, 0.5, RewardSource.JUDGE, "judge", detail={"reason": text})
    await store.record_scores([score], [reward])
    answer = {"answer": text, "session": session_id}
    await store.put_judgment(session_id.encode(), RUN_ID, answer, 0.25, session_id)
    await store.add_shadow_reply(make_shadow_reply(session_id, text))
    await store.end_session(session_id, SessionStatus.COMPLETED, text)


async def train_on(store: Store, step: int, claims: list[Claim], state: StepState) -> None:
    await store.claim_step(RUN_ID, step, claims)
    if state is not StepState.CLAIMED:
        path = f"/{step}" if state in (StepState.SAVED, StepState.COMMITTED) else None
        await store.advance_step(RUN_ID, step, state, state_path=path, version=step)


class ForgetTests:
    async def test_forgotten_session_is_gone_and_others_are_unchanged(self, store: Store) -> None:
        await add_live_session(store, "a", "first")
        await add_live_session(store, "b", "second")
        others = await store.calls("b")
        assert await store.forget_sessions(RUN_ID, ["a", "missing"]) == ["a"]
        assert await store.session("a") is None
        assert await store.session_by_key("hash first") is None
        assert (await store.calls("a"), await store.rewards("a"), await store.call("a-1")) == ([], [], None)
        assert await store.feedback(RUN_ID, session_id="a") == []
        assert (await store.tags(["a"]), await store.scores(["a"])) == ({"a": []}, {"a": []})
        assert await store.corrections(RUN_ID, 0, 10, [others[0].agent_id]) == await store.feedback(
            RUN_ID, session_id="b"
        )
        assert await store.session_ids(RUN_ID, user_id="user first") == []
        assert [call.messages for call in await store.calls("b")] == [call.messages for call in others]
        assert len(await store.rewards("b")) == 2
        (forgotten,) = await store.forgotten_sessions(["a", "b"])
        assert (forgotten.session_id, forgotten.agent_id, forgotten.channel) == ("a", AGENT_ID, Channel.LIVE)
        assert (forgotten.calls, forgotten.sampled_tokens, forgotten.cause) == (2, 4, "request")
        assert forgotten.forgotten_at == pytest.approx(time.time(), abs=30)

    async def test_forget_sessions_of_another_run_deletes_nothing(self, store: Store) -> None:
        await add_live_session(store, "a", "first")
        assert await store.forget_sessions("other", ["a"]) == []
        assert await store.session("a") is not None

    async def test_forget_session_twice_deletes_it_once(self, store: Store) -> None:
        await add_live_session(store, "a", "first")
        results = await asyncio.gather(*(store.forget_sessions(RUN_ID, ["a"]) for _ in range(4)))
        assert sorted(results) == [[], [], [], ["a"]]

    async def test_forgotten_open_session_is_counted_as_abandoned(self, store: Store) -> None:
        await store.put_run(Run(RUN_ID, POLICY_ID, {}))
        await store.open_session(make_session("a"))
        await store.forget_sessions(RUN_ID, ["a"])
        assert (await store.progress(RUN_ID)).sessions == {SessionStatus.ABANDONED: 1}

    async def test_shared_tools_stay_until_their_last_session_is_forgotten(self, store: Store) -> None:
        for session_id in ("a", "b"):
            await store.open_session(make_session(session_id))
            await store.add_calls([make_call(f"{session_id}-1", session_id, tools=(CALCULATOR,))])
        await store.forget_sessions(RUN_ID, ["a"])
        (call,) = await store.calls("b")
        assert call.tools == (CALCULATOR,)
        await store.forget_sessions(RUN_ID, ["b"])
        rows = await store.read(lambda db: db.execute("SELECT hash FROM tools").fetchall())
        assert rows == []

    async def test_every_write_to_a_forgotten_session_fails(self, store: Store) -> None:
        await add_live_session(store, "a", "first")
        (_, last) = await store.calls("a")
        await store.forget_sessions(RUN_ID, ["a"])
        next_call = make_next_call(last, "a-3", ids(4), user("more"))
        for calls in ([next_call], [make_call("x", "a")]):
            with pytest.raises(SessionNotFound, match="there is no session a"):
                await store.add_calls(calls)
        with pytest.raises(SessionNotFound):
            await store.add_rewards([Reward("a", 1.0, RewardSource.RULE)])
        with pytest.raises(SessionNotFound):
            await store.add_feedback(Feedback("new", "a", text="late"))
        with pytest.raises(SessionNotFound):
            await store.add_tags([Tag("a", "late")])
        with pytest.raises(SessionNotFound):
            await store.record_scores([Score("a", "rule", ScoreState.SCORED)], [])
        with pytest.raises(StoreError, match="there is no session a"):
            await store.end_session("a", SessionStatus.COMPLETED)
        with pytest.raises(ConflictError, match="data of session a was deleted"):
            await store.put_records([], [SessionRecord(make_session("a"), (make_call("x", "a"),))])
        await store.open_session(make_session("b"))
        assert await store.complete_sessions(["a", "b"], "the gateway was stopped") == 1
        await store.put_judgment(b"late", RUN_ID, {"answer": "text"}, 0.25, "a")
        assert await store.judgment(b"late") is None

    async def test_judgments_of_a_forgotten_session_keep_only_their_costs(self, store: Store) -> None:
        await add_live_session(store, "a", "first")
        await add_live_session(store, "b", "second")
        await store.forget_sessions(RUN_ID, ["a"])
        assert await store.judgment(b"a") is None
        assert await store.judgment(b"b") is not None
        assert await store.judgment_totals(RUN_ID) == (2, 0.5)

    async def test_comparisons_with_a_forgotten_session_lose_their_text(self, store: Store) -> None:
        await store.open_group(make_group())
        for slot, session_id in enumerate(("a", "b")):
            await store.open_session(make_session(session_id, group_id="g", slot=slot))
            await store.end_session(session_id, SessionStatus.COMPLETED)
        await store.close_group("g", GroupStatus.SCORING)
        await store.add_rewards([Reward("b", 0.5, RewardSource.JUDGE, detail={"reason": "better than a"})])
        await store.put_judgment(b"pair", RUN_ID, {"answer": "a said hello"}, 0.25, "b")
        await store.forget_sessions(RUN_ID, ["a"])
        (reward,) = await store.rewards("b")
        assert (reward.value, reward.detail) == (0.5, {})
        assert await store.judgment(b"pair") is None

    async def test_questions_of_a_judge_are_forgotten_with_the_judged_session(self, store: Store) -> None:
        await store.open_group(make_group())
        for slot, session_id in enumerate(("a", "b")):
            await store.open_session(make_session(session_id, group_id="g", slot=slot))
        await store.close_group("g", GroupStatus.READY)
        for session_id, judged in (("about a", "a"), ("about a and b", "b"), ("other", "c")):
            await store.open_session(make_session(session_id, channel=Channel.LIVE))
            await store.add_tags([Tag(session_id, JUDGED_TAG, judged)])
        assert await store.forget_sessions(RUN_ID, ["a"]) == ["a"]
        assert await store.session_ids(RUN_ID) == ["b", "other"]
        rows = await store.forgotten_sessions(["a", "about a", "about a and b"])
        assert [row.session_id for row in rows] == ["a", "about a", "about a and b"]

    async def test_judgments_of_resampled_replies_are_forgotten_with_the_live_session(
        self, store: Store
    ) -> None:
        await add_live_session(store, "live", "secret")
        copy = make_session("copy", channel=Channel.RESAMPLED, group_id=make_resampled_group_id("live"))
        await store.put_records([], [SessionRecord(copy, tags=(Tag("copy", RESAMPLED_TAG, "live"),))])
        await store.put_judgment(b"copy", RUN_ID, {"answer": "secret"}, 0.25, "copy")
        await add_live_session(store, "question", "secret question")
        await store.add_tags([Tag("question", JUDGED_TAG, "copy")])
        await store.forget_sessions(RUN_ID, ["live"])
        assert await store.sessions(RUN_ID) == []
        assert await store.judgment(b"copy") is None

    async def test_resampled_replies_of_a_forgotten_session_are_not_stored(self, store: Store) -> None:
        await add_live_session(store, "live", "secret")
        await store.forget_sessions(RUN_ID, ["live"])
        copy = make_session("copy", channel=Channel.RESAMPLED)
        with pytest.raises(ConflictError):
            await store.put_records([], [SessionRecord(copy, tags=(Tag("copy", RESAMPLED_TAG, "live"),))])
        assert await store.sessions(RUN_ID) == []

    async def test_task_of_a_group_is_cleared_with_its_last_session(self, store: Store) -> None:
        await store.open_group(make_group(task=Task("t", {"q": "text"})))
        for slot, session_id in enumerate(("a", "b")):
            await store.open_session(make_session(session_id, group_id="g", slot=slot))
        await store.close_group("g", GroupStatus.READY)
        for session_id, expected in (("a", {"q": "text"}), ("b", {})):
            await store.forget_sessions(RUN_ID, [session_id])
            group = await store.group("g")
            assert group is not None
            assert group.task == Task("t", expected)

    async def test_sessions_of_an_open_group_are_not_forgotten(self, store: Store) -> None:
        await store.open_group(make_group())
        await store.open_session(make_session("a", group_id="g"))
        await store.open_session(make_session("b", group_id="g", run_id="other"))  # not in the group's run
        assert await store.forget_sessions(RUN_ID, ["a"]) == []
        assert await store.forget_sessions("other", ["b"]) == ["b"]
        await store.close_group("g", GroupStatus.SCORING)
        assert await store.forget_sessions(RUN_ID, ["a"]) == ["a"]

    async def test_session_ids_finds_sessions_by_agent_and_user(self, store: Store) -> None:
        await store.open_session(make_session("a"))
        await store.open_session(make_session("b", agent_id="other"))
        await store.add_calls([make_call("1", "a"), make_call("2", "b")], users=["Ada", "Grace"])
        await store.add_calls([make_call("3", "a")], users=["Ada", "Alan"])
        assert await store.session_ids(RUN_ID, agent_id="other") == ["b"]
        assert await store.session_ids(RUN_ID, user_id="Ada") == ["a", "b"]
        assert await store.session_ids(RUN_ID, user_id="Alan") == ["a"]
        assert await store.session_ids(RUN_ID, user_id="Ada", agent_id="other") == ["b"]
        assert await store.session_ids("missing", user_id="Ada") == []

    async def test_forgotten_after_returns_each_deleted_session_once(self, store: Store) -> None:
        for session_id in ("a", "b", "c"):
            await store.open_session(make_session(session_id))
        await store.forget_sessions(RUN_ID, ["a"])
        start = await store.forgotten_after(RUN_ID, None)
        assert start.session_ids == []
        await store.forget_sessions(RUN_ID, ["b", "c"])
        page = await store.forgotten_after(RUN_ID, start.last_seq)
        assert page.session_ids == ["b", "c"]
        assert (await store.forgotten_after(RUN_ID, page.last_seq)) == (page.last_seq, [])
        assert (await store.forgotten_after("other", None)).session_ids == []


class ForgottenClaimTests:
    async def test_claim_step_drops_the_samples_of_forgotten_sessions(self, store: Store) -> None:
        for session_id in ("a", "b"):
            await store.open_session(make_session(session_id))
        await store.forget_sessions(RUN_ID, ["a"])
        claims = [
            make_claim("a/0", session_id="a", reward=1.0),
            make_dropped_claim("a/1", session_id="a"),
            make_claim("b/0", session_id="b"),
        ]
        assert await store.claim_step(RUN_ID, 1, claims) == {"a"}
        stored = {claim.sample_key: (claim.outcome, claim.reason) for claim in await store.claims(RUN_ID)}
        assert stored == {
            "a/0": (ClaimOutcome.DROPPED, "forgotten"),
            "a/1": (ClaimOutcome.DROPPED, "too old"),
            "b/0": (ClaimOutcome.TRAINED, None),
        }

    async def test_claims_of_forgotten_sessions_name_the_trained_versions(self, store: Store) -> None:
        for session_id in ("a", "b"):
            await store.open_session(make_session(session_id))
        await train_on(
            store,
            1,
            [make_claim("a/0", session_id="a"), make_claim("a/1", session_id="a")],
            StepState.COMMITTED,
        )
        epoch = {"session_id": "a", "epoch": 1}
        await train_on(
            store, 2, [make_claim("a/0", **epoch), make_claim("b/0", session_id="b")], StepState.CLAIMED
        )
        await store.forget_sessions(RUN_ID, ["a"])
        rows = await store.trained_sessions(["a"])
        assert [(row.step, row.state, row.version, row.samples) for row in rows] == [
            (1, StepState.COMMITTED, 1, 2),
            (2, StepState.CLAIMED, None, 1),
        ]
        # After a crash, the claims of the unfinished step are released, and no step can claim the session.
        await store.release_steps(RUN_ID, after=1)
        assert [row.step for row in await store.trained_sessions(["a"])] == [1]
        assert await store.claim_step(RUN_ID, 2, [make_claim("a/0", **epoch)]) == {"a"}
        assert [row.step for row in await store.trained_sessions(["a"])] == [1]


async def get_expired(store: Store, **overrides: Any) -> list[str]:
    settings: dict[str, Any] = {"max_age": None, "max_sessions": None, "min_age": 0.0, "keep_checkpoints": 1}
    return await store.expired_sessions(RUN_ID, **({**settings, "limit": 100} | overrides))


async def add_old_session(store: Store, session_id: str, hours: float, **overrides: Any) -> None:
    """Add a completed session that ended ``hours`` ago."""
    at = time.time() - hours * HOUR
    fields = {"channel": Channel.LIVE, "status": SessionStatus.COMPLETED, "created_at": at, "ended_at": at}
    await store.open_session(make_session(session_id, **(fields | overrides)))


class ResampledClaimTests:
    async def test_versions_trained_on_resampled_replies_are_listed_for_the_live_session(
        self, store: Store
    ) -> None:
        await add_live_session(store, "live", "secret")
        group_id = make_resampled_group_id("live")
        claim = make_claim(f"{group_id}/0/0", session_id="copy", group_id=group_id)
        await train_on(store, 1, [claim], StepState.COMMITTED)
        await store.forget_sessions(RUN_ID, ["live"])
        (trained,) = await store.trained_sessions(["live"])
        assert (trained.step, trained.version, trained.samples) == (1, 1, 1)


class RetentionTests:
    async def test_expired_sessions_are_selected_by_age_and_count(self, store: Store) -> None:
        for number in range(6):
            await add_old_session(store, f"s{number}", hours=10 - number)
        await add_old_session(store, "other", hours=10, run_id="other")
        assert await get_expired(store) == []
        assert await get_expired(store, max_age=7.5 * HOUR) == ["s0", "s1", "s2"]
        assert await get_expired(store, max_age=7.5 * HOUR, limit=2) == ["s0", "s1"]
        assert await get_expired(store, max_sessions=4) == ["s0", "s1"]
        assert await get_expired(store, max_sessions=6) == []
        assert await get_expired(store, max_sessions=1, max_age=9.5 * HOUR) == [f"s{n}" for n in range(5)]
        assert await get_expired(store, max_sessions=1, min_age=7.5 * HOUR) == ["s0", "s1", "s2"]

    async def test_open_sessions_and_exported_data_never_expire(self, store: Store) -> None:
        await add_old_session(store, "open", 9, status=SessionStatus.OPEN, ended_at=None)
        await add_old_session(store, "data", 9, channel=Channel.DATA)
        await add_old_session(store, "failed", 9, status=SessionStatus.FAILED)
        assert await get_expired(store, max_age=HOUR) == ["failed"]

    async def test_sessions_of_a_group_expire_after_training_is_saved(self, store: Store) -> None:
        await store.put_run(Run(RUN_ID, POLICY_ID, {}))
        for index in range(3):
            await store.open_group(make_group(f"g{index}", index, size=1))
            await add_old_session(store, f"s{index}", 9 - index, channel=Channel.TRAIN, group_id=f"g{index}")
            assert await get_expired(store, max_age=HOUR) == []
            await store.close_group(f"g{index}", GroupStatus.READY)
            assert await get_expired(store, max_age=HOUR) == []
        states = (StepState.COMMITTED, StepState.COMMITTED, StepState.SUBMITTED)
        for index, state in enumerate(states):
            claim = make_claim(f"g{index}/0/0", session_id=f"s{index}", group_id=f"g{index}")
            await train_on(store, index + 1, [claim], state)
        # Step 3 is not saved, and step 2 is repeated if the second of two checkpoints is damaged.
        assert await get_expired(store, max_age=HOUR) == ["s0", "s1"]
        assert await get_expired(store, max_age=HOUR, keep_checkpoints=2) == ["s0"]

    async def test_dropped_groups_expire_and_evaluations_expire_after_they_end(self, store: Store) -> None:
        await store.open_group(make_group("dropped", 0))
        await add_old_session(store, "dropped", 9, channel=Channel.TRAIN, group_id="dropped")
        await store.close_group("dropped", GroupStatus.DROPPED, "session_failed")
        for index in range(2):
            await store.open_group(make_group(f"val-{index}", index, channel=Channel.VAL))
            await add_old_session(store, f"val-{index}", 8, channel=Channel.VAL, group_id=f"val-{index}")
        await store.close_group("val-0", GroupStatus.READY)
        assert await get_expired(store, max_age=HOUR) == ["dropped"]
        await store.close_group("val-1", GroupStatus.READY)
        assert await get_expired(store, max_age=HOUR) == ["dropped", "val-0", "val-1"]

    async def test_session_with_a_claimed_correction_expires_after_the_step(self, store: Store) -> None:
        await add_old_session(store, "s", 9)
        claim = make_claim("feedback:1", session_id="s", group_id=None)
        await store.claim_step(RUN_ID, 1, [claim])
        assert await get_expired(store, max_age=HOUR) == []
        await store.advance_step(RUN_ID, 1, StepState.COMMITTED, state_path="/1", version=1)
        assert await get_expired(store, max_age=HOUR) == ["s"]


class ForgettingTests(ForgetTests, ForgottenClaimTests, ResampledClaimTests, RetentionTests):
    """All tests for deleting sessions."""
