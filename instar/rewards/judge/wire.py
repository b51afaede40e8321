"""A question over HTTP, in OpenAI's words or Anthropic's."""

from __future__ import annotations

import asyncio
import json
import math
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any, TypeVar, cast

import aiohttp
import msgspec
from yarl import URL

from instar.config.judge import JudgeRewardConfig
from instar.errors import ConfigError, ScoreError
from instar.types import Json
from instar.wire.anthropic import MessagesResponse, MessagesUsage
from instar.wire.openai import ChatResponse, ChatUsage

T = TypeVar("T")

ANTHROPIC_VERSION = "2023-06-01"
MOST_BYTES = 4 << 20
"""Of an answer."""
TOOL = "answer"
_KEEPALIVE_SECONDS = 4.0
_AGAIN = frozenset({408, 409, 425, 429})
_REFUSED_FORMAT = (400, 404, 422)
"""What endpoints say to a `response_format` that they do not know."""


@dataclass(frozen=True, slots=True)
class JudgeReply:
    text: str
    structured_answer: Json | None = None
    """The answer itself, where the endpoint gave it as JSON and not as text."""
    input_tokens: int = 0
    output_tokens: int = 0
    is_truncated: bool = False
    """It was longer than `max_tokens`."""


class JudgeHttpError(ScoreError):
    """The endpoint answered with this status."""

    def __init__(self, status: int, message: str, **more: Any) -> None:
        super().__init__(message, **more)
        self.status = status


class JudgeEndpoint(ABC):
    @abstractmethod
    async def ask(self, system: str, user: str, schema: Json) -> JudgeReply:
        """Raises ScoreError."""

    @abstractmethod
    async def close(self) -> None: ...


class JudgeHttpClient:
    """Posts JSON, through the proxy that the environment names if ``proxied``. ``secret`` is never part of an
    error's text."""

    def __init__(self, timeout: float, secret: str | None = None, *, use_proxy: bool = True) -> None:
        self._timeout = timeout
        self._proxied = use_proxy
        self._secret = secret
        self._session: aiohttp.ClientSession | None = None

    async def post(self, url: URL, headers: Mapping[str, str], body: Json) -> bytes:
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEPALIVE_SECONDS)
            self._session = aiohttp.ClientSession(
                connector=connector, cookie_jar=aiohttp.DummyCookieJar(), trust_env=self._proxied
            )
        try:
            async with asyncio.timeout(self._timeout):
                async with self._session.post(
                    url, data=json.dumps(body).encode(), headers=headers, allow_redirects=False
                ) as response:
                    raw = await _read(response)
        except TimeoutError as error:
            raise ScoreError(
                f"no answer from the judge within {self._timeout:g} s", retryable=True
            ) from error
        except (aiohttp.ClientError, OSError) as error:
            cause = self._clean(str(error) or type(error).__name__)
            raise ScoreError(f"the judge cannot be reached: {cause}", retryable=True) from error
        if 200 <= response.status < 300:
            return raw
        again = response.status in _AGAIN or response.status >= 500
        raise JudgeHttpError(
            response.status,
            f"the judge answered {response.status}: {self._clean(_said(raw))}",
            retryable=again,
            retry_after=parse_retry_after(response.headers.get("Retry-After")) if again else None,
        )

    def _clean(self, text: str) -> str:
        return text.replace(self._secret, "***") if self._secret else text

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None


async def _read(response: aiohttp.ClientResponse) -> bytes:
    raw = bytearray()
    async for piece in response.content.iter_chunked(1 << 16):
        raw += piece
        if len(raw) > MOST_BYTES:
            raise ScoreError(f"the judge's answer is longer than {MOST_BYTES} bytes", retryable=True)
    return bytes(raw)


def _said(raw: bytes) -> str:
    """What an error says, in the shapes that providers write."""
    try:
        body: Any = json.loads(raw)
    except (ValueError, RecursionError):
        return raw[:200].decode("utf-8", "replace").strip()
    error = cast(Json, body).get("error", cast(Any, body)) if isinstance(body, dict) else body
    message = cast(Json, error).get("message") if isinstance(error, dict) else error
    return str(message or body)[:200]


def parse_retry_after(header: str | None) -> float | None:
    """Seconds, or a date."""
    if not header:
        return None
    try:
        seconds = float(header)
    except ValueError:
        try:
            seconds = parsedate_to_datetime(header).timestamp() - time.time()
        except ValueError:
            return None
    return max(0.0, seconds) if math.isfinite(seconds) else None


# --- OpenAI's chat completions ------------------------------------------------------------------


def build_chat_request(config: JudgeRewardConfig, system: str, user: str, schema: Json | None) -> Json:
    # OpenAI's newer models refuse the name that everyone else goes by.
    own = (URL(config.endpoint).host or "").endswith(("openai.com", "openai.azure.com"))
    body: Json = {
        "model": config.model,
        "messages": [{"role": "system", "content": system}, {"role": "user", "content": user}],
        "max_completion_tokens" if own else "max_tokens": config.max_tokens,
    }
    if config.temperature is not None:
        body["temperature"] = config.temperature
    if schema is not None:
        named = {"name": TOOL, "strict": True, "schema": schema}
        body["response_format"] = {"type": "json_schema", "json_schema": named}
    return body


