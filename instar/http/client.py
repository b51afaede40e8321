"""An HTTP client that reads complete responses. The client in ``plain.py`` streams responses."""

from __future__ import annotations

from collections.abc import AsyncIterable, Mapping
from dataclasses import dataclass, field
from typing import TypedDict, Unpack

import aiohttp
from yarl import URL

from instar.http.retry import parse_retry_after


class NoResponse(Exception):
    """The server could not be reached, or sent no complete response within the time and size limits."""


@dataclass(frozen=True, slots=True)
class HttpResponse:
    status: int
    body: bytes
    retry_after: float | None = None
    """The ``Retry-After`` header in seconds, or None if it is missing or invalid."""

    @property
    def is_success(self) -> bool:
        return 200 <= self.status < 300

    def excerpt(self, size: int = 300) -> str:
        """Return the first ``size`` bytes of the body as text, for an error message."""
        return self.body[:size].decode(errors="replace").strip()


class RequestOptions(TypedDict, total=False):
    headers: Mapping[str, str] | None
    timeout: float | None
    max_bytes: int | None


@dataclass(eq=False, kw_only=True)
class HttpClient:
    """Sends requests in an aiohttp session, which the first request opens.

    ``secret`` is replaced with ``***`` in error messages. An idle connection stays open for
    ``keep_alive`` seconds; with 0, each connection is closed after its response.
    """

    headers: Mapping[str, str] = field(default_factory=dict[str, str], repr=False)
    timeout: float = 30.0
    connect_timeout: float | None = None
    keep_alive: float = 15.0
    use_environment_proxy: bool = False
    secret: str | None = field(default=None, repr=False)
    _session: aiohttp.ClientSession | None = field(default=None, init=False, repr=False)

    async def request(
        self,
        method: str,
        url: str | URL,
        body: bytes | AsyncIterable[bytes] | None = None,
        **options: Unpack[RequestOptions],
    ) -> HttpResponse:
        """Send a request and return its response. Redirects are not followed.

        Raises NoResponse if the server cannot be reached, if no complete response arrives within ``timeout``
        seconds (default: the client's), or if the body exceeds ``max_bytes`` (default: no limit).
        """
        timeout = options.get("timeout")
        seconds = self.timeout if timeout is None else timeout
        try:
            async with self._open_session().request(
                method,
                url,
                data=body,
                headers=options.get("headers"),
                allow_redirects=False,
                timeout=aiohttp.ClientTimeout(total=max(0.001, seconds), sock_connect=self.connect_timeout),
            ) as response:
                content = await _read_at_most(response, options.get("max_bytes"))
        except TimeoutError as error:
            raise NoResponse(f"no response within {seconds:g} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise NoResponse(self.redact(str(error) or type(error).__name__)) from error
        retry_after = parse_retry_after(response.headers.get("Retry-After"))
        return HttpResponse(response.status, content, retry_after)

    async def post(self, url: str | URL, body: bytes, **options: Unpack[RequestOptions]) -> HttpResponse:
        return await self.request("POST", url, body, **options)

    def redact(self, text: str) -> str:
        """Replace the secret in the text with ``***``. Servers may quote a key that they reject."""
        return text.replace(self.secret, "***") if self.secret else text

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    def _open_session(self) -> aiohttp.ClientSession:
        if self._session is None:
            # No connection limit, because the callers limit the number of concurrent requests.
            connector = aiohttp.TCPConnector(
                limit=0, keepalive_timeout=self.keep_alive or None, force_close=not self.keep_alive
            )
            self._session = aiohttp.ClientSession(
                connector=connector,
                cookie_jar=aiohttp.DummyCookieJar(),
                headers=self.headers,
                trust_env=self.use_environment_proxy,
            )
        return self._session


async def _read_at_most(response: aiohttp.ClientResponse, limit: int | None) -> bytes:
    if limit is None:
        return await response.read()
    content = bytearray()
    async for chunk in response.content.iter_chunked(1 << 16):
        content += chunk
        if len(content) > limit:
            raise NoResponse(f"the response is longer than {limit} bytes")
    return bytes(content)
