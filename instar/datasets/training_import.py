"""Into a run's store, from a folder, as data that the run trains on."""

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

TRAINED = (SessionStatus.COMPLETED, SessionStatus.FAILED)


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
    """As finished groups of the run's data channel, under ids of their own: the same data may be in the store
    as what it was. Groups that were given up and sessions for evaluation are left out; a session of no group
    is a group of one. What is there already is left alone."""
    prefix = group_prefix(run_id, label)
    there = {group.group_id for group in await store.groups(run_id, Channel.DATA)}
    rename = _renaming(run_id, label)
    groups = _training_groups(folder, manifest, prefix, run_id)
    left = _sizes(folder, manifest)
    waiting = {key for key, group in groups.items() if group.group_id not in there and left[key]}
    held: dict[str, list[SessionRecord]] = {}
    added = 0
    for done, record in enumerate(read_sessions(folder, manifest), 1):
        key = _key(record.session.group_id, record.session.session_id)
        if key in waiting and record.session.status in TRAINED:
            if needs_logprobs:
                _require_logprobs(record)
            held.setdefault(key, []).append(_as_data(record, rename, groups[key], label))
            if len(held[key]) == left[key]:
                added += left[key]
                await store.put_records([groups[key]], held.pop(key))
        if progress is not None:
            progress(done, manifest.counts.get("sessions", 0))
    return ImportResult(groups=len(waiting), sessions=added, unchanged=len(groups) - len(waiting))


def _key(group_id: str | None, session_id: str) -> str:
    """What a group to train on was called."""
    return group_id or f"session {session_id}"


def _sizes(folder: Path, manifest: DatasetManifest) -> Counter[str]:
    """How many sessions to train on the groups have, by what they were called."""
    return Counter(
        _key(row["group_id"], row["session_id"])
        for row in read_rows(folder, manifest.format, "sessions")
        if row["status"] in TRAINED
    )


def _training_groups(folder: Path, manifest: DatasetManifest, prefix: str, run_id: str) -> dict[str, Group]:
    """By what they were called."""
    found: dict[str, Group] = {}

    def add(key: str, group: Group) -> None:
        place = len(found)
        found[key] = replace(
            group,
            group_id=f"{prefix}{place:06d}",
            run_id=run_id,
            channel=Channel.DATA,
            index=place,
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
    return found


def _renaming(run_id: str, label: str) -> Callable[[str], str]:
    mark = hashlib.sha256(f"{run_id} {label}".encode()).hexdigest()[:8]
    return lambda name: f"{name}.{mark}"


def _as_data(record: SessionRecord, rename: Callable[[str], str], group: Group, label: str) -> SessionRecord:
    session = record.session
    session_id = rename(session.session_id)
    origin = {"dataset": label, "run_id": session.run_id, "session_id": session.session_id}

    def opt(name: str | None) -> str | None:
        return None if name is None else rename(name)

    def call(given: Call) -> Call:
        return replace(
            given,
            call_id=rename(given.call_id),
            session_id=session_id,
            run_id=group.run_id,
            request_id=rename(given.request_id),
            parent_id=opt(given.parent_id),
            base_id=opt(given.base_id),
        )

    def reward(given: Reward) -> Reward:
        return replace(
            given, session_id=session_id, call_id=opt(given.call_id), reward_id=opt(given.reward_id)
        )

    def feedback(given: Feedback) -> Feedback:
        return replace(
            given, session_id=session_id, call_id=opt(given.call_id), feedback_id=rename(given.feedback_id)
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
        calls=tuple(map(call, record.calls)),
        rewards=tuple(map(reward, record.rewards)),
        scores=tuple(replace(score, session_id=session_id) for score in record.scores),
        tags=tuple(replace(tag, session_id=session_id) for tag in record.tags),
        feedback=tuple(map(feedback, record.feedback)),
    )


def _require_logprobs(record: SessionRecord) -> None:
    for call in record.calls:
        if call.trainable and call.status is CallStatus.OK and np.isnan(call.logprobs).any():
            raise DataError(
                f"call {call.call_id} of session {call.session_id} lacks logprobs: only trainer.loss.name "
                "cross_entropy can be trained on such data"
            )
