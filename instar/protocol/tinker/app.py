"""The app that speaks Tinker's protocol for a workshop."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.responses import Response

from instar.protocol.base import Operations, ProtocolError, Workshop
from instar.protocol.tinker.auth import Keys, is_tinkers
from instar.protocol.tinker.http import Call, Routes, answer, not_offered
from instar.protocol.tinker.listing import Listing
from instar.protocol.tinker.requests import OfSession, RetrieveFuture
from instar.protocol.tinker.results import PROTOBUF, PassResult, SampleResult
from instar.protocol.tinker.sampling import SamplingRoutes, SamplingSessions
from instar.protocol.tinker.training import Training

HOLD_SECONDS = 30.0
"""For how long a question after a result is held open. Clients give up after 45 s."""


def create_app(workshop: Workshop, operations: Operations, keys: Iterable[str]) -> Starlette:
    known = Keys(keys)
    sessions = SamplingSessions()
    routes = Routes(known, workshop.limits.max_body)
    _Service(workshop, operations, known, sessions).add_to(routes)
    Training(workshop, operations, sessions).add_to(routes)
    SamplingRoutes(workshop, operations, sessions).add_to(routes)
    Listing(workshop).add_to(routes)
    return Starlette(routes=routes.routes, exception_handlers={HTTPException: not_offered})


class _Service:
    """Sessions, results, and what clients ask of any server."""

    def __init__(
        self, workshop: Workshop, operations: Operations, keys: Keys, sessions: SamplingSessions
    ) -> None:
        self._workshop = workshop
        self._operations = operations
        self._keys = keys
        self._sessions = sessions

    def add_to(self, routes: Routes) -> None:
        routes.get("healthz", self.health)
        routes.post("client/config", self.config)
        routes.post("client/dynamic_config", self.dynamic_config)
        routes.post("auth/token", self.token)
        routes.post("telemetry", self.telemetry)
        routes.post("create_session", self.create_session)
        routes.post("session_heartbeat", self.heartbeat)
        routes.post("sessions/{session_id}/finish", self.finish)
        routes.post("retrieve_future", self.retrieve)

    async def health(self, call: Call) -> Response:
        return answer({"status": "ok"})

    async def config(self, call: Call) -> Response:
        """Clients take their own defaults for what is not said. Older ones write JSON unless told. They open
        a connection for this alone and leave it to their garbage collector, so it is closed from here."""
        told = {"pjwt_auth_enabled": not is_tinkers(call.http.headers), "proto_write_fwdbwd": True}
        response = answer(told)
        response.headers["connection"] = "close"
        return response

    async def dynamic_config(self, call: Call) -> Response:
        return answer({})

    async def token(self, call: Call) -> Response:
        return answer({"jwt": self._keys.token(call.owner)})

    async def telemetry(self, call: Call) -> Response:
        """Nothing is kept of it."""
        return answer({"status": "accepted"})

    async def create_session(self, call: Call) -> Response:
        session_id = await self._workshop.create_session(call.owner)
        return answer({"type": "create_session", "session_id": session_id})

    async def heartbeat(self, call: Call) -> Response:
        try:
            self._workshop.heartbeat(call.read(OfSession).session_id, call.owner)
        except ProtocolError as error:
            # With 410, and with nothing else, clients stop their heartbeat.
            raise ProtocolError(str(error), 410 if error.status == 404 else error.status) from error
        return answer({"type": "session_heartbeat"})

    async def finish(self, call: Call) -> Response:
        session_id = call.part("session_id")
        await self._workshop.end_session(session_id, call.owner)
        models, weights = self._sessions.end(session_id)
        for model_id in models:
            self._operations.end_lane(model_id)
        for path in weights:
            with contextlib.suppress(ProtocolError):  # it may have expired
                self._workshop.delete_checkpoint(path, call.owner)
        return Response(status_code=204)

    async def retrieve(self, call: Call) -> Response:
        request_id = call.read(RetrieveFuture).request_id
        try:
            outcome = await self._operations.wait(request_id, call.owner, HOLD_SECONDS)
        except ProtocolError as error:
            # Of an earlier life of this server. 410 makes clients send what they sampled again, and tells
            # those that train that it is lost.
            raise ProtocolError(str(error), 410 if error.status == 404 else error.status) from error
        if outcome is None:
            return answer({"type": "try_again", "request_id": request_id, "queue_state": "active"}, 408)
        if outcome.error is not None:
            return answer({"error": str(outcome.error), "category": outcome.error.category})
        value = outcome.value
        if not isinstance(value, (PassResult, SampleResult)):
            return answer(value)
        if PROTOBUF in call.http.headers.get("accept", ""):
            return Response(value.protobuf(), media_type=PROTOBUF)
        return answer(value.json())
