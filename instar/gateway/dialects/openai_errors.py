"""The shape in which OpenAI's APIs say that something went wrong."""

from __future__ import annotations

from instar.gateway.base import ApiError
from instar.types import Json

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}


def format_openai_error(error: ApiError) -> Json:
    kind = _TYPES.get(error.status, "server_error" if error.status >= 500 else "invalid_request_error")
    return {"error": {"message": error.message, "type": kind, "param": error.param, "code": error.code}}
