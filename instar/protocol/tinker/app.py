"""The app that speaks Tinker's protocol for a workshop."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.responses import Response

from instar.protocol.base import OperationScheduler, ProtocolError, TrainingService
from instar.protocol.tinker.auth import TinkerKeyStore, has_tinker_key
from instar.protocol.tinker.http import TinkerRequest, TinkerRouter, json_response, unknown_route
from instar.protocol.tinker.listing import TinkerListingRoutes
from instar.protocol.tinker.requests import TinkerRetrieveFuture, TinkerSessionRef
from instar.protocol.tinker.results import PROTOBUF, TinkerPassResult, TinkerSampleResult
from instar.protocol.tinker.sampling import TinkerSamplingRoutes, TinkerSamplingSessions
from instar.protocol.tinker.training import TinkerTrainingRoutes

HOLD_SECONDS = 30.0
"""For how long a question after a result is held open. Clients give up after 45 s."""


def create_app(service: TrainingService, operations: OperationScheduler, keys: Iterable[str]) -> Starlette:
    known = TinkerKeyStore(keys)
    sessions = TinkerSamplingSessions()
    routes = TinkerRouter(known, service.limits.max_body)
    TinkerSessionRoutes(service, operations, known, sessions).register(routes)
    TinkerTrainingRoutes(service, operations, sessions).register(routes)
    TinkerSamplingRoutes(service, operations, sessions).register(routes)
    TinkerListingRoutes(service).register(routes)
    return Starlette(routes=routes.routes, exception_handlers={HTTPException: unknown_route})


class TinkerSessionRoutes:
    """Sessions, results, and what clients ask of any server."""

    def __init__(
        self,
        service: TrainingService,
        operations: OperationScheduler,
        keys: TinkerKeyStore,
        sessions: TinkerSamplingSessions,
    ) -> None:
        self._service = service
        self._operations = operations
        self._keys = keys
        self._sessions = sessions

    def register(self, routes: TinkerRouter) -> None:
        routes.get("healthz", self.health)
        routes.post("client/config", self.config)
        routes.post("client/dynamic_config", self.dynamic_config)
        routes.post("auth/token", self.token)
        routes.post("telemetry", self.telemetry)
        routes.post("create_session", self.create_session)
        routes.post("session_heartbeat", self.heartbeat)
        routes.post("sessions/{session_id}/finish", self.finish)
        routes.post("retrieve_future", self.retrieve)

    async def health(self, request: TinkerRequest) -> Response:
        return json_response({"status": "ok"})

    async def config(self, request: TinkerRequest) -> Response:
        """Clients take their own defaults for what is not said. Older ones write JSON unless told. They open
        a connection for this alone and leave it to their garbage collector, so it is closed from here."""
        told = {"pjwt_auth_enabled": not has_tinker_key(request.http.headers), "proto_write_fwdbwd": True}
        response = json_response(told)
        response.headers["connection"] = "close"
        return response

    async def dynamic_config(self, request: TinkerRequest) -> Response:
        return json_response({})

    async def token(self, request: TinkerRequest) -> Response:
        return json_response({"jwt": self._keys.issue_token(request.owner)})

    async def telemetry(self, request: TinkerRequest) -> Response:
        """Nothing is kept of it."""
        return json_response({"status": "accepted"})

    async def create_session(self, request: TinkerRequest) -> Response:
        session_id = await self._service.create_session(request.owner)
        return json_response({"type": "create_session", "session_id": session_id})

    async def heartbeat(self, request: TinkerRequest) -> Response:
        try:
            self._service.heartbeat(request.parse(TinkerSessionRef).session_id, request.owner)
        except ProtocolError as error:
            # With 410, and with nothing else, clients stop their heartbeat.
            raise ProtocolError(str(error), 410 if error.status == 404 else error.status) from error
        return json_response({"type": "session_heartbeat"})

    async def finish(self, request: TinkerRequest) -> Response:
        session_id = request.path_param("session_id")
        await self._service.end_session(session_id, request.owner)
        models, weights = self._sessions.end(session_id)
        for model_id in models:
            self._operations.close_queue(model_id)
        for path in weights:
            with contextlib.suppress(ProtocolError):  # it may have expired
                self._service.delete_checkpoint(path, request.owner)
        return Response(status_code=204)

    async def retrieve(self, request: TinkerRequest) -> Response:
        request_id = request.parse(TinkerRetrieveFuture).request_id
        try:
            outcome = await self._operations.wait(request_id, request.owner, HOLD_SECONDS)
        except ProtocolError as error:
            # Of an earlier life of this server. 410 makes clients send what they sampled again, and tells
            # those that train that it is lost.
            raise ProtocolError(str(error), 410 if error.status == 404 else error.status) from error
        if outcome is None:
            return json_response(
                {"type": "try_again", "request_id": request_id, "queue_state": "active"}, 408
            )
        if outcome.error is not None:
            return json_response({"error": str(outcome.error), "category": outcome.error.category})
        value = outcome.value
        if not isinstance(value, (TinkerPassResult, TinkerSampleResult)):
            return json_response(value)
        if PROTOBUF in request.http.headers.get("accept", ""):
            return Response(value.to_protobuf(), media_type=PROTOBUF)
        return json_response(value.to_json())
