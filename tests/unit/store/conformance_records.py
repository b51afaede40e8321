"""Conformance tests for imported session records and named datasets."""

from __future__ import annotations

from typing import Any

import pytest

from instar.errors import ConflictError
from instar.store.base import SessionRecord, Store
from instar.types import Feedback, GroupStatus, Reward, RewardSource, Score, ScoreState, SessionStatus, Tag

from .factories import RUN_ID, make_call, make_group, make_session


def make_record(session_id: str = "s", **fields: Any) -> SessionRecord:
    session = make_session(session_id, status=SessionStatus.COMPLETED, created_at=1.5, ended_at=2.5)
    defaults: dict[str, Any] = {
        "calls": (make_call(f"{session_id}-c", session_id=session_id),),
        "rewards": (Reward(session_id, 1.0, RewardSource.RULE, reward_id=f"{session_id}-r", created_at=3.5),),
        "scores": (Score(session_id, "math@1", ScoreState.SCORED, created_at=3.5),),
        "tags": (Tag(session_id, "seen", created_at=4.5),),
        "feedback": (Feedback(f"{session_id}-f", session_id, thumbs=1, created_at=5.5),),
    }
    return SessionRecord(session, **{**defaults, **fields})


class RecordTests:
    async def test_put_records_stores_every_part(self, store: Store) -> None:
        record = make_record()
        group = make_group("g", status=GroupStatus.READY)
        await store.put_records([group], [record])
        assert await store.session("s") == record.session
        assert [call.call_id for call in await store.calls("s")] == ["s-c"]
        assert await store.rewards("s") == list(record.rewards)
        assert await store.scores(["s"]) == {"s": list(record.scores)}
        assert await store.tags(["s"]) == {"s": list(record.tags)}
        assert await store.feedback(RUN_ID) == list(record.feedback)
        (stored,) = await store.groups(RUN_ID, group.channel)
        assert (stored.group_id, stored.status) == ("g", GroupStatus.READY)

    @pytest.mark.parametrize("conflict", ["session", "call", "reward", "feedback"])
    async def test_put_records_with_a_conflict_stores_none(self, store: Store, conflict: str) -> None:
        await store.put_records([], [make_record()])
        conflicting = {
            "session": make_record("s"),
            "call": make_record("t", calls=(make_call("s-c", session_id="t"),)),
            "reward": make_record("t", rewards=(Reward("t", 0.0, RewardSource.RULE, reward_id="s-r"),)),
            "feedback": make_record("t", feedback=(Feedback("s-f", "t", thumbs=1),)),
        }[conflict]
        with pytest.raises(ConflictError):
            await store.put_records([make_group("g")], [make_record("u"), conflicting])
        assert [row.session.session_id for row in await store.sessions(RUN_ID)] == ["s"]
        assert await store.groups(RUN_ID, make_group("g").channel) == []

    async def test_put_dataset_with_the_same_hash_updates_its_path(self, store: Store) -> None:
        first = await store.put_dataset("golden", "/old", "h", {"format": "jsonl"})
        moved = await store.put_dataset("golden", "/new", "h", {"format": "parquet"})
        assert (moved.version, moved.path, moved.manifest) == (1, "/new", {"format": "parquet"})
        assert moved.created_at == first.created_at
        assert await store.datasets() == [moved]

    async def test_remove_dataset_removes_one_or_all_versions(self, store: Store) -> None:
        for version in (1, 2, 3):
            await store.put_dataset("golden", "/x", f"h{version}", {})
        await store.put_dataset("other", "/x", "h", {})
        assert await store.remove_dataset("golden", 2) == 1
        assert [(row.name, row.version) for row in await store.datasets()] == [
            ("golden", 1),
            ("golden", 3),
            ("other", 1),
        ]
        assert await store.remove_dataset("golden") == 2
        assert await store.remove_dataset("golden") == 0
