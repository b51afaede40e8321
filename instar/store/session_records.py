"""The write that stores imported sessions."""

from __future__ import annotations

from collections.abc import Sequence

from instar.errors import ConflictError
from instar.store import annotations, sessions
from instar.store.calls import AddCalls, BaseCallCache
from instar.store.database import Database
from instar.store.models import SessionRecord
from instar.types import Group


class PutRecords:
    def __init__(self, groups: Sequence[Group], records: Sequence[SessionRecord]) -> None:
        self._groups = groups
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
            _add_annotations(db, record)


def _add_annotations(db: Database, record: SessionRecord) -> None:
    for reward in record.rewards:
        if sessions.reward_exists(db, reward.reward_id):
            raise ConflictError(f"Reward {reward.reward_id} of session {reward.session_id} exists already.")
    sessions.add_rewards(db, record.rewards)
    annotations.record_scores(db, record.scores, [])
    annotations.add_tags(db, record.tags)
    for feedback in record.feedback:
        if not annotations.add_feedback(db, feedback):
            raise ConflictError(f"Feedback {feedback.feedback_id} exists already.")
