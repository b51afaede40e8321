"""Queries for rows that do not belong to a run: API keys, secrets and datasets."""

from __future__ import annotations

import secrets
import time
from dataclasses import replace

from instar.store.codec import dump_json
from instar.store.database import Database
from instar.store.models import DatasetRow, KeyRow
from instar.store.rows import DATASET_ROWS, KEY_ROWS, match_columns
from instar.store.schema import DATASETS, KEYS
from instar.types import Json

MIN_PREFIX_LENGTH = 8
SECRET_BYTES = 32


def put_key(db: Database, key: KeyRow) -> None:
    """Insert a key. Raises ConflictError if its hash is taken, or if an active key has the same name."""
    db.execute(KEYS.insert_sql, KEY_ROWS.encode(key))


def get_key(db: Database, key_hash: str) -> KeyRow | None:
    return KEY_ROWS.select_one(db, "SELECT * FROM keys WHERE key_hash = ?", (key_hash,))


def get_keys(db: Database) -> list[KeyRow]:
    return KEY_ROWS.select(db, "SELECT * FROM keys ORDER BY created_at, key_hash")


def revoke_key(db: Database, prefix_or_name: str) -> int:
    """Revoke keys by name, or by a hash prefix of at least 8 hex digits. Return how many were revoked."""
    where = "name = :text AND name != ''"
    if len(prefix_or_name) >= MIN_PREFIX_LENGTH:
        where = f"({where} OR substr(key_hash, 1, length(:text)) = :text)"
    cursor = db.execute(
        f"UPDATE keys SET revoked_at = :now WHERE revoked_at IS NULL AND {where}",
        {"now": time.time(), "text": prefix_or_name},
    )
    return cursor.rowcount


def get_secret(db: Database, name: str) -> bytes | None:
    row = db.execute("SELECT value FROM secrets WHERE name = ?", (name,)).fetchone()
    return row["value"] if row else None


def create_secret(db: Database, name: str) -> bytes:
    """Create the secret with this name, unless another process has already created it, and return it."""
    value = secrets.token_bytes(SECRET_BYTES)
    db.execute("INSERT INTO secrets (name, value) VALUES (?, ?) ON CONFLICT (name) DO NOTHING", (name, value))
    return get_secret(db, name) or value


def put_dataset(db: Database, name: str, path: str, hash: str, manifest: Json) -> DatasetRow:
    """Add and return the next version of a dataset. If the newest version has the same hash, update the path
    and manifest of that version and return it instead."""
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
    """Return a version of the dataset, by default the newest."""
    where, values = match_columns(name=name, version=version)
    sql = f"SELECT * FROM datasets WHERE {where} ORDER BY version DESC LIMIT 1"
    return DATASET_ROWS.select_one(db, sql, values)


def get_datasets(db: Database) -> list[DatasetRow]:
    return DATASET_ROWS.select(db, "SELECT * FROM datasets ORDER BY name, version")


def remove_dataset(db: Database, name: str, version: int | None = None) -> int:
    """Remove one or all versions of a dataset, but not its files. Return the number of removed versions."""
    where, values = match_columns(name=name, version=version)
    return db.execute(f"DELETE FROM datasets WHERE {where}", values).rowcount
