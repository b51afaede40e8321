"""An HTTP server for any engine: token ids in, token ids out.

    POST /generate  header + prompt ids   → one JSON TokenChunk per line, as they are sampled
    POST /logprobs  header + token ids    → their logprobs
    POST /load      {policy}              → {}
    POST /keep      {policy}              → {}
    POST /unload    {policy: PolicyRef}   → {}
    POST /stage     WeightTransfer        → the response for the sender
    POST /commit    {policy}              → {}   (these five may have the header x-instar-lease)
    POST /seen, /upload                     see `instar.engines.uploads`
    GET  /info, /status, /healthz

Binary integers and floats are 4 bytes, little-endian. The body of /generate is the length of the header, the
header as JSON (``params`` and optionally ``policy``, a PolicyRef), and the prompt ids. A line of the response
contains all tokens that were ready when it was sent. A missing logprob is null. The body of /logprobs has the
same format, its ``params`` are ignored, and the response is one float per token, with NaN for the first.

An error is ``{"error": {"type": <class in instar.errors>, "message": ...}}``. It is the body of a failed
response, or the last line of a reply that has begun. Closing the connection cancels the request.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Generator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from instar.async_utils import cancel_and_wait
from instar.engines.base import Engine, WeightTransfer
from instar.engines.checks import check_artifact, check_request, check_score_request
from instar.engines.uploads import FolderCheck, UploadStore
from instar.engines.wire import (
    LEASE_HEADER,
    encode_line,
    join_chunks,
    pack_floats,
    unpack_request,
)
from instar.errors import EngineError, EngineUnavailable, InstarError, PolicyNotFound, PromptTooLong
from instar.http.auth import has_bearer_token
from instar.types import Policy, PolicyRef, TokenChunk

MAX_BODY_BYTES = 16 * 1024 * 1024
JSONL_HEADERS = [(b"content-type", b"application/x-ndjson")]
T = TypeVar("T")


class PolicyRequest(msgspec.Struct, forbid_unknown_fields=True):
    policy: Policy


class UnloadRequest(msgspec.Struct, forbid_unknown_fields=True):
    policy: PolicyRef


class DrainGate:
    """Counts the active requests. A closed gate rejects new requests. ``drained`` is set when the gate is
    closed and the last request has finished."""

    def __init__(self) -> None:
        self.is_closed = False
        self.drained = asyncio.Event()
        self._active_requests = 0

    def close(self) -> None:
        self.is_closed = True
        self._set_drained_if_idle()

    @contextmanager
    def admit(self) -> Generator[None]:
        if self.is_closed:
            raise EngineUnavailable("The engine is being drained and accepts no new requests.")
        self._active_requests += 1
        try:
            yield
        finally:
            self._active_requests -= 1
            self._set_drained_if_idle()

    def _set_drained_if_idle(self) -> None:
        if self.is_closed and not self._active_requests:
            self.drained.set()


class LeaseFence:
    """Rejects weights from a trainer that has been replaced but is still running. ``lease`` is the highest
    trainer lease seen so far."""

    def __init__(self, lease: int = 0) -> None:
        self.lease = lease

    def check(self, lease: int) -> None:
        if lease < self.lease:
            raise EngineError(
                f"The weights come from a replaced trainer (lease {lease}, the current one is {self.lease})."
            )
        self.lease = lease

    def raise_to(self, lease: int) -> None:
        self.lease = max(self.lease, lease)


def create_engine_app(
    engine: Engine,
    token: str | None = None,
    gate: DrainGate | None = None,
    fence: LeaseFence | None = None,
) -> Starlette:
    """Create the HTTP app. If ``token`` is set, every route except /healthz requires it as a bearer token."""
    gate = gate or DrainGate()
    handlers = _Handlers(engine, gate, UploadStore(), fence or LeaseFence())
    post_handlers = [
        handlers.logprobs,
        handlers.load,
        handlers.keep,
        handlers.unload,
        handlers.stage,
        handlers.commit,
        handlers.seen,
        handlers.upload,
    ]
    get_handlers = [handlers.info, handlers.status, handlers.healthz]
    return Starlette(
        routes=[
            Route("/generate", _GenerateEndpoint(engine, gate), methods=["POST"]),
            *(Route(f"/{handler.__name__}", handler, methods=["POST"]) for handler in post_handlers),
            *(Route(f"/{handler.__name__}", handler) for handler in get_handlers),
        ],
        middleware=[Middleware(_RequireToken, token=token)] if token else [],
        exception_handlers={InstarError: _handle_error},
    )


@dataclass(frozen=True, slots=True)
class _GenerateEndpoint:
    """The endpoint that streams replies. It is a plain ASGI app, because Starlette's responses are slow."""

    engine: Engine
    gate: DrainGate

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            prompt, params, policy = unpack_request(await _read_body(receive))
            check_request(self.engine.info, prompt, params, policy)
        except ClientDisconnect:
            return
        except EngineError as error:
            await _error_response(error, 400)(scope, receive, send)
            return
        try:
            with self.gate.admit():
                chunks = self.engine.generate(prompt, params, policy)
                failure = await _ReplyStream(chunks, receive, send).run()
        except EngineUnavailable as error:
            failure = error
        if failure is not None:
            await _error_response(failure)(scope, receive, send)


