"""An HTTP server for any engine: token ids in, token ids out.

    POST /generate  params + prompt ids   → one JSON TokenChunk per line, as they are sampled
    POST /logprobs  token ids             → their logprobs
    POST /load      {policy}              → {}
    POST /stage     WeightTransfer        → the response for the sender
    POST /commit    {policy}              → {}
    POST /seen, /upload                     policy folders, see `uploads`
    GET  /info, /status, /healthz

All integers and floats are 4 bytes, little-endian. The body of /generate is the length of the params, the
SamplingParams as JSON, and the prompt ids. A line of the response holds all tokens that were ready when it
was sent. A missing logprob is null. The body of /logprobs is token ids, its response floats, the first one
NaN.

An error is ``{"error": {"type": <class in instar.errors>, "message"}}``, either the body of a failed response
or the last line of a reply that has begun. Closing the connection cancels the request.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Generator
from contextlib import aclosing, contextmanager
from typing import TypeVar

import msgspec
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from instar.engines.base import Engine, WeightTransfer
from instar.engines.checks import check_request, check_score_request
from instar.engines.uploads import UploadStore
from instar.engines.wire import encode_line, join_chunks, pack_floats, unpack_ids, unpack_request
from instar.errors import EngineError, EngineUnavailable, InstarError, PromptTooLong
from instar.http.auth import has_bearer_token
from instar.types import Policy, TokenChunk

MAX_BODY = 16 * 1024 * 1024
HEADERS = [(b"content-type", b"application/x-ndjson")]
T = TypeVar("T")


class LoadRequest(msgspec.Struct, forbid_unknown_fields=True):
    policy: Policy


class ErrorDetail(msgspec.Struct):
    type: str
    message: str


class ErrorBody(msgspec.Struct):
    error: ErrorDetail


class DrainGate:
    """Counts the requests that sample or score. A closed gate rejects new requests. ``drained`` is set once
    the gate is closed and the last request has finished."""

    def __init__(self) -> None:
        self.closed = False
        self.drained = asyncio.Event()
        self._active = 0

    def close(self) -> None:
        self.closed = True
        self._leave(0)

    @contextmanager
    def admit(self) -> Generator[None]:
        if self.closed:
            raise EngineUnavailable("The engine is being drained and accepts no new requests.")
        self._active += 1
        try:
            yield
        finally:
            self._leave(1)

    def _leave(self, count: int) -> None:
        self._active -= count
        if self.closed and not self._active:
            self.drained.set()


def create_engine_app(engine: Engine, token: str | None = None, gate: DrainGate | None = None) -> Starlette:
    """Return the HTTP app of an engine. With a token, every route except /healthz requires it as a bearer
    token."""
    gate = gate or DrainGate()
    uploads = UploadStore()
    handlers = _Handlers(engine, gate, uploads)
    return Starlette(
        routes=[
            Route("/generate", _GenerateEndpoint(engine, gate), methods=["POST"]),
            Route("/logprobs", _handle_errors(handlers.logprobs), methods=["POST"]),
            Route("/load", _handle_errors(handlers.load), methods=["POST"]),
            Route("/stage", _handle_errors(handlers.stage), methods=["POST"]),
            Route("/commit", _handle_errors(handlers.commit), methods=["POST"]),
            Route("/seen", _handle_errors(uploads.check_folder), methods=["POST"]),
            Route("/upload", _handle_errors(uploads.receive_folder), methods=["POST"]),
            Route("/info", _handle_errors(handlers.info)),
            Route("/status", _handle_errors(handlers.status)),
            Route("/healthz", _handle_errors(handlers.healthz)),
        ],
        middleware=[Middleware(_RequireToken, token=token)] if token else [],
    )


class _GenerateEndpoint:
    """The endpoint that streams replies. It is a plain ASGI app, because Starlette's responses take longer
    than a short scripted reply."""

    def __init__(self, engine: Engine, gate: DrainGate) -> None:
        self._engine = engine
        self._gate = gate

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            prompt, params = unpack_request(await _read_body(receive))
            check_request(self._engine.info, prompt, params)
        except ClientDisconnect:
            return
        except EngineError as error:
            await _error(400, error)(scope, receive, send)
            return
        try:
            with self._gate.admit():
                failure = await _ReplyStream(self._engine.generate(prompt, params), receive, send).run()
        except EngineUnavailable as error:
            failure = error
        if failure is not None:
            await _error(_status_of(failure), failure)(scope, receive, send)


class _ReplyStream:
    """Sends one reply. All tokens sampled while a line is being sent go into the next line. If the client
    disconnects, even before the first token, the engine's iterator is closed."""

    def __init__(self, chunks: AsyncGenerator[TokenChunk, None], receive: Receive, send: Send) -> None:
        self._chunks = chunks
        self._receive = receive
        self._send = send
        self._ready: list[TokenChunk] = []
        self._changed = asyncio.Event()

    async def run(self) -> InstarError | None:
        """Send the reply. Returns the error if one occurred before the first token."""
        sampling = self._start(self._sample())
        disconnect = self._start(_wait_for_disconnect(self._receive))
        has_begun = False
        try:
            while True:
                await self._changed.wait()
                self._changed.clear()
                if disconnect.done():
                    return None
                ended = sampling.done()
                error = sampling.result() if ended else None
                if error is not None and not has_begun and not self._ready:
                    return error
                if not has_begun:
                    has_begun = True
                    await self._send({"type": "http.response.start", "status": 200, "headers": HEADERS})
                await self._send(
                    {"type": "http.response.body", "body": self._take(error), "more_body": not ended}
                )
                if ended:
                    return None
        finally:
            sampling.cancel()
            disconnect.cancel()
            await asyncio.gather(sampling, disconnect, return_exceptions=True)

    def _start(self, work: Coroutine[None, None, T]) -> asyncio.Task[T]:
        task = asyncio.create_task(work)
        task.add_done_callback(lambda _: self._changed.set())
        return task

    async def _sample(self) -> InstarError | None:
        try:
            async with aclosing(self._chunks) as chunks:
                async for chunk in chunks:
                    self._ready.append(chunk)
                    self._changed.set()
        except InstarError as error:
            return error
        return None

    def _take(self, error: InstarError | None) -> bytes:
        lines = encode_line(join_chunks(self._ready)) if self._ready else b""
        self._ready.clear()
        return lines if error is None else lines + msgspec.json.encode(_error_body(error)) + b"\n"


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class _Handlers:
    def __init__(self, engine: Engine, gate: DrainGate, uploads: UploadStore) -> None:
        self._engine = engine
        self._gate = gate
        self._uploads = uploads

    async def load(self, request: Request) -> Response:
        body = await _decode_body(request, LoadRequest)
        if body.policy.artifact.kind not in self._engine.info.artifacts:
            kinds = ", ".join(self._engine.info.artifacts)
            return _error(400, EngineError(f"This engine loads {kinds}, not {body.policy.artifact.kind}."))
        await self._engine.load(body.policy)
        self._uploads.loaded_path = body.policy.artifact.path
        return _json({})

    async def stage(self, request: Request) -> Response:
        return _json(await self._engine.stage(await _decode_body(request, WeightTransfer)))

    async def commit(self, request: Request) -> Response:
        await self._engine.commit((await _decode_body(request, LoadRequest)).policy)
        return _json({})

    async def logprobs(self, request: Request) -> Response:
        try:
            ids = unpack_ids(await _read_body(request.receive))
            check_score_request(self._engine.info, ids)
        except EngineError as error:
            return _error(400, error)
        with self._gate.admit():
            values = await self._engine.logprobs(ids)
        return Response(pack_floats(values), media_type="application/octet-stream")

    async def info(self, request: Request) -> Response:
        return _json(self._engine.info)

    async def status(self, request: Request) -> Response:
        return _json(msgspec.structs.replace(await self._engine.status(), draining=self._gate.closed))

    async def healthz(self, request: Request) -> Response:
        await self._engine.status()
        return _json({"ok": True})


