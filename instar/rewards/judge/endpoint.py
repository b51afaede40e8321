"""Sends questions to a judge: an HTTP endpoint in OpenAI's or Anthropic's format, or the run's own model."""

from __future__ import annotations

import json
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import msgspec
from yarl import URL

from instar.config.judge import JudgeRewardConfig
from instar.errors import ConfigError, ScoreError, SessionNotFound
from instar.gateway.base import OpenedSession, OpenSession
from instar.http.client import HttpClient, NoResponse
from instar.rewards.base import JUDGE_AGENT, ScoringContext
from instar.store.base import JUDGED_TAG
from instar.types import UNTRAINABLE, Json, SessionStatus, Tag
from instar.wire.anthropic import MessagesResponse, MessagesUsage
from instar.wire.openai import ChatResponse, ChatUsage

T = TypeVar("T")

JUDGE_SESSION_REASON = "a judge's question"
ANTHROPIC_VERSION = "2023-06-01"
MAX_RESPONSE_BYTES = 4 << 20
ANSWER_TOOL_NAME = "answer"
_KEEPALIVE_SECONDS = 4.0
_RETRYABLE_STATUSES = frozenset({408, 409, 425, 429})
_FORMAT_ERROR_STATUSES = (400, 404, 422)
"""Endpoints that do not support a `response_format` or a tool respond with one of these statuses."""


@dataclass(frozen=True, slots=True)
class JudgeReply:
    text: str
    structured_answer: Json | None = None
    """The input of the tool call with the answer, or None if the endpoint returned no tool call."""
    input_tokens: int = 0
    output_tokens: int = 0
    is_truncated: bool = False
    """True if the reply reached `max_tokens`."""


class JudgeHttpError(ScoreError):
    def __init__(self, status: int, message: str, *, retryable: bool, retry_after: float | None) -> None:
        super().__init__(message, retryable=retryable, retry_after=retry_after)
        self.status = status


class JudgeEndpoint(ABC):
    def __init__(self, timeout: float, secret: str | None, *, use_proxy: bool = True) -> None:
        self._http = HttpClient(
            timeout=timeout, keep_alive=_KEEPALIVE_SECONDS, use_environment_proxy=use_proxy, secret=secret
        )

    @abstractmethod
    async def ask(self, system: str, user: str, schema: Json, session_id: str) -> JudgeReply:
        """Return the reply to a prompt about the session. Endpoints may ignore ``schema``. Raises ScoreError
        on failure."""

    async def close(self) -> None:
        await self._http.close()

    async def _post_json(self, url: URL, headers: Mapping[str, str], body: Json) -> bytes:
        headers = {"content-type": "application/json", **headers}
        data = json.dumps(body).encode()
        try:
            response = await self._http.post(url, data, headers=headers, max_bytes=MAX_RESPONSE_BYTES)
        except NoResponse as error:
            raise ScoreError(f"no usable response from the judge: {error}", retryable=True) from error
        if response.is_success:
            return response.body
        is_retryable = response.status in _RETRYABLE_STATUSES or response.status >= 500
        message = self._http.redact(_read_error_message(response.body))
        raise JudgeHttpError(
            response.status,
            f"the judge responded with status {response.status}: {message}",
            retryable=is_retryable,
            retry_after=response.retry_after if is_retryable else None,
        )


def _read_error_message(raw: bytes) -> str:
    """Return the message from an error response, in any of the providers' formats."""
    try:
        body: Any = json.loads(raw)
    except (ValueError, RecursionError):
        return raw[:200].decode("utf-8", "replace").strip()
    error = cast(Json, body).get("error", cast(Any, body)) if isinstance(body, dict) else body
    message = cast(Json, error).get("message") if isinstance(error, dict) else error
    return str(message or body)[:200]


def _build_request(config: JudgeRewardConfig, system: str, user: str, schema: Json | None) -> Json:
    messages = [{"role": "user", "content": user}]
    body: Json = {"model": config.model}
    if config.temperature is not None:
        body["temperature"] = config.temperature
    if config.dialect == "messages":
        body |= {"system": system, "messages": messages, "max_tokens": config.max_tokens}
        if schema is not None:
            tool = {"name": ANSWER_TOOL_NAME, "description": "Give the answer.", "input_schema": schema}
            body |= {"tools": [tool], "tool_choice": {"type": "tool", "name": ANSWER_TOOL_NAME}}
        return body
    body["messages"] = [{"role": "system", "content": system}, *messages]
    # OpenAI's newer models reject `max_tokens`, which all other endpoints expect.
    is_openai = (URL(config.endpoint).host or "").endswith(("openai.com", "openai.azure.com"))
    body["max_completion_tokens" if is_openai else "max_tokens"] = config.max_tokens
    if schema is not None:
        json_schema = {"name": ANSWER_TOOL_NAME, "strict": True, "schema": schema}
        body["response_format"] = {"type": "json_schema", "json_schema": json_schema}
    return body


def _parse_chat_response(raw: bytes) -> JudgeReply:
    response = _decode(raw, ChatResponse)
    if not response.choices or (message := response.choices[0].message) is None:
        raise ScoreError("the judge's response contains no message", retryable=True)
    usage = response.usage or ChatUsage()
    content = message.content or message.refusal or ""
    return JudgeReply(
        content if isinstance(content, str) else "".join(part.text or "" for part in content),
        input_tokens=usage.prompt_tokens or 0,
        output_tokens=usage.completion_tokens or 0,
        is_truncated=response.choices[0].finish_reason == "length",
    )


