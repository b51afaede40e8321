"""Parse the input items and tools of a Responses API request.

The items of one model turn (reasoning, message, calls) become one message. Items are grouped into turns by
the response id that the gateway puts into item ids. If ids do not identify the response, an item joins the
turn of the previous item, unless that is a tool output or both are messages. Items and tools that only a
provider can handle add an error to ``errors``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from instar.gateway.base import ApiError, bad_request, invalid_value
from instar.gateway.dialects.common import format_placeholder, missing_parameter, unsupported_value
from instar.types import Json, Message, Tool, ToolCall
from instar.wire.openai import ResponsesContentPart, ResponsesInputItem, ResponsesTool

T = TypeVar("T")

_CALLABLE_TOOL_TYPES = ("function", "custom")
IGNORED_TOOLS = {
    "web_search": "Runs on OpenAI's servers. Codex lists it by default.",
    "image_generation": "Runs on OpenAI's servers. Codex lists it if image generation is enabled.",
    "tool_search": "Finds tools that are not in the request. Codex lists it if it has many tools.",
}
"""Tools that agents list by default, and why they are not offered to the model. The model never calls them,
so the agent works unchanged. Other hosted tools are rejected."""


@dataclass(frozen=True, slots=True)
class ClientTool:
    """A tool under the client's name, which may differ from the name that the model sees."""

    name: str
    namespace: str | None = None
    is_custom: bool = False
    """True if the tool takes text. The model sees it as a function with one string parameter, ``input``."""


@dataclass(frozen=True, slots=True)
class RequestTools:
    offered: tuple[Tool, ...]
    by_name: dict[str, ClientTool]
    """Maps the tool name that the model sees to the client's tool."""
    echo: list[Json]
    """The offered tools, as the response lists them."""

    def to_stored_names(self) -> Json:
        """Return the client's names of the tools that the model does not see as the client's functions."""
        return {
            name: [tool.name, tool.namespace, tool.is_custom]
            for name, tool in self.by_name.items()
            if tool != ClientTool(name)
        }


def list_stored_tools(offered: tuple[Tool, ...], stored_names: Json) -> RequestTools:
    """Return a recorded call's tools. ``stored_names`` was built by ``RequestTools.to_stored_names``. The
    tools of a namespace are listed as functions, and custom tools without their format."""
    by_name = {tool["name"]: ClientTool(*stored_names.get(tool["name"], [tool["name"]])) for tool in offered}
    echo: list[Json] = []
    for tool in offered:
        client = by_name[tool["name"]]
        head: Json = {"name": client.name, "description": tool["description"]}
        if client.is_custom:
            echo.append({"type": "custom", **head, "format": {"type": "text"}})
        else:
            echo.append({"type": "function", **head, "parameters": tool["parameters"], "strict": None})
    return RequestTools(offered, by_name, echo)


def parse_tools(specs: Sequence[ResponsesTool], errors: list[ApiError]) -> RequestTools:
    offered: list[Tool] = []
    by_name: dict[str, ClientTool] = {}
    echo: list[Json] = []
    for i, spec in enumerate(specs):
        path = f"tools[{i}]"
        if spec.type in IGNORED_TOOLS:
            continue
        if spec.type == "namespace":
            namespace = _require(spec.name, f"{path}.name")
            for k, inner in enumerate(spec.tools or ()):
                offered.append(_parse_tool(inner, namespace, f"{path}.tools[{k}]", by_name))
        elif spec.type in _CALLABLE_TOOL_TYPES:
            offered.append(_parse_tool(spec, None, path, by_name))
        else:
            supported = (*_CALLABLE_TOOL_TYPES, "namespace")
            errors.append(_unsupported_type_error("tool", spec.type, supported, f"{path}.type"))
            continue
        echo.append(_format_tool(spec))
    return RequestTools(tuple(offered), by_name, echo)


def build_model_tool_name(name: str, namespace: str | None) -> str:
    return f"{namespace}__{name}" if namespace else name


def _parse_tool(
    spec: ResponsesTool, namespace: str | None, path: str, by_name: dict[str, ClientTool]
) -> Tool:
    """Return the tool as the model sees it, and add the client's tool to ``by_name``."""
    if spec.type not in _CALLABLE_TOOL_TYPES:
        raise _unsupported_type_error("tool", spec.type, _CALLABLE_TOOL_TYPES, f"{path}.type")
    client = ClientTool(_require(spec.name, f"{path}.name"), namespace, spec.type == "custom")
    name = build_model_tool_name(client.name, namespace)
    if by_name.setdefault(name, client) != client:
        raise invalid_value(f"Two tools are named {name!r}; rename one.", f"{path}.name")
    parameters = _build_custom_parameters(spec) if client.is_custom else spec.parameters or {}
    if not isinstance(parameters.get("properties", {}), dict):
        path = f"{path}.parameters.properties"
        raise bad_request(f"'{path}' is not an object; send a JSON schema.", path, "invalid_type")
    return Tool(name=name, description=spec.description or "", parameters=parameters)


