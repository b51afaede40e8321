"""HTTP to one vLLM server."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

import aiohttp
import msgspec

from instar.engines.remote import CONNECT_SECONDS
from instar.errors import EngineError, EngineUnavailable
from instar.http.plain import PlainClient, PlainResponse
from instar.types import Json

IDLE_SECONDS = 2.0
"""vLLM itself keeps a connection for 5 seconds."""
CALL_SECONDS = 600.0
"""Deadline of one call that is not a reply: reading weights is the longest."""


class VllmClient:
    """Raises EngineUnavailable where the server cannot be reached or is going down, EngineError with its own
    words where it refuses."""

    def __init__(self, url: str, key: str | None = None, *, idle_seconds: float = IDLE_SECONDS) -> None:
        """``idle_seconds``: how long a connection is kept for another request; less than the server does."""
        self.url = url.rstrip("/")
        address = urlsplit(self.url)
        if address.scheme != "http" or not address.hostname:
            raise EngineError(f"a vLLM server is reached by http://host:port, not by {url!r}")
        self._path = address.path
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._plain = PlainClient(
            address.hostname,
            address.port or 80,
            idle_seconds=idle_seconds,
            connect_seconds=CONNECT_SECONDS,
        )
        self._session: aiohttp.ClientSession | None = None

    async def get(self, path: str, *, timeout: float = CALL_SECONDS) -> Any:
        return await self._call("GET", path, None, timeout)

    async def post(self, path: str, body: Json | None = None, *, timeout: float = CALL_SECONDS) -> Any:
        return await self._call("POST", path, body, timeout)

    async def rpc(self, method: str, kwargs: Json | None = None, *, timeout: float = CALL_SECONDS) -> Any:
        """Call a method of every worker of the server; what each returned: dicts and lists as they are,
        anything else as text."""
        body: Json = {"method": method, "kwargs": kwargs or {}}
        answer = await self.post("/collective_rpc", body, timeout=timeout)
        return answer["results"] if answer else []

    async def post_bytes(self, path: str, body: bytes) -> bytes:
        """Until the whole answer has come."""
        response = await self.stream(path, body)
        try:
            return await response.read()
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise self.unreachable_error(error) from error
        finally:
            response.close()

    async def stream(self, path: str, body: bytes) -> PlainResponse:
        """Returns when the server has begun to answer with 200."""
        headers = {**self._headers, "content-type": "application/json"}
        try:
            response = await self._plain.post(self._path + path, headers, body)
            if response.status != 200:
                raise response_error(response.status, await response.read())
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise self.unreachable_error(error) from error
        return response

    def unreachable_error(self, error: Exception) -> EngineUnavailable:
        return EngineUnavailable(
            f"the vLLM server at {self.url} cannot be reached: {error or type(error).__name__}"
        )

    async def close(self) -> None:
        self._plain.close()
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def _call(self, method: str, path: str, body: Json | None, seconds: float) -> Any:
        if self._session is None:
            # Calls are few, and vLLM closes a connection on which something failed.
            connector = aiohttp.TCPConnector(force_close=True)
            self._session = aiohttp.ClientSession(headers=self._headers, connector=connector)
        timeout = aiohttp.ClientTimeout(total=seconds, sock_connect=CONNECT_SECONDS)
        try:
            async with self._session.request(method, self.url + path, json=body, timeout=timeout) as response:
                content = await response.read()
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise self.unreachable_error(error) from error
        if response.status != 200:
            raise response_error(response.status, content)
        try:
            return msgspec.json.decode(content) if content else None
        except msgspec.DecodeError:  # words, such as those of /v1/load_lora_adapter
            return content.decode(errors="replace")


def response_error(status: int, body: bytes) -> EngineError:
    """What a server said instead of an answer."""
    try:
        told = msgspec.json.decode(body)
        text = told["error"]["message"] if isinstance(told["error"], dict) else told["error"]
    except (msgspec.DecodeError, KeyError, TypeError):
        text = body[:400].decode(errors="replace")
    # A server whose engine has died says 500, and ends.
    gone = status in (502, 503, 504) or "EngineCore" in str(text)
    return (EngineUnavailable if gone else EngineError)(f"vLLM answered {status}: {text}")
