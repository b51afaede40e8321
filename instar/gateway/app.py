"""The gateway's routes. Knows no dialect's details: each is chosen by its path."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any, TypeVar, cast

import msgspec
import orjson
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from instar.config import GatewayConfig, ModelRoute, SamplingConfig
from instar.engines.base import Engine
from instar.errors import EngineError, StoreError
from instar.gateway.answers import CallResponse, ForwardResponse, api_error, failure
from instar.gateway.auth import Caller, Keys, bearer
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
from instar.gateway.calls import Calls, Evidence, Exchange
from instar.gateway.dialects.base import Dialect, Request
from instar.gateway.dialects.messages import models_answer
from instar.gateway.forward import Forward, as_message
from instar.gateway.identity import external_id
from instar.gateway.recall import Recall
from instar.gateway.recording import Recorder
from instar.gateway.sessions import Named, Sessions, SessionState
from instar.gateway.upstream.base import Upstream
from instar.gateway.watch import LoopWatch, memory_mb
from instar.record.base import Renderer
from instar.record.chain import Chain, Hasher
from instar.record.redact import Redactor
from instar.registry import names, resolve
from instar.store.base import Store
from instar.types import new_id

T = TypeVar("T")
JSON = "application/json"
HASH_KEY = "message-hashes"
"""The store's secret that messages are hashed with."""


def create_app(
    *,
    store: Store,
    engine: Engine | None,
    renderer: Renderer | None,
    run_id: str,
    agent_id: str,
    policy_id: str,
    config: GatewayConfig,
    admin_key: str,
    hash_key: bytes = b"",
    train_sampling: SamplingConfig | None = None,
    upstreams: Mapping[str, Upstream] | None = None,
    upstream: Upstream | None = None,
    models: Mapping[str, ModelRoute] | None = None,
) -> Starlette:
    """``train_sampling``: forced on the train channel. ``upstream``: answers in the place of an engine.
    Closing store, engine and upstreams is the caller's."""
    hasher = Hasher(hash_key)
    sessions = Sessions(
        store,
        Keys(store, admin_key, run_id),
        hasher,
        run_id=run_id,
        agent_id=agent_id,
        policy_id=policy_id,
        limit=config.max_sessions_in_memory,
    )
    recorder = Recorder(store, sessions, hasher, Redactor.of(config.redact))
    calls = None
    if engine is not None and renderer is not None:
        sampling = train_sampling or SamplingConfig()
        calls = Calls(store, engine, renderer, sessions, recorder, config, sampling)
    routing = Routing(calls, upstream, upstreams or {}, models or {})
    gateway = Gateway(sessions, recorder, routing, hasher, config, policy_id)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncGenerator[None]:
        async with gateway.background():
            yield
        await recorder.drain()

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


class Routing:
    """What answers when an agent asks for a model by some name."""

    def __init__(
        self,
        calls: Calls | None,
        upstream: Upstream | None,
        upstreams: Mapping[str, Upstream],
        models: Mapping[str, ModelRoute],
    ) -> None:
        self.calls = calls
        self._upstream = upstream
        self._upstreams = upstreams
        self._models = models

    def of(self, model: str) -> tuple[Upstream | None, bool]:
        """The upstream, or None for the engine; and whether its calls may be trained on."""
        for pattern, route in self._models.items():
            if fnmatchcase(model, pattern):
                upstream = self._upstreams[route.upstream] if route.upstream else self._upstream
                return upstream, route.trainable
        return self._upstream, True