def _build_custom_parameters(spec: ResponsesTool) -> Json:
    schema = {"type": "string"}
    if spec.format and (grammar := spec.format.get("definition")):
        syntax = spec.format.get("syntax")
        grammar_name = f"{syntax} grammar" if syntax else "grammar"
        schema["description"] = f"Text that matches this {grammar_name}:\n{grammar}"
    return {"type": "object", "properties": {"input": schema}, "required": ["input"]}


def _format_tool(spec: ResponsesTool) -> Json:
    head: Json = {"type": spec.type, "name": spec.name, "description": spec.description}
    if spec.type == "namespace":
        return {**head, "tools": [_format_tool(inner) for inner in spec.tools or ()]}
    if spec.type == "custom":
        return {**head, "format": spec.format or {"type": "text"}}
    return {**head, "parameters": spec.parameters, "strict": spec.strict}


_GATEWAY_ITEM_ID = re.compile(r"(?P<kind>rs|msg|fc|ctc)_(?P<response>[0-9a-f]{8,})_(?P<index>\d+)")
_TEXT_PARTS = ("input_text", "output_text", "text")
_REASONING_PARTS = ("reasoning_text", "summary_text", "text")
_SUPPORTED_ITEMS = (
    "message",
    "reasoning",
    "function_call",
    "function_call_output",
    "custom_tool_call",
    "custom_tool_call_output",
    "item_reference",
)
_REFERENCED_TYPES = {"rs": "reasoning", "msg": "message"}


def make_item_id(prefix: str, request_id: str, index: int | str) -> str:
    """Return an item id that contains its response's id. ``index`` is the position of a tool call among the
    reply's calls, and that of other items in the output."""
    return f"{prefix}_{request_id.replace('_', '-').rpartition('-')[2]}_{index}"


def parse_items(
    items: Sequence[ResponsesInputItem], errors: list[ApiError], replies: Mapping[str, Message] | None
) -> tuple[list[Message], tuple[str, ...]]:
    """Return the messages, and the ids of the responses that must be in ``replies`` to complete them. It is
    None if the responses were not looked up yet; otherwise, references to others are errors."""
    parser = _ItemParser(errors, replies)
    for i, item in enumerate(items):
        parser.parse(item, f"input[{i}]")
    return parser.messages, tuple(dict.fromkeys(parser.referenced_ids))


