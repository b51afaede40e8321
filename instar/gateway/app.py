"""The gateway's ASGI app, composed of the call pipeline and the control API."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Collection, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import Lifespan, Receive, Scope, Send

from instar.config import GatewayConfig, ModelRoute, RunConfig, SamplingConfig, UpstreamEngineConfig
from instar.engines.base import Engine
from instar.errors import StoreError
from instar.gateway.auth import KEYS_PER_SESSION_IN_MEMORY, Authenticator
from instar.gateway.base import ApiError
from instar.gateway.context import GatewayContext, RunIdentity
from instar.gateway.control import ControlApi, ControlServices, LoopLagMonitor
from instar.gateway.dialects.base import Dialect
from instar.gateway.engine_source import EngineSource
from instar.gateway.feedback import FeedbackService
from instar.gateway.feedback_api import NO_REASONS, UnusedReasons, explain_unused
from instar.gateway.forgetting import RetentionPolicy, run_forgetting_tasks
from instar.gateway.groups import GroupOptions, GroupService
from instar.gateway.http_protocol import find_post_path
from instar.gateway.live_policies import LiveOptions, LivePolicies
from instar.gateway.openapi import ApiRoute, describe_api
from instar.gateway.pipeline.parse import RequestReader
from instar.gateway.pipeline.pipeline import CallPipeline, RouteMatch
from instar.gateway.pipeline.record import Recorder
from instar.gateway.pipeline.resolve import SessionResolver
from instar.gateway.pipeline.respond import JSON
from instar.gateway.provider_source import ProviderSource
from instar.gateway.routing import ModelRouter
from instar.gateway.session_service import SessionService
from instar.gateway.session_states import SessionStates
from instar.gateway.shadow import ShadowSampler
from instar.gateway.stored_responses import StoredResponses
from instar.gateway.submissions import SubmissionService
from instar.models import resolve_tokenizer
from instar.record.base import Renderer
from instar.record.hashing import MessageHasher
from instar.record.redact import Redactor
from instar.registry import list_names, resolve
from instar.store.base import Store

if TYPE_CHECKING:
    from instar.gateway.upstream.http import HttpUpstream
    from instar.live.activity import ActivityRecorder
    from instar.rollout.admission import Admission

logger = logging.getLogger(__name__)

HASH_KEY_NAME = "message-hashes"
"""The name of the store's secret that keys the message hashes."""


@asynccontextmanager
async def open_gateway(
    config: RunConfig,
    store: Store,
    engine: Engine | None,
    admin_key: str,
    admission: Admission,
    live: LiveOptions | None = None,
) -> AsyncGenerator[GatewayApp]:
    """Yield the app for a run, and close its upstreams on exit. The caller closes the store and engine. If
    ``live`` is None, the version that the engines serve replies to all agents."""
    from instar.gateway.upstream.http import HttpUpstream

    async with AsyncExitStack() as stack:

        def open_upstream(section: UpstreamEngineConfig, path: str) -> HttpUpstream:
            upstream = HttpUpstream(section, path)
            stack.push_async_callback(upstream.close)
            return upstream

        renderer = None
        if engine is not None:
            folder = resolve_tokenizer(config.model.name)
            renderer = await asyncio.to_thread(Renderer.load, folder, config.model)
        provider_config = config.engine if isinstance(config.engine, UpstreamEngineConfig) else None
        yield create_app(
            store=store,
            engine=engine,
            renderer=renderer,
            run_id=config.name,
            agent_id=config.agent_id,
            policy_id=config.name,
            agent_policies={name: config.get_policy_id(name) for name in config.agents},
            live=live,
            config=config.gateway,
            admin_key=admin_key,
            hash_key=await store.secret(HASH_KEY_NAME),
            train_sampling=config.group_settings.sampling,
            groups=create_group_options(config, admission),
            upstream=open_upstream(provider_config, "engine") if provider_config else None,
            upstreams={name: open_upstream(s, f"upstreams.{name}") for name, s in config.upstreams.items()},
            models=config.models,
            unused_feedback=explain_unused(config),
            trained_agents=config.trained_agents,
            retention=RetentionPolicy(config.store.retention, config.trainer.keep_checkpoints),
        )


