"""An engine in another process, reached through `instar.engines.server`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterable, Sequence
from pathlib import Path
from typing import Any, Self, TypeVar
from urllib.parse import urlsplit

import aiohttp
import msgspec

from instar import errors
from instar.engines.base import Engine, EngineInfo, EngineStatus, Prompt, WeightTransfer
from instar.engines.checks import to_ids
from instar.engines.uploads import (
    FolderCheck,
    FolderCheckResult,
    UploadResult,
    encode_folder,
    read_file_stats,
)
from instar.engines.wire import decode_line, join_chunks, pack_ids, pack_request, unpack_floats
from instar.errors import EngineError, EngineUnavailable
from instar.http.plain import PlainClient, PlainResponse
from instar.types import Floats, Json, Policy, SamplingParams, TokenChunk

T = TypeVar("T")
CONNECT_SECONDS = 10.0
LOAD_SECONDS = 600.0
SCORE_SECONDS = 600.0
STATUS_SECONDS = 30.0
IDLE_SECONDS = 30.0
"""How long a connection is kept for another request; the server keeps it longer."""


class RemoteEngine(Engine):
    """Use ``await RemoteEngine.connect(url)``, or call ``refresh`` before ``info``."""

    def __init__(self, url: str, token: str | None = None) -> None:
        self._url = url.rstrip("/")
        address = urlsplit(self._url)
        if address.scheme != "http" or not address.hostname:
            raise EngineError(f"an engine is reached by http://host:port, not by {url!r}")
        self._target = f"{address.path}/generate"
        self._plain = PlainClient(
            address.hostname,
            address.port or 80,
            idle_seconds=IDLE_SECONDS,
            connect_seconds=CONNECT_SECONDS,
        )
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._client: aiohttp.ClientSession | None = None
        self._info: EngineInfo | None = None

    @classmethod
    async def connect(cls, url: str, token: str | None = None, timeout: float = 60.0) -> Self:
        """Wait until the engine answers, at most ``timeout`` seconds."""
        engine = cls(url, token)
        deadline = time.monotonic() + timeout
        pause = 0.05
        while True:
            try:
                await engine.refresh()
                return engine
            except EngineUnavailable:
                if time.monotonic() + pause > deadline:
                    await engine.close()
                    raise
            except BaseException:  # cancelled too: nobody else would close it
                await engine.close()
                raise
            await asyncio.sleep(pause)
            pause = min(2 * pause, 1.0)

    async def refresh(self) -> EngineInfo:
        """Ask the engine what it can do."""
        self._info = self._decoded(await self._call("GET", "/info", STATUS_SECONDS), EngineInfo)
        return self._info

    @property
    def info(self) -> EngineInfo:
        if self._info is None:
            raise EngineUnavailable(f"the engine at {self._url} was not connected to")
        return self._info

    async def generate(self, prompt_ids: Prompt, params: SamplingParams) -> AsyncGenerator[TokenChunk, None]:
        body = pack_request(to_ids(prompt_ids), params)
        finished = False
        response: PlainResponse | None = None
        try:
            response = await self._plain.post(self._target, self._headers, body)
            if response.status != 200:
                raise _error(await response.read(), response.status)
            rest = b""
            while data := await response.readany():
                *lines, rest = (rest + data).split(b"\n")
                chunk, error = _read(lines)
                if chunk is not None:
                    finished = chunk.finish_reason is not None
                    yield chunk
                if error is not None:
                    raise error
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise self._unavailable(error) from error
        except msgspec.DecodeError as error:
            raise self._strange(error) from error
        finally:
            if response is not None:
                response.close()
        if not finished:
            raise EngineUnavailable(f"the engine at {self._url} broke off in the middle of a reply")

    async def logprobs(self, token_ids: Prompt) -> Floats:
        ids = to_ids(token_ids)
        body = await self._call("POST", "/logprobs", SCORE_SECONDS, pack_ids(ids))
        return unpack_floats(body, len(ids))

    async def load(self, policy: Policy) -> None:
        await self._call("POST", "/load", LOAD_SECONDS, msgspec.json.encode({"policy": policy}))

    async def upload_files(self, policy: Policy) -> Policy:
        if policy.artifact.kind not in ("adapter", "weights"):
            return policy
        folder = Path(policy.artifact.path)
        try:
            files = await asyncio.to_thread(read_file_stats, folder)
        except OSError:
            return policy  # not here either; the engine says what it makes of that
        asked = msgspec.json.encode(FolderCheck(str(folder), files))
        if self._decoded(await self._call("POST", "/seen", STATUS_SECONDS, asked), FolderCheckResult).seen:
            return policy
        told = await self._call("POST", "/upload", LOAD_SECONDS, encode_folder(folder, files))
        artifact = msgspec.structs.replace(policy.artifact, path=self._decoded(told, UploadResult).path)
        return msgspec.structs.replace(policy, artifact=artifact)

    async def stage(self, transfer: WeightTransfer) -> Json:
        told = await self._call("POST", "/stage", LOAD_SECONDS, msgspec.json.encode(transfer))
        return self._decoded(told, Json)

    async def commit(self, policy: Policy) -> None:
        await self._call("POST", "/commit", LOAD_SECONDS, msgspec.json.encode({"policy": policy}))

    async def status(self) -> EngineStatus:
        return self._decoded(await self._call("GET", "/status", STATUS_SECONDS), EngineStatus)

    async def close(self) -> None:
        """Close the connections, and with them what is under way; the engine itself goes on."""
        self._plain.close()
        if self._client is not None:
            await self._client.close()

    async def _call(
        self, method: str, path: str, seconds: float, body: bytes | AsyncIterable[bytes] | None = None
    ) -> bytes:
        timeout = aiohttp.ClientTimeout(total=seconds, sock_connect=CONNECT_SECONDS)
        try:
            async with self._session().request(
                method, self._url + path, data=body, timeout=timeout
            ) as response:
                content = await response.read()
        except (aiohttp.ClientError, TimeoutError) as error:
            raise self._unavailable(error) from error
        if response.status != 200:
            raise _error(content, response.status)
        return content

    def _decoded(self, body: bytes, kind: type[T]) -> T:
        try:
            return msgspec.json.decode(body, type=kind)
        except msgspec.DecodeError as error:
            raise self._strange(error) from error

    def _strange(self, error: msgspec.DecodeError) -> EngineUnavailable:
        """Something else answers there: a proxy, say."""
        return EngineUnavailable(f"what answers at {self._url} is no engine: {error}")

    def _session(self) -> aiohttp.ClientSession:
        if self._client is None:
            # As many connections as there are replies in flight: the caller bounds those.
            self._client = aiohttp.ClientSession(
                headers=self._headers, connector=aiohttp.TCPConnector(limit=0)
            )
        return self._client

    def _unavailable(self, error: Exception) -> EngineUnavailable:
        return EngineUnavailable(
            f"the engine at {self._url} cannot be reached: {error or type(error).__name__}"
        )


def _read(lines: Sequence[bytes]) -> tuple[TokenChunk | None, EngineError | None]:
    """All tokens of these lines as one chunk: fewer pieces of work, the busier this process is."""
    chunks: list[TokenChunk] = []
    error = None
    for line in lines:
        if line.startswith(b'{"error"'):
            error = _error(line, 500)
            break
        chunks.append(decode_line(line))
    return join_chunks(chunks) if chunks else None, error


def _error(body: bytes, status: int) -> EngineError:
    """The error that the engine raised, of the same class; a stranger's answer is EngineError."""
    try:
        detail: dict[str, Any] = msgspec.json.decode(body)["error"]
        kind, message = getattr(errors, str(detail["type"]), EngineError), str(detail["message"])
    except (msgspec.DecodeError, KeyError, TypeError):
        text = body[:200].decode(errors="replace")
        return EngineError(f"the engine answered {status}: {text}")
    return kind(message) if isinstance(kind, type) and issubclass(kind, EngineError) else EngineError(message)
