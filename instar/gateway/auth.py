"""The keys of the admin, of agents and of sessions. Only hashes of the keys are stored.

The admin key has access to everything, an agent's key to all sessions of its agent, and a session's key to
its own session.
"""

from __future__ import annotations

import ipaddress
import secrets
import time
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from instar.errors import ConfigError
from instar.gateway.base import ApiError
from instar.http.auth import hash_key
from instar.store.base import KeyKind, KeyRow, Store
from instar.types import Session

KEY_CACHE_SECONDS = 3.0
"""The time after which a key is looked up again. A revoked key works for up to this time."""
MAX_CACHED_KEYS = 20_000
MIN_KEY_LENGTH = 16
MIN_REMOTE_KEY_LENGTH = 32

KEY_HEADER = "x-instar-key"
KEY_HEADERS = frozenset({"authorization", "x-api-key", "api-key"})


def new_key() -> str:
    return f"sk-instar-{secrets.token_urlsafe(32)}"


def extract_key(headers: Mapping[str, str]) -> str:
    """Return the caller's key. Raise ApiError (401) if the request has no key. The gateway's own header is
    read before those of OpenAI, Anthropic and Azure, because the client may send a provider's key in the
    latter."""
    if key := headers.get(KEY_HEADER):
        return key.strip()
    scheme, _, key = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and key.strip():
        return key.strip()
    if key := headers.get("x-api-key", "") or headers.get("api-key", ""):
        return key.strip()
    message = "The request has no API key; send the header 'Authorization: Bearer <key>'."
    raise ApiError(401, message, code="missing_api_key")


@dataclass(frozen=True, slots=True)
class Caller:
    """The sender of a request."""

    kind: Literal["admin", "agent", "session"]
    agent_id: str | None = None
    session_id: str | None = None

    def check_access(self, session: Session) -> None:
        """Raise ApiError (403) if the caller may not use the session."""
        if not self.can_access(session):
            raise ApiError(403, f"This key belongs to another {self.kind}.", code=f"wrong_{self.kind}")

    def can_access(self, session: Session) -> bool:
        if self.kind == "session":
            return self.session_id == session.session_id
        return self.kind == "admin" or self.agent_id == session.agent_id


class Authenticator:
    """Identifies callers by the admin key, the keys in the store and the keys of the run's sessions."""

    def __init__(self, store: Store, admin_key: str, run_id: str) -> None:
        if not admin_key:
            raise ValueError("the admin key is empty")
        self._store = store
        self._admin_hash = hash_key(admin_key)
        self._run_id = run_id
        self._cache: OrderedDict[str, tuple[Caller, float]] = OrderedDict()

    async def identify(self, key: str) -> Caller:
        """Return the owner of the key. Raise ApiError (401) if the key is unknown or revoked."""
        hashed = hash_key(key)
        if secrets.compare_digest(hashed, self._admin_hash):
            return Caller("admin")
        cached = self._cache.get(hashed)
        if cached is not None and time.monotonic() < cached[1]:
            return cached[0]
        caller, cache_seconds = await self._look_up(hashed)
        self._cache[hashed] = (caller, time.monotonic() + cache_seconds)
        self._cache.move_to_end(hashed)
        if len(self._cache) > MAX_CACHED_KEYS:
            self._cache.popitem(last=False)
        return caller

    async def _look_up(self, hashed: str) -> tuple[Caller, float]:
        """Return the caller, and the number of seconds for which the caller may be cached."""
        session = await self._store.session_by_key(hashed)
        if session is not None and session.run_id == self._run_id:
            # A session's key is never revoked, because it is useless after the end of its session.
            return Caller("session", session.agent_id, session.session_id), float("inf")
        row = await self._store.key(hashed)
        if row is None:
            raise ApiError(401, "This API key is unknown.", code="invalid_api_key")
        if row.revoked_at is not None:
            raise ApiError(401, "This API key was revoked.", code="invalid_api_key")
        return Caller(row.kind, row.agent_id), KEY_CACHE_SECONDS


async def create_key(store: Store, kind: KeyKind, agent_id: str | None, name: str = "") -> str:
    """Store the hash of a new key and return the key. Raise ConflictError if the name is already used."""
    key = new_key()
    await store.put_key(KeyRow(hash_key(key), kind, agent_id, name))
    return key


async def create_agent_key(store: Store, agent_id: str) -> str:
    """Store the hash of a new key of the agent and return the key. Earlier keys stay valid."""
    return await create_key(store, "agent", agent_id, f"serve-{secrets.token_hex(4)}")


def resolve_admin_key(environment: Mapping[str, str], variable: str, host: str) -> str:
    """Return the admin key from the environment, or a new key if the variable is not set.

    Raise ConfigError if the key is too short for a gateway on ``host`` or cannot be sent in a header.
    """
    key = environment.get(variable)
    if key is None:
        return new_key()
    min_length = MIN_KEY_LENGTH if is_loopback(host) else MIN_REMOTE_KEY_LENGTH
    advice = f"Set a random key of at least {min_length} characters, or unset it to have one generated"
    if len(key) < min_length:
        raise ConfigError(
            f"{variable} has {len(key)} characters, which is too short for gateway.host {host!r}. {advice}"
        )
    if not (key.isascii() and key.isprintable()) or " " in key:
        raise ConfigError(f"{variable} has characters that an HTTP header cannot contain. {advice}")
    return key


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False  # A host name may belong to any machine.
