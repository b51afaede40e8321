"""Builds constraints from a model's formats of tool calls and reasoning."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from decimal import Decimal
from math import prod

from instar.errors import RenderError
from instar.record.base import Renderer, Tools
from instar.record.render import TemplateRenderer
from instar.record.tool_formats import ToolFormat
from instar.types import CallForm, Json, OutputConstraint, Tool

MAX_SCHEMA_LENGTH = 64 * 1024  # as JSON text
MAX_EXPANSION = 10_000
"""The maximum sum of all `minItems` and `maxItems` of a schema, and product of all `multipleOf`. Engines
expand them, so larger ones would take minutes and gigabytes of memory."""
_EXPANDED_NUMBER = re.compile(r'"(minItems|maxItems|multipleOf)": -?([-+.\deE]+|Infinity)')


def build_constraint(
    renderer: Renderer, schema: Json | None, tools: Tools, prompt_ids: Sequence[int], *, is_single_call: bool
) -> OutputConstraint:
    if not isinstance(renderer, TemplateRenderer):
        raise RenderError("the replies of models without a chat template cannot be constrained")
    reasoning_format, tool_format = renderer.reasoning_format, renderer.tool_format
    if reasoning_format.frames:
        raise RenderError("the replies of models that write to channels cannot be constrained")
    if schema is not None and (problem := _find_excess(schema)) is not None:
        raise RenderError(f"the schema's {problem}")
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
    schema = {"type": "object", **tool["parameters"]}
    if _find_excess(schema) is not None:
        schema = {"type": "object"}  # agents list tools that they do not require
    return CallForm(f"{begin}{name}{middle}", json.dumps(schema), end)


def _find_excess(schema: Json) -> str | None:
    """Return what makes the schema too expensive for engines, or None."""
    text = json.dumps(schema)
    if len(text) > MAX_SCHEMA_LENGTH:
        return f"length is {len(text)}; the limit is {MAX_SCHEMA_LENGTH}"
    numbers = _EXPANDED_NUMBER.findall(text)
    items = sum(float(value) for name, value in numbers if name != "multipleOf")
    # Multiples of 7 and 11 are matched by an automaton with 77 states. Decimals are scaled to integers.
    multiples = {f"{Decimal(value):f}".replace(".", "") for name, value in numbers if name == "multipleOf"}
    for size, name in ((items, "'minItems' and 'maxItems'"), (prod(map(float, multiples)), "'multipleOf'")):
        if size > MAX_EXPANSION:
            return f"values of {name} are too large; the limit is {MAX_EXPANSION}"
    return None
