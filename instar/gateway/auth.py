"""Keys: one for the admin, one for each session. Only hashes are kept."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Mapping

from instar.gateway.base import ApiError


def new_key() -> str:
    return f"sk-instar-{secrets.token_urlsafe(32)}"


def key_hash(key: str) -> str:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()


def bearer(headers: Mapping[str, str]) -> str:
    """The key of a request, as OpenAI's clients or Anthropic's send it."""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and key.strip():
        return key.strip()
    if key := headers.get("x-api-key", ""):
        return key
    raise ApiError(401, "No API key: send 'Authorization: Bearer <key>'.", code="missing_api_key")


class Keys:
    def __init__(self, admin_key: str) -> None:
        if not admin_key:
            raise ValueError("the admin key is empty")
        self._admin_hash = key_hash(admin_key)

    def is_admin(self, key: str) -> bool:
        """Compares hashes, in constant time."""
        return secrets.compare_digest(key_hash(key), self._admin_hash)
