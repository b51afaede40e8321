"""The Responses API, in: its items → messages, its tools → those that the model is offered.

The items of one turn of the model (reasoning, message, calls) are one message here. Which items make up one
turn is told by their ids, which carry the id of our answer, and without ids by what stands side by side.
What only a provider could make something of is appended to ``refused``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Literal, TypeVar

import msgspec

from instar.gateway.base import ApiError, bad_request
from instar.types import Json, Message, Tool, ToolCall

T = TypeVar("T")

# --- the wire -----------------------------------------------------------------------------------


class Part(msgspec.Struct):
    type: str
    text: str | None = None
    refusal: str | None = None
    image_url: Any = None
    input_audio: Any = None
    file_id: Any = None
    file_url: Any = None
    file_data: Any = None


class Item(msgspec.Struct):
    """Any kind of item. Fields that agents echo from our own answers and that say nothing (``status``,
    ``phase``, ``annotations``, ``encrypted_content``, ...) are passed over."""

    type: str | None = None
    id: str | None = None
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: str | list[Part] | None = None
    summary: list[Part] | None = None
    call_id: str | None = None
    name: str | None = None
    namespace: str | None = None
    arguments: str | None = None
    input: str | None = None
    output: str | list[Part] | None = None


class ToolSpec(msgspec.Struct):
    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    format: dict[str, Any] | None = None
    tools: list[ToolSpec] | None = None


# --- tools --------------------------------------------------------------------------------------

IGNORED_TOOLS = {
    "web_search": "runs at OpenAI; Codex lists it by default",
    "image_generation": "runs at OpenAI; Codex lists it where it may draw",
    "tool_search": "finds tools that are not in the request; Codex lists it when it has many",
}
"""Tools that agents list as a matter of course and that the model is not offered: it then never calls them,
and the agent runs as it is. The answer's ``tools`` are those that were offered. Any other hosted tool is
refused by its name."""


@dataclass(frozen=True, slots=True)
class ClientTool:
    """A tool by the words of the client."""

    name: str
    namespace: str | None = None
    custom: bool = False
    """Takes text, not JSON. The model is offered a function of one string, ``input``."""


@dataclass(frozen=True, slots=True)
class RequestTools:
    offered: tuple[Tool, ...]
    by_name: dict[str, ClientTool]
    """By the name that the model knows."""
    echo: list[Json]
    """The offered ones, as an answer lists them."""


def parse_tools(specs: Sequence[ToolSpec], refused: list[ApiError]) -> RequestTools:
    offered: list[Tool] = []
    by_name: dict[str, ClientTool] = {}
    echo: list[Json] = []
    for i, spec in enumerate(specs):
        path = f"tools[{i}]"
        if spec.type in IGNORED_TOOLS:
            continue
        if spec.type not in ("function", "custom", "namespace"):
            refused.append(
                _unsupported("tool", spec.type, ("function", "custom", "namespace"), f"{path}.type")
            )
            continue
        if spec.type == "namespace":
            namespace = _needed(spec.name, f"{path}.name")
            for k, inner in enumerate(spec.tools or ()):
                offered.append(_offer(inner, namespace, f"{path}.tools[{k}]", by_name))
        else:
            offered.append(_offer(spec, None, path, by_name))
        echo.append(_echo(spec))
    return RequestTools(tuple(offered), by_name, echo)


def model_tool_name(name: str, namespace: str | None) -> str:
    """The name under which the model knows a tool."""
    return f"{namespace}__{name}" if namespace else name


def custom_arguments(text: str) -> str:
    """A custom tool's input as the arguments of the function that the model was offered."""
    return json.dumps({"input": text}, ensure_ascii=False)


def _offer(spec: ToolSpec, namespace: str | None, path: str, by_name: dict[str, ClientTool]) -> Tool:
    if spec.type not in ("function", "custom"):
        raise _unsupported("tool", spec.type, ("function", "custom"), f"{path}.type")
    client = ClientTool(_needed(spec.name, f"{path}.name"), namespace, spec.type == "custom")
    name = model_tool_name(client.name, namespace)
    if by_name.setdefault(name, client) != client:
        raise bad_request(f"Two tools are named {name!r}.", f"{path}.name", "invalid_value")
    parameters = _custom_parameters(spec) if client.custom else spec.parameters or {}
    if not isinstance(parameters.get("properties", {}), dict):
        where = f"{path}.parameters.properties"
        raise bad_request(f"'{where}' is not an object.", where, "invalid_type")
    return Tool(name=name, description=spec.description or "", parameters=parameters)


def _custom_parameters(spec: ToolSpec) -> Json:
    schema = {"type": "string"}
    if spec.format and (grammar := spec.format.get("definition")):
        schema["description"] = f"Text of this {spec.format.get('syntax', '')} grammar:\n{grammar}"
    return {"type": "object", "properties": {"input": schema}, "required": ["input"]}


def _echo(spec: ToolSpec) -> Json:
    head: Json = {"type": spec.type, "name": spec.name, "description": spec.description}
    if spec.type == "namespace":
        return {**head, "tools": [_echo(inner) for inner in spec.tools or ()]}
    if spec.type == "custom":
        return {**head, "format": spec.format or {"type": "text"}}
    return {**head, "parameters": spec.parameters, "strict": spec.strict}