class _ReplyStream:
    """Sends one reply. Tokens that are sampled while a line is being sent go into the next line. If the
    client disconnects, the engine's iterator is closed."""

    def __init__(self, chunks: AsyncGenerator[TokenChunk, None], receive: Receive, send: Send) -> None:
        self._chunks = chunks
        self._receive = receive
        self._send = send
        self._ready_chunks: list[TokenChunk] = []
        self._changed = asyncio.Event()

    async def run(self) -> InstarError | None:
        """Send the reply. Return the error if sampling fails before the first token; a later error is sent as
        the last line."""
        sample_task = self._start_task(self._sample())
        disconnect_task = self._start_task(_wait_for_disconnect(self._receive))
        has_begun = False
        try:
            while True:
                await self._changed.wait()
                self._changed.clear()
                if disconnect_task.done():
                    return None
                is_finished = sample_task.done()
                error = sample_task.result() if is_finished else None
                if error is not None and not has_begun and not self._ready_chunks:
                    return error
                if not has_begun:
                    has_begun = True
                    await self._send({"type": "http.response.start", "status": 200, "headers": JSONL_HEADERS})
                body = self._encode_ready(error)
                await self._send({"type": "http.response.body", "body": body, "more_body": not is_finished})
                if is_finished:
                    return None
        finally:
            await cancel_and_wait(sample_task, disconnect_task)

    def _start_task(self, coroutine: Coroutine[None, None, T]) -> asyncio.Task[T]:
        task = asyncio.create_task(coroutine)
        task.add_done_callback(lambda _: self._changed.set())
        return task

    async def _sample(self) -> InstarError | None:
        try:
            async with aclosing(self._chunks) as chunks:
                async for chunk in chunks:
                    self._ready_chunks.append(chunk)
                    self._changed.set()
        except InstarError as error:
            return error
        return None

    def _encode_ready(self, error: InstarError | None) -> bytes:
        lines = encode_line(join_chunks(self._ready_chunks)) if self._ready_chunks else b""
        self._ready_chunks.clear()
        return lines if error is None else lines + msgspec.json.encode(_error_body(error)) + b"\n"


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


