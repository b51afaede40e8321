"""Conformance tests for feedback and for corrections that are not trained on yet."""

from __future__ import annotations

from dataclasses import replace

import pytest

from instar.errors import StoreError
from instar.store.base import Store, make_feedback_reward_id
from instar.types import UNTRAINABLE, Channel, Feedback, Reward, RewardSource, Tag

from .factories import RUN_ID, ids, make_claim, make_session


def make_correction(number: int, session_id: str = "s", suffix: str = "") -> Feedback:
    return Feedback(
        f"f{number}{suffix}",
        session_id,
        "c",
        correction="Corrected.",
        correction_ids=ids(5, number),
        created_at=number + 0.5,
    )


class FeedbackTests:
    async def test_feedback_with_every_field_round_trips_and_is_stored_once(self, store: Store) -> None:
        await store.open_session(make_session())
        feedback = replace(make_correction(1), thumbs=-1, score=0.25, text="no\x00", author="Ada")
        reward = Reward("s", 0.25, RewardSource.HUMAN, reward_id=make_feedback_reward_id("f1"))
        assert await store.add_feedback(feedback, [reward])
        assert not await store.add_feedback(replace(feedback, text="other"), [replace(reward, value=1.0)])
        (stored,) = await store.feedback(RUN_ID)
        assert stored.correction_ids is not None
        assert stored.correction_ids.tolist() == [5, 1]
        actual = (stored.thumbs, stored.score, stored.author, stored.call_id, stored.created_at)
        assert actual == (-1, 0.25, "Ada", "c", 1.5)
        assert stored.text.startswith("no")
        assert [r.value for r in await store.rewards("s")] == [0.25]

    async def test_add_feedback_on_an_unknown_session_raises(self, store: Store) -> None:
        with pytest.raises(StoreError):
            await store.add_feedback(make_correction(1, "missing"))
        assert await store.feedback(RUN_ID) == []

    async def test_corrections_excludes_claimed_and_untrainable_ones(self, store: Store) -> None:
        for name, channel in (("s", Channel.TRAIN), ("tagged", Channel.TRAIN), ("val", Channel.VAL)):
            await store.open_session(make_session(name, channel=channel))
        await store.open_session(make_session("other", run_id="other-run"))
        await store.add_tags([Tag("tagged", UNTRAINABLE)])
        corrections = [make_correction(1), make_correction(2), make_correction(3)]
        corrections += [make_correction(4, "tagged"), make_correction(5, "val"), make_correction(6, "other")]
        for feedback in [*corrections, replace(make_correction(7), correction_ids=None)]:
            await store.add_feedback(feedback)

        async def list_remaining(epoch: int = 0, limit: int = 10) -> list[str]:
            return [feedback.feedback_id for feedback in await store.corrections(RUN_ID, epoch, limit)]

        assert await list_remaining() == ["f1", "f2", "f3"]
        assert await list_remaining(limit=2) == ["f1", "f2"]
        claim = replace(make_claim(make_feedback_reward_id("f1")), session_id="s", group_id=None, step=1)
        await store.claim_step(RUN_ID, 1, [claim])
        assert await list_remaining() == ["f2", "f3"]
        assert await list_remaining(epoch=1) == ["f1", "f2", "f3"]
        await store.release_steps(RUN_ID, after=0)
        assert await list_remaining() == ["f1", "f2", "f3"], "released corrections must be listed again"

    async def test_corrections_of_live_sessions_are_listed_for_the_given_agents(self, store: Store) -> None:
        for number, name in enumerate(("a", "b")):
            for suffix, channel in (("", Channel.LIVE), ("-resampled", Channel.RESAMPLED)):
                await store.open_session(make_session(name + suffix, channel=channel, agent_id=name))
                await store.add_feedback(make_correction(number, name + suffix, suffix))
        assert await store.corrections(RUN_ID, 0, 10) == []
        listed = await store.corrections(RUN_ID, 0, 10, ["b", "c"])
        assert [feedback.session_id for feedback in listed] == ["b", "b-resampled"]