def create_group_options(config: RunConfig, admission: Admission) -> GroupOptions | None:
    """Return the options for groups from outside, or None if the run does not accept them."""
    if config.groups is None or not config.accepts_groups:
        return None
    has_scorers = any(section.type != "agent" for section in config.reward)
    return GroupOptions(admission, config.groups, config.min_group_size, has_scorers)


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
    groups: GroupOptions | None = None,
    upstreams: Mapping[str, HttpUpstream] | None = None,
    upstream: HttpUpstream | None = None,
    models: Mapping[str, ModelRoute] | None = None,
    unused_feedback: UnusedReasons = NO_REASONS,
    trained_agents: Collection[str] | None = None,
    retention: RetentionPolicy | None = None,
    agent_policies: Mapping[str, str] | None = None,
    live: LiveOptions | None = None,
) -> GatewayApp:
    """Create the gateway's app. The caller closes the store, the engine and the upstreams.

    ``train_sampling`` are the sampling settings of the `train` channel. ``groups`` are the options for groups
    from outside, or None if the run does not accept them. If ``upstream`` is set, it replies instead of the
    engine. ``models`` maps model name patterns to routes, which may select ``upstreams``.
    ``unused_feedback`` says why the run does not train on corrections or preferences. ``trained_agents`` are
    the agents whose live replies it trains on, or None for all. ``agent_policies`` maps agents to policies of
    their own. If ``live`` is set, the versions that the store names reply.
    """
    identity = RunIdentity(run_id, agent_id, policy_id, agent_policies or {})
    context = GatewayContext(
        store,
        identity,
        config,
        MessageHasher(hash_key),
        Redactor.from_config(config.redact),
        train_sampling or SamplingConfig(),
        LivePolicies(store, engine, identity.policy_ids, live) if live and engine else None,
    )
    states = SessionStates(context)
    sessions, resolver = SessionService(context, states), SessionResolver(context, states)
    recorder = Recorder(context, resolver, renderer)
    max_cached_keys = KEYS_PER_SESSION_IN_MEMORY * config.max_sessions_in_memory
    reader = RequestReader(Authenticator(store, admin_key, run_id, max_cached_keys), config)
    engine_source, submissions = None, None
    if engine is not None and renderer is not None:
        engine_source = _create_engine_source(context, engine, renderer, live)
        submissions = SubmissionService(context, states, recorder, renderer)
    router = _create_router(context, engine_source, upstreams or {}, upstream, models or {})
    feedback = _create_feedback(context, engine, renderer, models or {}, unused_feedback, trained_agents)
    group_service = GroupService(context, states, sessions, groups) if groups and engine_source else None
    responses = StoredResponses(context, states)
    services = ControlServices(sessions, responses, group_service, feedback, submissions, LoopLagMonitor())
    pipeline = CallPipeline(context, reader, router, states, resolver, recorder)
    tasks = _list_background_tasks(context, services, pipeline, engine_source, retention)
    control = ControlApi(context, reader, router, states, services)
    return GatewayApp(context, pipeline, control, partial(_run_background_tasks, tasks, recorder))


def _create_engine_source(
    context: GatewayContext, engine: Engine, renderer: Renderer, live: LiveOptions | None
) -> EngineSource:
    shadow = None
    if context.live is not None and live is not None:
        timeout = context.config.request_timeout
        store, redactor = context.store, context.redactor
        shadow = ShadowSampler(store, engine, renderer, context.live, redactor, live.canary, timeout)
    return EngineSource(context, engine, renderer, shadow)


def _list_background_tasks(
    context: GatewayContext,
    services: ControlServices,
    pipeline: CallPipeline,
    engine_source: EngineSource | None,
    retention: RetentionPolicy | None,
) -> list[Callable[[], Coroutine[Any, Any, None]]]:
    shadow = engine_source.shadow if engine_source is not None else None
    drops = [pipeline.drop_sessions, *([] if shadow is None else [shadow.drop_sessions])]
    return [
        services.loop_lag.run,
        partial(_end_idle_sessions, services.sessions, context.config.idle_timeout),
        partial(run_forgetting_tasks, context.store, context.identity.run_id, drops, retention),
        *(service.run for service in (services.groups, context.live, shadow) if service is not None),
    ]


