"""Queries for API keys and the store's secrets."""

from __future__ import annotations

import secrets
import time

from instar.store.database import Database
from instar.store.models import KeyRow
from instar.store.rows import KEY_ROWS
from instar.store.schema import KEYS

MIN_PREFIX_LENGTH = 8
SECRET_BYTES = 32


def put_key(db: Database, key: KeyRow) -> None:
    """Insert a key. Raises ConflictError if its hash is taken, or if a key that is not revoked has the same
    name."""
    db.execute(KEYS.insert_sql, KEY_ROWS.encode(key))


def get_key(db: Database, key_hash: str) -> KeyRow | None:
    return KEY_ROWS.select_one(db, "SELECT * FROM keys WHERE key_hash = ?", (key_hash,))


def get_keys(db: Database) -> list[KeyRow]:
    return KEY_ROWS.select(db, "SELECT * FROM keys ORDER BY created_at, key_hash")


def revoke_key(db: Database, prefix_or_name: str) -> int:
    """Revoke the keys with this name, and those with a hash that begins with these eight or more digits.
    Return the number of keys that were valid before."""
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
    """Create the secret with this name unless another process has already created it, and return it."""
    value = secrets.token_bytes(SECRET_BYTES)
    db.execute("INSERT INTO secrets (name, value) VALUES (?, ?) ON CONFLICT (name) DO NOTHING", (name, value))
    return get_secret(db, name) or value
