"""Builds constraints from a model's formats of tool calls and reasoning."""

from __future__ import annotations

import json
from collections.abc import Sequence

from instar.errors import RenderError
from instar.record.base import Renderer, Tools
from instar.record.render import TemplateRenderer
from instar.record.tool_formats import ToolFormat
from instar.types import CallForm, Json, OutputConstraint, Tool


def build_constraint(
    renderer: Renderer, schema: Json | None, tools: Tools, prompt_ids: Sequence[int], *, is_single_call: bool
) -> OutputConstraint:
    if not isinstance(renderer, TemplateRenderer):
        raise RenderError("the replies of models without a chat template cannot be constrained")
    reasoning_format, tool_format = renderer.reasoning_format, renderer.tool_format
    if reasoning_format.frames:
        raise RenderError("the replies of models that write to channels cannot be constrained")
    reasoning = None
    if renderer.ends_in_reasoning(prompt_ids):
        reasoning = ("", reasoning_format.end)
    elif renderer.can_reason:
        reasoning = (reasoning_format.begin, reasoning_format.end)
    return OutputConstraint(
        schema=None if schema is None else json.dumps(schema),
        calls=tuple(_build_call(tool_format, tool) for tool in tools),
        separator=None if is_single_call else tool_format.separator,
        reasoning=reasoning,
    )


def _build_call(tool_format: ToolFormat, tool: Tool) -> CallForm:
    if tool_format.frame is None:
        raise RenderError(f"tool calls in this model's format ({tool_format.name}) cannot be constrained")
    begin, middle, end = tool_format.frame
    name = json.dumps(tool["name"], ensure_ascii=False)
    return CallForm(f"{begin}{name}{middle}", json.dumps({"type": "object", **tool["parameters"]}), end)
