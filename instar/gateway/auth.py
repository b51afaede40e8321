"""API keys and the actions that they allow. There are keys for the admin, for agents, for sessions and for
people who give feedback. Only hashes of the keys are stored.

All routes except the public ones check `PERMISSIONS`. docs/security.md lists who may access each route.
"""

from __future__ import annotations

import ipaddress
import secrets
import time
from collections import OrderedDict
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import Enum, StrEnum
from typing import Literal

from instar.errors import ConfigError
from instar.gateway.base import ApiError, invalid_value
from instar.http.auth import hash_key
from instar.store.base import KeyKind, KeyRow, Store
from instar.types import Channel, Session

KEY_CACHE_SECONDS = 3.0
"""How long a revocable key is cached. A revoked key may still be accepted for this long."""
KEYS_PER_SESSION_IN_MEMORY = 2
"""The maximum number of cached keys, as a multiple of `gateway.max_sessions_in_memory`."""
MIN_KEY_LENGTH = 16
MIN_REMOTE_KEY_LENGTH = 32

CallerKind = Literal[KeyKind, "session"]

GATEWAY_KEY_HEADER = "x-instar-key"
SDK_KEY_HEADERS = frozenset({"authorization", "x-api-key", "api-key"})


def new_key() -> str:
    return f"sk-instar-{secrets.token_urlsafe(32)}"


def extract_key(headers: Mapping[str, str]) -> str:
    """Return the caller's key. Raise ApiError (401) if the request has no key. The gateway's own header takes
    precedence over those of OpenAI, Anthropic and Azure, which may contain a provider's key."""
    if key := headers.get(GATEWAY_KEY_HEADER):
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

    kind: CallerKind
    agent_id: str | None = None
    """None if the key is not limited to one agent."""
    session_id: str | None = None
    """None unless this is a session key."""


class Action(StrEnum):
    """An action that a key may allow. The value completes the sentence "Agent keys may not ..."."""

    LIST_MODELS = "list models"
    CALL_MODEL = "call models"
    OPEN_SESSION = "open sessions"
    PLACE_SESSION = "choose the task, channel, group, slot or attempt of a session"
    READ_SESSION = "read sessions"
    END_SESSION = "end sessions"
    SUBMIT_CALLS = "submit calls unless gateway.trust_submitted_calls is set"
    SUBMIT_TRUSTED_CALLS = "submit calls"
    SEND_REWARDS = "send rewards and scores from other sources"
    GIVE_FEEDBACK = "give feedback"
    GIVE_HUMAN_FEEDBACK = "give human feedback"
    EXCEED_REWARD_RANGE = "send rewards outside gateway.reward_range"
    LIST_FEEDBACK = "list feedback"
    READ_STATS = "read statistics"
    MANAGE_GROUPS = "open, read or abandon groups"


class Scope(Enum):
    NONE = 0
    OWN = 1
    """The caller's own sessions. A session key owns its session, an agent key its agent's live sessions, and
    a feedback key all sessions of its agent, or of every agent if it is not limited to one."""
    ALL = 2


def _allow(agent: Scope, session: Scope, feedback: Scope) -> Mapping[CallerKind, Scope]:
    return {"admin": Scope.ALL, "agent": agent, "session": session, "feedback": feedback}


PERMISSIONS: Mapping[Action, Mapping[CallerKind, Scope]] = {
    Action.LIST_MODELS: _allow(Scope.OWN, Scope.OWN, Scope.NONE),
    Action.CALL_MODEL: _allow(Scope.OWN, Scope.OWN, Scope.NONE),
    Action.OPEN_SESSION: _allow(Scope.OWN, Scope.NONE, Scope.NONE),
    Action.PLACE_SESSION: _allow(Scope.NONE, Scope.NONE, Scope.NONE),
    Action.READ_SESSION: _allow(Scope.OWN, Scope.OWN, Scope.NONE),
    Action.END_SESSION: _allow(Scope.OWN, Scope.OWN, Scope.NONE),
    Action.SUBMIT_CALLS: _allow(Scope.NONE, Scope.NONE, Scope.NONE),
    Action.SUBMIT_TRUSTED_CALLS: _allow(Scope.OWN, Scope.OWN, Scope.NONE),
    Action.SEND_REWARDS: _allow(Scope.NONE, Scope.NONE, Scope.NONE),
    Action.GIVE_FEEDBACK: _allow(Scope.OWN, Scope.OWN, Scope.OWN),
    Action.GIVE_HUMAN_FEEDBACK: _allow(Scope.NONE, Scope.NONE, Scope.OWN),
    Action.EXCEED_REWARD_RANGE: _allow(Scope.NONE, Scope.NONE, Scope.NONE),
    Action.LIST_FEEDBACK: _allow(Scope.NONE, Scope.NONE, Scope.NONE),
    Action.READ_STATS: _allow(Scope.NONE, Scope.NONE, Scope.NONE),
    Action.MANAGE_GROUPS: _allow(Scope.NONE, Scope.NONE, Scope.NONE),
}