def _parse_messages_response(raw: bytes) -> JudgeReply:
    response = _decode(raw, MessagesResponse)
    if response.content is None:
        raise ScoreError("the judge's response contains no message", retryable=True)
    usage = response.usage or MessagesUsage()
    inputs = (msgspec.json.decode(block.input) for block in response.content if block.type == "tool_use")
    return JudgeReply(
        "".join(block.text or "" for block in response.content if block.type == "text"),
        next((cast(Json, value) for value in inputs if isinstance(value, dict)), None),
        usage.input_tokens or 0,
        usage.output_tokens or 0,
        response.stop_reason == "max_tokens",
    )


def _decode(raw: bytes, response_type: type[T], problem: str = "the judge returned an invalid response") -> T:
    try:
        return msgspec.json.decode(raw, type=response_type)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ScoreError(f"{problem}: {error}", retryable=True) from error


class HttpJudgeEndpoint(JudgeEndpoint):
    def __init__(self, config: JudgeRewardConfig) -> None:
        self._config = config
        key = os.environ.get(config.api_key_env, "").strip() if config.api_key_env is not None else None
        if key == "":
            raise ConfigError(
                f"reward.api_key_env: the environment variable {config.api_key_env!r} is unset or empty"
            )
        super().__init__(config.timeout, key)
        self._url = _build_url(config)
        self._is_anthropic = config.dialect == "messages"
        self._headers = {"anthropic-version": ANTHROPIC_VERSION} if self._is_anthropic else {}
        if key is not None:
            self._headers |= {"x-api-key": key} if self._is_anthropic else _build_headers(key)
        self._headers |= config.headers
        self._sends_schema = config.structured != "text"

    async def ask(self, system: str, user: str, schema: Json, session_id: str) -> JudgeReply:
        if not self._sends_schema:
            return await self._request_reply(system, user, None)
        try:
            return await self._request_reply(system, user, schema)
        except JudgeHttpError as error:
            if self._config.structured != "auto" or error.status not in _FORMAT_ERROR_STATUSES:
                raise
        # The endpoint may not support schemas. If a request without one succeeds, later requests omit it.
        reply = await self._request_reply(system, user, None)
        self._sends_schema = False
        return reply

    async def _request_reply(self, system: str, user: str, schema: Json | None) -> JudgeReply:
        body = _build_request(self._config, system, user, schema)
        raw = await self._post_json(self._url, self._headers, body)
        return (_parse_messages_response if self._is_anthropic else _parse_chat_response)(raw)


def _build_url(config: JudgeRewardConfig) -> URL:
    try:
        base = URL(config.endpoint)
    except ValueError:
        base = URL()
    if base.scheme not in ("http", "https") or not base.host:
        raise ConfigError(
            f"reward.endpoint must be an http:// or https:// URL or 'self', got {config.endpoint!r}"
        )
    # As in the SDKs, OpenAI's base URL includes the version, and Anthropic's does not.
    root = base.path.rstrip("/")
    is_anthropic = config.dialect == "messages"
    path = f"{root.removesuffix('/v1')}/v1/messages" if is_anthropic else f"{root}/chat/completions"
    return base.with_path(path).with_query(base.query)


class RunModelEndpoint(JudgeEndpoint):
    """The run's own model as a judge. Each question is asked in a new live session. The session is tagged
    untrainable before the call and abandoned after it, so that it is neither scored nor used for training. A
    second tag names the judged session, so that the question is deleted together with it."""

    def __init__(self, config: JudgeRewardConfig, context: ScoringContext) -> None:
        if not context.base_url:
            raise ConfigError(
                "reward.endpoint: 'self' requires a gateway, but none is running; use an API's URL instead"
            )
        super().__init__(config.timeout, context.api_key, use_proxy=False)
        self._config = config.model_copy(update={"model": JUDGE_AGENT})
        self._context = context

    async def ask(self, system: str, user: str, schema: Json, session_id: str) -> JudgeReply:
        session = await self._open_session()
        store, own_id = self._context.store, session.session_id
        tags = {UNTRAINABLE: "", JUDGED_TAG: session_id}
        try:
            await store.add_tags(
                [Tag(own_id, name, tags[name], JUDGE_SESSION_REASON, "judge") for name in tags]
            )
            try:
                # After the tag was added: if the judged session is deleted later, so is this one.
                if await store.forgotten_sessions([session_id]):
                    raise ScoreError("the data of the judged session was deleted")
                raw = await self._post_json(
                    URL(session.base_url.rstrip("/") + "/chat/completions"),
                    _build_headers(session.api_key),
                    _build_request(self._config, system, user, None),
                )
            finally:
                await store.end_session(own_id, SessionStatus.ABANDONED, JUDGE_SESSION_REASON)
        except SessionNotFound as error:
            raise ScoreError("the session of the judge's question was deleted", retryable=True) from error
        return _parse_chat_response(raw)

    async def _open_session(self) -> OpenedSession:
        body = msgspec.to_builtins(OpenSession(metadata={"judge": self._config.name or self._config.rubric}))
        root = self._context.base_url.rstrip("/").removesuffix("/v1")
        raw = await self._post_json(URL(f"{root}/sessions"), _build_headers(self._context.api_key), body)
        return _decode(raw, OpenedSession, "the gateway returned an invalid session")


def _build_headers(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}
