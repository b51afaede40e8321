"""What people say: kept once, with the reward that follows; which corrections are still to be taught."""

from __future__ import annotations

from dataclasses import replace

import pytest

from instar.errors import StoreError
from instar.store.base import Store, correction_key
from instar.types import UNTRAINABLE, Channel, Feedback, Reward, RewardSource, Tag

from .factories import RUN, ids, make_claim, make_session


def correction(number: int, session_id: str = "s") -> Feedback:
    return Feedback(
        f"f{number}",
        session_id,
        "c",
        correction="So.",
        correction_ids=ids(5, number),
        created_at=number + 0.5,
    )


class OfPeople:
    async def test_feedback_comes_back_whole_and_once(self, store: Store) -> None:
        await store.open_session(make_session())
        whole = replace(correction(1), thumbs=-1, score=0.25, text="no\x00", author="Ada")
        reward = Reward("s", 0.25, RewardSource.HUMAN, reward_id=correction_key("f1"))
        assert await store.add_feedback(whole, [reward])
        assert not await store.add_feedback(replace(whole, text="other"), [replace(reward, value=1.0)])
        (found,) = await store.feedback(RUN)
        assert found.correction_ids is not None
        assert found.correction_ids.tolist() == [5, 1]
        told = (found.thumbs, found.score, found.author, found.call_id, found.created_at)
        assert told == (-1, 0.25, "Ada", "c", 1.5)
        assert found.text.startswith("no")
        assert [r.value for r in await store.rewards("s")] == [0.25]

    async def test_feedback_on_nothing_is_refused(self, store: Store) -> None:
        with pytest.raises(StoreError):
            await store.add_feedback(correction(1, "nobody"))
        assert await store.feedback(RUN) == []

    async def test_lessons_are_those_that_no_step_has_claimed(self, store: Store) -> None:
        for name, channel in (("s", Channel.LIVE), ("tagged", Channel.TRAIN), ("val", Channel.VAL)):
            await store.open_session(make_session(name, channel=channel))
        await store.open_session(make_session("other", run_id="another"))
        await store.add_tags([Tag("tagged", UNTRAINABLE)])
        told = [correction(1), correction(2), correction(3)]
        told += [correction(4, "tagged"), correction(5, "val"), correction(6, "other")]
        for one in [*told, replace(correction(7), correction_ids=None)]:
            await store.add_feedback(one)

        async def left(epoch: int = 0, limit: int = 10) -> list[str]:
            return [one.feedback_id for one in await store.corrections(RUN, epoch, limit)]

        assert await left() == ["f1", "f2", "f3"]
        assert await left(limit=2) == ["f1", "f2"]
        claim = replace(make_claim(correction_key("f1")), session_id="s", group_id=None, step=1)
        await store.claim_step(RUN, 1, [claim])
        assert await left() == ["f2", "f3"]
        assert await left(epoch=1) == ["f1", "f2", "f3"]
        await store.release_steps(RUN, after=0)
        assert await left() == ["f1", "f2", "f3"], "given back"
