"""Import an exported folder into a run's store as data that the run trains on."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np

from instar.config.data import group_prefix
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
    SessionStatus,
    Task,
)

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
    """Import the sessions as finished groups of the run's data channel, and return the result.

    Groups and sessions get new ids, because the store may also hold the same data under the original ids.
    Groups that were discarded and evaluation sessions are skipped; a session without a group becomes a group
    of one. Groups that the store already has are left unchanged.
    """
    prefix = group_prefix(run_id, label)
    existing = {group.group_id for group in await store.groups(run_id, Channel.DATA)}
    rename = _make_renamer(run_id, label)
    groups = _training_groups(folder, manifest, prefix, run_id)
    sizes = _count_sessions(folder, manifest)
    waiting = {key for key, group in groups.items() if group.group_id not in existing and sizes[key]}
    pending: dict[str, list[SessionRecord]] = {}
    added = 0
    for done, record in enumerate(read_sessions(folder, manifest), 1):
        key = _key(record.session.group_id, record.session.session_id)
        if key in waiting and record.session.status in TRAINABLE_STATUSES:
            if needs_logprobs:
                _require_logprobs(record)
            pending.setdefault(key, []).append(_as_data(record, rename, groups[key], label))
            if len(pending[key]) == sizes[key]:
                added += sizes[key]
                await store.put_records([groups[key]], pending.pop(key))
        if progress is not None:
            progress(done, manifest.counts.get("sessions", 0))
    return ImportResult(groups=len(waiting), sessions=added, unchanged=len(groups) - len(waiting))


def _key(group_id: str | None, session_id: str) -> str:
    """Return the key by which this module identifies a group of the folder, or a session without a group."""
    return group_id or f"session {session_id}"


def _count_sessions(folder: Path, manifest: DatasetManifest) -> Counter[str]:
    """Return the number of trainable sessions of each group, by key."""
    return Counter(
        _key(row["group_id"], row["session_id"])
        for row in read_rows(folder, manifest.format, "sessions")
        if row["status"] in TRAINABLE_STATUSES
    )


def _training_groups(folder: Path, manifest: DatasetManifest, prefix: str, run_id: str) -> dict[str, Group]:
    """Return the groups to train on, by key."""
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
                _key(None, row["session_id"]),
                Group("", run_id, Channel.DATA, 0, 1, task, created_at=row["created_at"]),
            )
    return by_key


def _make_renamer(run_id: str, label: str) -> Callable[[str], str]:
    suffix = hashlib.sha256(f"{run_id} {label}".encode()).hexdigest()[:8]
    return lambda name: f"{name}.{suffix}"


def _as_data(record: SessionRecord, rename: Callable[[str], str], group: Group, label: str) -> SessionRecord:
    """Return the record as a session of the data group, with new ids."""
    session = record.session
    session_id = rename(session.session_id)
    origin = {"dataset": label, "run_id": session.run_id, "session_id": session.session_id}

    def rename_optional(name: str | None) -> str | None:
        return None if name is None else rename(name)

    def convert_call(call: Call) -> Call:
        return replace(
            call,
            call_id=rename(call.call_id),
            session_id=session_id,
            run_id=group.run_id,
            request_id=rename(call.request_id),
            parent_id=rename_optional(call.parent_id),
            base_id=rename_optional(call.base_id),
        )

    def convert_reward(reward: Reward) -> Reward:
        return replace(
            reward,
            session_id=session_id,
            call_id=rename_optional(reward.call_id),
            reward_id=rename_optional(reward.reward_id),
        )

    def convert_feedback(feedback: Feedback) -> Feedback:
        return replace(
            feedback,
            session_id=session_id,
            call_id=rename_optional(feedback.call_id),
            feedback_id=rename(feedback.feedback_id),
        )

    return SessionRecord(
        session=replace(
            session,
            session_id=session_id,
            run_id=group.run_id,
            channel=Channel.DATA,
            group_id=group.group_id,
            metadata={**session.metadata, "imported_from": origin},
        ),
        calls=tuple(map(convert_call, record.calls)),
        rewards=tuple(map(convert_reward, record.rewards)),
        scores=tuple(replace(score, session_id=session_id) for score in record.scores),
        tags=tuple(replace(tag, session_id=session_id) for tag in record.tags),
        feedback=tuple(map(convert_feedback, record.feedback)),
    )


def _require_logprobs(record: SessionRecord) -> None:
    for call in record.calls:
        if call.trainable and call.status is CallStatus.OK and np.isnan(call.logprobs).any():
            raise DataError(
                f"call {call.call_id} of session {call.session_id} lacks logprobs; train on this data with "
                "trainer.loss.name cross_entropy, which needs none"
            )