class Gateway:
    def __init__(
        self,
        sessions: Sessions,
        recorder: Recorder,
        routing: Routing,
        hasher: Hasher,
        config: GatewayConfig,
        policy_id: str,
    ) -> None:
        self._sessions = sessions
        self._recorder = recorder
        self._routing = routing
        self._hasher = hasher
        self._recall = Recall(hasher)
        self._config = config
        self._policy_id = policy_id
        self._dialects = [cast(Dialect, resolve("dialects", name)()) for name in names("dialects")]
        self._watch = LoopWatch()
        self._in_flight = 0

    def routes(self) -> list[Route]:
        routes: list[Route] = []
        for prefix in ("/v1", "/s/{session}/v1"):
            for dialect in self._dialects:
                routes.append(Route(f"{prefix}{dialect.path}", self._endpoint(dialect), methods=["POST"]))
                if dialect.count_path:
                    counting = self._counting(dialect)
                    routes.append(Route(f"{prefix}{dialect.count_path}", counting, methods=["POST"]))
            routes.append(Route(f"{prefix}/models", self.models))
            routes.append(Route(f"{prefix}/models/{{model:path}}", self.model))
        return [
            *routes,
            Route("/healthz", self.health),
            Route("/stats", self.stats),
            Route("/sessions", self.open_session, methods=["POST"]),
            Route("/sessions/{session}", self.read_session),
            Route("/sessions/{session}/complete", self.complete_session, methods=["POST"]),
            Route("/sessions/{session}/fail", self.fail_session, methods=["POST"]),
        ]

    @asynccontextmanager
    async def background(self) -> AsyncGenerator[None]:
        tasks = [asyncio.create_task(self._watch.run()), asyncio.create_task(self._close_silent())]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _close_silent(self) -> None:
        limit = self._config.idle_timeout
        while True:
            await asyncio.sleep(min(limit / 4, 30))
            try:
                await self._sessions.close_silent(limit)
            except StoreError as error:
                print(f"silent sessions stay open for now: {error}", flush=True)

    # --- model calls ------------------------------------------------------------------------------

    def _endpoint(self, dialect: Dialect) -> Callable[[HttpRequest], Awaitable[Response]]:
        async def endpoint(http: HttpRequest) -> Response:
            try:
                if self._in_flight >= self._config.max_in_flight:
                    raise ApiError(429, "Too many requests at once.", code="too_many_requests", retry_after=1)
                return await self._call(dialect, http)
            except (ApiError, StoreError) as error:
                return failure(dialect, api_error(error))

        return endpoint

    async def _call(self, dialect: Dialect, http: HttpRequest) -> Response:
        caller, headers = await self._caller(http), http.headers
        body = await self._body(http)
        url, header = http.path_params.get("session"), headers.get(SESSION_HEADER)
        where = url or header or caller.session_id or caller.agent_id
        request, chain = self._recall.read(dialect, where, body)
        self._check_size(request)
        request, chain, previous = await self._with_previous(caller, request, chain)
        upstream, trainable = self._routing.of(request.model)
        if request.prompt is not None and (upstream is not None or isinstance(request.prompt, str)):
            chain = self._hasher.chain([as_message(request.prompt)])
        named = Named(url, header, external_id(headers, request.identity), previous)
        state = await self._sessions.resolve(caller, named, chain)
        evidence = _evidence(headers)
        request_id = f"{dialect.id_prefix}-{new_id('')[1:]}"
        if upstream is None:
            exchange = self._exchange(state, request, chain, request_id, dialect, evidence, trainable)
            return CallResponse(dialect, exchange, self._counted)
        if request.prompt is not None:
            request = replace(request, messages=(as_message(request.prompt),))
        forward = Forward(
            self._sessions,
            self._recorder,
            upstream,
            state,
            request,
            chain,
            request_id=request_id,
            dialect=dialect.name,
            body=body,
            headers=_without_our_keys(headers),
            config=self._config,
            evidence=evidence,
            trainable=trainable,
        )
        return ForwardResponse(dialect, forward, self._counted)

    def _exchange(
        self,
        state: SessionState,
        request: Request,
        chain: Chain,
        request_id: str,
        dialect: Dialect,
        evidence: Evidence,
        trainable: bool,
    ) -> Exchange:
        if self._routing.calls is None:
            raise ApiError(
                404, f"There is no model {request.model!r}.", code="model_not_found", param="model"
            )
        return Exchange(
            self._routing.calls,
            state,
            request,
            chain,
            request_id=request_id,
            dialect=dialect.name,
            evidence=evidence,
            trainable=trainable,
        )

    def _counted(self, change: int) -> None:
        self._in_flight += change

    def _check_size(self, request: Request) -> None:
        for name, given, limit in (
            ("messages", len(request.messages), self._config.max_messages),
            ("tools", len(request.tools), self._config.max_tools),
        ):
            if given > limit:
                raise bad_request(f"{given} {name} are more than {limit}.", name, "too_many")

    async def _with_previous(
        self, caller: Caller, request: Request, chain: Chain
    ) -> tuple[Request, Chain, str | None]:
        """With the messages of the answer that it continues, and that answer's session."""
        if request.previous is None:
            return request, chain, None
        call = (await self._sessions.answer(caller, request.previous))[0]
        own, new = request.messages[: request.instructions], request.messages[request.instructions :]
        earlier = call.messages
        if earlier and earlier[0]["role"] == "system" and call.dialect == "responses":
            earlier = earlier[1:]
        request = replace(request, messages=(*own, *earlier, call.reply, *new))
        return request, self._hasher.chain(request.messages, request.tools), call.session_id

    def _counting(self, dialect: Dialect) -> Callable[[HttpRequest], Awaitable[Response]]:
        async def endpoint(http: HttpRequest) -> Response:
            try:
                await self._caller(http)
                request = dialect.read_count(await self._body(http))
                if self._routing.calls is None:
                    raise ApiError(404, "Tokens cannot be counted without a model of our own.")
                ids = self._routing.calls.renderer.render(request.messages, request.tools)
                return Response(dialect.count(len(ids)), media_type=JSON)
            except Exception as error:  # noqa: BLE001 — in the dialect's own words
                return failure(dialect, api_error(error))

        return endpoint

    async def _caller(self, http: HttpRequest) -> Caller:
        headers = http.headers
        if sum(len(name) + len(value) for name, value in headers.raw) > self._config.max_header:
            raise ApiError(431, f"The headers are larger than {self._config.max_header} bytes.")
        return await self._sessions.keys.identify(bearer(headers))

    async def _body(self, http: HttpRequest) -> bytes:
        limit = self._config.max_body
        if http.headers.get("content-encoding", "identity") != "identity":
            raise ApiError(415, "Compressed bodies are not taken.", code="unsupported_encoding")
        chunks: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(self._config.read_timeout):
                async for chunk in http.stream():
                    chunks.append(chunk)
                    size += len(chunk)
                    if size > limit:
                        raise ApiError(413, f"The body is larger than {limit} bytes.", code="too_large")
        except TimeoutError as error:
            raise ApiError(408, "The body did not arrive in time.", code="timeout") from error
        return chunks[0] if len(chunks) == 1 else b"".join(chunks)

    async def models(self, http: HttpRequest) -> Response:
        await self._caller(http)
        if "anthropic-version" in http.headers:
            return Response(models_answer([self._policy_id]), media_type=JSON)
        return _json({"object": "list", "data": [self._model(self._policy_id)]})

    async def model(self, http: HttpRequest) -> Response:
        await self._caller(http)
        return _json(self._model(http.path_params["model"]))

    def _model(self, name: str) -> dict[str, Any]:
        return {"id": name, "object": "model", "created": 0, "owned_by": "instar"}

    async def health(self, http: HttpRequest) -> Response:
        if self._routing.calls is None:
            return _json({"status": "ok", "engine": "none"})
        try:
            async with asyncio.timeout(2):
                status = await self._routing.calls.engine.status()
        except (EngineError, TimeoutError) as error:
            return _json({"status": "ok", "engine": "down", "reason": str(error)})
        return _json({"status": "ok", "engine": "up", "version": status.version})

    async def stats(self, http: HttpRequest) -> Response:
        if (await self._caller(http)).kind != "admin":
            raise ApiError(403, "Only the admin key reads these.", code="not_allowed")
        lag = self._watch.p99() * 1000
        return _json({"loop_lag_p99_ms": lag, "rss_mb": memory_mb(), "in_flight": self._in_flight})

    # --- control ----------------------------------------------------------------------------------

    async def open_session(self, http: HttpRequest) -> Response:
        caller = await self._caller(http)
        session, key = await self._sessions.open(caller, _decode(await self._body(http), OpenSession))
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
        fits = (d for d in self._dialects if http.url.path.endswith((d.path, d.count_path or d.path)))
        return failure(next(fits, self._chat), api_error(error))

    @property
    def _chat(self) -> Dialect:
        return next(dialect for dialect in self._dialects if dialect.name == "chat")


def _evidence(headers: Headers) -> Evidence:
    """OpenAI's and Anthropic's clients count their retries: that tells a replay from a second wish."""
    retried = headers.get("x-stainless-retry-count", "0") != "0"
    return Evidence(headers.get("idempotency-key"), retried)


def _without_our_keys(headers: Headers) -> dict[str, str]:
    """The agent's headers, without a key that is ours: it is nobody else's business."""
    kept: dict[str, str] = {}
    for name, value in headers.items():
        if name in ("authorization", "x-api-key", "api-key"):
            continue
        kept[name] = value
    return kept


def _decode(body: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(body or b"{}", type=kind)
    except msgspec.DecodeError as error:
        raise from_validation(error) from error
    except (UnicodeDecodeError, RecursionError) as error:
        raise bad_request(f"The body is not valid JSON: {error}", code="invalid_json") from error


def _json(value: Any) -> Response:
    return Response(orjson.dumps(value), media_type=JSON)


def _struct(value: msgspec.Struct, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type=JSON)
