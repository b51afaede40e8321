"""Requests and responses of Weaver's protocol, including operation results.

A request that starts or polls an operation is held open until the operation is done, for at most
`LONG_POLL_TIMEOUT_SECONDS`. Otherwise the SDK would poll with a backoff of 0.5 s to 10 s.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from instar.protocol.base import ProtocolError
from instar.protocol.http import KeyStore, ProtocolRouter, json_response, parse_json, read_body
from instar.protocol.operations import OperationScheduler
from instar.protocol.service import TrainingService

KEY_HEADER = "X-WEAVER-API-KEY"
JSON, MULTIPART = "application/json", "multipart/form-data"
ERROR_CODES = {
    400: "invalid_request",
    401: "unauthorized",
    404: "not_found",
    405: "method_not_allowed",
    409: "conflict",
    413: "payload_too_large",
    415: "unsupported_media_type",
    429: "rate_limited",
    501: "not_offered",
    503: "unavailable",
}
RETRYABLE_STATUSES = frozenset({429, 503})
LONG_POLL_TIMEOUT_SECONDS = 25.0
"""How long a request is held open. The SDK gives up after 60 s."""
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class WeaverRequest:
    owner: str
    path_params: dict[str, str]
    content_type: str
    body: bytes
    call_id: str | None
    """Identifies a call across retries: its trace context or the digest of its manifest. None if unknown."""

    @property
    def media_type(self) -> str:
        return self.content_type.partition(";")[0].strip().lower()

    def parse(self, message_type: type[T]) -> T:
        if self.media_type != JSON:
            raise ProtocolError(
                f"unsupported content-type {self.media_type!r}; this route supports {JSON}", 415
            )
        return parse_json(self.body or b"{}", message_type)


def create_router(key_store: KeyStore, max_body: int) -> ProtocolRouter[WeaverRequest]:
    async def parse_request(http_request: Request, owner: str) -> WeaverRequest:
        request = WeaverRequest(
            owner=owner,
            path_params=http_request.path_params,
            content_type=http_request.headers.get("content-type", JSON),
            body=await read_body(http_request, max_body),
            call_id=http_request.headers.get("traceparent"),
        )
        if request.media_type not in (JSON, MULTIPART):
            raise ProtocolError(
                f"unsupported content-type {request.media_type!r}; supported: {JSON}, {MULTIPART}", 415
            )
        return request

    return ProtocolRouter[WeaverRequest](key_store, parse_request, _error_response)


def _error_response(error: ProtocolError) -> Response:
    code, is_retryable = _classify_error(error)
    return json_response({"error": code, "message": str(error), "retryable": is_retryable}, error.status)


def _classify_error(error: ProtocolError) -> tuple[str, bool]:
    """Return the error code and whether a retry may succeed."""
    code = ERROR_CODES.get(error.status, "invalid_request" if error.category == "user" else "internal_error")
    return code, error.status in RETRYABLE_STATUSES


class WeaverRoutes:
    def __init__(self, service: TrainingService, operations: OperationScheduler) -> None:
        self._service = service
        self._operations = operations

    async def _respond(self, operation_id: str, request: WeaverRequest) -> Response:
        result = await self._operations.wait(operation_id, request.owner, LONG_POLL_TIMEOUT_SECONDS)
        fields: dict[str, Any] = {"id": operation_id, "status": "running"}
        if result is not None and result.error is not None:
            code, is_retryable = _classify_error(result.error)
            fields |= {"status": "error", "error_code": code, "error_message": str(result.error)}
            fields["retryable"] = is_retryable
        elif result is not None:
            fields |= {"status": "done", "response": result.value}
        return json_response(fields)
