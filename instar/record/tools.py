"""The generic tool format, for models whose chat template knows no tools.

The tools are listed in the system message, behind its own text (a system message is added where there is
none), one line each, a `?` behind an optional parameter::

    Tools:
    calc(expression: string): Evaluate arithmetic.
    To call a tool, write <tool_call>{"name": ..., "arguments": {...}}</tool_call>

A call is written on one line, Hermes style, behind the text of its message, and so it stands in the
history too; the arguments are kept as they were generated::

    <tool_call>{"name": "calc", "arguments": {"expression": "24 * 310"}}</tool_call>

A result is a message of the role `tool` where the template writes that role, else a user message
`<tool_response>...</tool_response>`. What looks like a call and is not a valid one is plain text.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any, cast

from instar.types import Json, Message, Tool, ToolCall, new_id

CALL_OPEN = "<tool_call>"
CALL_CLOSE = "</tool_call>"
HOW_TO_CALL = f'To call a tool, write {CALL_OPEN}{{"name": ..., "arguments": {{...}}}}{CALL_CLOSE}'

_decoder = json.JSONDecoder()


def format_tool_list(tools: Iterable[Tool]) -> str:
    """What is put behind the system message."""
    return "\n".join(["Tools:", *map(_tool_line, tools), HOW_TO_CALL])


def _tool_line(tool: Tool) -> str:
    """A schema that is none says nothing: agents send all kinds."""
    schema = tool["parameters"]
    required, properties = _list(schema.get("required")), schema.get("properties")
    parameters = ", ".join(
        f"{name}{'' if name in required else '?'}: {_type_name(spec)}"
        for name, spec in (cast(Json, properties) if isinstance(properties, dict) else {}).items()
    )
    about = " ".join(tool["description"].split())
    return f"{tool['name']}({parameters})" + (f": {about}" if about else "")


def _type_name(spec: Any) -> str:
    if not isinstance(spec, dict):
        return "any"
    spec = cast(Json, spec)
    if choices := _list(spec.get("enum")):
        return "|".join(json.dumps(choice, ensure_ascii=False) for choice in choices)
    kind = spec.get("type", "any")
    return "|".join(map(str, cast(list[Any], kind))) if isinstance(kind, list) else str(kind)


def _list(value: Any) -> list[Any]:
    return cast(list[Any], value) if isinstance(value, list) else []


def format_call(call: ToolCall) -> str:
    """A call as the model would have written it. Arguments that are no JSON object are quoted."""
    arguments = call["arguments"] if _is_object(call["arguments"]) else json.dumps(call["arguments"])
    name = json.dumps(call["name"], ensure_ascii=False)
    return f'{CALL_OPEN}{{"name": {name}, "arguments": {arguments}}}{CALL_CLOSE}'


def parse_call(body: str) -> ToolCall | None:
    """The text between the tags → a call, its arguments as written; None when it is not a valid call."""
    try:
        members = _raw_members(body.strip())
        name = parse_call_name(members["name"])
        arguments = members.get("arguments", "{}")
    except (ValueError, KeyError, RecursionError):
        return None
    if name is None or not arguments.startswith("{"):
        return None
    return ToolCall(id=new_id("call"), name=name, arguments=arguments)


def parse_call_name(text: str) -> str | None:
    """The JSON text of a tool's name → the name; None when it is empty or could not be sent to anyone."""
    try:
        name: Any = json.loads(text)
        # Half a surrogate pair is valid JSON and no text.
        return name if isinstance(name, str) and name.encode() else None
    except ValueError:
        return None


def to_generic_messages(
    messages: Sequence[Message], tools: Sequence[Tool], *, tool_role: bool, block: bool = True
) -> list[Message]:
    """Messages with tools → messages of plain text. Without ``block``, the tools are not listed."""
    plain = [_to_plain(message, tool_role) for message in messages]
    if not tools or not block:
        return plain
    listed = format_tool_list(tools)
    if plain and plain[0]["role"] == "system":
        own = plain[0]["content"]
        return [Message(role="system", content=f"{own}\n{listed}" if own else listed), *plain[1:]]
    return [Message(role="system", content=listed), *plain]


def _to_plain(message: Message, tool_role: bool) -> Message:
    content = message["content"]
    if message["role"] == "tool" and not tool_role:
        return Message(role="user", content=f"<tool_response>{content}</tool_response>")
    if calls := message.get("tool_calls"):
        content = "\n".join([*([content] if content else []), *map(format_call, calls)])
    return Message(role=message["role"], content=content)


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


def _raw_members(text: str) -> dict[str, str]:
    """The members of a JSON object, each value as its own text. Raises ValueError on anything else."""
    if not text.startswith("{"):
        raise ValueError("not an object")
    members: dict[str, str] = {}
    at = _skip(text, 1)
    while text[at : at + 1] != "}":
        if members:
            at = _skip(text, _expect(text, at, ","))
        key, at = _decoder.raw_decode(text, at)
        if not isinstance(key, str):
            raise ValueError("a key is not a string")
        at = _skip(text, _expect(text, _skip(text, at), ":"))
        _, end = _decoder.raw_decode(text, at)
        members[key] = text[at:end]
        at = _skip(text, end)
    if at != len(text) - 1:
        raise ValueError("text behind the object")
    return members


def _skip(text: str, position: int) -> int:
    while position < len(text) and text[position] in " \t\n\r":
        position += 1
    return position


def _expect(text: str, at: int, char: str) -> int:
    if text[at : at + 1] != char:
        raise ValueError(f"expected {char!r}")
    return at + 1
