"""Any engine behind HTTP: tokens in, tokens out.

    POST /generate  params + prompt ids   → one JSON TokenChunk per line, as they are sampled
    POST /logprobs  token ids             → their logprobs
    POST /load      {policy}              → {}
    POST /stage     Transfer              → what the sender is to know
    POST /commit    {policy}              → {}
    POST /seen, /upload                     policies' folders, see `uploads`
    GET  /info, /status, /healthz

The body of /generate is, one after the other: 4 bytes, little-endian, the length of what follows; the
SamplingParams as JSON; the ids of the prompt as 4-byte integers, little-endian, to the end of the body.
A line holds all tokens that were ready when it was sent. A missing logprob is null.
The body of /logprobs is such ids alone, the answer 4-byte floats, little-endian, the first one NaN.

An error is ``{"error": {"type": <class in instar.errors>, "message"}}``, as the body of a failed
response or, once a reply has begun, as its last line. Closing the connection cancels the request.
"""

from __future__ import annotations

import asyncio
import hmac
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
    """Through it go the requests that sample or score. Closed, it lets no more in; ``empty`` is set once it
    is closed and all are out."""

    def __init__(self) -> None:
        self.closed = False
        self.drained = asyncio.Event()
        self._inside = 0

    def close(self) -> None:
        self.closed = True
        self._leave(0)

    @contextmanager
    def admit(self) -> Generator[None]:
        if self.closed:
            raise EngineUnavailable("it is being drained and takes no further request")
        self._inside += 1
        try:
            yield
        finally:
            self._leave(1)

    def _leave(self, count: int) -> None:
        self._inside -= count
        if self.closed and not self._inside:
            self.drained.set()


def create_engine_app(engine: Engine, token: str | None = None, gate: DrainGate | None = None) -> Starlette:
    """The app. With a token, every route but /healthz asks for it as a bearer token."""
    gate = gate or DrainGate()
    uploads = UploadStore()
    routes = _Handlers(engine, gate, uploads)
    return Starlette(
        routes=[
            Route("/generate", _GenerateEndpoint(engine, gate), methods=["POST"]),
            Route("/logprobs", _answer(routes.logprobs), methods=["POST"]),
            Route("/load", _answer(routes.load), methods=["POST"]),
            Route("/stage", _answer(routes.stage), methods=["POST"]),
            Route("/commit", _answer(routes.commit), methods=["POST"]),
            Route("/seen", _answer(uploads.check_folder), methods=["POST"]),
            Route("/upload", _answer(uploads.receive_folder), methods=["POST"]),
            Route("/info", _answer(routes.info)),
            Route("/status", _answer(routes.status)),
            Route("/healthz", _answer(routes.healthz)),
        ],
        middleware=[Middleware(_BearerToken, token=token)] if token else [],
    )


class _GenerateEndpoint:
    """A plain ASGI app: what Starlette's responses would add costs more than playing a short reply."""

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
                refused = await _ReplyStream(self._engine.generate(prompt, params), receive, send).run()
        except EngineUnavailable as error:
            refused = error
        if refused is not None:
            await _error(_status_of(refused), refused)(scope, receive, send)


class _ReplyStream:
    """One reply on its way: what the engine has sampled while the last line was sent goes out as the next
    one. A client that goes away, also one that still waits for its first token, closes the engine's iterator.
    """

    def __init__(self, chunks: AsyncGenerator[TokenChunk, None], receive: Receive, send: Send) -> None:
        self._chunks = chunks
        self._receive = receive
        self._send = send
        self._ready: list[TokenChunk] = []
        self._news = asyncio.Event()

    async def run(self) -> InstarError | None:
        """Returns the error that came in the place of a first token."""
        sampling = self._start(self._sample())
        leaving = self._start(_disconnected(self._receive))
        began = False
        try:
            while True:
                await self._news.wait()
                self._news.clear()
                if leaving.done():
                    return None
                ended = sampling.done()
                error = sampling.result() if ended else None
                if error is not None and not began and not self._ready:
                    return error
                if not began:
                    began = True
                    await self._send({"type": "http.response.start", "status": 200, "headers": HEADERS})
                await self._send(
                    {"type": "http.response.body", "body": self._take(error), "more_body": not ended}
                )
                if ended:
                    return None
        finally:
            sampling.cancel()
            leaving.cancel()
            await asyncio.gather(sampling, leaving, return_exceptions=True)

    def _start(self, work: Coroutine[None, None, T]) -> asyncio.Task[T]:
        task = asyncio.create_task(work)
        task.add_done_callback(lambda _: self._news.set())
        return task

    async def _sample(self) -> InstarError | None:
        try:
            async with aclosing(self._chunks) as chunks:
                async for chunk in chunks:
                    self._ready.append(chunk)
                    self._news.set()
        except InstarError as error:
            return error
        return None

    def _take(self, error: InstarError | None) -> bytes:
        lines = encode_line(join_chunks(self._ready)) if self._ready else b""
        self._ready.clear()
        return lines if error is None else lines + msgspec.json.encode(_error_body(error)) + b"\n"


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class _Handlers:
    def __init__(self, engine: Engine, gate: DrainGate, uploads: UploadStore) -> None:
        self._engine = engine
        self._gate = gate
        self._uploads = uploads

    async def load(self, request: Request) -> Response:
        body = await _decoded(request, LoadRequest)
        if body.policy.artifact.kind not in self._engine.info.artifacts:
            taken = ", ".join(self._engine.info.artifacts)
            return _error(400, EngineError(f"this engine loads {taken}, not {body.policy.artifact.kind}"))
        await self._engine.load(body.policy)
        self._uploads.loaded_path = body.policy.artifact.path
        return _json({})

    async def stage(self, request: Request) -> Response:
        return _json(await self._engine.stage(await _decoded(request, WeightTransfer)))

    async def commit(self, request: Request) -> Response:
        await self._engine.commit((await _decoded(request, LoadRequest)).policy)
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
            raise _BadBody(f"the body is larger than {MAX_BODY} bytes")
    return body


async def _decoded(request: Request, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(await _read_body(request.receive), type=kind)
    except msgspec.DecodeError as error:
        raise _BadBody(str(error)) from error


class _BadBody(EngineError):
    """The request cannot be read; the message is for the client."""


def _answer(
    handler: Callable[[Request], Awaitable[Response]],
) -> Callable[[Request], Awaitable[Response]]:
    async def answer(request: Request) -> Response:
        try:
            return await handler(request)
        except InstarError as error:
            return _error(_status_of(error), error)

    return answer


def _status_of(error: InstarError) -> int:
    match error:
        case _BadBody() | PromptTooLong():
            return 400
        case EngineUnavailable():
            return 503
        case _:
            return 500


def _json(value: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")


def _error_body(error: InstarError) -> ErrorBody:
    kind = EngineError if isinstance(error, _BadBody) else type(error)
    return ErrorBody(ErrorDetail(kind.__name__, str(error)))


def _error(status: int, error: InstarError) -> Response:
    return _json(_error_body(error), status)


class _BearerToken:
    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app = app
        self._expected = f"Bearer {token}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] != "/healthz":
            given = dict(scope["headers"]).get(b"authorization", b"")
            if not hmac.compare_digest(given, self._expected):
                await _error(401, EngineError("a bearer token is required"))(scope, receive, send)
                return
        await self._app(scope, receive, send)
