"""SQL of datasets: exported data, known by name and version."""

from __future__ import annotations

import time
from dataclasses import replace

from instar.store.base import DatasetRow
from instar.store.codec import DatabaseRow, dump_json, load_json
from instar.store.database import Database
from instar.store.schema import DATASETS
from instar.types import Json


def put_dataset(db: Database, name: str, path: str, hash: str, manifest: Json) -> DatasetRow:
    newest = get_dataset(db, name, None)
    if newest is not None and newest.hash == hash:
        if (newest.path, newest.manifest) == (path, manifest):
            return newest
        # The files were moved, or written again in another format: the name follows them.
        db.execute(
            "UPDATE datasets SET path = ?, manifest = ? WHERE name = ? AND version = ?",
            (path, dump_json(manifest), name, newest.version),
        )
        return replace(newest, path=path, manifest=manifest)
    row = {
        "name": name,
        "version": newest.version + 1 if newest else 1,
        "path": path,
        "hash": hash,
        "manifest": dump_json(manifest),
        "created_at": time.time(),
    }
    db.execute(DATASETS.insert, row)
    return _decode(row)


def get_dataset(db: Database, name: str, version: int | None) -> DatasetRow | None:
    if version is None:
        found = db.execute("SELECT * FROM datasets WHERE name = ? ORDER BY version DESC LIMIT 1", (name,))
    else:
        found = db.execute("SELECT * FROM datasets WHERE name = ? AND version = ?", (name, version))
    row = found.fetchone()
    return _decode(row) if row else None


def get_datasets(db: Database) -> list[DatasetRow]:
    return [_decode(row) for row in db.execute("SELECT * FROM datasets ORDER BY name, version")]


def remove_dataset(db: Database, name: str, version: int | None) -> int:
    if version is None:
        return db.execute("DELETE FROM datasets WHERE name = ?", (name,)).rowcount
    return db.execute("DELETE FROM datasets WHERE name = ? AND version = ?", (name, version)).rowcount


def _decode(row: DatabaseRow) -> DatasetRow:
    return DatasetRow(
        name=row["name"],
        version=row["version"],
        path=row["path"],
        hash=row["hash"],
        manifest=load_json(row["manifest"]),
        created_at=row["created_at"],
    )
