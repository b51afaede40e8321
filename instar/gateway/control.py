"""The control API: routes for models, health, statistics, sessions, groups, submitted calls and feedback."""

from __future__ import annotations

import asyncio
import resource
import sys
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from instar.errors import EngineError
from instar.gateway import base
from instar.gateway.auth import Action, Caller
from instar.gateway.base import ModelList, ModelView
from instar.gateway.context import GatewayContext
from instar.gateway.dialects.chat import ChatDialect
from instar.gateway.dialects.common import decode_body
from instar.gateway.dialects.messages import format_models
from instar.gateway.feedback import FeedbackService
from instar.gateway.feedback_api import FeedbackBody, FeedbackList, FeedbackView
from instar.gateway.groups import GroupService
from instar.gateway.openapi import PREFIXES, ApiRoute
from instar.gateway.pipeline.parse import RequestReader, RetryHeaders, check_body
from instar.gateway.pipeline.respond import JSON, error_response
from instar.gateway.routing import ModelRouter
from instar.gateway.session_service import SessionService
from instar.gateway.session_states import SessionStates
from instar.gateway.stored_responses import StoredResponses
from instar.gateway.submissions import RecordedCalls, SubmissionBody, SubmissionService, parse_submission
from instar.types import Group
from instar.wire.openai import ResponsesItemList, ResponsesResponse

T = TypeVar("T")
_LAG_INTERVAL_SECONDS = 0.05
_MAX_LAG_SAMPLES = 6000  # five minutes


class LoopLagMonitor:
    """Measures how late the event loop resumes its tasks."""

    def __init__(self) -> None:
        self._lags: deque[float] = deque(maxlen=_MAX_LAG_SAMPLES)

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            expected = loop.time() + _LAG_INTERVAL_SECONDS
            await asyncio.sleep(_LAG_INTERVAL_SECONDS)
            self._lags.append(max(0.0, loop.time() - expected))

    def p99(self) -> float:
        """Return the 99th percentile of the lag in the last five minutes, in seconds."""
        lags = sorted(self._lags)
        return lags[int(0.99 * (len(lags) - 1))] if lags else 0.0


@dataclass(frozen=True, slots=True)
class ControlServices:
    sessions: SessionService
    responses: StoredResponses
    groups: GroupService | None
    """The service for groups from outside, or None if the run does not accept them."""
    feedback: FeedbackService
    submissions: SubmissionService | None
    """The service that records submitted calls, or None if the gateway has no engine."""
    loop_lag: LoopLagMonitor


