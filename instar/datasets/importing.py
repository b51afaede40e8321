"""Into a store, from a folder, as it was."""

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
from instar.types import (
    Channel,
    Group,
)

AT_ONCE = 32
"""Sessions of one transaction."""


@dataclass(frozen=True, slots=True)
class ImportResult:
    groups: int = 0
    sessions: int = 0
    unchanged: int = 0
    """Sessions that the store had already, the same."""


def verify_content(folder: Path) -> DatasetManifest:
    """The folder's manifest, once its content is known to be what the manifest says."""
    manifest = read_manifest(folder)
    if manifest.format not in IMPORTABLE_FORMATS:
        raise DataError(
            f"{folder} is in the {manifest.format} form, which leaves out what was sampled; only "
            f"{', '.join(IMPORTABLE_FORMATS)} can be brought back"
        )
    digest = ContentHash()
    for table in CONTENT_TABLES:
        for row in read_rows(folder, manifest.format, table):
            digest.add(table, row)
    if (found := digest.hexdigest(*CONTENT_TABLES)) != manifest.hash:
        raise DataError(
            f"the content of {folder} is not what its manifest says ({found}, not {manifest.hash}): a file "
            "was changed or is not whole"
        )
    return manifest


def read_groups(folder: Path, manifest: DatasetManifest) -> Iterator[Group]:
    return map(decode_group, read_rows(folder, manifest.format, "groups"))


def read_sessions(folder: Path, manifest: DatasetManifest) -> Iterator[SessionRecord]:
    calls = read_rows(folder, manifest.format, "calls")
    for row in read_rows(folder, manifest.format, "sessions"):
        own = list(islice(calls, row["calls"]))
        if len(own) != row["calls"]:
            raise DataError(
                f"{len(own)} of the {row['calls']} calls of session {row['session_id']} are there"
            )
        yield decode_record(row, own)


# --- as it was ----------------------------------------------------------------------------------


async def import_sessions(
    store: Store,
    folder: Path,
    run_id: str,
    manifest: DatasetManifest,
    progress: ProgressCallback | None = None,
) -> ImportResult:
    """Everything, into a run: ids, order and arrays as they were. What is there already, the same, is left
    alone; what is there and differs is a ConflictError."""
    total, done, there, groups = manifest.counts.get("sessions", 0), 0, 0, 0
    known: dict[Channel, dict[str, Group]] = {}
    for group in read_groups(folder, manifest):
        group = replace(group, run_id=run_id)
        if group.channel not in known:
            known[group.channel] = {g.group_id: g for g in await store.groups(run_id, group.channel)}
        if (found := known[group.channel].get(group.group_id)) is None:
            await store.put_records([group], [])
            groups += 1
        else:
            _require_same(f"group {group.group_id}", encode_group(found), encode_group(group), "groups")
    for records in _batches(read_sessions(folder, manifest), AT_ONCE):
        new: list[SessionRecord] = []
        for given in records:
            record = _of_run(given, run_id)
            if await store.session(record.session.session_id) is None:
                new.append(record)
            else:
                await _require_session(store, record)
                there += 1
        await store.put_records([], new)
        done += len(records)
        if progress is not None:
            progress(done, total)
    return ImportResult(groups=groups, sessions=done - there, unchanged=there)


def _of_run(record: SessionRecord, run_id: str) -> SessionRecord:
    if record.session.run_id == run_id:
        return record
    return replace(
        record,
        session=replace(record.session, run_id=run_id),
        calls=tuple(replace(call, run_id=run_id) for call in record.calls),
    )


async def _require_session(store: Store, record: SessionRecord) -> None:
    session_id = record.session.session_id
    there = await store.session(session_id)
    assert there is not None
    (found,) = [each async for each in read_records(store, there.run_id, [session_id])]
    (one, calls), (other, others) = encode_record(found), encode_record(record)
    _require_same(f"session {session_id}", one, other, "sessions")
    for call, given in zip(calls, others, strict=True):
        _require_same(f"call {call['call_id']} of session {session_id}", call, given, "calls")


def _require_same(name: str, found: ExportRow, given: ExportRow, table: TableName) -> None:
    columns = TABLES[table]
    if encode_line(columns, found) == encode_line(columns, given):
        return
    differing = [
        column
        for column, kind in columns.items()
        if encode_line({column: kind}, found) != encode_line({column: kind}, given)
    ]
    raise ConflictError(
        f"{name} is in the store already, and not the same: {', '.join(differing)} differ. Import into "
        "another run's folder"
    )


def _batches(records: Iterator[SessionRecord], size: int) -> Iterator[list[SessionRecord]]:
    while batch := list(islice(records, size)):
        yield batch