async def _read_body(receive: Receive) -> bytes | bytearray:
    body = bytearray()
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        body += message.get("body", b"")
        more = message.get("more_body", False)
        if len(body) > MAX_BODY:
            raise _BadRequest(f"The body is larger than {MAX_BODY} bytes.")
    return body


async def _decode_body(request: Request, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(await _read_body(request.receive), type=kind)
    except msgspec.DecodeError as error:
        raise _BadRequest(str(error)) from error


class _BadRequest(EngineError):
    """An error for requests that cannot be parsed."""


def _handle_errors(
    handler: Callable[[Request], Awaitable[Response]],
) -> Callable[[Request], Awaitable[Response]]:
    async def handle(request: Request) -> Response:
        try:
            return await handler(request)
        except InstarError as error:
            return _error(_status_of(error), error)

    return handle


def _status_of(error: InstarError) -> int:
    match error:
        case _BadRequest() | PromptTooLong():
            return 400
        case EngineUnavailable():
            return 503
        case _:
            return 500


def _json(value: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")


def _error_body(error: InstarError) -> ErrorBody:
    kind = EngineError if isinstance(error, _BadRequest) else type(error)
    return ErrorBody(ErrorDetail(kind.__name__, str(error)))


def _error(status: int, error: InstarError) -> Response:
    return _json(_error_body(error), status)


class _RequireToken:
    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app = app
        self._token = token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_guarded = scope["type"] == "http" and scope["path"] != "/healthz"
        if is_guarded and not has_bearer_token(scope["headers"], self._token):
            error = EngineError("A bearer token is required; send the header Authorization: Bearer <token>.")
            await _error(401, error)(scope, receive, send)
        else:
            await self._app(scope, receive, send)
