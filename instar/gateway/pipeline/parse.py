"""Read and parse HTTP requests within the configured limits."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial
from hashlib import blake2b

import msgspec
from starlette.types import Receive, Scope

from instar.config import GatewayConfig
from instar.gateway.auth import Action, Authenticator, Caller, authorize, extract_key
from instar.gateway.base import MAX_SUBMITTED_CALLS, ApiError, bad_request
from instar.gateway.dialects.base import Dialect, ModelRequest
from instar.gateway.http_protocol import get_connection
from instar.gateway.request_cache import MIN_CACHED_BODY, RequestCache
from instar.record.hashing import HashChain, MessageHasher
from instar.record.redact import Redactor

SESSION_HEADERS = {
    "x-claude-code-session-id": "claude-session",  # same prefix as for ids in Claude Code's bodies
    "session-id": "session",  # Codex
    "session_id": "session",  # older Codex, OpenClaw
    "x-session-affinity": "session",  # OpenCode, OpenClaw
    "x-opencode-session": "session",
    "x-session-id": "session",
    "x-conversation-id": "conversation",
    "conversation_id": "conversation",
    "x-litellm-session-id": "session",
    "helicone-session-id": "session",
}
"""The headers in which known agents send their session id, and the prefix for each id. If a request has
several, the first one in this table is used."""
MAX_EXTERNAL_ID_LENGTH = 512
"""A longer id from an agent is truncated, and a digest is appended."""
_CACHED_BYTES_PER_SESSION = 64 * 1024
"""The memory of the request cache, divided by the maximum number of sessions in memory."""
_MIN_CHECKED_BODY = 64 * 1024
"""The size, in bytes, above which a body is checked before it is decoded."""
_MAX_SETTINGS_BYTES = 2 * 1024 * 1024
"""The maximum size of the part of a body that is not in `_LARGE_FIELDS`."""
_LARGE_FIELDS = re.compile(
    "messages|input|system|instructions|prompt(_ids)?|sampled_ids|(behavior_)?logprobs|versions|reply"
)


class RequestReader:
    """Authenticates callers, reads request bodies, and limits the number of requests in flight."""

    def __init__(self, authenticator: Authenticator, config: GatewayConfig) -> None:
        self._authenticator = authenticator
        self._config = config
        self._incomplete_bodies: Counter[Caller] = Counter()
        self.in_flight = 0
        self._arriving = 0
        """The number of calls that have arrived in this iteration of the event loop. Their tasks, which count
        them as in flight, have not started yet."""

    @property
    def is_full(self) -> bool:
        return self.in_flight + self._arriving >= self._config.max_in_flight

    def count_arrival(self) -> None:
        """Count a call whose complete request has arrived and whose task starts in the next iteration."""
        if not self._arriving:
            asyncio.get_running_loop().call_soon(self._reset_arriving)
        self._arriving += 1

    def _reset_arriving(self) -> None:
        self._arriving = 0

    def capacity_error(self) -> ApiError:
        limit = self._config.max_in_flight
        message = f"Too many requests in flight (gateway.max_in_flight: {limit}); retry later."
        return ApiError(429, message, code="too_many_requests", retry_after=1)

    def check_capacity(self) -> None:
        if self.is_full:
            raise self.capacity_error()

    def drop_keys(self, session_ids: Collection[str]) -> None:
        """Remove the keys of deleted sessions from memory."""
        self._authenticator.drop_sessions(session_ids)

    async def authenticate(self, headers: Mapping[str, str], action: Action) -> Caller:
        """Return the caller. Raise ApiError if the headers are too large (431), or if the key is missing,
        unknown or revoked (401) or does not allow the action (403)."""
        size = sum(map(len, headers)) + sum(map(len, headers.values()))
        if size > self._config.max_header:
            limit = f"{self._config.max_header} (gateway.max_header)"
            raise ApiError(431, f"The headers have {size} bytes; the limit is {limit}.")
        caller = await self._authenticator.identify(extract_key(headers))
        authorize(caller, action)
        return caller

    async def read_body(
        self, caller: Caller, headers: Mapping[str, str], scope: Scope, receive: Receive
    ) -> bytes:
        """Return the body. Raise ApiError if it is compressed (415), too large (413), cut off (400) or late
        (408), or if the caller has too many incomplete bodies (429)."""
        if headers.get("content-encoding", "identity") != "identity":
            message = "Compressed request bodies are not supported; send the body without Content-Encoding."
            raise ApiError(415, message, code="unsupported_encoding")
        max_bytes = self._config.max_body
        if (connection := get_connection(scope)) is not None and connection.has_complete_body:
            return await _receive_body(receive, max_bytes)  # The body has arrived, so no timeout is needed.
        if self._incomplete_bodies[caller] >= self._config.max_in_flight:
            limit = f"gateway.max_in_flight: {self._config.max_in_flight}"
            message = f"Too many requests with incomplete bodies ({limit}); retry later."
            raise ApiError(429, message, code="too_many_requests", retry_after=1)
        self._incomplete_bodies[caller] += 1
        try:
            async with asyncio.timeout(self._config.read_timeout):
                return await _receive_body(receive, max_bytes)
        except TimeoutError as error:
            seconds = self._config.read_timeout
            message = f"The body did not arrive within {seconds:g} seconds (gateway.read_timeout)."
            raise ApiError(408, message, code="timeout") from error
        finally:
            self._incomplete_bodies[caller] -= 1
            if not self._incomplete_bodies[caller]:
                del self._incomplete_bodies[caller]


async def _receive_body(receive: Receive, max_bytes: int) -> bytes:
    chunks: list[bytes] = []
    size, has_more = 0, True
    while has_more and size <= max_bytes:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ApiError(400, "The connection closed before the body was complete.", code="invalid_json")
        chunks.append(message.get("body", b""))
        size += len(chunks[-1])
        has_more = message.get("more_body", False)
    if size > max_bytes:
        raise ApiError(413, f"The body has more than {max_bytes} bytes (gateway.max_body).", code="too_large")
    return b"".join(chunks)


def check_body(config: GatewayConfig, body: bytes, *, is_trusted: bool = False) -> None:
    """Raise ApiError (400) if a large body has too much metadata, too many messages or tools or, unless the
    sender is trusted, too many bytes outside of messages and token ids. They are not decoded, because many
    small values take many times the memory of their JSON, and block the event loop."""
    if len(body) <= _MIN_CHECKED_BODY:
        return
    try:
        top = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
        calls = msgspec.json.decode(top.pop("calls", b"[]"), type=list[msgspec.Raw])[:MAX_SUBMITTED_CALLS]
        parts = [top, *(msgspec.json.decode(call, type=dict[str, msgspec.Raw]) for call in calls)]
        fields = [field for part in parts for field in part.items()]
        tool_count = sum(_count_items(raw) for name, raw in fields if name == "tools")
        message_count = sum(_count_items(raw) for name, raw in fields if name in ("messages", "input"))
    except msgspec.DecodeError:
        return  # The route's parser reports a better error.
    for name, raw in fields:
        size = memoryview(raw).nbytes
        if name in ("metadata", "client_metadata") and size > config.max_metadata:
            limit = f"{config.max_metadata} (gateway.max_metadata)"
            raise bad_request(f"The {name} has {size} bytes; the limit is {limit}.", name, "too_large")
    _check_counts(config, message_count, tool_count)
    large_fields = (raw for name, raw in fields if _LARGE_FIELDS.fullmatch(name))
    size = len(body) - sum(memoryview(raw).nbytes for raw in large_fields)
    if size > _MAX_SETTINGS_BYTES and not is_trusted:
        problem = f"The body has {size} bytes outside of messages and token ids"
        raise bad_request(f"{problem}; the limit is {_MAX_SETTINGS_BYTES}.", code="too_large")


def _check_counts(config: GatewayConfig, message_count: int, tool_count: int) -> None:
    for name, count, limit in (
        ("messages", message_count, config.max_messages),
        ("tools", tool_count, config.max_tools),
    ):
        if count > limit:
            message = f"The request has {count} {name}; the limit is {limit} (gateway.max_{name})."
            raise bad_request(message, name, "too_many")


def _count_items(raw: msgspec.Raw) -> int:
    """Return the length of a JSON list, or 0 for other values."""
    is_list = bytes(memoryview(raw)[:1]) == b"["
    return len(msgspec.json.decode(raw, type=list[msgspec.Raw])) if is_list else 0


class RequestParser:
    def __init__(self, config: GatewayConfig, hasher: MessageHasher) -> None:
        self._config = config
        self._hasher = hasher
        self.check_body = partial(check_body, config)
        max_bytes = config.max_sessions_in_memory * _CACHED_BYTES_PER_SESSION
        self._cache = RequestCache(hasher, max_bytes, self.check_body)

    def clear_cache(self) -> None:
        self._cache.clear()

    def parse(
        self,
        dialect: Dialect,
        cache_key: str | None,
        body: bytes,
        check_size: Callable[[ModelRequest], None] | None = None,
    ) -> tuple[ModelRequest, HashChain]:
        """Return the request and the hash chain of its messages. Raise ApiError (400) if the request is
        invalid. ``cache_key`` is the id of the session or agent, or None if neither is known. ``check_size``
        raises an error for requests that are too large; it is not called for small bodies."""

        try:
            return self._parse(dialect, cache_key, body, check_size)
        except ApiError as error:
            known_body, unknown = self._drop_unknown_fields(dialect, body, error)
            request, chain = self._parse(dialect, cache_key, known_body, check_size)
            return replace(request, ignored_fields=unknown), chain

    def parse_count(self, dialect: Dialect, body: bytes) -> ModelRequest:
        """Return the request for a token count. Raise ApiError (400) if it is invalid."""
        self.check_body(body)
        try:
            return dialect.parse_count_request(body)
        except ApiError as error:
            return dialect.parse_count_request(self._drop_unknown_fields(dialect, body, error)[0])

    def _drop_unknown_fields(
        self, dialect: Dialect, body: bytes, error: ApiError
    ) -> tuple[bytes, tuple[str, ...]]:
        """Return the body without unknown fields, and their names. Raise the error that the body caused if
        unknown fields are to be rejected, or if it has another cause."""
        if self._config.unsupported_fields == "reject" or error.code != "unknown_parameter":
            raise error
        fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
        known = {field.encode_name for field in msgspec.structs.fields(dialect.decoder.type)}
        unknown = tuple(name for name in fields if name not in known)
        if error.param not in unknown:  # The field is inside another one.
            raise error
        return msgspec.json.encode({name: fields[name] for name in fields if name in known}), unknown

    def _parse(
        self,
        dialect: Dialect,
        cache_key: str | None,
        body: bytes,
        check_size: Callable[[ModelRequest], None] | None,
    ) -> tuple[ModelRequest, HashChain]:
        def check(request: ModelRequest) -> None:
            _check_counts(self._config, len(request.messages), len(request.tools))
            if check_size is not None:
                check_size(request)

        if len(body) < MIN_CACHED_BODY:
            request = dialect.parse_request(body)
            _check_counts(self._config, len(request.messages), len(request.tools))
        elif dialect.parses_messages_independently:
            return self._cache.parse(dialect, cache_key, body, check)
        else:
            self.check_body(body)
            request = dialect.parse_request(body)
            check(request)
        return request, self._hasher.hash_messages(request.messages, request.tools)


def shorten_id(identifier: str) -> str:
    """Return the id, or its start and a digest if it is too long."""
    if len(identifier) <= MAX_EXTERNAL_ID_LENGTH:
        return identifier
    digest = blake2b(identifier.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
    return identifier[: MAX_EXTERNAL_ID_LENGTH - len(digest)] + digest


def encode_user_id(user_id: str, redactor: Redactor, hasher: MessageHasher) -> str:
    """Return the id by which a user's sessions are stored: a keyed hash if the id must be redacted."""
    if redactor.redact_text(user_id) != user_id:
        return f"redacted-{hasher.hash_text(user_id).hex()}"
    return shorten_id(user_id)


