"""Hashes API keys and compares them in constant time. This module imports only the standard library."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable


def hash_key(key: str) -> str:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()


def find_key_hash(key: str, hashes: Iterable[str]) -> str | None:
    """Return the hash of ``key`` if ``hashes`` contains it, else None."""
    # All hashes are compared, so that the duration does not reveal which hash matches.
    key_hash = hash_key(key)
    matches = [known_hash for known_hash in hashes if hmac.compare_digest(known_hash, key_hash)]
    return matches[0] if matches else None


def has_bearer_token(headers: Iterable[tuple[bytes, bytes]], token: str) -> bool:
    """Return True if the ASGI headers contain ``token`` as a bearer token."""
    authorization = dict(headers).get(b"authorization", b"")
    return hmac.compare_digest(authorization, f"Bearer {token}".encode())