class _ItemParser:
    def __init__(self, errors: list[ApiError], replies: Mapping[str, Message] | None) -> None:
        self.messages: list[Message] = []
        self.referenced_ids: list[str] = []
        self._errors = errors
        self._replies = replies
        self._turn: Message | None = None
        """The model turn to which the next items may be added."""
        self._response_id = ""
        """The id of the gateway response that produced the turn; empty if it is unknown."""
        self._previous_type = ""

    def parse(self, item: ResponsesInputItem, path: str) -> None:
        item_type = item.type or ("item_reference" if _has_only_id(item) else "message")
        match item_type:
            case "item_reference":
                item_type = self._parse_reference(item, path)
            case "message":
                self._parse_message(item, path)
            case "reasoning":
                self._parse_reasoning(item, path)
            case "function_call" | "custom_tool_call":
                self._parse_call(item, path)
            case "function_call_output" | "custom_tool_call_output":
                call_id = _require(item.call_id, f"{path}.call_id")
                content = self._parse_content(_require(item.output, f"{path}.output"), f"{path}.output")
                self.messages.append(Message(role="tool", content=content, tool_call_id=call_id))
            case _:
                error = _unsupported_type_error("item", item_type, _SUPPORTED_ITEMS, f"{path}.type")
                self._errors.append(error)
                # Hosted tool calls are part of the model's turn and are dropped.
                if not item_type.endswith("_call"):
                    self._turn = None
                    self.messages.append(Message(role="user", content=format_placeholder(item, item_type)))
        self._previous_type = item_type

    def _parse_reference(self, item: ResponsesInputItem, path: str) -> str:
        """Add the part of an earlier reply that the item refers to, and return the item's type."""
        item_id = _require(item.id, f"{path}.id")
        match = _GATEWAY_ITEM_ID.fullmatch(item_id)
        response_id = f"resp-{match['response']}" if match else item_id
        if self._replies is None:
            self.referenced_ids.append(response_id)
            return "item_reference"
        reply = self._replies.get(response_id)
        calls = reply.get("tool_calls", []) if reply else []
        kind, index = (match["kind"], int(match["index"])) if match else ("", 0)
        if reply is None or (kind not in _REFERENCED_TYPES and index >= len(calls)):
            message = (
                f"Item with id {item_id!r} not found. Send the item itself if its response was not stored."
            )
            self._errors.append(ApiError(404, message, param=f"{path}.id"))
            self._turn = None
            self.messages.append(Message(role="user", content=format_placeholder(item, "item_reference")))
            return "item_reference"
        turn = self._get_or_start_turn(item)
        if kind == "msg":
            turn["content"] = reply["content"]
        elif kind == "rs":
            turn["reasoning"] = reply.get("reasoning", "")
        else:
            turn.setdefault("tool_calls", []).append(calls[index])
        return _REFERENCED_TYPES.get(kind, "function_call")

    def _parse_message(self, item: ResponsesInputItem, path: str) -> None:
        role = _require(item.role, f"{path}.role")
        text = self._parse_content(_require(item.content, f"{path}.content"), f"{path}.content")
        if role == "assistant":
            self._get_or_start_turn(item)["content"] += text
            return
        self._turn = None
        self.messages.append(Message(role="user" if role == "user" else "system", content=text))

    def _parse_reasoning(self, item: ResponsesInputItem, path: str) -> None:
        field = "content" if item.content else "summary"
        text = self._parse_content(getattr(item, field) or "", f"{path}.{field}", _REASONING_PARTS)
        turn = self._get_or_start_turn(item)
        if text:
            turn["reasoning"] = turn.get("reasoning", "") + text

    def _parse_call(self, item: ResponsesInputItem, path: str) -> None:
        is_custom = item.type == "custom_tool_call"
        field = "input" if is_custom else "arguments"
        arguments = _require(getattr(item, field), f"{path}.{field}")
        call = ToolCall(
            id=_require(item.call_id, f"{path}.call_id"),
            name=build_model_tool_name(_require(item.name, f"{path}.name"), item.namespace),
            arguments=json.dumps({"input": arguments}, ensure_ascii=False) if is_custom else arguments,
        )
        self._get_or_start_turn(item).setdefault("tool_calls", []).append(call)

    def _get_or_start_turn(self, item: ResponsesInputItem) -> Message:
        match = _GATEWAY_ITEM_ID.fullmatch(item.id or "")
        response_id = match["response"] if match else ""
        if self._turn is None or not self._continues_turn(item, response_id):
            self._turn = Message(role="assistant", content="")
            self._response_id = ""
            self.messages.append(self._turn)
        self._response_id = response_id or self._response_id
        return self._turn

    def _continues_turn(self, item: ResponsesInputItem, response_id: str) -> bool:
        if response_id and self._response_id:
            return response_id == self._response_id
        if self._previous_type.endswith("_output"):
            return False
        # The gateway's responses never have two adjacent messages, so adjacent messages belong to two turns.
        return not (self._previous_type == "message" and item.type in (None, "message"))

    def _parse_content(
        self, content: str | list[ResponsesContentPart], path: str, text_types: Sequence[str] = _TEXT_PARTS
    ) -> str:
        if isinstance(content, str):
            return content
        return "".join(self._parse_part(part, f"{path}[{i}]", text_types) for i, part in enumerate(content))

    def _parse_part(self, part: ResponsesContentPart, path: str, text_types: Sequence[str]) -> str:
        text = part.refusal if part.type == "refusal" else part.text if part.type in text_types else None
        if text is not None:
            return text
        self._errors.append(_unsupported_type_error("content part", part.type, text_types, path))
        return format_placeholder(part, part.type)


def _has_only_id(item: ResponsesInputItem) -> bool:
    return item.id is not None and item.role is None and item.content is None


def _unsupported_type_error(kind: str, value: str, supported: Sequence[str], path: str) -> ApiError:
    allowed = ", ".join(map(repr, supported))
    return unsupported_value(f"Unsupported {kind} {value!r}; supported: {allowed}.", path)


def _require(value: T | None, path: str) -> T:
    if value is None:
        raise missing_parameter(path)
    return value
