"""Imports an exported folder into a store, with its original ids."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

from instar.datasets.columns import CONTENT_TABLES, TABLES, ExportRow, TableName, encode_line
from instar.datasets.export import ProgressCallback, read_records
from instar.datasets.files import read_rows
from instar.datasets.manifest import IMPORTABLE_FORMATS, ContentHash, DatasetManifest, read_manifest
from instar.datasets.records import decode_group, decode_record, encode_group, encode_record
from instar.errors import ConflictError, DataError
from instar.store.base import SessionRecord, Store
from instar.types import Channel, Group

SESSIONS_PER_TRANSACTION = 32


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
