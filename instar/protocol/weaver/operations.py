"""Operations as Weaver's clients see them.

A request that starts an operation or asks for its state is held open for up to `HOLD_SECONDS` until the
operation is done: the SDK would poll again only after half a second, then one, two, up to ten.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from starlette.responses import Response

from instar.protocol.base import OperationResult, OperationScheduler, ProtocolError
from instar.protocol.http import json_response
from instar.protocol.weaver.http import WeaverRequest, error_fields

HOLD_SECONDS = 25.0
"""Seconds that a request is held open: less than half of the 60 s after which the SDK gives up."""

OperationWork = Callable[[], Awaitable[Any]]


class WeaverOperationRoutes:
    def __init__(self, operations: OperationScheduler) -> None:
        self._operations = operations

    async def submit(self, kind: str, request: WeaverRequest, work: OperationWork) -> Response:
        return await self.respond(self._operations.submit(kind, request.owner, work), request)

    async def run(
        self, kind: str, request: WeaverRequest, work: OperationWork, *, key: str | None, deadline: float
    ) -> Any:
        """Run an operation and return its value, for requests whose result the SDK expects in the response.
        With ``key``, a repeated request gets the result of the same operation."""
        operation_id = self._operations.submit(kind, request.owner, work, key=key)
        result = await self._operations.wait(operation_id, request.owner, deadline)
        if result is None:
            raise ProtocolError(f"{kind} is not done after {deadline:g} s; send it again", 503, "server")
        if result.error is not None:
            raise result.error
        return result.value

    async def show(self, request: WeaverRequest) -> Response:
        return await self.respond(request.path_params["operation"], request)

    async def respond(self, operation_id: str, request: WeaverRequest) -> Response:
        result = await self._operations.wait(operation_id, request.owner, HOLD_SECONDS)
        return json_response({"id": operation_id, **_status_fields(result)})


def _status_fields(result: OperationResult | None) -> dict[str, Any]:
    if result is None:
        return {"status": "running"}
    if result.error is None:
        return {"status": "done", "response": result.value}
    code, message, retryable = error_fields(result.error)
    return {"status": "error", "error_code": code, "error_message": message, "retryable": retryable}
