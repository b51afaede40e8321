"""Send calls to a provider.

Requests and responses in one of the provider's dialects are passed on with few changes (`rewrite`); others
are translated. All calls are recorded, but they are trainable only if the provider returns the sampled token
ids and their logprobs, because text is never tokenized again.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Awaitable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any
from urllib.request import getproxies, proxy_bypass

import aiohttp
import msgspec
from multidict import CIMultiDict
from yarl import URL

from instar.config import UpstreamEngineConfig
from instar.errors import ConfigError, EngineUnavailable
from instar.gateway.base import ApiError, bad_request
from instar.gateway.dialects.base import ModelRequest
from instar.gateway.upstream import chat, messages, rewrite
from instar.gateway.upstream.http_response import (
    HttpResponse,
    HttpUpstreamResponse,
    interrupted_error,
    read_error,
)

if TYPE_CHECKING:
    from instar.http.plain import PlainClient

_PATHS = {
    "chat": "/chat/completions",
    "completions": "/completions",
    "responses": "/responses",
    "messages": "/messages",
}
_TRANSLATION_TARGETS = ("chat", "messages")
_DIALECTS_WITH_TOKEN_IDS = ("chat", "completions")

# The agent's other headers are dropped, except its key.
_FORWARDED_HEADERS = frozenset(
    {"user-agent", "x-app", "originator", "session_id", "conversation_id", "idempotency-key"}
    | {"chatgpt-account-id", "http-referer", "x-title"}
)
_FORWARDED_PREFIXES = ("anthropic-", "openai-", "x-stainless-")
_ANTHROPIC_VERSION = "2023-06-01"

_KEEPALIVE_TIMEOUT_SECONDS = 4.0  # uvicorn, and therefore vLLM, closes idle connections after 5 seconds.
_CONNECT_TIMEOUT_SECONDS = 30.0
_MAX_BODY_AS_BYTES = 1 << 20  # aiohttp warns if a larger body is passed as bytes.

_COUNTED_FIELDS = ("model", "system", "messages", "tools", "tool_choice")
"""The fields that Anthropic's token count API accepts."""


class HttpUpstream:
    def __init__(self, config: UpstreamEngineConfig, path: str = "engine") -> None:
        """Create an upstream. ``path`` is the path of its config section, for error messages."""
        self._config = config
        self._dialects = (config.dialect, *config.also)
        self._key = _load_api_key(config, path)
        self._base = _parse_base_url(config, path)
        self._urls = {dialect: _build_url(self._base, dialect, config.dialect) for dialect in self._dialects}
        self._fixed_headers = {dialect: self._build_fixed_headers(dialect) for dialect in self._dialects}
        # OpenAI's newer models reject 'max_tokens'.
        is_openai = (self._base.host or "").endswith(("openai.com", "openai.azure.com"))
        self._max_tokens_field = "max_completion_tokens" if is_openai else "max_tokens"
        self._proxy = None if proxy_bypass(self._base.host or "") else getproxies().get(self._base.scheme)
        self._plain_client = None if self._proxy else _create_plain_client(self._base)
        self._session: aiohttp.ClientSession | None = None

    def send(
        self,
        request: ModelRequest,
        dialect: str,
        body: bytes,
        headers: Mapping[str, str],
        sampling_overrides: Mapping[str, Any] | None = None,
    ) -> HttpUpstreamResponse:
        """Return the response to one call. The request is sent when the response's chunks are read.

        ``body`` and ``headers`` come from the agent; header names are lowercase, and the gateway's keys are
        removed. The messages of ``request`` include those of a previous response. ``sampling_overrides``
        replace the agent's settings; the keys are those in `SAMPLING_KEYS`.
        """
        target = self.get_target(dialect)
        is_translated = target != dialect
        if is_translated:
            body = self._translate(request, target)
        elif self._config.model is not None and self._config.model != request.model:
            body = rewrite.set_fields(body, {"model": self._config.model})
        if sampling_overrides:
            body = rewrite.override_sampling(body, target, sampling_overrides)
        added_fields = None
        if self._config.token_ids and target in _DIALECTS_WITH_TOKEN_IDS:
            body, added_fields = rewrite.request_token_ids(body, target)
        provider_headers = self._build_headers(target, headers, is_translated=is_translated)
        return HttpUpstreamResponse(
            partial(self._post, self._urls[target], body, provider_headers),
            request,
            target,
            is_translated=is_translated,
            added_fields=added_fields,
        )

    async def count_tokens(
        self, request: ModelRequest, dialect: str, body: bytes, headers: Mapping[str, str]
    ) -> bytes:
        """Return the response of the provider's token count API, which is that of Anthropic. Raise ApiError
        (404) if there is none."""
        if "messages" not in self._dialects:
            message = "This model's provider cannot count tokens, because it lacks Anthropic's Messages API."
            raise ApiError(404, message, code="not_found")
        is_translated = dialect != "messages"
        if is_translated:
            translated = msgspec.json.decode(self._translate(request, "messages"))
            counted = {name: translated[name] for name in _COUNTED_FIELDS if name in translated}
            body = msgspec.json.encode(counted)
        elif self._config.model is not None:
            body = rewrite.set_fields(body, {"model": self._config.model})
        url = self._urls["messages"] / "count_tokens"
        provider_headers = self._build_headers("messages", headers, is_translated=is_translated)
        response = await self._post(url, body, provider_headers)
        try:
            if response.status != 200:
                raise await read_error(response)
            return await response.read()
        except (aiohttp.ClientError, OSError) as error:
            raise interrupted_error(error) from error
        finally:
            response.close()

    async def close(self) -> None:
        if self._plain_client is not None:
            self._plain_client.close()
        if self._session is not None:
            await self._session.close()

    async def _post(self, url: URL, body: bytes, headers: CIMultiDict[str]) -> HttpResponse:
        try:
            try:
                return await self._send(url, body, headers)
            except aiohttp.ServerDisconnectedError:
                # The provider probably closed an idle connection, so send the request again.
                return await self._send(url, body, headers)
        except (aiohttp.ClientError, OSError) as error:
            reason = str(error) or type(error).__name__
            raise EngineUnavailable(f"the provider cannot be reached: {reason}") from error

    def _send(self, url: URL, body: bytes, headers: CIMultiDict[str]) -> Awaitable[HttpResponse]:
        if self._plain_client is not None:
            return self._plain_client.post(url.raw_path_qs, headers, body)
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEPALIVE_TIMEOUT_SECONDS),
                cookie_jar=aiohttp.DummyCookieJar(),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_TIMEOUT_SECONDS),
                proxy=self._proxy,
            )
        data = body if len(body) < _MAX_BODY_AS_BYTES else io.BytesIO(body)
        return self._session.post(url, data=data, headers=headers, allow_redirects=False)

    def get_target(self, dialect: str) -> str:
        """Return the dialect in which such requests are sent. Raise ApiError (400) if there is none."""
        if dialect in self._dialects:
            return dialect
        targets = [other for other in self._dialects if other in _TRANSLATION_TARGETS]
        if targets and dialect != "completions":
            return targets[0]
        supported = ", ".join(self._dialects)
        message = f"The provider of this model does not support '{dialect}'; it supports: {supported}."
        raise bad_request(message, "model")

    def _translate(self, request: ModelRequest, target: str) -> bytes:
        if request.unsupported_error is not None:
            raise request.unsupported_error
        if request.required_output is not None and request.required_output.schema is not None:
            param = request.required_output.param
            message = f"'{param}' cannot be translated to this model's API ({target}); leave it out."
            raise bad_request(message, param, "unsupported_parameter")
        if request.logprobs:
            message = f"Logprobs cannot be translated to this model's API ({target}); leave 'logprobs' out."
            raise bad_request(message, "logprobs", "unsupported_parameter")
        model = self._config.model or request.model
        if target == "messages":
            return msgspec.json.encode(messages.build_messages_request(request, model))
        return msgspec.json.encode(chat.build_chat_request(request, model, self._max_tokens_field))

    def _build_fixed_headers(self, dialect: str) -> CIMultiDict[str]:
        headers = CIMultiDict({"accept": "*/*", "accept-encoding": "identity"})
        headers["content-type"] = "application/json"
        if dialect == "messages":
            headers["anthropic-version"] = _ANTHROPIC_VERSION
        if self._key is not None:
            headers.update(_build_auth_header(dialect, self._key))
        headers.update(self._config.headers)
        return headers

    def _build_headers(
        self, dialect: str, client_headers: Mapping[str, str], *, is_translated: bool = False
    ) -> CIMultiDict[str]:
        headers = self._fixed_headers[dialect].copy()
        for name, value in () if is_translated else client_headers.items():
            is_forwarded = name in _FORWARDED_HEADERS or name.startswith(_FORWARDED_PREFIXES)
            if is_forwarded and name not in self._config.headers:
                headers[name] = value
        if self._key is None and "authorization" not in headers and "x-api-key" not in headers:
            _forward_key(dialect, client_headers, headers)
        return headers