@dataclass(slots=True, eq=False)
class ControlApi:
    _context: GatewayContext
    _reader: RequestReader
    _router: ModelRouter
    _states: SessionStates
    _services: ControlServices

    def build_routes(self) -> list[ApiRoute]:
        return [
            *(ApiRoute(f"{prefix}/models", self.list_models, ModelList) for prefix in PREFIXES),
            *(ApiRoute(f"{prefix}/models/{{model:path}}", self.get_model, ModelView) for prefix in PREFIXES),
            *(
                ApiRoute(f"{prefix}/responses/{{response}}", self.get_response, ResponsesResponse)
                for prefix in PREFIXES
            ),
            *(
                ApiRoute(
                    f"{prefix}/responses/{{response}}/input_items",
                    self.list_input_items,
                    ResponsesItemList,
                    query=("after", "limit", "order"),
                )
                for prefix in PREFIXES
            ),
            ApiRoute("/healthz", self.get_health, base.HealthView, is_public=True),
            ApiRoute("/stats", self.get_stats, base.StatsView),
            ApiRoute("/sessions", self.open_session, base.OpenedSession, body_type=base.OpenSession),
            ApiRoute("/sessions/{session}", self.get_session, base.SessionView),
            *(
                ApiRoute(f"/sessions/{{session}}/{end}", self.end_session, base.EndedSession, body_type=type_)
                for end, type_ in (("complete", base.CompleteSession), ("fail", base.FailSession))
            ),
            ApiRoute("/sessions/{session}/calls", self.submit_calls, RecordedCalls, body_type=SubmissionBody),
            ApiRoute("/groups", self.open_group, base.GroupView, body_type=base.OpenGroup),
            ApiRoute("/groups/{group}", self.get_group, base.GroupView),
            ApiRoute("/groups/{group}", self.abandon_group, base.GroupView, method="DELETE"),
            ApiRoute("/feedback", self.list_feedback, FeedbackList, query=("session", "after")),
            *(
                ApiRoute(f"{prefix}/feedback", self.add_feedback, FeedbackView, body_type=FeedbackBody)
                for prefix in ("", *PREFIXES)
            ),
        ]

    async def list_models(self, http: HttpRequest) -> Response:
        """List the agent's own model and the versions that it can name. Provider models are not listed."""
        caller = await self._authorize_models(http)
        source, identity = self._router.engine_source, self._context.identity
        names = [identity.get_policy_id(caller.agent_id)]
        if source is not None:
            names = await source.list_models(caller)
        if "anthropic-version" in http.headers:
            return Response(format_models(names), media_type=JSON)
        return _to_response(ModelList([ModelView(name) for name in names]))

    async def get_model(self, http: HttpRequest) -> Response:
        """Describe a model. Every name is accepted, except a version that the engine does not have."""
        caller = await self._authorize_models(http)
        model = http.path_params["model"]
        source = self._router.engine_source
        if source is not None and self._router.select(model)[0] is source:
            await source.check_version(model, caller)
        return _to_response(ModelView(model))

    async def get_response(self, http: HttpRequest) -> Response:
        """Return a stored response of the Responses API."""
        caller = await self._reader.authenticate(http.headers, Action.READ_SESSION)
        path, responses = http.path_params, self._services.responses
        body = await responses.get(caller, path["response"], path.get("session"))
        return Response(body, media_type=JSON)

    async def list_input_items(self, http: HttpRequest) -> Response:
        """List the input items of a stored response, in pages."""
        caller = await self._reader.authenticate(http.headers, Action.READ_SESSION)
        path, query, responses = http.path_params, http.query_params, self._services.responses
        body = await responses.list_input_items(caller, path["response"], path.get("session"), query)
        return Response(body, media_type=JSON)

    async def get_health(self, http: HttpRequest) -> Response:
        """Report whether the gateway and its engine respond."""
        if self._router.engine_source is None:
            return _to_response(base.HealthView("ok", "none"))
        try:
            status = await self._router.engine_source.get_status()
        except EngineError as error:
            return _to_response(base.HealthView("ok", "down", reason=str(error)))
        version = self._router.engine_source.get_served_version(status)
        return _to_response(base.HealthView("ok", "up", version=version))

    async def get_stats(self, http: HttpRequest) -> Response:
        """Report the gateway's load."""
        await self._reader.authenticate(http.headers, Action.READ_STATS)
        lag_ms, in_flight = self._services.loop_lag.p99() * 1000, self._reader.in_flight
        return _to_response(base.StatsView(lag_ms, _get_memory_mib(), in_flight, len(self._states)))

    async def open_session(self, body_type: type[base.OpenSession], http: HttpRequest) -> Response:
        """Open a session and return its key."""
        caller, body = await self._read_request(http, body_type, Action.OPEN_SESSION)
        session, key = await self._services.sessions.open(caller, body)
        base_url = f"{self._get_root_url(http)}/s/{session.session_id}/v1"
        opened = base.OpenedSession(session_id=session.session_id, base_url=base_url, api_key=key)
        return _to_response(opened, 201)

    async def end_session(
        self, body_type: type[base.CompleteSession | base.FailSession], http: HttpRequest
    ) -> Response:
        """End a session and record its rewards."""
        caller, body = await self._read_request(http, body_type, Action.END_SESSION)
        return _to_response(await self._services.sessions.end(http.path_params["session"], caller, body))

    async def get_session(self, http: HttpRequest) -> Response:
        """Return a session with its calls and rewards."""
        caller = await self._reader.authenticate(http.headers, Action.READ_SESSION)
        return _to_response(await self._services.sessions.view(http.path_params["session"], caller))

    async def submit_calls(self, body_type: type[SubmissionBody], http: HttpRequest) -> Response:
        """Record calls that were sampled outside the gateway."""
        is_trusted = self._context.config.trust_submitted_calls
        action = Action.SUBMIT_TRUSTED_CALLS if is_trusted else Action.SUBMIT_CALLS
        caller, body = await self._read_request(http, body_type, action)
        engine = self._router.require_engine().engine
        state = await self._states.get_open(http.path_params["session"], caller, action)
        latest = (await self._context.store.latest_policy(state.session.policy_id)).version
        calls = parse_submission(body.calls, engine.info, latest)
        assert self._services.submissions is not None, "a gateway with an engine accepts submissions"
        return _to_response(RecordedCalls(await self._services.submissions.submit(state, calls)), 201)

    async def open_group(self, body_type: type[base.OpenGroup], http: HttpRequest) -> Response:
        """Open a group with a session for each slot, and return the keys of the sessions."""
        _, body = await self._read_request(http, body_type, Action.MANAGE_GROUPS)
        client_key = RetryHeaders.parse(http.headers).client_key
        group, is_new = await self._get_group_service().open(body, client_key)
        return await self._describe_group(http, group, 201 if is_new else 200)

    async def get_group(self, http: HttpRequest) -> Response:
        """Return a group with the latest session of each slot."""
        await self._reader.authenticate(http.headers, Action.MANAGE_GROUPS)
        group = await self._get_group_service().get(http.path_params["group"])
        return await self._describe_group(http, group)

    async def abandon_group(self, http: HttpRequest) -> Response:
        """Abandon an open group: its sessions end, and the run does not train on it."""
        await self._reader.authenticate(http.headers, Action.MANAGE_GROUPS)
        group = await self._get_group_service().abandon(http.path_params["group"])
        return await self._describe_group(http, group)

    async def add_feedback(self, body_type: type[FeedbackBody], http: HttpRequest) -> Response:
        """Record feedback on a session or a reply."""
        caller, body = await self._read_request(http, body_type, Action.GIVE_FEEDBACK)
        if session_id := http.path_params.get("session"):
            if body.session_id not in (None, session_id):
                problem = f"The URL names the session {session_id!r}, but the body names {body.session_id!r}"
                raise base.ApiError(403, f"{problem}; leave 'session_id' out.", code="session_conflict")
            body.session_id = session_id
        client_key = RetryHeaders.parse(http.headers).client_key
        view, is_new = await self._services.feedback.add(caller, body, client_key)
        return _to_response(view, 201 if is_new else 200)

    async def list_feedback(self, http: HttpRequest) -> Response:
        """List the feedback on a session, or on all sessions of the run, in pages."""
        await self._reader.authenticate(http.headers, Action.LIST_FEEDBACK)
        session_id, after = http.query_params.get("session"), http.query_params.get("after")
        return _to_response(await self._services.feedback.list_feedback(session_id, after))

    async def on_error(self, http: HttpRequest, error: Exception) -> Response:
        return error_response(ChatDialect(), error)

    def _get_group_service(self) -> GroupService:
        if (groups := self._services.groups) is not None:
            return groups
        message = (
            "This run does not accept groups from outside: its config has the section 'rollout', or it was "
            "started with 'instar serve' without the section 'groups', or it has no engine."
        )
        raise base.ApiError(409, message, code="groups_not_accepted")

    async def _describe_group(self, http: HttpRequest, group: Group, status: int = 200) -> Response:
        view = await self._get_group_service().view(group, self._get_root_url(http))
        return _to_response(view, status)

    def _get_root_url(self, http: HttpRequest) -> str:
        # The Host header is not used, because the client controls it.
        host, port = http.scope["server"]
        local_url = f"{http.url.scheme}://{f'[{host}]' if ':' in host else host}:{port}"
        return self._context.config.public_url or local_url

    async def _authorize_models(self, http: HttpRequest) -> Caller:
        caller = await self._reader.authenticate(http.headers, Action.LIST_MODELS)
        if session_id := http.path_params.get("session"):
            await self._states.get(session_id, caller, Action.LIST_MODELS)
        return caller

    async def _read_request(self, http: HttpRequest, body_type: type[T], action: Action) -> tuple[Caller, T]:
        caller = await self._reader.authenticate(http.headers, action)
        body = await self._reader.read_body(caller, http.headers, http.scope, http.receive)
        check_body(self._context.config, body, is_trusted=caller.kind == "admin")
        return caller, decode_body(msgspec.json.Decoder(body_type), body or b"{}")


def _to_response(value: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type=JSON)


def _get_memory_mib() -> float:
    """Return the resident memory of this process in MiB, or its peak on systems without /proc."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * resource.getpagesize() / 2**20
    except OSError:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak / (2**20 if sys.platform == "darwin" else 2**10)