@dataclass(frozen=True, slots=True)
class _Handlers:
    engine: Engine
    gate: DrainGate
    uploads: UploadStore
    fence: LeaseFence

    async def load(self, request: Request) -> Response:
        policy = (await _decode_body(request, PolicyRequest)).policy
        try:
            check_artifact(self.engine.info, policy)
        except EngineError as error:
            return _error_response(error, 400)
        self._check_lease(request)
        await self.engine.load(policy)
        self.uploads.loaded_path = policy.artifact.path
        return _json_response({})

    async def keep(self, request: Request) -> Response:
        policy = (await _decode_body(request, PolicyRequest)).policy
        self._check_lease(request)
        await self.engine.keep(policy)
        return _json_response({})

    async def unload(self, request: Request) -> Response:
        policy = (await _decode_body(request, UnloadRequest)).policy
        self._check_lease(request)
        await self.engine.unload(policy)
        return _json_response({})

    async def stage(self, request: Request) -> Response:
        transfer = await _decode_body(request, WeightTransfer)
        self._check_lease(request)
        return _json_response(await self.engine.stage(transfer))

    async def commit(self, request: Request) -> Response:
        policy = (await _decode_body(request, PolicyRequest)).policy
        self._check_lease(request)
        await self.engine.commit(policy)
        return _json_response({})

    async def seen(self, request: Request) -> Response:
        return _json_response(await self.uploads.check_folder(await _decode_body(request, FolderCheck)))

    async def upload(self, request: Request) -> Response:
        return _json_response(await self.uploads.receive_folder(request))

    async def logprobs(self, request: Request) -> Response:
        try:
            token_ids, _, policy = unpack_request(await _read_body(request.receive))
            ids = check_score_request(self.engine.info, token_ids, policy)
        except EngineError as error:
            return _error_response(error, 400)
        with self.gate.admit():
            values = await self.engine.logprobs(ids, policy)
        return Response(pack_floats(values), media_type="application/octet-stream")

    async def info(self, request: Request) -> Response:
        return _json_response(self.engine.info)

    async def status(self, request: Request) -> Response:
        status = await self.engine.status()
        return _json_response(msgspec.structs.replace(status, draining=self.gate.is_closed))

    async def healthz(self, request: Request) -> Response:
        await self.engine.status()
        return _json_response({"ok": True})

    def _check_lease(self, request: Request) -> None:
        """Check the lease of a trainer. Other clients, such as the gateway, send none."""
        if (value := request.headers.get(LEASE_HEADER)) is not None:
            if not value.isdecimal():
                raise _BadRequest(f"The header {LEASE_HEADER} must be a number, got {value!r}.")
            self.fence.check(int(value))


async def _read_body(receive: Receive) -> bytes | bytearray:
    body = bytearray()
    has_more = True
    while has_more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        body += message.get("body", b"")
        has_more = message.get("more_body", False)
        if len(body) > MAX_BODY_BYTES:
            raise _BadRequest(f"The body is larger than the maximum of {MAX_BODY_BYTES} bytes.")
    return body


async def _decode_body(request: Request, expected_type: type[T]) -> T:
    try:
        return msgspec.json.decode(await _read_body(request.receive), type=expected_type)
    except msgspec.DecodeError as error:
        raise _BadRequest(f"The body is not a valid JSON {expected_type.__name__}: {error}") from error


class _BadRequest(EngineError):
    """The request body is too large or malformed. Sent to the client as an EngineError with status 400."""


async def _handle_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, InstarError)
    return _error_response(error)


def _json_response(value: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")


def _error_body(error: InstarError) -> dict[str, Any]:
    error_class = EngineError if isinstance(error, _BadRequest) else type(error)
    return {"error": {"type": error_class.__name__, "message": str(error)}}


def _error_response(error: InstarError, status: int | None = None) -> Response:
    if status is None:
        match error:
            case _BadRequest() | PromptTooLong():
                status = 400
            case PolicyNotFound():
                status = 404
            case EngineUnavailable():
                status = 503
            case _:
                status = 500
    return _json_response(_error_body(error), status)


class _RequireToken:
    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app = app
        self._token = token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        needs_token = scope["type"] == "http" and scope["path"] != "/healthz"
        if needs_token and not has_bearer_token(scope["headers"], self._token):
            error = EngineError("The bearer token is missing or wrong; send Authorization: Bearer <token>.")
            await _error_response(error, 401)(scope, receive, send)
        else:
            await self._app(scope, receive, send)
