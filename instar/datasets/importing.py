"""Imports an exported folder into a store, with its original ids or as training data of a run."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from instar.config.data import group_id_prefix
from instar.datasets.columns import CONTENT_TABLES, TABLES, ExportRow, TableName, encode_line
from instar.datasets.export import ProgressCallback, read_records
from instar.datasets.files import read_rows
from instar.datasets.manifest import IMPORTABLE_FORMATS, ContentHash, DatasetManifest, read_manifest
from instar.datasets.records import decode_group, decode_record, encode_group, encode_record
from instar.errors import ConflictError, DataError
from instar.store.base import SessionRecord, Store
from instar.types import CallStatus, Channel, Group, GroupStatus, SessionStatus, Task

SESSIONS_PER_TRANSACTION = 32
TRAINABLE_STATUSES = (SessionStatus.COMPLETED, SessionStatus.FAILED)


@dataclass(frozen=True, slots=True)
class ImportResult:
    groups: int = 0
    sessions: int = 0
    unchanged: int = 0
    """The number of sessions that the store already had, or of groups that `import_for_training` skipped."""


def verify_content(folder: Path) -> DatasetManifest:
    """Check a folder before it is imported, and return its manifest. Raises DataError if it is invalid."""
    manifest = read_manifest(folder)
    if manifest.format not in IMPORTABLE_FORMATS:
        raise DataError(
            f"{folder} has the format {manifest.format}, which does not contain the sampled tokens; export "
            f"the data again in one of these formats: {', '.join(IMPORTABLE_FORMATS)}"
        )
    digest = ContentHash()
    for table in CONTENT_TABLES:
        for row in read_rows(folder, manifest.format, table):
            digest.add(table, row)
    if (actual := digest.hexdigest(*CONTENT_TABLES)) != manifest.hash:
        raise DataError(
            f"the content of {folder} does not match its manifest (hash {actual}, expected {manifest.hash}): "
            "a file was changed or is incomplete; export or copy the data again"
        )
    return manifest


def read_groups(folder: Path, manifest: DatasetManifest) -> Iterator[Group]:
    return map(decode_group, read_rows(folder, manifest.format, "groups"))


def read_sessions(folder: Path, manifest: DatasetManifest) -> Iterator[SessionRecord]:
    calls = read_rows(folder, manifest.format, "calls")
    for row in read_rows(folder, manifest.format, "sessions"):
        call_rows = list(islice(calls, row["calls"]))
        if len(call_rows) != row["calls"]:
            raise DataError(
                f"session {row['session_id']} has {row['calls']} calls, but {folder} contains only "
                f"{len(call_rows)} of them; export or copy the data again"
            )
        yield decode_record(row, call_rows)


async def import_sessions(
    store: Store,
    folder: Path,
    run_id: str,
    manifest: DatasetManifest,
    progress: ProgressCallback | None = None,
) -> ImportResult:
    """Import all groups and sessions into a run, with their original ids, and return the counts. Groups and
    sessions that the store already has are skipped. Raises ConflictError if their content differs."""
    total, done, unchanged, added_groups = manifest.counts.get("sessions", 0), 0, 0, 0
    existing: dict[Channel, dict[str, Group]] = {}
    for group in read_groups(folder, manifest):
        group = replace(group, run_id=run_id)
        if group.channel not in existing:
            existing[group.channel] = {g.group_id: g for g in await store.groups(run_id, group.channel)}
        if (stored := existing[group.channel].get(group.group_id)) is None:
            await store.put_records([group], [])
            added_groups += 1
        else:
            _require_same(f"group {group.group_id}", encode_group(stored), encode_group(group), "groups")
    sessions = read_sessions(folder, manifest)
    while records := list(islice(sessions, SESSIONS_PER_TRANSACTION)):
        new_records: list[SessionRecord] = []
        for imported in records:
            record = replace(
                imported,
                session=replace(imported.session, run_id=run_id),
                calls=tuple(replace(call, run_id=run_id) for call in imported.calls),
            )
            if (session := await store.session(record.session.session_id)) is None:
                new_records.append(record)
            else:
                await _require_same_session(store, session.run_id, record)
                unchanged += 1
        await store.put_records([], new_records)
        done += len(records)
        if progress is not None:
            progress(done, total)
    return ImportResult(groups=added_groups, sessions=done - unchanged, unchanged=unchanged)


async def _require_same_session(store: Store, stored_run_id: str, record: SessionRecord) -> None:
    session_id = record.session.session_id
    (stored,) = [stored async for stored in read_records(store, stored_run_id, [session_id])]
    (stored_row, stored_calls), (row, calls) = encode_record(stored), encode_record(record)
    _require_same(f"session {session_id}", stored_row, row, "sessions")
    for stored_call, call in zip(stored_calls, calls, strict=True):
        _require_same(f"call {call['call_id']} of session {session_id}", stored_call, call, "calls")


def _require_same(name: str, stored: ExportRow, imported: ExportRow, table: TableName) -> None:
    differing = [
        column
        for column, column_type in TABLES[table].items()
        if encode_line({column: column_type}, stored) != encode_line({column: column_type}, imported)
    ]
    if differing:
        raise ConflictError(
            f"{name} is already in the store with different values in these columns: {', '.join(differing)}. "
            "Import the data into a run with a different store"
        )


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
    DataError if ``needs_logprobs`` is True and a trainable call lacks logprobs. Groups and sessions get new
    ids derived from ``label``, because the store may also contain the original ids. Skips evaluation
    sessions, groups that are not ready, groups without trainable sessions, and groups that the store already
    has. A completed session without a group id, or a live one, becomes a group of one."""
    prefix = group_id_prefix(run_id, label)
    existing_ids = {group.group_id for group in await store.groups(run_id, Channel.DATA)}
    groups = _read_training_groups(folder, manifest, prefix, run_id)
    # The number of trainable sessions in each group, by group key.
    sizes = Counter(
        _get_group_key(row["group_id"], row["session_id"], row["channel"])
        for row in read_rows(folder, manifest.format, "sessions")
        if row["status"] in TRAINABLE_STATUSES
    )
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
    groups = [
        (group.group_id, group)
        for group in read_groups(folder, manifest)
        if group.status is GroupStatus.READY and group.channel is not Channel.VAL
    ]
    live_groups: list[tuple[str, Group]] = []
    """The groups of live sessions with the id of a group that they do not belong to."""
    for row in read_rows(folder, manifest.format, "sessions"):
        has_group_id = row["group_id"] is not None
        is_ungrouped = row["channel"] == Channel.LIVE if has_group_id else row["channel"] != Channel.VAL
        if is_ungrouped and row["status"] == SessionStatus.COMPLETED:
            task = Task(row["task_id"] or row["session_id"], {})
            group = Group("", run_id, Channel.DATA, 0, 1, task, created_at=row["created_at"])
            key = _get_group_key(None, row["session_id"], row["channel"])
            (live_groups if has_group_id else groups).append((key, group))
    # These come last, because earlier versions of Instar skipped them and numbered only the others.
    groups += live_groups
    changes = {"run_id": run_id, "channel": Channel.DATA, "status": GroupStatus.READY, "reason": None}
    return {
        key: replace(group, group_id=f"{prefix}{index:06d}", index=index, **changes)
        for index, (key, group) in enumerate(groups)
    }


def _convert_record(record: SessionRecord, group: Group, label: str) -> SessionRecord:
    """Convert the record to a session in a group of the data channel, with new ids."""
    session = record.session
    suffix = hashlib.sha256(f"{group.run_id} {label}".encode()).hexdigest()[:8]
    session_id = f"{session.session_id}.{suffix}"
    origin = {"dataset": label, "run_id": session.run_id, "session_id": session.session_id}

    def convert(item: Any, *id_fields: str, **changes: Any) -> Any:
        """Return a copy of a dataclass with the new session id, and with new ids in ``id_fields``."""
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
        feedback=tuple(
            convert(feedback, "call_id", "other_call_id", "feedback_id") for feedback in record.feedback
        ),
    )


def _require_logprobs(record: SessionRecord) -> None:
    for call in record.calls:
        if call.trainable and call.status is CallStatus.OK and np.isnan(call.logprobs).any():
            raise DataError(
                f"call {call.call_id} of session {call.session_id} lacks logprobs; set trainer.loss.name to "
                "cross_entropy, which does not need them"
            )
