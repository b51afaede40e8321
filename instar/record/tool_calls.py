"""The generic tool format: tool calls as plain text, for chat templates that do not support tools.

The tools are listed at the end of the system message, one per line, with a `?` after an optional parameter::

    Tools:
    calc(expression: string): Evaluate arithmetic.
    To call a tool, write <tool_call>{"name": ..., "arguments": {...}}</tool_call>

A call is one line in the Hermes format after the text of the message. In the history, its arguments stay as
they were generated::

    <tool_call>{"name": "calc", "arguments": {"expression": "24 * 310"}}</tool_call>

A result is a message with the role `tool` if the template supports that role, or else a user message
`<tool_response>...</tool_response>`. A malformed call is treated as plain text. `PartialToolCall` parses a
call that is still being generated.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any, cast

from instar.record.base import Messages, ReplyDelta, ToolCallDelta, Tools
from instar.record.hashing import parse_arguments
from instar.types import Json, Message, Tool, ToolCall, new_id

CALL_OPEN = "<tool_call>"
CALL_CLOSE = "</tool_call>"
CALL_INSTRUCTIONS = f'To call a tool, write {CALL_OPEN}{{"name": ..., "arguments": {{...}}}}{CALL_CLOSE}'

_decoder = json.JSONDecoder()


def format_tool_list(tools: Iterable[Tool]) -> str:
    return "\n".join(["Tools:", *map(_format_tool, tools), CALL_INSTRUCTIONS])


def _format_tool(tool: Tool) -> str:
    # Agents may send invalid schemas. A tool without valid properties is listed without parameters.
    schema = tool["parameters"]
    required, properties = _as_list(schema.get("required")), schema.get("properties")
    parameters = ", ".join(
        f"{name}{'' if name in required else '?'}: {_format_type(spec)}"
        for name, spec in (cast(Json, properties) if isinstance(properties, dict) else {}).items()
    )
    description = " ".join(tool["description"].split())
    return f"{tool['name']}({parameters})" + (f": {description}" if description else "")


def _format_type(spec: Any) -> str:
    if not isinstance(spec, dict):
        return "any"
    spec = cast(Json, spec)
    if choices := _as_list(spec.get("enum")):
        return "|".join(json.dumps(choice, ensure_ascii=False) for choice in choices)
    type_name = spec.get("type", "any")
    if isinstance(type_name, list):
        return "|".join(map(str, cast(list[Any], type_name)))
    return str(type_name)


def _as_list(value: Any) -> list[Any]:
    return cast(list[Any], value) if isinstance(value, list) else []


def format_call(call: ToolCall) -> str:
    """Return the text of a call. Arguments that are not a JSON object become a JSON string."""
    arguments = call["arguments"]
    if not isinstance(parse_arguments(call), dict):
        arguments = json.dumps(arguments)
    name = json.dumps(call["name"], ensure_ascii=False)
    return f'{CALL_OPEN}{{"name": {name}, "arguments": {arguments}}}{CALL_CLOSE}'


def parse_call(body: str) -> ToolCall | None:
    """Parse the text between a call's markers; the arguments stay text. Return None if it is invalid."""
    try:
        members = split_members(body.strip())
        name = parse_call_name(members["name"])
        arguments = members.get("arguments", "{}")
    except (ValueError, KeyError, RecursionError):
        return None
    if name is None or not arguments.startswith("{"):
        return None
    return ToolCall(id=new_id("call"), name=name, arguments=arguments)


def parse_call_name(text: str) -> str | None:
    """Parse a tool name from its JSON text. Return None if the name is not valid."""
    try:
        name: Any = json.loads(text)
    except ValueError:
        return None
    return name if isinstance(name, str) and name and can_encode(name) else None


