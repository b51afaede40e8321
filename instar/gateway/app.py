"""The gateway's routes. Knows no dialect's details: each is chosen by its path."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Generator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any, TypeVar, cast

import msgspec
import orjson
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

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
from instar.gateway.calls import Calls, Exchange
from instar.gateway.dialects.base import Dialect, Request
from instar.gateway.dialects.messages import models_answer
from instar.gateway.forward import Forward, as_message
from instar.gateway.identity import evidence, external_id
from instar.gateway.protocol import connection
from instar.gateway.recall import Recall
from instar.gateway.recording import Recorder
from instar.gateway.sessions import Named, Sessions
from instar.gateway.tokens import GenerateResponse, submit
from instar.gateway.upstream.base import Upstream
from instar.gateway.watch import LoopWatch, memory_mb
from instar.gateway.whitebox import read_generate, read_submission, write_submitted
from instar.record.base import Renderer
from instar.record.chain import Chain, Hasher
from instar.record.redact import Redactor
from instar.registry import names, resolve
from instar.store.base import Store
from instar.types import new_id

T = TypeVar("T")
JSON = "application/json"
_PREFIXES = ("/v1", "/s/{session}/v1")
_KEY_HEADERS = frozenset({"authorization", "x-api-key", "api-key"})
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
    hasher, redactor = Hasher(hash_key), Redactor.of(config.redact)
    sessions = Sessions(
        store,
        Keys(store, admin_key, run_id),
        hasher,
        run_id=run_id,
        agent_id=agent_id,
        policy_id=policy_id,
        limit=config.max_sessions_in_memory,
        redactor=redactor,
    )
    sampling = train_sampling or SamplingConfig()
    recorder = Recorder(store, sessions, hasher, redactor, renderer)
    calls = None
    if engine is not None and renderer is not None:
        calls = Calls(store, engine, renderer, sessions, recorder, config, sampling)
    routing = Routing(calls, upstream, upstreams or {}, models or {})
    gateway = Gateway(sessions, recorder, routing, hasher, config, policy_id, sampling)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncGenerator[None]:
        async with gateway.background():
            yield
        await recorder.drain()

    return App(
        gateway,
        routes=gateway.routes(),
        lifespan=lifespan,
        exception_handlers={
            ApiError: gateway.on_error,
            StoreError: gateway.on_error,
            HTTPException: gateway.on_error,
            Exception: gateway.on_error,
        },
    )


class App(Starlette):
    """Model calls go straight to the gateway: a router and its layers cost more than many a call."""

    def __init__(self, gateway: Gateway, **options: Any) -> None:
        super().__init__(**options)
        self._gateway = gateway

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        found = self._gateway.find(scope["path"]) if scope["type"] == "http" else None
        if found is None:
            await super().__call__(scope, receive, send)
        else:
            await self._gateway.answer(found, scope, receive, send)


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


@dataclass(frozen=True, slots=True)
class Found:
    """What a path asks for."""

    dialect: Dialect
    session: str | None
    counts: bool
    """To count a prompt's tokens, not to answer it."""


