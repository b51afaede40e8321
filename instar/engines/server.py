"""Any engine behind HTTP: tokens in, tokens out.

    POST /generate  {prompt_ids, params}  → one JSON TokenChunk per line, as they are sampled
    POST /load      {policy}              → {}
    GET  /info, /status, /healthz

An error is ``{"error": {"type": <class in instar.errors>, "message"}}``, as the body of a failed
response or, once a reply has begun, as its last line. Closing the connection cancels the request.
"""

from __future__ import annotations

import hmac
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TypeVar

import msgspec
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from instar.engines.base import Engine
from instar.engines.checks import check_request
from instar.errors import EngineError, EngineUnavailable, InstarError, PromptTooLong
from instar.types import Policy, SamplingParams, TokenChunk

MAX_BODY = 16 * 1024 * 1024
LINES = "application/x-ndjson"
T = TypeVar("T")


class GenerateBody(msgspec.Struct, forbid_unknown_fields=True):
    prompt_ids: list[int]
    params: SamplingParams = SamplingParams()


class LoadBody(msgspec.Struct, forbid_unknown_fields=True):
    policy: Policy


class ErrorDetail(msgspec.Struct):
    type: str
    message: str


class ErrorBody(msgspec.Struct):
    error: ErrorDetail


def create_engine_app(engine: Engine, token: str | None = None) -> Starlette:
    """The app. With a token, every route but /healthz asks for it as a bearer token."""
    routes = _Routes(engine)
    return Starlette(
        routes=[
            Route("/generate", _answer(routes.generate), methods=["POST"]),
            Route("/load", _answer(routes.load), methods=["POST"]),
            Route("/info", _answer(routes.info)),
            Route("/status", _answer(routes.status)),
            Route("/healthz", _answer(routes.healthz)),
        ],
        middleware=[Middleware(_BearerToken, token=token)] if token else [],
    )


class _Routes:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def generate(self, request: Request) -> Response:
        body = await _read(request, GenerateBody)
        try:
            check_request(self._engine.info, body.prompt_ids, body.params)
        except EngineError as error:
            return _error(400, error)
        chunks = self._engine.generate(body.prompt_ids, body.params)
        # The first chunk decides between an error status and a stream.
        first = await anext(chunks)
        return StreamingResponse(_lines(first, chunks), media_type=LINES)

    async def load(self, request: Request) -> Response:
        body = await _read(request, LoadBody)
        if body.policy.artifact.kind not in self._engine.info.artifacts:
            taken = ", ".join(self._engine.info.artifacts)
            return _error(400, EngineError(f"this engine loads {taken}, not {body.policy.artifact.kind}"))
        await self._engine.load(body.policy)
        return _json({})

    async def info(self, request: Request) -> Response:
        return _json(self._engine.info)

    async def status(self, request: Request) -> Response:
        return _json(await self._engine.status())

    async def healthz(self, request: Request) -> Response:
        await self._engine.status()
        return _json({"ok": True})


class _BadBody(Exception):
    """The request cannot be read; the message is for the client."""


async def _read(request: Request, kind: type[T]) -> T:
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > MAX_BODY:
            raise _BadBody(f"the body is larger than {MAX_BODY} bytes")
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.DecodeError as error:
        raise _BadBody(str(error)) from error


async def _lines(first: TokenChunk, rest: AsyncIterator[TokenChunk]) -> AsyncIterator[bytes]:
    """Starlette cancels this when the client goes away, which closes the engine's iterator."""
    encode = msgspec.json.encode
    try:
        yield encode(first) + b"\n"
        async for chunk in rest:
            yield encode(chunk) + b"\n"
    except InstarError as error:
        yield encode(_error_body(error)) + b"\n"
    finally:
        await rest.aclose()  # pyright: ignore[reportAttributeAccessIssue] # every generate() is a generator


def _answer(
    handler: Callable[[Request], Awaitable[Response]],
) -> Callable[[Request], Awaitable[Response]]:
    async def answer(request: Request) -> Response:
        try:
            return await handler(request)
        except _BadBody as error:
            return _error(400, EngineError(str(error)))
        except PromptTooLong as error:
            return _error(400, error)
        except EngineUnavailable as error:
            return _error(503, error)
        except InstarError as error:
            return _error(500, error)

    return answer


def _json(value: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")


def _error_body(error: InstarError) -> ErrorBody:
    return ErrorBody(ErrorDetail(type(error).__name__, str(error)))


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