def _load_api_key(config: UpstreamEngineConfig, path: str) -> str | None:
    if config.api_key_env is None:
        return None
    key = os.environ.get(config.api_key_env, "").strip()
    if not key:
        raise ConfigError(
            f"{path}.api_key_env: the environment variable {config.api_key_env!r} is not set or is empty; "
            "set it to the provider's key"
        )
    return key


def _parse_base_url(config: UpstreamEngineConfig, path: str) -> URL:
    try:
        url = URL(config.base_url)
    except ValueError:
        url = URL()
    if url.scheme not in ("http", "https") or not url.host:
        raise ConfigError(f"{path}.base_url: must be an http:// or https:// URL, got {config.base_url!r}")
    return url


def _build_url(base: URL, dialect: str, base_dialect: str) -> URL:
    # As in the SDKs, OpenAI base URLs include the version, and Anthropic base URLs do not.
    root = base.path.rstrip("/")
    if dialect == "messages":
        root = root.removesuffix("/v1") + "/v1"
    elif base_dialect == "messages" and not root.endswith("/v1"):
        root += "/v1"
    return base.with_path(root + _PATHS[dialect]).with_query(base.query)


def _create_plain_client(base: URL) -> PlainClient | None:
    if base.scheme != "http" or sys.platform == "win32":
        return None
    from instar.http.plain import PlainClient  # Its parser is not available on Windows.

    return PlainClient(
        base.raw_host or "",
        base.port or 80,
        idle_timeout=_KEEPALIVE_TIMEOUT_SECONDS,
        connect_timeout=_CONNECT_TIMEOUT_SECONDS,
    )


def _build_auth_header(dialect: str, key: str) -> dict[str, str]:
    return {"x-api-key": key} if dialect == "messages" else {"authorization": f"Bearer {key}"}


def _forward_key(dialect: str, client_headers: Mapping[str, str], headers: CIMultiDict[str]) -> None:
    """Add the agent's own key to the headers, under the name that the provider expects."""
    # A Bearer token from an Anthropic client belongs to a subscription and is forwarded unchanged.
    authorization, key = client_headers.get("authorization"), client_headers.get("x-api-key")
    if key is not None:
        headers.update(_build_auth_header(dialect, key))
    if authorization is not None and dialect == "messages" and "anthropic-version" not in client_headers:
        headers["x-api-key"] = authorization.removeprefix("Bearer ")
    elif authorization is not None:
        headers["authorization"] = authorization