class Gateway:
    def __init__(
        self,
        sessions: Sessions,
        recorder: Recorder,
        routing: Routing,
        hasher: Hasher,
        config: GatewayConfig,
        policy_id: str,
        train_sampling: SamplingConfig,
    ) -> None:
        self._sessions = sessions
        self._train_sampling = train_sampling
        self._recorder = recorder
        self._routing = routing
        self._hasher = hasher
        self._recall = Recall(hasher)
        self._config = config
        self._policy_id = policy_id
        self._dialects = [cast(Dialect, resolve("dialects", name)()) for name in names("dialects")]
        self._paths = {f"/v1{path}": d for d in self._dialects for path in (d.path, d.count_path) if path}
        self._watch = LoopWatch()
        self._in_flight = 0

    def routes(self) -> list[Route]:
        return [
            *(Route(f"{prefix}/models", self.models) for prefix in _PREFIXES),
            *(Route(f"{prefix}/models/{{model:path}}", self.model) for prefix in _PREFIXES),
            Route("/healthz", self.health),
            Route("/stats", self.stats),
            Route("/sessions", self.open_session, methods=["POST"]),
            Route("/sessions/{session}", self.read_session),
            Route("/sessions/{session}/complete", self.complete_session, methods=["POST"]),
            Route("/sessions/{session}/fail", self.fail_session, methods=["POST"]),
            Route("/sessions/{session}/calls", self.submit_calls, methods=["POST"]),
            *(Route(f"{prefix}/generate", self.generate, methods=["POST"]) for prefix in _PREFIXES),
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

    def find(self, path: str) -> Found | None:
        """The model call that a path stands for."""
        session = None
        if path.startswith("/s/"):
            session, _, rest = path[3:].partition("/")
            path = f"/{rest}"
        if (dialect := self._paths.get(path)) is not None:
            return Found(dialect, session, counts=path == f"/v1{dialect.count_path}")
        return None

    async def answer(self, found: Found, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            response = await self._response(found, scope, receive)
        except Exception as error:  # noqa: BLE001 — whatever it is, it is said in the dialect's words
            response = failure(found.dialect, api_error(error))
        await response(scope, receive, send)

    async def _response(self, found: Found, scope: Scope, receive: Receive) -> Response:
        if scope["method"] != "POST":
            raise ApiError(405, "Only POST is possible here.", code="method_not_allowed")
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        with self._admitted():
            caller = await self._identified(headers)
            arrived = (link := connection(scope)) is not None and link.has_body
            body = await self._body(headers, receive, arrived=arrived)
            if found.counts:
                return await self._count(found.dialect, headers, body)
            return await self._call(found.dialect, caller, found.session, headers, body)

    @contextmanager
    def _admitted(self) -> Generator[None]:
        """While a request is read and understood; its answer counts itself."""
        if self._in_flight >= self._config.max_in_flight:
            raise ApiError(429, "Too many requests at once.", code="too_many_requests", retry_after=1)
        self._in_flight += 1
        try:
            yield
        finally:
            self._in_flight -= 1

    async def _call(
        self, dialect: Dialect, caller: Caller, url: str | None, headers: Mapping[str, str], body: bytes
    ) -> Response:
        header = headers.get(SESSION_HEADER)
        where = url or header or caller.session_id or caller.agent_id
        request, chain = self._recall.read(dialect, where, body)
        self._check_size(request)
        upstream, trainable = self._routing.of(request.model)
        request, chain, previous = await self._with_previous(
            caller, request, chain, upstream=upstream is not None
        )
        if request.prompt is not None and (upstream is not None or isinstance(request.prompt, str)):
            chain = self._hasher.chain([as_message(request.prompt)])
        calls = self._engine(request) if upstream is None else None
        again = evidence(headers)
        named = Named(url, header, external_id(headers, request.identity), previous, again)
        state = await self._sessions.resolve(caller, named, chain, request.messages)
        request_id = f"{dialect.id_prefix}-{new_id('')[1:]}"
        if calls is not None:
            exchange = Exchange(
                calls,
                state,
                request,
                chain,
                request_id=request_id,
                dialect=dialect.name,
                evidence=again,
                trainable=trainable,
            )
            return CallResponse(dialect, exchange, self._counted, self._config.read_timeout)
        assert upstream is not None
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
            evidence=again,
            trainable=trainable,
            train_sampling=self._train_sampling,
        )
        return ForwardResponse(dialect, forward, self._counted, self._config.read_timeout)

    def _engine(self, request: Request | None = None) -> Calls:
        """Raises ApiError where there is none, or where the request asks for what it cannot give."""
        if request is not None and request.refusal is not None:
            raise request.refusal
        if self._routing.calls is None:
            raise ApiError(
                404, "This gateway has no model of its own.", code="model_not_found", param="model"
            )
        return self._routing.calls

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
        self, caller: Caller, request: Request, chain: Chain, *, upstream: bool
    ) -> tuple[Request, Chain, str | None]:
        """With the messages of the answer that it continues, and that answer's session."""
        if request.previous is None:
            return request, chain, None
        try:
            call = (await self._sessions.answer(caller, request.previous))[0]
        except ApiError:
            if upstream:  # it may be of before our time: the provider knows
                return request, chain, None
            raise
        own, new = request.messages[: request.instructions], request.messages[request.instructions :]
        earlier = call.messages
        if earlier and earlier[0]["role"] == "system" and call.dialect == "responses":
            earlier = earlier[1:]
        request = replace(request, messages=(*own, *earlier, call.reply, *new))
        return request, self._hasher.chain(request.messages, request.tools), call.session_id

    async def _count(self, dialect: Dialect, headers: Mapping[str, str], body: bytes) -> Response:
        request = dialect.read_count(body)
        upstream, _ = self._routing.of(request.model)
        if upstream is not None:
            return Response(await upstream.count_tokens(body, _without_our_keys(headers)), media_type=JSON)
        if self._routing.calls is None:
            raise ApiError(404, "Tokens cannot be counted without a model of our own.")
        ids = self._routing.calls.renderer.render(request.messages, request.tools)
        return Response(dialect.count(len(ids)), media_type=JSON)

    async def _identified(self, headers: Mapping[str, str]) -> Caller:
        size = sum(map(len, headers)) + sum(map(len, headers.values()))
        if size > self._config.max_header:
            raise ApiError(431, f"The headers are larger than {self._config.max_header} bytes.")
        return await self._sessions.keys.identify(bearer(headers))

    async def _caller(self, http: HttpRequest) -> Caller:
        return await self._identified(http.headers)

    async def _body(self, headers: Mapping[str, str], receive: Receive, *, arrived: bool = False) -> bytes:
        """``arrived``: it is there already, and needs no deadline."""
        limit = self._config.max_body
        if headers.get("content-encoding", "identity") != "identity":
            raise ApiError(415, "Compressed bodies are not taken.", code="unsupported_encoding")
        if arrived:
            return await _whole_body(receive, limit)
        try:
            async with asyncio.timeout(self._config.read_timeout):
                return await _whole_body(receive, limit)
        except TimeoutError as error:
            raise ApiError(408, "The body did not arrive in time.", code="timeout") from error

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
        return _json(
            {
                "loop_lag_p99_ms": lag,
                "rss_mb": memory_mb(),
                "in_flight": self._in_flight,
                "sessions_in_memory": len(self._sessions),
            }
        )

    # --- tokens in, tokens out --------------------------------------------------------------------

    async def generate(self, http: HttpRequest) -> Response:
        caller, calls = await self._caller(http), self._engine()
        with self._admitted():
            body = await self._body(http.headers, http.receive)
        asked = read_generate(body, calls.engine.info.vocab_size)
        named = Named(
            http.path_params.get("session"), http.headers.get(SESSION_HEADER), external_id(http.headers, ())
        )
        state = await self._sessions.resolve(caller, named, None, ())
        exchange = Exchange(
            calls,
            state,
            asked.request,
            None,
            request_id=new_id("gen"),
            dialect="tokens",
            evidence=evidence(http.headers),
            stop_token_ids=asked.stop_token_ids,
        )
        return GenerateResponse(self._chat, exchange, self._counted, self._config.read_timeout)

    async def submit_calls(self, http: HttpRequest) -> Response:
        caller, calls = await self._caller(http), self._engine()
        body = await self._body(http.headers, http.receive)
        state = await self._sessions.usable(http.path_params["session"], caller)
        head = (await calls.store.head(state.session.policy_id)).version
        given = read_submission(body, calls.engine.info.vocab_size, head)
        return Response(
            write_submitted(await submit(calls, self._hasher, state, given)), 201, media_type=JSON
        )

    # --- control ----------------------------------------------------------------------------------

    async def open_session(self, http: HttpRequest) -> Response:
        caller = await self._caller(http)
        session, key = await self._sessions.open(
            caller, _decode(await self._body(http.headers, http.receive), OpenSession)
        )
        base_url = f"{http.url.scheme}://{http.url.netloc}/s/{session.session_id}/v1"
        opened = OpenedSession(session_id=session.session_id, base_url=base_url, api_key=key)
        return _struct(opened, 201)

    async def complete_session(self, http: HttpRequest) -> Response:
        return await self._end(http, CompleteSession)

    async def fail_session(self, http: HttpRequest) -> Response:
        return await self._end(http, FailSession)

    async def _end(self, http: HttpRequest, kind: type[CompleteSession | FailSession]) -> Response:
        caller = await self._caller(http)
        asked = _decode(await self._body(http.headers, http.receive), kind)
        return _struct(await self._sessions.end(http.path_params["session"], caller, asked))

    async def read_session(self, http: HttpRequest) -> Response:
        caller = await self._caller(http)
        return _struct(await self._sessions.view(http.path_params["session"], caller))

    async def on_error(self, http: HttpRequest, error: Exception) -> Response:
        return failure(self._chat, api_error(error))

    @property
    def _chat(self) -> Dialect:
        """Whose words are used where no dialect was chosen."""
        return self._paths["/v1/chat/completions"]


async def _whole_body(receive: Receive, limit: int) -> bytes:
    message = await receive()
    body: bytes = message.get("body", b"")
    if not message.get("more_body", False) and len(body) <= limit:
        return body
    return await _rest_of_body(body, receive, limit)


async def _rest_of_body(body: bytes, receive: Receive, limit: int) -> bytes:
    chunks, size, more = [body], len(body), True
    while more and size <= limit:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ApiError(400, "The body broke off.", code="invalid_json")
        chunks.append(message.get("body", b""))
        size += len(chunks[-1])
        more = message.get("more_body", False)
    if size > limit:
        raise ApiError(413, f"The body is larger than {limit} bytes.", code="too_large")
    return b"".join(chunks)


def _without_our_keys(headers: Mapping[str, str]) -> dict[str, str]:
    """The agent's headers, without a key that is ours: it is nobody else's business."""
    return {name: value for name, value in headers.items() if name not in _KEY_HEADERS}


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
