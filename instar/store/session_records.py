"""SQL of whole sessions, as they are brought in from elsewhere."""

from __future__ import annotations

from collections.abc import Sequence

from instar.errors import ConflictError
from instar.store import annotations, sessions
from instar.store.base import SessionRecord
from instar.store.calls import AddCalls, BaseCallCache
from instar.store.database import Database
from instar.store.rows import encode_group, encode_reward
from instar.types import Group


class PutRecords:
    def __init__(self, groups: Sequence[Group], records: Sequence[SessionRecord]) -> None:
        self._groups = [encode_group(group) for group in groups]
        self._records = records
        self._calls = [
            AddCalls(record.calls, record.session, None, {}, BaseCallCache()) for record in records
        ]
        for calls in self._calls:
            calls.prepare()

    def __call__(self, db: Database) -> None:
        for group in self._groups:
            sessions.open_group(db, group)
        for record, calls in zip(self._records, self._calls, strict=True):
            calls(db)
            _add_opinions(db, record)


def _add_opinions(db: Database, record: SessionRecord) -> None:
    for reward in record.rewards:
        there = db.execute("SELECT 1 FROM rewards WHERE reward_id = ?", (reward.reward_id,)).fetchone()
        if there is not None:  # an id of None is nowhere
            raise ConflictError(f"reward {reward.reward_id} of session {reward.session_id} is there already")
    sessions.add_rewards(db, [encode_reward(reward) for reward in record.rewards])
    annotations.record_scores(db, record.scores, [])
    annotations.add_tags(db, record.tags)
    for feedback in record.feedback:
        if not annotations.add_feedback(db, feedback, []):
            raise ConflictError(f"feedback {feedback.feedback_id} is there already")
