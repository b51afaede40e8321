"""The keys of the admin, of agents, of sessions and of people who give feedback, and the actions that each
kind of key allows. Only hashes of the keys are stored.

Every route is authorized with `PERMISSIONS`. docs/security.md lists the resulting access to every route;
tests/unit/gateway/test_authorization.py compares that list with the responses of a gateway.
"""

from __future__ import annotations

import ipaddress
import secrets
import time
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, StrEnum
from typing import Literal

from instar.errors import ConfigError
from instar.gateway.base import ApiError, invalid_value
from instar.http.auth import hash_key
from instar.store.base import KeyKind, KeyRow, Store
from instar.types import Channel, Session

KEY_CACHE_SECONDS = 3.0
"""The time after which a key is looked up again. A revoked key works for up to this time."""
MAX_CACHED_KEYS = 20_000
MIN_KEY_LENGTH = 16
MIN_REMOTE_KEY_LENGTH = 32

CallerKind = Literal[KeyKind, "session"]

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

    kind: CallerKind
    agent_id: str | None = None
    session_id: str | None = None


class Action(StrEnum):
    """An action, as error messages describe it."""

    LIST_MODELS = "list models"
    CALL_MODEL = "call models"
    OPEN_SESSION = "open sessions"
    PLACE_SESSION = "choose the channel, group, slot or attempt of a session"
    READ_SESSION = "read sessions"
    END_SESSION = "end sessions"
    SUBMIT_CALLS = "submit calls"
    SEND_REWARDS = "send rewards and scores of other sources"
    GIVE_FEEDBACK = "give feedback"
    SPEAK_FOR_PEOPLE = "give feedback that counts as a person's"
    EXCEED_REWARD_RANGE = "send rewards outside of gateway.reward_range"
    LIST_FEEDBACK = "list feedback"
    READ_STATS = "read statistics"


class Scope(Enum):
    NONE = 0
    OWN = 1
    """The caller's own sessions: the session of a session's key, the live sessions of an agent's key, and all
    sessions of the agent of a feedback key."""
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
    Action.SUBMIT_CALLS: _allow(Scope.OWN, Scope.OWN, Scope.NONE),
    Action.SEND_REWARDS: _allow(Scope.NONE, Scope.NONE, Scope.NONE),
    Action.GIVE_FEEDBACK: _allow(Scope.OWN, Scope.OWN, Scope.OWN),
    Action.SPEAK_FOR_PEOPLE: _allow(Scope.NONE, Scope.NONE, Scope.OWN),
    Action.EXCEED_REWARD_RANGE: _allow(Scope.NONE, Scope.NONE, Scope.NONE),
    Action.LIST_FEEDBACK: _allow(Scope.NONE, Scope.NONE, Scope.NONE),
    Action.READ_STATS: _allow(Scope.NONE, Scope.NONE, Scope.NONE),
}


def is_allowed(caller: Caller, action: Action, session: Session | None = None) -> bool:
    """Return True if the caller may perform the action on the session or, without a session, on some
    session."""
    scope = PERMISSIONS[action].get(caller.kind, Scope.NONE)
    return scope is Scope.ALL or (scope is Scope.OWN and (session is None or _owns(caller, session)))


def authorize(
    caller: Caller, action: Action, session: Session | None = None, *, param: str | None = None
) -> None:
    """Raise ApiError (403) if the caller may not perform the action. ``param`` is the field that requests the
    action."""
    if is_allowed(caller, action, session):
        return
    if not is_allowed(caller, action):
        kinds = [kind for kind, scope in PERMISSIONS[action].items() if scope is not Scope.NONE]
        subject = "A" if param is None else f"'{param}' is not allowed: a"
        allowed = " or ".join(kinds)
        message = f"{subject} key of kind {caller.kind} may not {action.value}; use a key of kind {allowed}."
        raise ApiError(403, message, code="not_allowed", param=param)
    if caller.kind == "session":
        raise ApiError(403, "This key belongs to another session.", code="wrong_session")
    assert session is not None
    if caller.agent_id != session.agent_id:
        raise ApiError(403, "This key belongs to another agent.", code="wrong_agent")
    message = (
        f"The session belongs to the channel {session.channel.value!r}, and an agent's key may only use live "
        "sessions; use the session's own key."
    )
    raise ApiError(403, message, code="wrong_channel")


def check_reward(caller: Caller, value: float | None, reward_range: tuple[float, float], param: str) -> None:
    """Raise ApiError (400) if the value is outside of the range and the caller is bound by the range."""
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
    # A session of a rollout belongs to its slot: an agent that could use it by its agent's key could train
    # on its own rewards.
    return caller.agent_id == session.agent_id and (
        caller.kind == "feedback" or session.channel is Channel.LIVE
    )


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