def _create_router(
    context: GatewayContext,
    engine_source: EngineSource | None,
    upstreams: Mapping[str, HttpUpstream],
    upstream: HttpUpstream | None,
    models: Mapping[str, ModelRoute],
) -> ModelRouter:
    providers = {name: ProviderSource(context, value) for name, value in upstreams.items()}
    provider = ProviderSource(context, upstream) if upstream is not None else None
    return ModelRouter(engine_source, provider, providers, models)


def _create_feedback(
    context: GatewayContext,
    engine: Engine | None,
    renderer: Renderer | None,
    models: Mapping[str, ModelRoute],
    unused_feedback: UnusedReasons,
    trained_agents: Collection[str] | None,
) -> FeedbackService:
    return FeedbackService(
        context.store,
        context.redactor,
        run_id=context.identity.run_id,
        renderer=renderer,
        get_max_context=lambda: engine.info.max_context if engine else None,
        models=models,
        reward_range=context.config.reward_range,
        unused_reasons=unused_feedback,
        trained_agents=trained_agents,
    )


class GatewayApp(Starlette):
    """The gateway's ASGI app. Model calls skip Starlette's slow router and middleware."""

    def __init__(
        self,
        context: GatewayContext,
        pipeline: CallPipeline,
        control: ControlApi,
        lifespan: Lifespan[Starlette],
    ) -> None:
        # Starlette logs a traceback for errors that reach the Exception handler, so list the expected ones.
        error_types = (ApiError, StoreError, HTTPException, RecursionError, Exception)
        handlers = dict.fromkeys(error_types, control.on_error)
        description_route = ApiRoute("/openapi.json", self._get_description, dict, is_public=True)
        routes = [*control.build_routes(), description_route]
        super().__init__(routes=routes, lifespan=lifespan, exception_handlers=handlers)
        self.router.redirect_slashes = False  # A redirect would use the Host header, which clients choose.
        self._context = context
        self._pipeline = pipeline
        dialects = [cast(Dialect, resolve("dialects", name)()) for name in list_names("dialects")]
        self.description = describe_api(routes, dialects)
        self._dialects = {f"/v1{path}": d for d in dialects for path in (d.path, d.count_path) if path}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        route = self._match_route(scope["path"]) if scope["type"] == "http" else None
        if route is None:
            await super().__call__(scope, receive, send)
        else:
            await self._pipeline.handle(route, scope, receive, send)

    def reject_early(self, data: bytes) -> bytes | None:
        """Return a complete response that rejects a model call at capacity, or None to process the data."""
        path = find_post_path(data)
        route = self._match_route(path.decode()) if path else None
        return None if route is None else self._pipeline.reject_early(route.dialect)

    def announce_requests(self, activity: ActivityRecorder) -> None:
        """Announce live requests to a trainer on this machine, which then pauses."""
        self._pipeline.activity = activity

    @property
    def problem(self) -> str:
        """Why versions that should reply to agents cannot be loaded, or an empty string."""
        return self._context.live.problem if self._context.live is not None else ""

    async def _get_description(self, http: HttpRequest) -> Response:
        """Return this OpenAPI description."""
        return Response(msgspec.json.encode(self.description), media_type=JSON)

    def _match_route(self, path: str) -> RouteMatch | None:
        session_id = None
        if path.startswith("/s/"):
            session_id, _, rest = path[3:].partition("/")
            path = f"/{rest}"
        if (dialect := self._dialects.get(path)) is not None:
            return RouteMatch(dialect, session_id, is_token_count=path == f"/v1{dialect.count_path}")
        return None


@asynccontextmanager
async def _run_background_tasks(
    functions: Sequence[Callable[[], Coroutine[Any, Any, None]]], recorder: Recorder, _: Starlette
) -> AsyncGenerator[None]:
    def log_failure(task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("A gateway background task failed.", exc_info=error)

    tasks = [asyncio.create_task(function()) for function in functions]
    for task in tasks:
        task.add_done_callback(log_failure)
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    await recorder.drain()


async def _end_idle_sessions(sessions: SessionService, idle_timeout: float) -> None:
    while True:
        await asyncio.sleep(min(idle_timeout / 4, 30))
        try:
            await sessions.end_idle(idle_timeout)
        except StoreError as error:
            logger.warning("Could not end idle sessions, will retry: %s", error)
