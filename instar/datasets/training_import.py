"""Imports an exported folder into a run's store as training data."""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from instar.config.data import group_id_prefix
from instar.datasets.export import ProgressCallback
from instar.datasets.files import read_rows
from instar.datasets.importing import ImportResult, read_groups, read_sessions
from instar.datasets.manifest import DatasetManifest
from instar.errors import DataError
from instar.store.base import SessionRecord, Store
from instar.types import (
    Call,
    CallStatus,
    Channel,
    Feedback,
    Group,
    GroupStatus,
    Reward,
    Score,
    Session,
    SessionStatus,
    Tag,
    Task,
)

T = TypeVar("T", Session, Call, Reward, Score, Tag, Feedback)
TRAINABLE_STATUSES = (SessionStatus.COMPLETED, SessionStatus.FAILED)


async def import_for_training(
    store: Store,
    folder: Path,
    run_id: str,
    label: str,
    manifest: DatasetManifest,
    *,
    needs_logprobs: bool = True,
    progress: ProgressCallback | None = None,
) -> ImportResult:
    """Import the sessions as finished groups of the run's data channel, and return the counts. Raises
    DataError if ``needs_logprobs`` is True and a trainable call lacks logprobs.

    Groups and sessions get new ids derived from ``label``, because the store may also contain the original
    ids. Skips evaluation sessions, groups that are not ready, groups without trainable sessions, and groups
    that the store already has. A completed session without a group id becomes a group of one.
    """
    prefix = group_id_prefix(run_id, label)
    existing_ids = {group.group_id for group in await store.groups(run_id, Channel.DATA)}
    groups = _read_training_groups(folder, manifest, prefix, run_id)
    sizes = Counter(
        _get_group_key(row["group_id"], row["session_id"], row["channel"])
        for row in read_rows(folder, manifest.format, "sessions")
        if row["status"] in TRAINABLE_STATUSES
    )
    """The number of trainable sessions in each group, by group key."""
    new_keys = {key for key, group in groups.items() if group.group_id not in existing_ids and sizes[key]}
    pending: dict[str, list[SessionRecord]] = {}
    added = 0
    for done, record in enumerate(read_sessions(folder, manifest), 1):
        session = record.session
        key = _get_group_key(session.group_id, session.session_id, session.channel)
        if key in new_keys and session.status in TRAINABLE_STATUSES:
            if needs_logprobs:
                _require_logprobs(record)
            pending.setdefault(key, []).append(_convert_record(record, groups[key], label))
            if len(pending[key]) == sizes[key]:
                added += sizes[key]
                await store.put_records([groups[key]], pending.pop(key))
        if progress is not None:
            progress(done, manifest.counts.get("sessions", 0))
    return ImportResult(groups=len(new_keys), sessions=added, unchanged=len(groups) - len(new_keys))


def _get_group_key(group_id: str | None, session_id: str, channel: str) -> str:
    """Return the key of the session's group. A session without a group has a key of its own. A live session
    is never part of a group, even if it has a group id."""
    return f"session {session_id}" if group_id is None or channel == Channel.LIVE else group_id


def _read_training_groups(
    folder: Path, manifest: DatasetManifest, prefix: str, run_id: str
) -> dict[str, Group]:
    """Return the groups to train on, converted to groups of the run's data channel, by key."""
    by_key: dict[str, Group] = {}

    def add(key: str, group: Group) -> None:
        index = len(by_key)
        by_key[key] = replace(
            group,
            group_id=f"{prefix}{index:06d}",
            run_id=run_id,
            channel=Channel.DATA,
            index=index,
            status=GroupStatus.READY,
            reason=None,
        )

    for group in read_groups(folder, manifest):
        if group.status is GroupStatus.READY and group.channel is not Channel.VAL:
            add(group.group_id, group)
    for row in read_rows(folder, manifest.format, "sessions"):
        if (
            row["group_id"] is None
            and row["channel"] != Channel.VAL
            and row["status"] == SessionStatus.COMPLETED
        ):
            task = Task(row["task_id"] or row["session_id"], {})
            add(
                _get_group_key(None, row["session_id"], row["channel"]),
                Group("", run_id, Channel.DATA, 0, 1, task, created_at=row["created_at"]),
            )
    return by_key


def _convert_record(record: SessionRecord, group: Group, label: str) -> SessionRecord:
    """Convert the record to a session in a group of the data channel, with new ids."""
    session = record.session
    suffix = hashlib.sha256(f"{group.run_id} {label}".encode()).hexdigest()[:8]
    session_id = f"{session.session_id}.{suffix}"
    origin = {"dataset": label, "run_id": session.run_id, "session_id": session.session_id}

    def convert(item: T, *id_fields: str, **changes: Any) -> T:
        """Return a copy with the new session id, and with new ids in ``id_fields``."""
        ids = {name: getattr(item, name) for name in id_fields}
        new_ids = {name: None if value is None else f"{value}.{suffix}" for name, value in ids.items()}
        return replace(item, session_id=session_id, **new_ids, **changes)

    return SessionRecord(
        session=convert(
            session,
            run_id=group.run_id,
            channel=Channel.DATA,
            group_id=group.group_id,
            slot=session.slot if group.size > 1 else 0,
            metadata={**session.metadata, "imported_from": origin},
        ),
        calls=tuple(
            convert(call, "call_id", "request_id", "parent_id", "base_id", run_id=group.run_id)
            for call in record.calls
        ),
        rewards=tuple(convert(reward, "call_id", "reward_id") for reward in record.rewards),
        scores=tuple(convert(score) for score in record.scores),
        tags=tuple(convert(tag) for tag in record.tags),
        feedback=tuple(convert(feedback, "call_id", "feedback_id") for feedback in record.feedback),
    )


def _require_logprobs(record: SessionRecord) -> None:
    for call in record.calls:
        if call.trainable and call.status is CallStatus.OK and np.isnan(call.logprobs).any():
            raise DataError(
                f"call {call.call_id} of session {call.session_id} lacks logprobs; set trainer.loss.name to "
                "cross_entropy, which does not need them"
            )
