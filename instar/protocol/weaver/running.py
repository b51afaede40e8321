"""Operations as Weaver shows them.

A request that starts one is held open until it is done, up to `HOLD` seconds, and so is one that asks for it:
the SDK would come back only after half a second, then one, two, up to ten.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from starlette.responses import Response

from instar.protocol.base import Operations, Outcome, ProtocolError
from instar.protocol.weaver.http import Call, error_fields, json_response

HOLD = 25.0
"""Less than half of the 60 s after which the SDK gives a request up."""

Work = Callable[[], Awaitable[Any]]


class Running:
    def __init__(self, operations: Operations) -> None:
        self._operations = operations

    async def start(self, kind: str, call: Call, work: Work) -> Response:
        return await self.shown(self._operations.submit(kind, call.owner, work), call)

    async def finish(self, kind: str, call: Call, work: Work, *, key: str | None, deadline: float) -> Any:
        """The value of work that the SDK does not wait for as an operation, but may well ask for twice."""
        operation_id = self._operations.submit(kind, call.owner, work, key=key)
        outcome = await self._operations.wait(operation_id, call.owner, deadline)
        if outcome is None:
            raise ProtocolError(f"{kind} is not done after {deadline:g} s: ask again", 503, "server")
        if outcome.error is not None:
            raise outcome.error
        return outcome.value

    async def show(self, call: Call) -> Response:
        return await self.shown(call.path["operation"], call)

    async def shown(self, operation_id: str, call: Call) -> Response:
        outcome = await self._operations.wait(operation_id, call.owner, HOLD)
        return json_response({"id": operation_id, **_status(outcome)})


def _status(outcome: Outcome | None) -> dict[str, Any]:
    if outcome is None:
        return {"status": "running"}
    if outcome.error is None:
        return {"status": "done", "response": outcome.value}
    code, message, retryable = error_fields(outcome.error)
    return {"status": "error", "error_code": code, "error_message": message, "retryable": retryable}