# --- items --------------------------------------------------------------------------------------

_OURS = re.compile(r"(?:rs|msg|fc|ctc)_(?P<answer>[0-9a-f]{8,})_\d+")
_TEXT = ("input_text", "output_text", "text")
_THOUGHT = ("reasoning_text", "summary_text", "text")
_ITEMS = (
    "message",
    "reasoning",
    "function_call",
    "function_call_output",
    "custom_tool_call",
    "custom_tool_call_output",
)


def make_item_id(prefix: str, request_id: str, index: int) -> str:
    """An id that tells which answer the item was part of."""
    return f"{prefix}_{request_id.replace('_', '-').rpartition('-')[2]}_{index}"


def parse_items(items: Sequence[Item], refused: list[ApiError]) -> list[Message]:
    reader = _ItemParser(refused)
    for i, item in enumerate(items):
        reader.read(item, f"input[{i}]")
    return reader.messages


class _ItemParser:
    def __init__(self, refused: list[ApiError]) -> None:
        self.messages: list[Message] = []
        self._refused = refused
        self._turn: Message | None = None
        """The model's turn that is being put together."""
        self._answer = ""
        """Our answer that the turn came from, where the ids tell."""
        self._last = ""
        """The kind of the item before."""

    def read(self, item: Item, path: str) -> None:
        kind = item.type or "message"
        match kind:
            case "message":
                self._message(item, path)
            case "reasoning":
                self._reasoning(item, path)
            case "function_call" | "custom_tool_call":
                self._call(item, path)
            case "function_call_output" | "custom_tool_call_output":
                call_id = _needed(item.call_id, f"{path}.call_id")
                said = self._text(_needed(item.output, f"{path}.output"), f"{path}.output")
                self.messages.append(Message(role="tool", content=said, tool_call_id=call_id))
            case _:
                self._unknown(item, kind, path)
        self._last = kind

    def _message(self, item: Item, path: str) -> None:
        role = _needed(item.role, f"{path}.role")
        text = self._text(_needed(item.content, f"{path}.content"), f"{path}.content")
        if role == "assistant":
            self._turn_of(item)["content"] += text
            return
        self._turn = None
        self.messages.append(Message(role="user" if role == "user" else "system", content=text))

    def _reasoning(self, item: Item, path: str) -> None:
        field = "content" if item.content else "summary"
        text = self._text(getattr(item, field) or "", f"{path}.{field}", _THOUGHT)
        turn = self._turn_of(item)
        if text:
            turn["reasoning"] = turn.get("reasoning", "") + text

    def _call(self, item: Item, path: str) -> None:
        custom = item.type == "custom_tool_call"
        field = "input" if custom else "arguments"
        given = _needed(getattr(item, field), f"{path}.{field}")
        call = ToolCall(
            id=_needed(item.call_id, f"{path}.call_id"),
            name=model_tool_name(_needed(item.name, f"{path}.name"), item.namespace),
            arguments=custom_arguments(given) if custom else given,
        )
        self._turn_of(item).setdefault("tool_calls", []).append(call)

    def _turn_of(self, item: Item) -> Message:
        ours = _OURS.fullmatch(item.id or "")
        answer = ours["answer"] if ours else ""
        if self._turn is None or not self._same_turn(item, answer):
            self._turn = Message(role="assistant", content="")
            self._answer = ""
            self.messages.append(self._turn)
        self._answer = answer or self._answer
        return self._turn

    def _same_turn(self, item: Item, answer: str) -> bool:
        if answer and self._answer:
            return answer == self._answer
        if self._last.endswith("_output"):
            return False
        # We never say two messages side by side: these are two turns.
        return not (self._last == "message" and item.type in (None, "message"))

    def _unknown(self, item: Item, kind: str, path: str) -> None:
        """A hosted tool's call is the model's and says nothing to it again; the rest is a message."""
        self._refused.append(_unsupported("item", kind, _ITEMS, f"{path}.type"))
        if not kind.endswith("_call"):
            self._turn = None
            self.messages.append(Message(role="user", content=_named(item, kind)))

    def _text(self, content: str | list[Part], path: str, kinds: Sequence[str] = _TEXT) -> str:
        if isinstance(content, str):
            return content
        return "".join(self._part(part, f"{path}[{i}]", kinds) for i, part in enumerate(content))

    def _part(self, part: Part, path: str, kinds: Sequence[str]) -> str:
        text = part.refusal if part.type == "refusal" else part.text if part.type in kinds else None
        if text is not None:
            return text
        self._refused.append(_unsupported("content part", part.type, kinds, path))
        return _named(part, part.type)


def _named(value: Part | Item, kind: str) -> str:
    """What is no text is named by what it holds, so that another picture is another message."""
    return f"[{kind} {blake2b(msgspec.json.encode(value), digest_size=8).hexdigest()}]"


def _unsupported(what: str, given: str, supported: Sequence[str], path: str) -> ApiError:
    said = ", ".join(map(repr, supported))
    return bad_request(f"Unsupported {what} {given!r}; supported: {said}.", path, "unsupported_value")


def _needed(value: T | None, path: str) -> T:
    if value is None:
        raise bad_request(f"Missing required parameter: '{path}'.", path, "missing_required_parameter")
    return value
