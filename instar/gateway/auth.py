"""Keys: of the admin, of agents, of single sessions. Only hashes are kept.

The admin key may do everything. An agent's key opens sessions of its agent and touches those only. A
session's key opens its session and nothing else.
"""

from __future__ import annotations

import hashlib
import ipaddress
import secrets
import time
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from instar.errors import ConfigError
from instar.gateway.base import ApiError
from instar.store.base import KeyKind, KeyRow, Store
from instar.types import Session

KEY_CACHE_SECONDS = 3.0
"""For how long a key that was found is not looked up again, and so may outlive its revocation."""

MAX_CACHED_KEYS = 20_000
MIN_KEY_LENGTH = 16
MIN_REMOTE_KEY_LENGTH = 32


KEY_HEADER = "x-instar-key"
KEY_HEADERS = frozenset({"authorization", "x-api-key", "api-key"})


def new_key() -> str:
    return f"sk-instar-{secrets.token_urlsafe(32)}"


def hash_key(key: str) -> str:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()


def extract_key(headers: Mapping[str, str]) -> str:
    """The key of a request, as the clients of OpenAI, Anthropic or Azure send it; or in a header of ours,
    which leaves theirs to a provider."""
    if key := headers.get(KEY_HEADER):
        return key.strip()
    scheme, _, key = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and key.strip():
        return key.strip()
    if key := headers.get("x-api-key", "") or headers.get("api-key", ""):
        return key.strip()
    raise ApiError(401, "No API key: send 'Authorization: Bearer <key>'.", code="missing_api_key")


@dataclass(frozen=True, slots=True)
class Caller:
    """Who sent a request."""

    kind: Literal["admin", "agent", "session"]
    agent_id: str | None = None
    session_id: str | None = None

    def check_access(self, session: Session) -> None:
        """Raises ApiError when the session is not one of theirs."""
        if self.kind == "session" and self.session_id != session.session_id:
            raise ApiError(403, "This key belongs to another session.", code="wrong_session")
        if self.kind == "agent" and self.agent_id != session.agent_id:
            raise ApiError(403, "This session belongs to another agent.", code="wrong_agent")


class Authenticator:
    """Tells callers by their keys, those of a run: its sessions', and the store's."""

    def __init__(self, store: Store, admin_key: str, run_id: str) -> None:
        if not admin_key:
            raise ValueError("the admin key is empty")
        self._store = store
        self._admin_hash = hash_key(admin_key)
        self._run_id = run_id
        self._known: OrderedDict[str, tuple[Caller, float]] = OrderedDict()

    async def identify(self, key: str) -> Caller:
        """Raises ApiError 401 for a key that is not known or was revoked."""
        hashed = hash_key(key)
        if secrets.compare_digest(hashed, self._admin_hash):
            return Caller("admin")
        known = self._known.get(hashed)
        if known is not None and time.monotonic() < known[1]:
            return known[0]
        caller, trusted = await self._look_up(hashed)
        self._known[hashed] = (caller, time.monotonic() + trusted)
        self._known.move_to_end(hashed)
        if len(self._known) > MAX_CACHED_KEYS:
            self._known.popitem(last=False)
        return caller

    async def _look_up(self, hashed: str) -> tuple[Caller, float]:
        """Who it is, and for how many seconds that holds."""
        session = await self._store.session_by_key(hashed)
        if session is not None and session.run_id == self._run_id:
            # A session's key is never revoked: it opens nothing once its session has ended.
            return Caller("session", session.agent_id, session.session_id), float("inf")
        row = await self._store.key(hashed)
        if row is None:
            raise ApiError(401, "This API key is not known.", code="invalid_api_key")
        if row.revoked_at is not None:
            raise ApiError(401, "This API key was revoked.", code="invalid_api_key")
        return Caller(row.kind, row.agent_id), KEY_CACHE_SECONDS


async def create_key(store: Store, kind: KeyKind, agent_id: str | None, name: str = "") -> str:
    """A new key, which only its holder knows from now on. Raises ConflictError when the name is taken."""
    key = new_key()
    await store.put_key(KeyRow(hash_key(key), kind, agent_id, name))
    return key


async def create_agent_key(store: Store, agent_id: str) -> str:
    """A key for the agent to be told now. Those told before cannot be told again, and stay valid."""
    return await create_key(store, "agent", agent_id, f"serve-{secrets.token_hex(4)}")


def resolve_admin_key(environment: Mapping[str, str], variable: str, host: str) -> str:
    """The admin key that the environment gives for a gateway on ``host``, or a new one.

    Raises ConfigError for one that could be guessed or cannot be sent: with it goes everything.
    """
    key = environment.get(variable)
    if key is None:
        return new_key()
    needed = MIN_KEY_LENGTH if is_loopback(host) else MIN_REMOTE_KEY_LENGTH
    advice = f"Give a random one of {needed} characters or more, or unset it to have one made"
    if len(key) < needed:
        raise ConfigError(
            f"{variable} has {len(key)} characters, too few for a gateway on {host} (gateway.host). {advice}"
        )
    if not (key.isascii() and key.isprintable()) or " " in key:
        raise ConfigError(f"{variable} has characters that no HTTP header can carry. {advice}")
    return key


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False  # a name, of any machine