def parse_external_id(headers: Mapping[str, str], body_ids: tuple[str, ...]) -> str | None:
    """Return the agent's session id (``session:7``) from a known header or else from the body, or None."""
    if not SESSION_HEADERS.keys().isdisjoint(headers):
        for name, prefix in SESSION_HEADERS.items():
            if value := headers.get(name):
                return shorten_id(f"{prefix}:{value}")
    return shorten_id(body_ids[0]) if body_ids else None


@dataclass(frozen=True, slots=True)
class RetryHeaders:
    """The headers that show whether a request retries an earlier one."""

    client_key: str | None = None
    """The idempotency key. If set, the request can only be a retry of a request with the same key."""
    is_retry: bool = False
    """True if the client's retry count is not 0."""

    @classmethod
    def parse(cls, headers: Mapping[str, str]) -> RetryHeaders:
        # The OpenAI and Anthropic clients count their retries in this header.
        is_retry = headers.get("x-stainless-retry-count", "0") != "0"
        return cls(headers.get("idempotency-key"), is_retry)

    def __bool__(self) -> bool:
        return self.is_retry or self.client_key is not None

    def matches(self, client_key: str | None) -> bool:
        """Return True if this request retries a request that was sent with ``client_key``."""
        return self.is_retry if self.client_key is None else self.client_key == client_key
