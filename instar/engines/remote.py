"""An engine in another process, reached through `instar.engines.server`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterable, Sequence
from pathlib import Path
from typing import Any, Self, TypeVar

import msgspec

from instar import errors
from instar.engines import uploads
from instar.engines.base import Engine, EngineInfo, EngineStatus, Prompt, WeightTransfer
from instar.engines.checks import to_ids
from instar.engines.connection import CONNECT_RETRY, STREAM_ERRORS, EngineConnection
from instar.engines.wire import LEASE_HEADER, decode_line, join_chunks, pack_request, unpack_floats
from instar.errors import EngineError, EngineUnavailable
from instar.http.plain import PlainResponse
from instar.types import Floats, Json, Policy, PolicyRef, SamplingParams, TokenChunk

T = TypeVar("T")
LOAD_TIMEOUT_SECONDS = 600.0
SCORE_TIMEOUT_SECONDS = 600.0
STATUS_TIMEOUT_SECONDS = 30.0
STREAM_KEEP_ALIVE = 30.0
"""Streams reuse an idle connection for this many seconds. The server keeps it open longer."""


class RemoteEngine(Engine):
    """An engine in another process. Create it with ``connect``, or call ``refresh`` before using ``info``.
    ``lease`` is the lease of the trainer that sends weights. The engine rejects the weights if it has seen a
    later lease."""

    def __init__(self, url: str, token: str | None = None, lease: int | None = None) -> None:
        self._connection = EngineConnection(url, token, "engine", stream_keep_alive=STREAM_KEEP_ALIVE)
        self._lease_headers = None if lease is None else {LEASE_HEADER: str(lease)}
        self._url = self._connection.url

    @classmethod
    async def connect(cls, url: str, token: str | None = None, timeout: float = 60.0) -> Self:
        """Return an engine that has responded. Raises EngineUnavailable after ``timeout`` seconds."""
        engine = cls(url, token)
        try:
            await CONNECT_RETRY.run(engine.refresh, retry_on=EngineUnavailable, seconds=timeout)
        except BaseException:  # including cancellation: no one else can close the engine
            await engine.close()
            raise
        return engine

    async def refresh(self) -> EngineInfo:
        self._info = self._decode(await self._call("GET", "/info", STATUS_TIMEOUT_SECONDS), EngineInfo)
        return self._info

    def _not_ready_error(self) -> EngineError:
        return EngineUnavailable(f"The engine at {self._url} has not responded yet; try again later.")

    async def generate(
        self, prompt_ids: Prompt, params: SamplingParams, policy: PolicyRef | None = None
    ) -> AsyncGenerator[TokenChunk, None]:
        body = pack_request(to_ids(prompt_ids), params, policy)
        is_finished = False
        response: PlainResponse | None = None
        try:
            response = await self._connection.stream("/generate", body)
            if response.status != 200:
                raise _decode_error(await response.read(), response.status)
            unread = b""
            while data := await response.readany():
                *lines, unread = (unread + data).split(b"\n")
                chunk, error = _decode_lines(lines)
                if chunk is not None:
                    is_finished = chunk.finish_reason is not None
                    yield chunk
                if error is not None:
                    raise error
        except STREAM_ERRORS as error:
            raise self._connection.unavailable_error(error) from error
        except msgspec.DecodeError as error:
            raise self._malformed_response_error(error) from error
        finally:
            if response is not None:
                response.close()
        if not is_finished:
            raise EngineUnavailable(f"The engine at {self._url} closed the connection during a reply.")

    async def logprobs(self, token_ids: Prompt, policy: PolicyRef | None = None) -> Floats:
        ids = to_ids(token_ids)
        request = pack_request(ids, SamplingParams(), policy)
        body = await self._call("POST", "/logprobs", SCORE_TIMEOUT_SECONDS, request)
        return unpack_floats(body, len(ids))

    async def load(self, policy: Policy) -> None:
        await self._post_policy("/load", policy)

    async def keep(self, policy: Policy) -> None:
        await self._post_policy("/keep", policy)

    async def unload(self, policy: PolicyRef) -> None:
        await self._post_policy("/unload", policy)

    async def upload_files(self, policy: Policy) -> Policy:
        if policy.artifact.kind not in ("adapter", "weights"):
            return policy
        folder = Path(policy.artifact.path)
        try:
            files = await asyncio.to_thread(uploads.read_file_stats, folder)
        except OSError:
            return policy  # the folder is not on this machine; the engine will report the error
        check = msgspec.json.encode(uploads.FolderCheck(str(folder), files))
        response = await self._call("POST", "/seen", STATUS_TIMEOUT_SECONDS, check)
        if self._decode(response, uploads.FolderCheckResult).seen:
            return policy
        content = uploads.encode_folder(folder, files)
        response = await self._call("POST", "/upload", LOAD_TIMEOUT_SECONDS, content)
        path = self._decode(response, uploads.UploadResult).path
        artifact = msgspec.structs.replace(policy.artifact, path=path)
        return msgspec.structs.replace(policy, artifact=artifact)

    async def stage(self, transfer: WeightTransfer) -> Json:
        body = await self._call("POST", "/stage", LOAD_TIMEOUT_SECONDS, msgspec.json.encode(transfer))
        return self._decode(body, Json)

    async def commit(self, policy: Policy) -> None:
        await self._post_policy("/commit", policy)

    async def status(self) -> EngineStatus:
        return self._decode(await self._call("GET", "/status", STATUS_TIMEOUT_SECONDS), EngineStatus)

    async def close(self) -> None:
        """Close the connections, which cancels their requests. The engine itself keeps running."""
        await self._connection.close()

    async def _post_policy(self, path: str, policy: Policy | PolicyRef) -> None:
        await self._call("POST", path, LOAD_TIMEOUT_SECONDS, msgspec.json.encode({"policy": policy}))

    async def _call(
        self, method: str, path: str, timeout: float, body: bytes | AsyncIterable[bytes] | None = None
    ) -> bytes:
        response = await self._connection.request(method, path, timeout, body, self._lease_headers)
        if response.status != 200:
            raise _decode_error(response.body, response.status)
        return response.body

    def _decode(self, body: bytes, expected_type: type[T]) -> T:
        try:
            return msgspec.json.decode(body, type=expected_type)
        except msgspec.DecodeError as error:
            raise self._malformed_response_error(error) from error

    def _malformed_response_error(self, error: msgspec.DecodeError) -> EngineUnavailable:
        # Not a plain EngineError, because a proxy may have sent the response while the engine was down.
        return EngineUnavailable(f"The server at {self._url} did not send a valid engine response: {error}")


def _decode_lines(lines: Sequence[bytes]) -> tuple[TokenChunk | None, EngineError | None]:
    """Return the lines' chunks as one chunk (None if there are none) and the last line's error, if any."""
    chunks: list[TokenChunk] = []
    error = None
    for line in lines:
        if line.startswith(b'{"error"'):
            error = _decode_error(line, 500)
            break
        chunks.append(decode_line(line))
    return join_chunks(chunks) if chunks else None, error


def _decode_error(body: bytes, status: int) -> EngineError:
    """Return the error that the engine raised, with the same class if that is a subclass of EngineError. A
    body from another program, such as a proxy, becomes a plain EngineError."""
    try:
        detail: dict[str, Any] = msgspec.json.decode(body)["error"]
        error_class, message = getattr(errors, str(detail["type"]), EngineError), str(detail["message"])
    except (msgspec.DecodeError, KeyError, TypeError):
        text = body[:200].decode(errors="replace")
        return EngineError(f"The engine responded with status {status}: {text}")
    if isinstance(error_class, type) and issubclass(error_class, EngineError):
        return error_class(message)
    return EngineError(message)
