"""HTTP calls to one vLLM server."""

from __future__ import annotations

from typing import Any

import msgspec

from instar.engines.connection import STREAM_ERRORS, EngineConnection
from instar.errors import EngineError, EngineUnavailable
from instar.http.plain import PlainResponse
from instar.types import Json

IDLE_SECONDS = 2.0
"""vLLM keeps idle connections for 5 seconds by default."""
CALL_SECONDS = 600.0
"""The deadline of a call; reading weights takes the longest."""
JSON_HEADERS = {"content-type": "application/json"}


class WorkerError(EngineError):
    """An error for a failed call to vLLM's workers. ``weights_changed`` is False if all workers still have
    their weights."""

    def __init__(self, message: str, *, weights_changed: bool) -> None:
        super().__init__(message)
        self.weights_changed = weights_changed


class VllmClient:
    """An HTTP client of one vLLM server. Raises EngineUnavailable if the server cannot be reached or is
    shutting down, and EngineError with the server's message if it rejects a call."""

    def __init__(self, url: str, key: str | None = None, *, idle_seconds: float = IDLE_SECONDS) -> None:
        # Calls are rare, and vLLM closes a connection after an error, so connections are not kept alive.
        self._connection = EngineConnection(
            url, key, "vLLM server", idle_seconds=idle_seconds, keep_alive=0.0
        )
        self.url = self._connection.url

    async def get(self, path: str, *, timeout: float = CALL_SECONDS) -> Any:
        return await self._call("GET", path, None, timeout)

    async def post(self, path: str, body: Json | None = None, *, timeout: float = CALL_SECONDS) -> Any:
        return await self._call("POST", path, body, timeout)

    async def rpc(self, method: str, kwargs: Json | None = None) -> Any:
        """Call a method of every worker and return the results. Dicts and lists arrive as they are, anything
        else as text."""
        response = await self.post("/collective_rpc", {"method": method, "kwargs": kwargs or {}})
        return response["results"] if response else []

    async def call_workers(self, method: str, body: Json) -> list[Json]:
        """Call a method of our worker extension on every worker and return the results. Raises WorkerError
        with the message of the first failure."""
        results: list[Json] = await self.rpc(method, {"text": msgspec.json.encode(body).decode()})
        errors = [result["error"] for result in results if "error" in result]
        if errors:
            changed = any("error" not in result or result.get("touched") for result in results)
            raise WorkerError(f"A vLLM worker failed: {errors[0]}", weights_changed=changed)
        return results

    async def post_bytes(self, path: str, body: bytes) -> bytes:
        response = await self.stream(path, body)
        try:
            return await response.read()
        except STREAM_ERRORS as error:
            raise self.unreachable_error(error) from error
        finally:
            response.close()

    async def stream(self, path: str, body: bytes) -> PlainResponse:
        """Send a request and return the response once it has begun with status 200."""
        response = await self._connection.stream(path, body, JSON_HEADERS)
        if response.status != 200:
            try:
                raise response_error(response.status, await response.read())
            except STREAM_ERRORS as error:
                raise self.unreachable_error(error) from error
        return response

    def unreachable_error(self, error: Exception) -> EngineUnavailable:
        return self._connection.unavailable(error)

    async def close(self) -> None:
        await self._connection.close()

    async def _call(self, method: str, path: str, body: Json | None, seconds: float) -> Any:
        data = None if body is None else msgspec.json.encode(body)
        headers = None if body is None else JSON_HEADERS
        response = await self._connection.request(method, path, seconds, data, headers)
        if response.status != 200:
            raise response_error(response.status, response.body)
        try:
            return msgspec.json.decode(response.body) if response.body else None
        except msgspec.DecodeError:  # plain text, for example from /v1/load_lora_adapter
            return response.body.decode(errors="replace")


def response_error(status: int, body: bytes) -> EngineError:
    try:
        error = msgspec.json.decode(body)["error"]
        text = error["message"] if isinstance(error, dict) else error
    except (msgspec.DecodeError, KeyError, TypeError):
        text = body[:400].decode(errors="replace")
    # A server whose engine core has died responds with 500 and exits.
    is_down = status in (502, 503, 504) or "EngineCore" in str(text)
    return (EngineUnavailable if is_down else EngineError)(f"vLLM responded with status {status}: {text}")
