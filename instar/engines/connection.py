"""The HTTP connection to an engine or a vLLM server."""

from __future__ import annotations

from collections.abc import AsyncIterable, Mapping
from urllib.parse import urlsplit

import aiohttp

from instar.errors import EngineError, EngineUnavailable
from instar.http.client import HttpClient, HttpResponse, NoResponse
from instar.http.plain import PlainClient, PlainResponse
from instar.http.retry import RetryPolicy

CONNECT_TIMEOUT_SECONDS = 10.0
CONNECT_RETRY = RetryPolicy(first_delay=0.05, max_delay=1.0, jitter=(1.0, 1.0))
STREAM_ERRORS = (aiohttp.ClientError, OSError, TimeoutError)


class EngineConnection:
    """An HTTP connection to one server. Calls raise EngineUnavailable if the server cannot be reached.
    ``name`` describes the server in error messages. Streams reuse idle connections for ``stream_keep_alive``
    seconds, other calls for ``keep_alive`` seconds (0: never). The server must keep them open longer."""

    def __init__(
        self, url: str, token: str | None, name: str, *, stream_keep_alive: float, keep_alive: float = 15.0
    ) -> None:
        self.url = url.rstrip("/")
        address = urlsplit(self.url)
        if address.scheme != "http" or not address.hostname:
            raise EngineError(f"The URL of the {name} must start with http://, got {url!r}.")
        self._name = name
        self._path = address.path
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        # Streams use a client with less overhead per request.
        self._stream_client = PlainClient(
            address.hostname,
            address.port or 80,
            idle_timeout=stream_keep_alive,
            connect_timeout=CONNECT_TIMEOUT_SECONDS,
        )
        self._client = HttpClient(
            headers=self._headers,
            connect_timeout=CONNECT_TIMEOUT_SECONDS,
            keep_alive=keep_alive,
            secret=token,
        )

    async def stream(self, path: str, body: bytes, headers: Mapping[str, str] | None = None) -> PlainResponse:
        """Send a POST request and return the response once its headers have arrived."""
        try:
            return await self._stream_client.post(
                self._path + path, {**self._headers, **(headers or {})}, body
            )
        except STREAM_ERRORS as error:
            raise self.unavailable_error(error) from error

    async def request(
        self,
        method: str,
        path: str,
        timeout: float,
        body: bytes | AsyncIterable[bytes] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> HttpResponse:
        try:
            return await self._client.request(method, self.url + path, body, headers=headers, timeout=timeout)
        except NoResponse as error:
            raise self.unavailable_error(error) from error

    def unavailable_error(self, error: Exception) -> EngineUnavailable:
        reason = str(error) or type(error).__name__
        return EngineUnavailable(f"The {self._name} at {self.url} cannot be reached: {reason}")

    async def close(self) -> None:
        self._stream_client.close()
        await self._client.close()
