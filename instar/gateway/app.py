"""The gateway's routes. Knows no dialect's details: each is chosen by its path."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, TypeVar, cast

import msgspec
import orjson
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from instar.config import GatewayConfig, SamplingConfig
from instar.engines.base import Engine
from instar.errors import EngineError, EngineUnavailable, PromptTooLong, RenderError, StoreError
from instar.gateway.auth import Keys, bearer
from instar.gateway.base import (
    SESSION_HEADER,
    ApiError,
    CompleteSession,
    FailSession,
    OpenedSession,
    OpenSession,
    bad_request,
    from_validation,
)
from instar.gateway.calls import Calls, Exchange
from instar.gateway.dialects.base import Dialect, StreamWriter, TokenLogprob
from instar.gateway.sessions import Caller, Sessions, SessionState
from instar.record.base import Delta, Renderer
from instar.record.graph import MessageGraph
from instar.registry import names, resolve
from instar.store.base import Store
from instar.types import SessionStatus

T = TypeVar("T")
JSON = "application/json"


def create_app(
    *,
    store: Store,
    engine: Engine,
    renderer: Renderer,
    run_id: str,
    agent_id: str,
    policy_id: str,
    config: GatewayConfig,
    admin_key: str,
    train_sampling: SamplingConfig | None = None,
) -> Starlette:
    """``train_sampling``: forced on the train channel. Closing store and engine is the caller's."""
    sessions = Sessions(
        store,
        Keys(admin_key),
        MessageGraph,
        run_id=run_id,
        agent_id=agent_id,
        policy_id=policy_id,
        limit=config.max_sessions_in_memory,
    )
    calls = Calls(store, engine, renderer, sessions, config, train_sampling or SamplingConfig())
    gateway = Gateway(sessions, calls, policy_id, config.max_body)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncGenerator[None]:
        yield
        await calls.drain()

    return Starlette(
        routes=gateway.routes(),
        lifespan=lifespan,
        exception_handlers={
            ApiError: gateway.on_error,
            StoreError: gateway.on_error,
            HTTPException: gateway.on_error,
            Exception: gateway.on_error,
        },
    )


def api_error(error: Exception) -> ApiError:
    """What a failure looks like from outside."""
    match error:
        case ApiError():
            return error
        case PromptTooLong():
            return ApiError(400, str(error), code="context_length_exceeded", param="messages")
        case RenderError():
            return ApiError(400, str(error), code="invalid_messages", param="messages")
        case EngineUnavailable():
            return ApiError(503, f"The engine is not ready: {error}", code="unavailable", retry_after=1)
        case EngineError():
            return ApiError(502, f"The engine failed: {error}", code="engine_error")
        case StoreError():
            return ApiError(503, f"The store refused: {error}", code="store_error", retry_after=1)
        case HTTPException():
            return ApiError(error.status_code, error.detail)
        case _:
            return ApiError(500, "Internal error; the gateway's log says more.", code="internal")


class Gateway:
    def __init__(self, sessions: Sessions, calls: Calls, policy_id: str, max_body: int) -> None:
        self._sessions = sessions
        self._calls = calls
        self._policy_id = policy_id
        self._max_body = max_body
        self._dialects = [cast(Dialect, resolve("dialects", name)()) for name in names("dialects")]

    def routes(self) -> list[Route]:
        routes = [
            Route("/healthz", self.health),
            Route("/sessions", self.open_session, methods=["POST"]),
            Route("/sessions/{session}", self.read_session),
            Route("/sessions/{session}/complete", self.complete_session, methods=["POST"]),
            Route("/sessions/{session}/fail", self.fail_session, methods=["POST"]),
        ]
        for prefix in ("/v1", "/s/{session}/v1"):
            routes.append(Route(f"{prefix}/models", self.models))
            for dialect in self._dialects:
                routes.append(Route(f"{prefix}{dialect.path}", self._endpoint(dialect), methods=["POST"]))
        return routes

    # --- model calls ------------------------------------------------------------------------------

    def _endpoint(self, dialect: Dialect) -> Callable[[HttpRequest], Awaitable[Response]]:
        async def endpoint(http: HttpRequest) -> Response:
            try:
                caller = await self._caller(http)
                request = dialect.read(await self._body(http))
                state = await self._session_of(http, caller)
                if state is None:
                    state = await self._sessions.live(MessageGraph.keys(request.messages, request.tools))
                if state.session.status is not SessionStatus.OPEN:
                    raise ApiError(410, "This session has ended.", code="session_ended")
            except (ApiError, StoreError) as error:
                return _failure(dialect, api_error(error))
            exchange = Exchange(self._calls, state, request, dialect.name)
            # OpenAI's clients count their retries: that is evidence of a replay, not of a second wish.
            retried = http.headers.get("x-stainless-retry-count", "0") != "0"
            return CallResponse(dialect, exchange, replay=retried)

        return endpoint

    async def _caller(self, http: HttpRequest) -> Caller:
        return await self._sessions.identify(bearer(http.headers))

    async def _session_of(self, http: HttpRequest, caller: Caller) -> SessionState | None:
        named = self._sessions.choose(
            caller, url=http.path_params.get("session"), header=http.headers.get(SESSION_HEADER)
        )
        return await self._sessions.state(named) if named else None

    async def _body(self, http: HttpRequest) -> bytes:
        body = bytearray()
        async for chunk in http.stream():
            body += chunk
            if len(body) > self._max_body:
                raise ApiError(413, f"The body is larger than {self._max_body} bytes.", code="too_large")
        return bytes(body)

    async def models(self, http: HttpRequest) -> Response:
        await self._session_of(http, await self._caller(http))
        model = {"id": self._policy_id, "object": "model", "created": 0, "owned_by": "instar"}
        return _json({"object": "list", "data": [model]})

    async def health(self, http: HttpRequest) -> Response:
        try:
            async with asyncio.timeout(2):
                status = await self._calls.engine.status()
        except (EngineError, TimeoutError) as error:
            return _json({"status": "ok", "engine": "down", "reason": str(error)})
        return _json({"status": "ok", "engine": "up", "version": status.version})

    # --- control ----------------------------------------------------------------------------------

    async def open_session(self, http: HttpRequest) -> Response:
        if not (await self._caller(http)).admin:
            raise ApiError(403, "Only the admin key opens sessions.", code="not_allowed")
        session, key = await self._sessions.open(_decode(await self._body(http), OpenSession))
        base_url = f"{http.url.scheme}://{http.url.netloc}/s/{session.session_id}/v1"
        opened = OpenedSession(session_id=session.session_id, base_url=base_url, api_key=key)
        return _struct(opened, 201)

    async def complete_session(self, http: HttpRequest) -> Response:
        return await self._end(http, CompleteSession)

    async def fail_session(self, http: HttpRequest) -> Response:
        return await self._end(http, FailSession)

    async def _end(self, http: HttpRequest, kind: type[CompleteSession | FailSession]) -> Response:
        caller = await self._caller(http)
        asked = _decode(await self._body(http), kind)
        return _struct(await self._sessions.end(http.path_params["session"], caller, asked))

    async def read_session(self, http: HttpRequest) -> Response:
        caller = await self._caller(http)
        return _struct(await self._sessions.view(http.path_params["session"], caller))

    async def on_error(self, http: HttpRequest, error: Exception) -> Response:
        return _failure(self._dialects[0], api_error(error))


