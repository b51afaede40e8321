"""The app that serves Tinker's protocol."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterable

from starlette.applications import Starlette
from starlette.responses import Response

from instar.protocol.base import ProtocolError
from instar.protocol.http import json_response
from instar.protocol.operations import OperationScheduler
from instar.protocol.service import TrainingService
from instar.protocol.tinker.auth import TinkerKeyStore, has_tinker_key
from instar.protocol.tinker.http import TinkerRequest, TinkerRouter, create_router
from instar.protocol.tinker.listing import TinkerListingRoutes
from instar.protocol.tinker.requests import TinkerRetrieveFuture, TinkerSessionRef
from instar.protocol.tinker.results import PROTOBUF, TinkerPassResult, TinkerSampleResult
from instar.protocol.tinker.sampling import TinkerSamplingRoutes, TinkerSamplingSessions
from instar.protocol.tinker.training import TinkerTrainingRoutes

HOLD_SECONDS = 30.0
"""The time that a request for a result is held open. Clients give up after 45 s."""


def create_app(service: TrainingService, operations: OperationScheduler, keys: Iterable[str]) -> Starlette:
    key_store = TinkerKeyStore(keys)
    sessions = TinkerSamplingSessions()
    router = create_router(key_store, service.limits.max_body)
    TinkerSessionRoutes(service, operations, key_store, sessions).register(router)
    TinkerTrainingRoutes(service, operations, sessions).register(router)
    TinkerSamplingRoutes(service, operations, sessions).register(router)
    TinkerListingRoutes(service).register(router)
    return router.create_app()


class TinkerSessionRoutes:
    """The routes for sessions, results of operations, client settings and telemetry."""

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

    def register(self, router: TinkerRouter) -> None:
        router.add("GET", "healthz", self.health)
        router.add("POST", "client/config", self.config)
        router.add("POST", "client/dynamic_config", self.dynamic_config)
        router.add("POST", "auth/token", self.token)
        router.add("POST", "telemetry", self.telemetry)
        router.add("POST", "create_session", self.create_session)
        router.add("POST", "session_heartbeat", self.heartbeat)
        router.add("POST", "sessions/{session_id}/finish", self.finish)
        router.add("POST", "retrieve_future", self.retrieve)

    async def health(self, request: TinkerRequest) -> Response:
        return json_response({"status": "ok"})

    async def config(self, request: TinkerRequest) -> Response:
        # Older clients send JSON unless ``proto_write_fwdbwd`` is set.
        settings = {"pjwt_auth_enabled": not has_tinker_key(request.http.headers), "proto_write_fwdbwd": True}
        response = json_response(settings)
        # Clients open a separate connection for this request and never close it themselves.
        response.headers["connection"] = "close"
        return response

    async def dynamic_config(self, request: TinkerRequest) -> Response:
        return json_response({})

    async def token(self, request: TinkerRequest) -> Response:
        return json_response({"jwt": self._keys.issue_token(request.owner)})

    async def telemetry(self, request: TinkerRequest) -> Response:
        """Discard the client's telemetry."""
        return json_response({"status": "accepted"})

    async def create_session(self, request: TinkerRequest) -> Response:
        session_id = await self._service.create_session(request.owner)
        return json_response({"type": "create_session", "session_id": session_id})

    async def heartbeat(self, request: TinkerRequest) -> Response:
        with _not_found_as_gone():  # clients stop their heartbeat only for 410
            self._service.heartbeat(request.parse(TinkerSessionRef).session_id, request.owner)
        return json_response({"type": "session_heartbeat"})

    async def finish(self, request: TinkerRequest) -> Response:
        session_id = request.path_param("session_id")
        await self._service.end_session(session_id, request.owner)
        model_ids, paths = self._sessions.end(session_id)
        for model_id in model_ids:
            self._operations.close_queue(model_id)
        for path in paths:
            with contextlib.suppress(ProtocolError):  # the checkpoint may have expired
                self._service.checkpoints.delete(path, request.owner)
        return Response(status_code=204)

    async def retrieve(self, request: TinkerRequest) -> Response:
        request_id = request.parse(TinkerRetrieveFuture).request_id
        # An unknown operation was started before a restart of this server. On a 410, clients submit sampling
        # requests again and report training requests as lost.
        with _not_found_as_gone():
            result = await self._operations.wait(request_id, request.owner, HOLD_SECONDS)
        if result is None:
            fields = {"type": "try_again", "request_id": request_id, "queue_state": "active"}
            return json_response(fields, 408)
        if result.error is not None:
            return json_response({"error": str(result.error), "category": result.error.category})
        value = result.value
        if not isinstance(value, (TinkerPassResult, TinkerSampleResult)):
            return json_response(value)
        if PROTOBUF in request.http.headers.get("accept", ""):
            return Response(value.to_protobuf(), media_type=PROTOBUF)
        return json_response(value.to_json())


@contextlib.contextmanager
def _not_found_as_gone() -> Generator[None]:
    try:
        yield
    except ProtocolError as error:
        raise ProtocolError(str(error), 410 if error.status == 404 else error.status) from error