def can_encode(text: str) -> bool:
    """Return False for text with lone surrogates, which are valid in JSON but not in UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def to_generic_messages(messages: Messages, tools: Tools, *, has_tool_role: bool) -> list[Message]:
    """Convert tools, calls and results to plain text. With ``has_tool_role``, results keep their role."""
    plain = [_to_plain_message(message, has_tool_role) for message in messages]
    if not tools:
        return plain
    tool_list = format_tool_list(tools)
    if plain and plain[0]["role"] == "system":
        text = plain.pop(0)["content"]
        tool_list = f"{text}\n{tool_list}" if text else tool_list
    return [Message(role="system", content=tool_list), *plain]


def _to_plain_message(message: Message, has_tool_role: bool) -> Message:
    content = message["content"]
    if message["role"] == "tool" and not has_tool_role:
        return Message(role="user", content=f"<tool_response>{content}</tool_response>")
    if calls := message.get("tool_calls"):
        content = "\n".join([*([content] if content else []), *map(format_call, calls)])
    return Message(role=message["role"], content=content)


def split_members(text: str) -> dict[str, str]:
    """Return the values in a JSON object as unparsed text, by key. Raises ValueError if it is invalid."""
    members: dict[str, str] = {}
    position = skip(text, 0, "{")
    while text[position : position + 1] != "}":
        if members:
            position = skip(text, position, ",")
        key, position = _decoder.raw_decode(text, position)
        if not isinstance(key, str):
            raise ValueError("a key is not a string")
        position = skip(text, skip(text, position), ":")
        end = find_value_end(text, position)
        members[key] = text[position:end]
        position = skip(text, end)
    if position != len(text) - 1:
        raise ValueError("there is text after the object")
    return members


def find_value_end(text: str, position: int) -> int:
    """Return the end of the JSON value at ``position``. Raises ValueError if it is invalid."""
    return _decoder.raw_decode(text, position)[1]


def skip(text: str, position: int, char: str = "") -> int:
    """Skip ``char``, if given, and the whitespace after it. Raises ValueError if ``char`` is missing."""
    if not text.startswith(char, position):
        raise ValueError(f"expected {char!r}")
    match = _WHITESPACE.match(text, position + len(char))
    assert match is not None  # it matches the empty string
    return match.end()


CALL_HEAD = re.compile(
    r"""[ \t\r\n]*\{[ \t\r\n]*"name"[ \t\r\n]*:[ \t\r\n]*(?P<name>"(?:[^"\\\x00-\x1f]|\\.)+")"""
    r"""[ \t\r\n]*,[ \t\r\n]*"arguments"[ \t\r\n]*:[ \t\r\n]*(?=\{)"""
)
_SCALAR = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?|true|false|null|NaN|-?Infinity")
_WHITESPACE = re.compile(r"[ \t\n\r]*")
_SCALAR_END = re.compile(r"[ \t\r\n,\]}]")
_UNESCAPED_TEXT = re.compile(r'[^"\\]+')
_ESCAPE = re.compile(r'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})')
_INCOMPLETE_ESCAPE = re.compile(r"\\(?:u[0-9a-fA-F]{0,3})?\Z")
_CONTROL = re.compile(r"[\x00-\x1f]")


