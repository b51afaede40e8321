"""Model calls, and how the gateway is put together. A dialect is chosen by its path; none is known here."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, cast

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from instar.config import GatewayConfig, ModelRoute, SamplingConfig
from instar.engines.base import Engine
from instar.errors import StoreError
from instar.gateway.auth import KEY_HEADER, KEY_HEADERS, Authenticator, Caller
from instar.gateway.base import SESSION_HEADER, ApiError, bad_request
from instar.gateway.calls import Calls, EngineCall
from instar.gateway.client_headers import external_id, retry_evidence
from instar.gateway.control import ControlApi
from instar.gateway.dialects.base import Dialect, ModelRequest, TokenLogprob
from instar.gateway.feedback import FeedbackService
from instar.gateway.http_protocol import get_connection
from instar.gateway.process_stats import LoopLagMonitor
from instar.gateway.recording import Recorder
from instar.gateway.request_cache import RequestCache
from instar.gateway.request_reader import RequestReader
from instar.gateway.responses import JSON, CallResponse, ForwardResponse, api_error, failure
from instar.gateway.routing import ModelRouter
from instar.gateway.sessions import SessionHints, Sessions
from instar.gateway.upstream.base import Upstream
from instar.gateway.upstream_call import UpstreamCall, as_message
from instar.record.base import Renderer
from instar.record.hashing import HashChain, MessageHasher
from instar.record.redact import Redactor
from instar.registry import list_names, resolve
from instar.store.base import Store
from instar.types import new_id

HASH_KEY_NAME = "message-hashes"
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
    hasher, redactor = MessageHasher(hash_key), Redactor.from_config(config.redact)
    sessions = Sessions(
        store,
        Authenticator(store, admin_key, run_id),
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
    routing = ModelRouter(calls, upstream, upstreams or {}, models or {})
    incoming, watch = RequestReader(sessions.keys, config), LoopLagMonitor()
    gateway = Gateway(sessions, recorder, routing, incoming, hasher, config, sampling)
    desk = FeedbackService(
        store,
        redactor,
        run_id=run_id,
        renderer=renderer,
        context=lambda: engine.info.max_context if engine else None,
        models=models or {},
    )
    control = ControlApi(sessions, routing, incoming, hasher, watch, policy_id, gateway.chat, desk)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncGenerator[None]:
        async with _running(watch.run(), _close_silent(sessions, config.idle_timeout)):
            yield
        await recorder.drain()

    refusals = (ApiError, StoreError, HTTPException, Exception)
    return App(
        gateway,
        routes=control.routes(),
        lifespan=lifespan,
        exception_handlers=dict.fromkeys(refusals, control.on_error),
    )


@asynccontextmanager
async def _running(*works: Coroutine[Any, Any, None]) -> AsyncGenerator[None]:
    """In the background meanwhile."""
    tasks = [asyncio.create_task(work) for work in works]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _close_silent(sessions: Sessions, limit: float) -> None:
    while True:
        await asyncio.sleep(min(limit / 4, 30))
        try:
            await sessions.close_silent(limit)
        except StoreError as error:
            print(f"silent sessions stay open for now: {error}", flush=True)


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


@dataclass(frozen=True, slots=True)
class RouteMatch:
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
        routing: ModelRouter,
        incoming: RequestReader,
        hasher: MessageHasher,
        config: GatewayConfig,
        train_sampling: SamplingConfig,
    ) -> None:
        self._sessions = sessions
        self._recorder = recorder
        self._routing = routing
        self._incoming = incoming
        self._hasher = hasher
        self._recall = RequestCache(hasher)
        self._config = config
        self._train_sampling = train_sampling
        dialects = [cast(Dialect, resolve("dialects", name)()) for name in list_names("dialects")]
        self._paths = {f"/v1{path}": d for d in dialects for path in (d.path, d.count_path) if path}

    @property
    def chat(self) -> Dialect:
        """Whose words are used where no dialect was chosen."""
        return self._paths["/v1/chat/completions"]

    def find(self, path: str) -> RouteMatch | None:
        """The model call that a path stands for."""
        session = None
        if path.startswith("/s/"):
            session, _, rest = path[3:].partition("/")
            path = f"/{rest}"
        if (dialect := self._paths.get(path)) is not None:
            return RouteMatch(dialect, session, counts=path == f"/v1{dialect.count_path}")
        return None

    async def answer(self, found: RouteMatch, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            response = await self._response(found, scope, receive)
        except Exception as error:  # noqa: BLE001 — whatever it is, it is said in the dialect's words
            response = failure(found.dialect, api_error(error))
        await response(scope, receive, send)

    async def _response(self, found: RouteMatch, scope: Scope, receive: Receive) -> Response:
        if scope["method"] != "POST":
            raise ApiError(405, "Only POST is possible here.", code="method_not_allowed")
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        with self._incoming.admitted():
            caller = await self._incoming.identified(headers)
            arrived = (link := get_connection(scope)) is not None and link.has_body
            body = await self._incoming.body(headers, receive, arrived=arrived)
            if found.counts:
                return await self._count(found.dialect, headers, body)
            return await self._call(found.dialect, caller, found.session, headers, body)

    async def _call(
        self, dialect: Dialect, caller: Caller, url: str | None, headers: Mapping[str, str], body: bytes
    ) -> Response:
        header = headers.get(SESSION_HEADER)
        where = url or header or caller.session_id or caller.agent_id
        request, chain = self._recall.read(dialect, where, body)
        self._check_size(request)
        upstream, trainable = self._routing.of(request.model)
        if request.score_prompt and upstream is None:
            return await self._score(dialect, request)
        request, chain, previous = await self._with_previous(
            caller, request, chain, upstream=upstream is not None
        )
        if request.prompt is not None and (upstream is not None or isinstance(request.prompt, str)):
            chain = self._hasher.hash_messages([as_message(request.prompt)])
        calls = self._routing.engine(request) if upstream is None else None
        again = retry_evidence(headers)
        prompt = request.prompt if isinstance(request.prompt, str) else None
        named = SessionHints(
            url, header, external_id(headers, request.session_hints), previous, again, prompt
        )
        state = await self._sessions.resolve(caller, named, chain, request.messages)
        request_id = f"{dialect.id_prefix}-{new_id('')[1:]}"
        if calls is not None:
            exchange = EngineCall(
                calls,
                state,
                request,
                chain,
                request_id=request_id,
                dialect=dialect.name,
                evidence=again,
                trainable=trainable,
            )
            return CallResponse(dialect, exchange, self._incoming.count, self._incoming.patience)
        assert upstream is not None
        if request.prompt is not None:
            request = replace(request, messages=(as_message(request.prompt),))
        forward = UpstreamCall(
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
        return ForwardResponse(dialect, forward, self._incoming.count, self._incoming.patience)

    def _check_size(self, request: ModelRequest) -> None:
        for name, given, limit in (
            ("messages", len(request.messages), self._config.max_messages),
            ("tools", len(request.tools), self._config.max_tools),
        ):
            if given > limit:
                raise bad_request(f"{given} {name} are more than {limit}.", name, "too_many")

    async def _with_previous(
        self, caller: Caller, request: ModelRequest, chain: HashChain, *, upstream: bool
    ) -> tuple[ModelRequest, HashChain, str | None]:
        """With the messages of the answer that it continues, and that answer's session."""
        if request.previous_response_id is None:
            return request, chain, None
        try:
            call = (await self._sessions.answer(caller, request.previous_response_id))[0]
        except ApiError:
            if upstream:  # it may be of before our time: the provider knows
                return request, chain, None
            raise
        own, new = (
            request.messages[: request.instruction_count],
            request.messages[request.instruction_count :],
        )
        earlier = call.messages
        if earlier and earlier[0]["role"] == "system" and call.dialect == "responses":
            earlier = earlier[1:]
        request = replace(request, messages=(*own, *earlier, call.reply, *new))
        return request, self._hasher.hash_messages(request.messages, request.tools), call.session_id

    async def _score(self, dialect: Dialect, request: ModelRequest) -> Response:
        """Nothing is sampled, so nothing is recorded."""
        calls = self._routing.engine(request)
        if not calls.engine.info.scores:
            raise bad_request(
                "The engine does not tell the logprobs of a prompt.", "echo", "unsupported_value"
            )
        assert request.prompt is not None
        ids = calls.renderer.encode(request.prompt) if isinstance(request.prompt, str) else request.prompt
        calls.check_ids(ids, "prompt")
        try:
            async with asyncio.timeout(calls.timeout):
                logprobs = await calls.engine.logprobs(ids)
        except TimeoutError as error:
            raise ApiError(504, f"No logprobs within {calls.timeout:g} seconds.", code="timeout") from error
        text = calls.renderer.token_text
        tokens = [TokenLogprob(text(i), p) for i, p in zip(ids, logprobs.tolist(), strict=True)]
        request_id = f"{dialect.id_prefix}-{new_id('')[1:]}"
        return Response(dialect.format_scores(request_id, request, tokens), media_type=JSON)

    async def _count(self, dialect: Dialect, headers: Mapping[str, str], body: bytes) -> Response:
        request = dialect.parse_count_request(body)
        upstream, _ = self._routing.of(request.model)
        if upstream is not None:
            return Response(await upstream.count_tokens(body, _without_our_keys(headers)), media_type=JSON)
        calls = self._routing.engine(request)
        ids = calls.renderer.render(request.messages, request.tools)
        return Response(dialect.format_count(len(ids)), media_type=JSON)


def _without_our_keys(headers: Mapping[str, str]) -> dict[str, str]:
    """The agent's headers, without a key that is ours: it is nobody else's business."""
    ours = {KEY_HEADER} if KEY_HEADER in headers else KEY_HEADERS
    return {name: value for name, value in headers.items() if name not in ours}
