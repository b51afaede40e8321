"""The routes beside model calls: models, health, sessions, tokens in and out."""

from __future__ import annotations

import asyncio
from typing import Any, TypeVar

import msgspec
import orjson
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from instar.errors import EngineError
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
from instar.gateway.calls import EngineCall
from instar.gateway.client_headers import external_id, retry_evidence
from instar.gateway.dialects.base import Dialect
from instar.gateway.dialects.messages import format_models
from instar.gateway.feedback import FeedbackBody, FeedbackList, FeedbackService
from instar.gateway.process_stats import LoopLagMonitor, memory_mb
from instar.gateway.request_reader import RequestReader
from instar.gateway.responses import JSON, api_error, failure
from instar.gateway.routing import ModelRouter
from instar.gateway.sessions import SessionHints, Sessions
from instar.gateway.token_api import read_generate, read_submission, write_submitted
from instar.gateway.tokens import GenerateResponse, submit
from instar.record.hashing import MessageHasher
from instar.types import new_id

T = TypeVar("T")
PREFIXES = ("/v1", "/s/{session}/v1")


class ControlApi:
    def __init__(
        self,
        sessions: Sessions,
        routing: ModelRouter,
        incoming: RequestReader,
        hasher: MessageHasher,
        watch: LoopLagMonitor,
        policy_id: str,
        chat: Dialect,
        desk: FeedbackService,
    ) -> None:
        """``chat``: whose words are used where no dialect was chosen."""
        self._sessions = sessions
        self._routing = routing
        self._incoming = incoming
        self._hasher = hasher
        self._watch = watch
        self._policy_id = policy_id
        self._chat = chat
        self._desk = desk

    def routes(self) -> list[Route]:
        return [
            *(Route(f"{prefix}/models", self.models) for prefix in PREFIXES),
            *(Route(f"{prefix}/models/{{model:path}}", self.model) for prefix in PREFIXES),
            Route("/healthz", self.health),
            Route("/stats", self.stats),
            Route("/sessions", self.open_session, methods=["POST"]),
            Route("/sessions/{session}", self.read_session),
            Route("/sessions/{session}/complete", self.complete_session, methods=["POST"]),
            Route("/sessions/{session}/fail", self.fail_session, methods=["POST"]),
            Route("/sessions/{session}/calls", self.submit_calls, methods=["POST"]),
            *(Route(f"{prefix}/generate", self.generate, methods=["POST"]) for prefix in PREFIXES),
            Route("/feedback", self.list_feedback),
            *(Route(f"{prefix}/feedback", self.feedback, methods=["POST"]) for prefix in ("", *PREFIXES)),
        ]

    async def models(self, http: HttpRequest) -> Response:
        await self._incoming.caller(http)
        if "anthropic-version" in http.headers:
            return Response(format_models([self._policy_id]), media_type=JSON)
        return _json({"object": "list", "data": [self._model(self._policy_id)]})

    async def model(self, http: HttpRequest) -> Response:
        await self._incoming.caller(http)
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
        await self._admin(http)
        lag = self._watch.p99() * 1000
        return _json(
            {
                "loop_lag_p99_ms": lag,
                "rss_mb": memory_mb(),
                "in_flight": self._incoming.in_flight,
                "sessions_in_memory": len(self._sessions),
            }
        )

    async def _admin(self, http: HttpRequest) -> None:
        if (await self._incoming.caller(http)).kind != "admin":
            raise ApiError(403, "Only the admin key reads these.", code="not_allowed")

    # --- tokens in, tokens out --------------------------------------------------------------------

    async def generate(self, http: HttpRequest) -> Response:
        caller, calls = await self._incoming.caller(http), self._routing.engine()
        with self._incoming.admitted():
            body = await self._incoming.body_of(http)
        asked = read_generate(body, calls.engine.info.vocab_size)
        named = SessionHints(
            http.path_params.get("session"), http.headers.get(SESSION_HEADER), external_id(http.headers, ())
        )
        state = await self._sessions.resolve(caller, named, None, ())
        exchange = EngineCall(
            calls,
            state,
            asked.request,
            None,
            request_id=new_id("gen"),
            dialect="tokens",
            evidence=retry_evidence(http.headers),
            stop_token_ids=asked.stop_token_ids,
        )
        return GenerateResponse(self._chat, exchange, self._incoming.count, self._incoming.patience)

    async def submit_calls(self, http: HttpRequest) -> Response:
        caller, calls = await self._incoming.caller(http), self._routing.engine()
        body = await self._incoming.body_of(http)
        state = await self._sessions.usable(http.path_params["session"], caller)
        head = (await calls.store.latest_policy(state.session.policy_id)).version
        given = read_submission(body, calls.engine.info.vocab_size, head)
        return Response(
            write_submitted(await submit(calls, self._hasher, state, given)), 201, media_type=JSON
        )

    # --- control ----------------------------------------------------------------------------------

    async def open_session(self, http: HttpRequest) -> Response:
        caller = await self._incoming.caller(http)
        session, key = await self._sessions.open(
            caller, _decode(await self._incoming.body_of(http), OpenSession)
        )
        base_url = f"{http.url.scheme}://{http.url.netloc}/s/{session.session_id}/v1"
        opened = OpenedSession(session_id=session.session_id, base_url=base_url, api_key=key)
        return _struct(opened, 201)

    async def complete_session(self, http: HttpRequest) -> Response:
        return await self._end(http, CompleteSession)

    async def fail_session(self, http: HttpRequest) -> Response:
        return await self._end(http, FailSession)

    async def _end(self, http: HttpRequest, kind: type[CompleteSession | FailSession]) -> Response:
        caller = await self._incoming.caller(http)
        asked = _decode(await self._incoming.body_of(http), kind)
        return _struct(await self._sessions.end(http.path_params["session"], caller, asked))

    async def read_session(self, http: HttpRequest) -> Response:
        caller = await self._incoming.caller(http)
        return _struct(await self._sessions.view(http.path_params["session"], caller))

    # --- people -----------------------------------------------------------------------------------

    async def feedback(self, http: HttpRequest) -> Response:
        caller = await self._incoming.caller(http)
        asked = _decode(await self._incoming.body_of(http), FeedbackBody)
        if session := http.path_params.get("session"):
            if asked.session_id not in (None, session):
                raise ApiError(403, "The URL and the body name different sessions.", code="session_conflict")
            asked.session_id = session
        given, is_new = await self._desk.add(caller, asked, retry_evidence(http.headers).client_key)
        return _struct(given, 201 if is_new else 200)

    async def list_feedback(self, http: HttpRequest) -> Response:
        await self._admin(http)
        return _struct(FeedbackList(await self._desk.list_feedback(http.query_params.get("session"))))

    async def on_error(self, http: HttpRequest, error: Exception) -> Response:
        return failure(self._chat, api_error(error))


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