class JsonObjectTracker:
    """Finds the end of a JSON object in text that arrives in pieces."""

    def __init__(self) -> None:
        self.has_value = False
        """True once part of a value in the object has been read."""
        self.is_complete = False
        """True once the object is closed."""
        self.is_broken = False
        """True if the text is not JSON, so the end of the object is unknown."""
        self.has_invalid_string = False
        """True if a string is invalid but its end is known, for example if it contains a line break."""
        self._closers: list[str] = []
        self._expected = "value"
        self._is_in_string = False
        self._is_key = False

    def feed(self, text: str) -> int:
        """Return how many characters were processed. Pass the rest again, followed by more text."""
        position = 0
        while position < len(text) and not (self.is_complete or self.is_broken):
            read = self._read_string if self._is_in_string else self._read_token
            length = read(text, position)
            if not length:
                break
            position += length
        return position

    def _read_string(self, text: str, position: int) -> int:
        char = text[position]
        if char == '"':
            self._is_in_string = False
            return self._set_expected("colon") if self._is_key else self._end_value()
        self.has_value = self.has_value or not self._is_key
        if char == "\\":
            if _INCOMPLETE_ESCAPE.match(text, position):
                return 0
            escape = _ESCAPE.match(text, position)
            self.has_invalid_string = self.has_invalid_string or escape is None
            return len(escape[0]) if escape else 2
        match = _UNESCAPED_TEXT.match(text, position)
        assert match
        self.has_invalid_string = self.has_invalid_string or _CONTROL.search(match[0]) is not None
        return len(match[0])

    def _read_token(self, text: str, position: int) -> int:
        char, expected = text[position], self._expected
        if char in " \t\r\n":
            return 1
        if expected == "colon" and char == ":":
            return self._set_expected("value")
        if expected in ("next", "key or end", "value or end") and char == self._closers[-1]:
            self._closers.pop()
            return self._end_value()
        if expected == "next" and char == ",":
            return self._set_expected("key" if self._closers[-1] == "}" else "value")
        if expected in ("key", "key or end") and char == '"':
            self._is_in_string = self._is_key = True
            return 1
        if expected in ("value", "value or end"):
            return self._read_value(text, position)
        self.is_broken = True
        return 0

    def _read_value(self, text: str, position: int) -> int:
        char = text[position]
        if char == '"':
            self._is_in_string, self._is_key = True, False
            return 1
        if char in "{[":
            self._closers.append("}" if char == "{" else "]")
            return self._set_expected("key or end" if char == "{" else "value or end")
        end = _SCALAR_END.search(text, position)
        if end is None:
            return 0
        if not _SCALAR.fullmatch(text, position, end.start()):
            self.is_broken = True
            return 0
        self._end_value()
        return end.start() - position

    def _end_value(self) -> int:
        self.is_complete = not self._closers
        self.has_value = self.has_value or not self.is_complete
        return self._set_expected("next")

    def _set_expected(self, token: str) -> int:
        """Set the next expected token. Return 1, the length of the current token."""
        self._expected = token
        return 1


class PartialToolCall:
    """A call ``{"name": ..., "arguments": {...}}`` whose arguments are emitted as they are generated. If they
    stop being valid JSON, their end is unknown, so all later text is added to them."""

    def __init__(self, name: str, index: int, call_id: str | None = None) -> None:
        self.call = ToolCall(id=call_id or new_id("call"), name=name, arguments="")
        """The call. `finish` sets its arguments."""
        self._index = index
        self._tracker = JsonObjectTracker()
        self._held = ""
        self._pieces: list[str] = []

    @staticmethod
    def try_start(
        text: str, index: int, head_pattern: re.Pattern[str] | None = None
    ) -> tuple[PartialToolCall, list[ReplyDelta]] | None:
        """Return the call that begins with ``text`` and the first deltas. Return None if ``text`` is not a
        valid call, contains all arguments, or ends before the first value in the arguments. ``head_pattern``
        matches the text before the arguments, by default that of a call as JSON."""
        head = (head_pattern or CALL_HEAD).match(text)
        if head is None:
            return None
        trial = JsonObjectTracker()
        trial.feed(text[head.end() :])
        if not trial.has_value or trial.is_complete or trial.has_invalid_string or trial.is_broken:
            return None
        name = parse_call_name(head["name"]) if head["name"].startswith('"') else head["name"]
        if name is None:
            return None
        partial = PartialToolCall(name, index, head.groupdict().get("id"))
        first_delta = ReplyDelta(call=ToolCallDelta(index, partial.call["id"], name))
        return partial, [first_delta, *partial.feed(text[head.end() :])]

    def feed(self, text: str) -> list[ReplyDelta]:
        if self._tracker.is_complete:
            return []
        text = self._held + text
        processed = self._tracker.feed(text)
        if self._tracker.is_broken:
            processed = len(text)
        self._held = "" if self._tracker.is_complete else text[processed:]
        return self._emit(text[:processed])

    def finish(self) -> list[ReplyDelta]:
        held, self._held = self._held, ""
        deltas = self._emit(held)
        self.call["arguments"] = "".join(self._pieces)
        return deltas

    def _emit(self, text: str) -> list[ReplyDelta]:
        if not text:
            return []
        self._pieces.append(text)
        return [ReplyDelta(call=ToolCallDelta(self._index, arguments=text))]
