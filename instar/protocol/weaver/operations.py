"""Operations as Weaver shows them.

A request that starts one is held open until it is done, up to `HOLD` seconds, and so is one that asks for it:
the SDK would come back only after half a second, then one, two, up to ten.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from starlette.responses import Response

from instar.protocol.base import OperationResult, OperationScheduler, ProtocolError
from instar.protocol.weaver.http import WeaverRequest, error_fields, json_response

HOLD = 25.0
"""Less than half of the 60 s after which the SDK gives a request up."""

OperationWork = Callable[[], Awaitable[Any]]


class WeaverOperationRoutes:
    def __init__(self, operations: OperationScheduler) -> None:
        self._operations = operations

    async def submit(self, kind: str, request: WeaverRequest, work: OperationWork) -> Response:
        return await self.respond(self._operations.submit(kind, request.owner, work), request)

    async def run(
        self, kind: str, request: WeaverRequest, work: OperationWork, *, key: str | None, deadline: float
    ) -> Any:
        """The value of work that the SDK does not wait for as an operation, but may well ask for twice."""
        operation_id = self._operations.submit(kind, request.owner, work, key=key)
        outcome = await self._operations.wait(operation_id, request.owner, deadline)
        if outcome is None:
            raise ProtocolError(f"{kind} is not done after {deadline:g} s: ask again", 503, "server")
        if outcome.error is not None:
            raise outcome.error
        return outcome.value

    async def show(self, request: WeaverRequest) -> Response:
        return await self.respond(request.path_params["operation"], request)

    async def respond(self, operation_id: str, request: WeaverRequest) -> Response:
        outcome = await self._operations.wait(operation_id, request.owner, HOLD)
        return json_response({"id": operation_id, **_status(outcome)})


def _status(outcome: OperationResult | None) -> dict[str, Any]:
    if outcome is None:
        return {"status": "running"}
    if outcome.error is None:
        return {"status": "done", "response": outcome.value}
    code, message, retryable = error_fields(outcome.error)
    return {"status": "error", "error_code": code, "error_message": message, "retryable": retryable}
