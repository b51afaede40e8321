"""SQL of API keys and of the store's own secrets: functions of a connection."""

from __future__ import annotations

import secrets
import time

from instar.store.base import KeyRow
from instar.store.codec import DatabaseRow
from instar.store.database import Database
from instar.store.schema import KEYS

SHORTEST_PREFIX = 8
SECRET_BYTES = 32


def put_key(db: Database, key: KeyRow) -> None:
    row = {
        "key_hash": key.key_hash,
        "kind": key.kind,
        "agent_id": key.agent_id,
        "name": key.name,
        "created_at": key.created_at or time.time(),
        "revoked_at": key.revoked_at,
    }
    db.execute(KEYS.insert, row)


def get_key(db: Database, key_hash: str) -> KeyRow | None:
    row = db.execute("SELECT * FROM keys WHERE key_hash = ?", (key_hash,)).fetchone()
    return _decode(row) if row else None


def get_keys(db: Database) -> list[KeyRow]:
    return [_decode(row) for row in db.execute("SELECT * FROM keys ORDER BY created_at, key_hash")]


def _decode(row: DatabaseRow) -> KeyRow:
    return KeyRow(
        key_hash=row["key_hash"],
        kind=row["kind"],
        agent_id=row["agent_id"],
        name=row["name"],
        created_at=row["created_at"],
        revoked_at=row["revoked_at"],
    )


def revoke_key(db: Database, prefix_or_name: str) -> int:
    where = "name = :given AND name != ''"
    if len(prefix_or_name) >= SHORTEST_PREFIX:
        where = f"({where} OR substr(key_hash, 1, length(:given)) = :given)"
    done = db.execute(
        f"UPDATE keys SET revoked_at = :now WHERE revoked_at IS NULL AND {where}",
        {"now": time.time(), "given": prefix_or_name},
    )
    return done.rowcount


def get_secret(db: Database, name: str) -> bytes | None:
    row = db.execute("SELECT value FROM secrets WHERE name = ?", (name,)).fetchone()
    return row["value"] if row else None


def make_secret(db: Database, name: str) -> bytes:
    """The one that is there, or a new one."""
    value = secrets.token_bytes(SECRET_BYTES)
    db.execute("INSERT INTO secrets (name, value) VALUES (?, ?) ON CONFLICT (name) DO NOTHING", (name, value))
    return get_secret(db, name) or value