def parse_chat_response(raw: bytes) -> JudgeReply:
    response = _decode(raw, ChatResponse)
    if not response.choices or response.choices[0].message is None:
        raise ScoreError("the judge's answer is empty", retryable=True)
    choice, usage = response.choices[0], response.usage or ChatUsage()
    content = response.choices[0].message.content or response.choices[0].message.refusal or ""
    return JudgeReply(
        content if isinstance(content, str) else "".join(part.text or "" for part in content),
        input_tokens=usage.prompt_tokens or 0,
        output_tokens=usage.completion_tokens or 0,
        is_truncated=choice.finish_reason == "length",
    )


# --- Anthropic's messages -----------------------------------------------------------------------


def build_messages_request(config: JudgeRewardConfig, system: str, user: str, schema: Json | None) -> Json:
    body: Json = {
        "model": config.model,
        "system": system,
        "messages": [{"role": "user", "content": user}],
        "max_tokens": config.max_tokens,
    }
    if config.temperature is not None:
        body["temperature"] = config.temperature
    if schema is not None:
        body["tools"] = [{"name": TOOL, "description": "Give the answer.", "input_schema": schema}]
        body["tool_choice"] = {"type": "tool", "name": TOOL}
    return body


def parse_messages_response(raw: bytes) -> JudgeReply:
    response = _decode(raw, MessagesResponse)
    if response.content is None:
        raise ScoreError("the judge's answer is empty", retryable=True)
    usage = response.usage or MessagesUsage()
    inputs = (msgspec.json.decode(block.input) for block in response.content if block.type == "tool_use")
    return JudgeReply(
        "".join(block.text or "" for block in response.content if block.type == "text"),
        next((cast(Json, value) for value in inputs if isinstance(value, dict)), None),
        usage.input_tokens or 0,
        usage.output_tokens or 0,
        response.stop_reason == "max_tokens",
    )


def _decode(raw: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(raw, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ScoreError(f"the judge's answer is no answer of its API: {error}", retryable=True) from error


# --- both ---------------------------------------------------------------------------------------


class HttpJudgeEndpoint(JudgeEndpoint):
    """Raises ConfigError for a key or an address that cannot be."""

    def __init__(self, config: JudgeRewardConfig) -> None:
        self._config = config
        key = _key(config)
        self._http = JudgeHttpClient(config.timeout, key)
        self._url = _url(config)
        self._headers = {"content-type": "application/json"}
        if config.dialect == "messages":
            self._headers["anthropic-version"] = ANTHROPIC_VERSION
        if key is not None and config.dialect == "messages":
            self._headers["x-api-key"] = key
        elif key is not None:
            self._headers["authorization"] = f"Bearer {key}"
        self._headers.update(config.headers)
        self._by_schema = config.structured != "text"

    async def ask(self, system: str, user: str, schema: Json) -> JudgeReply:
        if not self._by_schema:
            return await self._post(system, user, None)
        try:
            return await self._post(system, user, schema)
        except JudgeHttpError as error:
            if self._config.structured != "auto" or error.status not in _REFUSED_FORMAT:
                raise
        # It may be the schema that it does not take. If so, it is not asked for one again.
        reply = await self._post(system, user, None)
        self._by_schema = False
        return reply

    async def _post(self, system: str, user: str, schema: Json | None) -> JudgeReply:
        anthropic = self._config.dialect == "messages"
        body = (build_messages_request if anthropic else build_chat_request)(
            self._config, system, user, schema
        )
        raw = await self._http.post(self._url, self._headers, body)
        return (parse_messages_response if anthropic else parse_chat_response)(raw)

    async def close(self) -> None:
        await self._http.close()


def _key(config: JudgeRewardConfig) -> str | None:
    if config.api_key_env is None:
        return None
    key = os.environ.get(config.api_key_env, "").strip()
    if not key:
        raise ConfigError(
            f"reward.api_key_env: given {config.api_key_env!r}; the environment has no such variable"
        )
    return key


def _url(config: JudgeRewardConfig) -> URL:
    try:
        base = URL(config.endpoint)
    except ValueError:
        base = URL()
    if base.scheme not in ("http", "https") or not base.host:
        raise ConfigError(
            f"reward.endpoint: given {config.endpoint!r}; an http:// or https:// address is needed, or 'self'"
        )
    # As the SDKs do it: OpenAI's is given an address with its version, Anthropic's adds the version.
    root = base.path.rstrip("/")
    path = (
        f"{root.removesuffix('/v1')}/v1/messages"
        if config.dialect == "messages"
        else f"{root}/chat/completions"
    )
    return base.with_path(path).with_query(base.query)
