"""Anthropic's Messages, in: the body of a request → a Request.

What cannot be honoured is never passed over in silence: it becomes the request's ``refusal``, which names
it. Some of what agents send by default asks for nothing that a sampled token could show, or for what no one
can promise; those are taken as hints:

    field                        why it is taken
    tool_choice "any" or "tool"  A model cannot be made to call a tool without bending what it samples, and
                                 bent samples are not the policy's. The tools are offered; whether one was
                                 called is told by ``stop_reason``.
    tool_choice.disable_parallel_tool_use
                                 As above: the model is asked once, and its calls are all told.
    tools[].strict               As above, for the form of the input.
    thinking                     Whether it thinks is the model's own way; this decides whether it is shown.
    output_config.effort, .task_budget
                                 What a provider makes of them is its own; the model here has one way.
    context_management.edits "clear_thinking_..."
                                 What a model thought stays in the tokens it sampled.
    fallbacks, fallback_credit_token
                                 Other models for when the asked one declines; here none does.
    cache_control, diagnostics, inference_geo, service_tier, speed
                                 The provider's queues and caches.
    metadata.user_id             Tells whose session this is (`Request.identity`).

Tools that agents list as a matter of course and that only a provider has: `TOOLS_LEFT_OUT`.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from typing import Any, Literal, cast

import msgspec

from instar.gateway.base import ApiError, bad_request, from_validation
from instar.gateway.dialects.base import ModelRequest
from instar.gateway.dialects.messages_blocks import Block, WireMessage, parse_messages, parse_system
from instar.types import Tool

MAX_STOP_SEQUENCES = 16


class WireTool(msgspec.Struct):
    """Its other fields say how a provider may run it, not what it is: ``cache_control``, ``strict``,
    ``eager_input_streaming``, ``input_examples``, ``allowed_callers``. A tool with ``defer_loading`` is given
    to the model from the start."""

    name: str = ""
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None


class ToolChoice(msgspec.Struct):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(msgspec.Struct):
    type: Literal["enabled", "adaptive", "between_tools", "disabled"]
    budget_tokens: int | None = None
    display: str | None = None


class Edit(msgspec.Struct):
    type: str


class ContextManagement(msgspec.Struct, forbid_unknown_fields=True):
    edits: list[Edit] | None = None


class OutputConfig(msgspec.Struct, forbid_unknown_fields=True):
    effort: str | None = None
    task_budget: dict[str, Any] | None = None
    format: dict[str, Any] | None = None


class Metadata(msgspec.Struct):
    user_id: str | None = None


class Body(msgspec.Struct, forbid_unknown_fields=True):
    messages: list[WireMessage]
    model: str
    max_tokens: int | None = None
    system: str | list[Block] | None = None
    tools: list[WireTool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stream: bool | None = None
    metadata: Metadata | None = None
    # Hints, as the table above says.
    cache_control: dict[str, Any] | None = None
    diagnostics: dict[str, Any] | None = None
    inference_geo: str | None = None
    service_tier: str | None = None
    speed: str | None = None
    fallbacks: Any = None
    fallback_credit_token: Any = None
    # Taken where they ask for what is done anyway.
    output_config: OutputConfig | None = None
    context_management: ContextManagement | None = None
    # Known, and taken only when they ask for nothing.
    compaction: Any = None
    container: Any = None
    mcp_servers: list[Any] | None = None
    output_format: Any = None
    thread: Any = None


_decode_body = msgspec.json.Decoder(Body).decode

_RANGES: dict[str, tuple[float, float]] = {
    "max_tokens": (0, math.inf),
    "temperature": (0, 1),
    "top_p": (0, 1),
    "top_k": (0, 1 << 31),
}
_NEVER = ("compaction", "container", "mcp_servers", "output_format", "thread")
_HARMLESS_EDITS = ("clear_thinking_",)
IGNORED_TOOL_TYPES = {
    "tool_search_tool_": "tools that it would find are given to the model from the start",
}
"""Tools that a provider would run, by how their type begins, and why nothing is lost without them. All other
types of tools that we do not have are refused by name."""


def parse_request(body: bytes) -> ModelRequest:
    wire = _decode(body)
    if wire.max_tokens is None:
        raise _missing("max_tokens")
    return _request(wire, [*_refusals(wire), *_unanswerable(wire)])


def parse_count_request(body: bytes) -> ModelRequest:
    wire = _decode(body)
    return _request(wire, _refusals(wire))


def _decode(body: bytes) -> Body:
    try:
        wire = _decode_body(body)
    except msgspec.DecodeError as error:
        raise from_validation(error) from error
    except (UnicodeDecodeError, RecursionError) as error:
        raise bad_request(f"The body is not valid JSON: {error}", code="invalid_json") from error
    _check(wire)
    return wire


def _request(wire: Body, refused: list[ApiError]) -> ModelRequest:
    messages = (*parse_system(wire.system, refused), *parse_messages(wire.messages, refused))
    return ModelRequest(
        model=wire.model,
        messages=messages,
        tools=_tools(wire, refused),
        session_hints=_identity(wire.metadata),
        max_tokens=wire.max_tokens,
        temperature=wire.temperature,
        top_p=wire.top_p,
        top_k=wire.top_k,
        stop=tuple(wire.stop_sequences or ()),
        stream=bool(wire.stream),
        unsupported_error=refused[0] if refused else None,
        parsed_body=wire,
    )


# --- parameters ---------------------------------------------------------------------------------


def _unsupported(what: str, path: str) -> ApiError:
    return bad_request(what, path, "unsupported_value")


def _missing(path: str) -> ApiError:
    return bad_request(f"Missing required parameter: '{path}'.", path, "missing_required_parameter")


def _check(body: Body) -> None:
    if not body.messages:
        raise bad_request("'messages' is empty.", "messages", "invalid_value")
    for name, (low, high) in _RANGES.items():
        value = getattr(body, name)
        if value is not None and not low <= value <= high:
            raise bad_request(f"'{name}' is {value}, out of [{low}, {high}].", name, "invalid_value")
    if body.top_p == 0:
        raise bad_request("'top_p' must be greater than 0.", "top_p", "invalid_value")
    _check_stop(body.stop_sequences or ())
    _check_tool_choice(body.tool_choice, body.tools or ())


def _check_stop(stop: Sequence[str]) -> None:
    if "" in stop:
        raise bad_request("A stop sequence is empty.", f"stop_sequences[{stop.index('')}]", "invalid_value")
    if len(stop) > MAX_STOP_SEQUENCES:
        raise bad_request(
            f"{len(stop)} stop sequences are more than {MAX_STOP_SEQUENCES}.",
            "stop_sequences",
            "invalid_value",
        )


def _check_tool_choice(choice: ToolChoice | None, tools: Sequence[WireTool]) -> None:
    if choice is None or choice.type not in ("any", "tool"):
        return
    if not tools:
        raise bad_request("A tool is required and there is none in 'tools'.", "tool_choice", "invalid_value")
    if choice.type == "any":
        return
    if choice.name is None:
        raise _missing("tool_choice.name")
    if all(tool.name != choice.name and tool.type != "mcp_toolset" for tool in tools):
        raise bad_request(f"The tool {choice.name!r} is not in 'tools'.", "tool_choice.name", "invalid_value")


def _refusals(body: Body) -> list[ApiError]:
    refused = [
        _unsupported(f"'{name}' is not supported here.", name) for name in _NEVER if getattr(body, name)
    ]
    if body.output_config and body.output_config.format:
        refused.append(_unsupported("An output format cannot be enforced here.", "output_config.format"))
    edits = body.context_management.edits if body.context_management else None
    for i, edit in enumerate(edits or ()):
        if not edit.type.startswith(_HARMLESS_EDITS):
            told = f"The context is not edited here: {edit.type!r}."
            refused.append(_unsupported(told, f"context_management.edits[{i}].type"))
    return refused


def _unanswerable(body: Body) -> list[ApiError]:
    """What can be counted, and not be answered."""
    refused: list[ApiError] = []
    if body.max_tokens == 0:
        refused.append(_unsupported("There is no cache to be filled without a reply.", "max_tokens"))
    last = len(body.messages) - 1
    if body.messages[last].role == "assistant":
        told = "The last message is the assistant's: a reply that was begun cannot be continued here."
        refused.append(_unsupported(told, f"messages[{last}]"))
    return refused


def _tools(body: Body, refused: list[ApiError]) -> tuple[Tool, ...]:
    tools = [tool for i, wire in enumerate(body.tools or ()) if (tool := _tool(wire, f"tools[{i}]", refused))]
    return () if body.tool_choice and body.tool_choice.type == "none" else tuple(tools)


def _tool(wire: WireTool, path: str, refused: list[ApiError]) -> Tool | None:
    if wire.type not in (None, "custom"):
        if not wire.type.startswith(tuple(IGNORED_TOOL_TYPES)):
            told = f"A tool of the type {wire.type!r} is not available here; supported: 'custom'."
            refused.append(_unsupported(told, f"{path}.type"))
        return None
    if not wire.name:
        raise _missing(f"{path}.name")
    where = f"{path}.input_schema"
    if wire.input_schema is None:
        raise _missing(where)
    if not isinstance(wire.input_schema.get("properties") or {}, dict):
        raise bad_request("'properties' is not an object.", f"{where}.properties", "invalid_type")
    return Tool(name=wire.name, description=wire.description or "", parameters=wire.input_schema)


_CLAUDE_SESSION = re.compile(r"_session_([0-9A-Za-z-]+)$")


def _identity(metadata: Metadata | None) -> tuple[str, ...]:
    """Claude Code names its session in the user's id: ``user_…_account_…_session_<uuid>``, or as JSON with a
    ``session_id``. The rest of such an id is the same in all sessions of the user."""
    if metadata is None or not metadata.user_id:
        return ()
    user = metadata.user_id
    if found := _CLAUDE_SESSION.search(user):
        return (f"claude-session:{found[1]}",)
    if user.startswith("{"):
        try:
            named: Any = json.loads(user)
        except (ValueError, RecursionError):
            named = None
        session = cast(dict[str, Any], named).get("session_id") if isinstance(named, dict) else None
        if session and isinstance(session, str):
            return (f"claude-session:{session}",)
    return (f"user_id:{user}",)
