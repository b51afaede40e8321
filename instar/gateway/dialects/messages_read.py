"""Anthropic's Messages, as a client sends them → the canonical request.

What stands in several blocks is one text here: a system prompt, a user's text and a tool's result are their
blocks with an empty line between, an assistant's text is its blocks one behind the other, for so it was cut.
A user's message with tool results becomes tool messages and user messages, in the order of its blocks.

Claude Code puts a line ``x-anthropic-billing-header: ...`` in front of its system prompt, other in each
request and not meant for the model: it is left out, else no request would continue another.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Sequence
from typing import Any, Literal, cast

import msgspec

from instar.gateway.base import ApiError, bad_request, from_validation
from instar.gateway.dialects.base import Request
from instar.types import Message, Tool, ToolCall

BETWEEN_BLOCKS = "\n\n"
MOST_STOP_SEQUENCES = 16
BILLING_LINE = "x-anthropic-billing-header:"


class Block(msgspec.Struct):
    """A content block of any type. Marks that say nothing to a model (``cache_control``, ``citations``,
    ``signature``, ``caller``) are passed over."""

    type: str
    text: str | None = None
    thinking: str | None = None
    id: str = ""
    name: str = ""
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: str | list[Block] | None = None
    is_error: bool | None = None
    tool_name: str = ""


class WireMessage(msgspec.Struct):
    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


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
    disable_parallel_tool_use: bool | None = None


class Thinking(msgspec.Struct):
    """Whether it thinks is the model's own way; this decides whether the client is shown it."""

    type: Literal["enabled", "adaptive", "between_tools", "disabled"]
    budget_tokens: int | None = None
    display: str | None = None


class Edit(msgspec.Struct):
    type: str


class ContextManagement(msgspec.Struct, forbid_unknown_fields=True):
    edits: list[Edit] | None = None


class OutputConfig(msgspec.Struct, forbid_unknown_fields=True):
    effort: str | None = None
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
    # Hints to a provider about cost, speed and effort: taken, and of no effect here.
    cache_control: dict[str, Any] | None = None
    diagnostics: dict[str, Any] | None = None
    inference_geo: str | None = None
    service_tier: str | None = None
    speed: str | None = None
    output_config: OutputConfig | None = None
    context_management: ContextManagement | None = None
    # Known, and taken only when they ask for nothing.
    container: Any = None
    mcp_servers: list[Any] | None = None


_decode_body = msgspec.json.Decoder(Body).decode

_RANGES: dict[str, tuple[float, float]] = {
    "max_tokens": (1, math.inf),
    "temperature": (0, 1),
    "top_p": (0, 1),
    "top_k": (0, 1 << 31),
}
_HARMLESS_EDITS = ("clear_thinking_",)
"""Edits of the context that change nothing here: what a model thought stays in the tokens it sampled."""
_TOOLS_LEFT_OUT = {
    "tool_search_tool_": "tools that it would find are given to the model from the start",
}
"""Tools that a provider would run, by how their type begins, and why nothing is lost without them. All other
types of tools that we do not have are refused by name."""


def read_request(body: bytes) -> Request:
    wire = _decode(body)
    if wire.max_tokens is None:
        raise bad_request(
            "Missing required parameter: 'max_tokens'.", "max_tokens", "missing_required_parameter"
        )
    last = len(wire.messages) - 1
    if wire.messages[last].role == "assistant":
        raise bad_request(
            "The last message is the assistant's: a reply that was begun cannot be continued here.",
            f"messages[{last}]",
            "unsupported_value",
        )
    return _request(wire)


def read_count_request(body: bytes) -> Request:
    return _request(_decode(body))


def _decode(body: bytes) -> Body:
    try:
        wire = _decode_body(body)
    except msgspec.DecodeError as error:
        raise from_validation(error) from error
    except (UnicodeDecodeError, RecursionError) as error:
        raise bad_request(f"The body is not valid JSON: {error}", code="invalid_json") from error
    _check(wire)
    return wire


def _request(wire: Body) -> Request:
    messages = _system(wire.system)
    for i, message in enumerate(wire.messages):
        messages += read_message(message, f"messages[{i}]")
    return Request(
        model=wire.model,
        messages=tuple(messages),
        tools=_tools(wire),
        identity=_identity(wire.metadata),
        max_tokens=wire.max_tokens,
        temperature=wire.temperature,
        top_p=wire.top_p,
        top_k=wire.top_k,
        stop=tuple(wire.stop_sequences or ()),
        stream=bool(wire.stream),
        wire=wire,
    )


# --- parameters ---------------------------------------------------------------------------------


def _unsupported(what: str, path: str) -> ApiError:
    return bad_request(what, path, "unsupported_value")


def _check(body: Body) -> None:
    if not body.messages:
        raise bad_request("'messages' is empty.", "messages", "invalid_value")
    for name, (low, high) in _RANGES.items():
        value = getattr(body, name)
        if value is not None and not low <= value <= high:
            raise bad_request(f"'{name}' is {value}, out of [{low}, {high}].", name, "invalid_value")
    if body.top_p == 0:
        raise bad_request("'top_p' must be greater than 0.", "top_p", "invalid_value")
    for name in ("container", "mcp_servers"):
        if getattr(body, name):
            raise bad_request(f"'{name}' is not supported here.", name, "unsupported_parameter")
    _check_stop(body.stop_sequences or ())
    _check_tool_choice(body.tool_choice)
    if body.output_config and body.output_config.format:
        raise _unsupported("An output format cannot be enforced here.", "output_config.format")
    edits = body.context_management.edits if body.context_management else None
    for i, edit in enumerate(edits or ()):
        if not edit.type.startswith(_HARMLESS_EDITS):
            raise _unsupported(
                f"The context is not edited here: {edit.type!r}.", f"context_management.edits[{i}].type"
            )