class CallResponse(Response):
    """Samples while it answers, and stops when the client goes away."""

    def __init__(self, dialect: Dialect, exchange: Exchange, *, replay: bool) -> None:
        super().__init__()
        self._dialect = dialect
        self._exchange = exchange
        self._replay = replay

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        work = asyncio.create_task(self._answer(scope, receive, send))
        gone = asyncio.create_task(_disconnected(receive))
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            gone.cancel()
            if not work.done():
                work.cancel()
            with suppress(asyncio.CancelledError):
                await work

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = self._exchange
        if exchange.request.stream:
            await EventStream(self._dialect, exchange, send).run(scope, receive, replay=self._replay)
            return
        try:
            choices = await exchange.run(replay=self._replay)
        except _EXPECTED as error:
            await _failure(self._dialect, api_error(error))(scope, receive, send)
            return
        body = self._dialect.answer(exchange.request_id, exchange.request, choices)
        await Response(body, media_type=JSON)(scope, receive, send)


class EventStream:
    """A streamed answer. Headers leave with the first piece, so an early failure has its own status."""

    def __init__(self, dialect: Dialect, exchange: Exchange, send: Send) -> None:
        self._dialect = dialect
        self._exchange = exchange
        self._send = send
        self._writer: StreamWriter | None = None

    async def run(self, scope: Scope, receive: Receive, *, replay: bool) -> None:
        try:
            choices = await self._exchange.run(self._emit, replay=replay)
            last = (await self._begun()).end(choices)
        except _EXPECTED as error:
            if self._writer is None:
                await _failure(self._dialect, api_error(error))(scope, receive, self._send)
                return
            last = self._writer.failure(api_error(error))
        await self._send({"type": "http.response.body", "body": last, "more_body": False})

    async def _emit(self, index: int, deltas: Sequence[Delta], logprobs: Sequence[TokenLogprob]) -> None:
        piece = (await self._begun()).delta(index, deltas, logprobs)
        if piece:
            await self._send({"type": "http.response.body", "body": piece, "more_body": True})

    async def _begun(self) -> StreamWriter:
        if self._writer is None:
            exchange = self._exchange
            self._writer = self._dialect.writer(exchange.request_id, exchange.request)
            headers = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-cache")]
            await self._send({"type": "http.response.start", "status": 200, "headers": headers})
            first = b"".join(map(self._writer.begin, range(exchange.request.n)))
            await self._send({"type": "http.response.body", "body": first, "more_body": True})
        return self._writer


_EXPECTED = (ApiError, EngineError, RenderError, StoreError)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _decode(body: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(body or b"{}", type=kind)
    except msgspec.DecodeError as error:
        raise from_validation(error) from error
    except (UnicodeDecodeError, RecursionError) as error:
        raise bad_request(f"The body is not valid JSON: {error}", code="invalid_json") from error


def _failure(dialect: Dialect, error: ApiError) -> Response:
    headers = {"retry-after": str(error.retry_after)} if error.retry_after else None
    return Response(dialect.error(error), error.status, headers, JSON)


def _json(value: Any) -> Response:
    return Response(orjson.dumps(value), media_type=JSON)


def _struct(value: msgspec.Struct, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type=JSON)
