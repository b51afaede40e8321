"""Queries for datasets: exported data with a name and version."""

from __future__ import annotations

from dataclasses import replace

from instar.store.codec import dump_json
from instar.store.database import Database
from instar.store.models import DatasetRow
from instar.store.rows import DATASET_ROWS
from instar.store.schema import DATASETS
from instar.types import Json


def put_dataset(db: Database, name: str, path: str, hash: str, manifest: Json) -> DatasetRow:
    """Add and return the next version of a dataset. If the newest version has the same hash, update the path
    of that version and return it instead."""
    newest = get_dataset(db, name)
    if newest is not None and newest.hash == hash:
        if (newest.path, newest.manifest) == (path, manifest):
            return newest
        # The files were moved, or written again in a different format.
        db.execute(
            "UPDATE datasets SET path = ?, manifest = ? WHERE name = ? AND version = ?",
            (path, dump_json(manifest), name, newest.version),
        )
        return replace(newest, path=path, manifest=manifest)
    row = DATASET_ROWS.encode(DatasetRow(name, newest.version + 1 if newest else 1, path, hash, manifest))
    db.execute(DATASETS.insert_sql, row)
    return DATASET_ROWS.decode(row)


def get_dataset(db: Database, name: str, version: int | None = None) -> DatasetRow | None:
    """Return a version of the dataset, by default the newest version."""
    sql = "SELECT * FROM datasets WHERE name = ?"
    if version is None:
        return DATASET_ROWS.select_one(db, f"{sql} ORDER BY version DESC LIMIT 1", (name,))
    return DATASET_ROWS.select_one(db, f"{sql} AND version = ?", (name, version))


def get_datasets(db: Database) -> list[DatasetRow]:
    return DATASET_ROWS.select(db, "SELECT * FROM datasets ORDER BY name, version")


def remove_dataset(db: Database, name: str, version: int | None = None) -> int:
    """Remove one version of a dataset, by default all versions, and return the number of removed versions.
    The files are not deleted."""
    if version is None:
        return db.execute("DELETE FROM datasets WHERE name = ?", (name,)).rowcount
    return db.execute("DELETE FROM datasets WHERE name = ? AND version = ?", (name, version)).rowcount