def _check_stop(stop: Sequence[str]) -> None:
    if "" in stop:
        raise bad_request("A stop sequence is empty.", f"stop_sequences[{stop.index('')}]", "invalid_value")
    if len(stop) > MOST_STOP_SEQUENCES:
        raise bad_request(
            f"{len(stop)} stop sequences are more than {MOST_STOP_SEQUENCES}.",
            "stop_sequences",
            "invalid_value",
        )


def _check_tool_choice(choice: ToolChoice | None) -> None:
    if choice is None:
        return
    if choice.type in ("any", "tool"):
        raise _unsupported(
            f"A tool call cannot be enforced here: {choice.type!r}; supported: 'auto', 'none'.",
            "tool_choice.type",
        )
    if choice.disable_parallel_tool_use:
        raise _unsupported(
            "Parallel tool calls cannot be kept from the model.", "tool_choice.disable_parallel_tool_use"
        )


def _tools(body: Body) -> tuple[Tool, ...]:
    tools = [tool for i, wire in enumerate(body.tools or ()) if (tool := _tool(wire, f"tools[{i}]"))]
    return () if body.tool_choice and body.tool_choice.type == "none" else tuple(tools)


def _tool(wire: WireTool, path: str) -> Tool | None:
    if wire.type not in (None, "custom"):
        if wire.type.startswith(tuple(_TOOLS_LEFT_OUT)):
            return None
        raise _unsupported(
            f"A tool of the type {wire.type!r} is not available here; supported: 'custom'.", f"{path}.type"
        )
    if not wire.name:
        raise bad_request(
            f"Missing required parameter: '{path}.name'.", f"{path}.name", "missing_required_parameter"
        )
    where = f"{path}.input_schema"
    if wire.input_schema is None:
        raise bad_request(f"Missing required parameter: '{where}'.", where, "missing_required_parameter")
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


# --- messages -----------------------------------------------------------------------------------


def _system(system: str | list[Block] | None) -> list[Message]:
    blocks = [system] if isinstance(system, str) else _texts(system or [], "system")
    content = _joined(map(_without_billing, blocks))
    return [Message(role="system", content=content)] if content else []


def _without_billing(text: str) -> str:
    return text.partition("\n")[2] if text.startswith(BILLING_LINE) else text


def read_message(wire: WireMessage, path: str) -> list[Message]:
    content = [Block(type="text", text=wire.content)] if isinstance(wire.content, str) else wire.content
    where = f"{path}.content"
    if wire.role == "assistant":
        return [_assistant(content, where)]
    if wire.role == "system":
        return [Message(role="system", content=_joined(_texts(content, where)))]
    return _user(content, where)


def _user(blocks: list[Block], path: str) -> list[Message]:
    messages: list[Message] = []
    said: list[str] = []
    for i, block in enumerate(blocks):
        where = f"{path}[{i}]"
        if block.type == "tool_result":
            if said:
                messages.append(Message(role="user", content=_joined(said)))
                said = []
            messages.append(_tool_result(block, where))
        else:
            said.append(_text(block, where, "'text', 'tool_result'"))
    if said or not messages:
        messages.append(Message(role="user", content=_joined(said)))
    return messages


def _tool_result(block: Block, path: str) -> Message:
    if block.tool_use_id is None:
        where = f"{path}.tool_use_id"
        raise bad_request(f"Missing required parameter: '{where}'.", where, "missing_required_parameter")
    content = block.content or ""
    text = content if isinstance(content, str) else _joined(_texts(content, f"{path}.content"))
    if block.is_error:
        text = f"Error: {text}"
    return Message(role="tool", content=text, tool_call_id=block.tool_use_id)


def _assistant(blocks: list[Block], path: str) -> Message:
    said: list[str] = []
    thought: list[str] = []
    calls: list[ToolCall] = []
    for i, block in enumerate(blocks):
        where = f"{path}[{i}]"
        match block.type:
            case "thinking":
                thought.append(block.thinking or "")
            case "redacted_thinking":
                pass
            case "tool_use":
                calls.append(_tool_use(block, where))
            case _:
                said.append(_text(block, where, "'text', 'tool_use', 'thinking', 'redacted_thinking'"))
    message = Message(role="assistant", content="".join(said))
    if reasoning := "".join(thought):
        message["reasoning"] = reasoning
    if calls:
        message["tool_calls"] = calls
    return message


def _tool_use(block: Block, path: str) -> ToolCall:
    if not block.name:
        raise bad_request(
            f"Missing required parameter: '{path}.name'.", f"{path}.name", "missing_required_parameter"
        )
    # Spaced as models write it.
    arguments = json.dumps(block.input or {}, ensure_ascii=False)
    return ToolCall(id=block.id, name=block.name, arguments=arguments)


def _texts(blocks: list[Block], path: str) -> list[str]:
    return [
        block.tool_name if block.type == "tool_reference" else _text(block, f"{path}[{i}]", "'text'")
        for i, block in enumerate(blocks)
    ]


def _text(block: Block, path: str, supported: str) -> str:
    if block.type != "text":
        raise _unsupported(f"Unsupported content block {block.type!r}; supported: {supported}.", path)
    if block.text is None:
        where = f"{path}.text"
        raise bad_request(f"Missing required parameter: '{where}'.", where, "missing_required_parameter")
    return block.text


def _joined(texts: Iterable[str]) -> str:
    return BETWEEN_BLOCKS.join(text for text in texts if text)
