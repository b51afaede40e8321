"""Translate what a request requires of the reply to a constraint on the sampled tokens.

The functions are only called for requests with a ``required_output``.
"""

from __future__ import annotations

from instar.engines.base import EngineInfo
from instar.errors import RenderError
from instar.gateway.base import ApiError, bad_request
from instar.gateway.dialects.base import ModelRequest
from instar.record.base import Placement, Renderer
from instar.types import OutputConstraint


def check_support(request: ModelRequest, info: EngineInfo) -> None:
    """Raise ApiError (400) if the engine cannot constrain replies and the request depends on it."""
    required = request.required_output
    assert required is not None
    if not (required.is_optional or info.constrains_output):
        raise unsupported_error(request, f"the {info.kind} engine cannot constrain replies")


def constrain(
    request: ModelRequest, info: EngineInfo, renderer: Renderer, placement: Placement
) -> OutputConstraint | None:
    """Return the constraint, or None if it is optional and not supported. Raise ApiError (400) if the model's
    format does not support another one."""
    required = request.required_output
    assert required is not None
    if not info.constrains_output:
        return None
    prompt_ids, is_single_call = placement.prompt_ids.tolist(), required.is_single_call
    try:
        return renderer.constrain(required.schema, required.tools, prompt_ids, is_single_call=is_single_call)
    except RenderError as error:
        if required.is_optional:
            return None
        raise unsupported_error(request, str(error)) from error


def unsupported_error(request: ModelRequest, reason: str) -> ApiError:
    assert request.required_output is not None
    param = request.required_output.param
    message = f"'{param}' cannot be honoured: {reason.rstrip('.')}. Change it or leave it out."
    return bad_request(message, param, "unsupported_value")
