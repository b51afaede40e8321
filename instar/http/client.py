"""An HTTP client for requests whose response is read as a whole. ``plain.py`` has a client that streams."""

from __future__ import annotations

from collections.abc import AsyncIterable, Mapping
from dataclasses import dataclass

import aiohttp
from yarl import URL

from instar.http.retry import parse_retry_after


class NoResponse(Exception):
    """Raised when the server could not be reached, did not answer in time, or broke off its response."""


@dataclass(frozen=True, slots=True)
class HttpResponse:
    status: int
    body: bytes
    content_type: str = ""
    retry_after: float | None = None
    """The number of seconds in the ``Retry-After`` header."""

    @property
    def is_success(self) -> bool:
        return 200 <= self.status < 300

    def excerpt(self, size: int = 300) -> str:
        """Return the beginning of the body as text, for an error message."""
        return self.body[:size].decode(errors="replace").strip()


class HttpClient:
    """An HTTP client with an aiohttp session, which opens with the first request.

    ``secret`` is replaced with ``***`` in the text of every error. ``keep_alive`` is the number of seconds
    for which an idle connection is kept; 0 closes each connection after its response.
    """

    def __init__(
        self,
        *,
        headers: Mapping[str, str] | None = None,
        timeout: float = 30.0,
        connect_timeout: float | None = None,
        keep_alive: float = 15.0,
        use_environment_proxy: bool = False,
        secret: str | None = None,
    ) -> None:
        self._headers = dict(headers or {})
        self._timeout = timeout
        self._connect_timeout = connect_timeout
        self._keep_alive = keep_alive
        self._use_environment_proxy = use_environment_proxy
        self._secret = secret
        self._session: aiohttp.ClientSession | None = None

    async def request(
        self,
        method: str,
        url: str | URL,
        body: bytes | AsyncIterable[bytes] | None = None,
        *,
        headers: Mapping[str, str] | None = None,
        timeout: float | None = None,
        max_bytes: int | None = None,
    ) -> HttpResponse:
        """Send a request and return its response. Redirects are not followed.

        Raises NoResponse if no response arrives within ``timeout`` seconds, or if the response is longer than
        ``max_bytes``.
        """
        seconds = self._timeout if timeout is None else timeout
        try:
            async with self._open_session().request(
                method,
                url,
                data=body,
                headers=headers,
                allow_redirects=False,
                timeout=aiohttp.ClientTimeout(total=max(0.001, seconds), sock_connect=self._connect_timeout),
            ) as response:
                content = await _read_at_most(response, max_bytes)
        except TimeoutError as error:
            raise NoResponse(f"no response within {seconds:g} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise NoResponse(self.redact(str(error) or type(error).__name__)) from error
        return HttpResponse(
            response.status,
            content,
            response.headers.get("Content-Type", ""),
            parse_retry_after(response.headers.get("Retry-After")),
        )

    async def post(
        self,
        url: str | URL,
        body: bytes,
        *,
        headers: Mapping[str, str] | None = None,
        timeout: float | None = None,
        max_bytes: int | None = None,
    ) -> HttpResponse:
        return await self.request("POST", url, body, headers=headers, timeout=timeout, max_bytes=max_bytes)

    def redact(self, text: str) -> str:
        """Return the text without the secret: servers may quote the key that they refuse."""
        return text.replace(self._secret, "***") if self._secret else text

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    def _open_session(self) -> aiohttp.ClientSession:
        if self._session is None:
            # The callers bound how many requests are in flight, so the connector does not.
            connector = (
                aiohttp.TCPConnector(limit=0, keepalive_timeout=self._keep_alive)
                if self._keep_alive
                else aiohttp.TCPConnector(limit=0, force_close=True)
            )
            self._session = aiohttp.ClientSession(
                connector=connector,
                cookie_jar=aiohttp.DummyCookieJar(),
                headers=self._headers,
                trust_env=self._use_environment_proxy,
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