def is_allowed(caller: Caller, action: Action, session: Session | None = None) -> bool:
    """Return True if the caller may perform the action on ``session``, or on any session if it is None."""
    scope = PERMISSIONS[action].get(caller.kind, Scope.NONE)
    return scope is Scope.ALL or (scope is Scope.OWN and (session is None or _owns(caller, session)))


def authorize(
    caller: Caller, action: Action, session: Session | None = None, *, param: str | None = None
) -> None:
    """Raise ApiError (403) if the caller may not perform the action (see `is_allowed`). ``param`` names the
    request field that requires the action, if it is not the route itself."""
    if is_allowed(caller, action, session):
        return
    if not is_allowed(caller, action):
        kinds = [kind for kind, scope in PERMISSIONS[action].items() if scope is not Scope.NONE]
        subject = caller.kind.capitalize() if param is None else f"'{param}' is not allowed: {caller.kind}"
        message = f"{subject} keys may not {action.value}; use an {' or '.join(kinds)} key."
        raise ApiError(403, message, code="not_allowed", param=param)
    if caller.kind == "session":
        raise ApiError(403, "This key is for another session; use the session's key.", code="wrong_session")
    assert session is not None
    if caller.agent_id != session.agent_id:
        raise ApiError(403, "This key is for another agent; use the session's key.", code="wrong_agent")
    problem = (
        f"Agent keys may only use live sessions, but this session is on the channel {session.channel.value!r}"
    )
    raise ApiError(403, f"{problem}; use the session's key.", code="wrong_channel")


def check_reward(caller: Caller, value: float | None, reward_range: tuple[float, float], param: str) -> None:
    """Raise ApiError (400) if the reward is out of range, unless the caller may exceed the range."""
    low, high = reward_range
    if value is None or low <= value <= high or is_allowed(caller, Action.EXCEED_REWARD_RANGE):
        return
    message = f"'{param}' is {value:g}; it must be between {low:g} and {high:g} (gateway.reward_range)."
    raise invalid_value(message, param)


def _owns(caller: Caller, session: Session) -> bool:
    if caller.kind == "session":
        return caller.session_id == session.session_id
    if caller.kind == "feedback" and caller.agent_id is None:
        return True
    # An agent key may not access rollout sessions: the agent could send the rewards that it is trained on.
    is_channel_allowed = caller.kind == "feedback" or session.channel is Channel.LIVE
    return caller.agent_id == session.agent_id and is_channel_allowed


class Authenticator:
    """Identifies callers by the admin key, the keys in the store and the run's session keys."""

    def __init__(self, store: Store, admin_key: str, run_id: str, max_cached_keys: int) -> None:
        if not admin_key:
            raise ValueError("the admin key must not be empty")
        self._store = store
        self._admin_hash = hash_key(admin_key)
        self._run_id = run_id
        self._max_cached_keys = max_cached_keys
        self._cache: OrderedDict[str, tuple[Caller, float]] = OrderedDict()

    async def identify(self, key: str) -> Caller:
        """Return the owner of the key. Raise ApiError (401) if the key is unknown or revoked."""
        key_hash = hash_key(key)
        if secrets.compare_digest(key_hash, self._admin_hash):
            return Caller("admin")
        cached = self._cache.get(key_hash)
        if cached is not None and time.monotonic() < cached[1]:
            return cached[0]
        caller, cache_seconds = await self._look_up_caller(key_hash)
        self._cache[key_hash] = (caller, time.monotonic() + cache_seconds)
        self._cache.move_to_end(key_hash)
        if len(self._cache) > self._max_cached_keys:
            self._cache.popitem(last=False)
        return caller

    def drop_sessions(self, session_ids: Collection[str]) -> None:
        """Remove the keys of deleted sessions from the cache."""
        for key_hash in [key for key, (caller, _) in self._cache.items() if caller.session_id in session_ids]:
            del self._cache[key_hash]

    async def _look_up_caller(self, key_hash: str) -> tuple[Caller, float]:
        """Return the owner of the key, and how many seconds this result may be cached."""
        session = await self._store.session_by_key(key_hash)
        if session is not None and session.run_id == self._run_id:
            # Session keys cannot be revoked, and `drop_sessions` removes those of deleted sessions.
            return Caller("session", session.agent_id, session.session_id), float("inf")
        row = await self._store.key(key_hash)
        if row is None:
            raise ApiError(401, "This API key is not valid for this run.", code="invalid_api_key")
        if row.revoked_at is not None:
            raise ApiError(401, "This API key has been revoked.", code="invalid_api_key")
        return Caller(row.kind, row.agent_id), KEY_CACHE_SECONDS


async def create_key(store: Store, kind: KeyKind, agent_id: str | None, name: str = "") -> str:
    """Create a key, store its hash and return it. Raise ConflictError if an active key has this name."""
    key = new_key()
    await store.put_key(KeyRow(hash_key(key), kind, agent_id, name))
    return key


def resolve_admin_key(environment: Mapping[str, str], variable: str, host: str) -> str:
    """Return the admin key from the environment, or a new key if the variable is not set.

    Raise ConfigError if the key is too short for a gateway on ``host``, or has invalid characters.
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
        raise ConfigError(f"{variable} has a space or a character that is not printable ASCII. {advice}")
    return key


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False  # A host name may resolve to any address.
