"""Tool calls in text: the generic tool format, for models whose chat template has no tools.

The tools are listed in the system message, after its own text (a system message is added if there is none),
one per line, with a `?` after an optional parameter::

    Tools:
    calc(expression: string): Evaluate arithmetic.
    To call a tool, write <tool_call>{"name": ..., "arguments": {...}}</tool_call>

A call is written on one line, in the style of Hermes, after the text of its message, and has the same form in
the history; the arguments are kept as they were generated::

    <tool_call>{"name": "calc", "arguments": {"expression": "24 * 310"}}</tool_call>

A result is a message of the role `tool` if the template writes that role, else a user message
`<tool_response>...</tool_response>`. A malformed call is plain text.

``PartialToolCall`` streams the arguments of a call while the model writes them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from typing import Any, cast

from instar.record.base import ReplyDelta, ToolCallDelta
from instar.types import Json, Message, Tool, ToolCall, new_id

CALL_OPEN = "<tool_call>"
CALL_CLOSE = "</tool_call>"
HOW_TO_CALL = f'To call a tool, write {CALL_OPEN}{{"name": ..., "arguments": {{...}}}}{CALL_CLOSE}'

_decoder = json.JSONDecoder()


def format_tool_list(tools: Iterable[Tool]) -> str:
    """Return the list of tools that is appended to the system message."""
    return "\n".join(["Tools:", *map(_tool_line, tools), HOW_TO_CALL])


def _tool_line(tool: Tool) -> str:
    # Agents send all kinds of schemas; an invalid one yields a tool without parameters.
    schema = tool["parameters"]
    required, properties = _list(schema.get("required")), schema.get("properties")
    parameters = ", ".join(
        f"{name}{'' if name in required else '?'}: {_type_name(spec)}"
        for name, spec in (cast(Json, properties) if isinstance(properties, dict) else {}).items()
    )
    description = " ".join(tool["description"].split())
    return f"{tool['name']}({parameters})" + (f": {description}" if description else "")


def _type_name(spec: Any) -> str:
    if not isinstance(spec, dict):
        return "any"
    spec = cast(Json, spec)
    if choices := _list(spec.get("enum")):
        return "|".join(json.dumps(choice, ensure_ascii=False) for choice in choices)
    type_name = spec.get("type", "any")
    if isinstance(type_name, list):
        return "|".join(map(str, cast(list[Any], type_name)))
    return str(type_name)


def _list(value: Any) -> list[Any]:
    return cast(list[Any], value) if isinstance(value, list) else []


def format_call(call: ToolCall) -> str:
    """Return a call as the model would write it. Arguments that are not a JSON object are quoted."""
    arguments = call["arguments"] if _is_object(call["arguments"]) else json.dumps(call["arguments"])
    name = json.dumps(call["name"], ensure_ascii=False)
    return f'{CALL_OPEN}{{"name": {name}, "arguments": {arguments}}}{CALL_CLOSE}'


def parse_call(body: str) -> ToolCall | None:
    """Return the call in the text between the tags, with the arguments as written, or None if it is not
    valid."""
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
    """Return the tool's name from its JSON text, or None if the name is empty or cannot be encoded."""
    try:
        name: Any = json.loads(text)
        # Half a surrogate pair is valid JSON but cannot be encoded.
        return name if isinstance(name, str) and name.encode() else None
    except ValueError:
        return None


def to_generic_messages(
    messages: Sequence[Message], tools: Sequence[Tool], *, tool_role: bool, list_tools: bool = True
) -> list[Message]:
    """Return the messages with tool calls and tool results as plain text. The tools are listed only with
    ``list_tools``."""
    plain = [_to_plain(message, tool_role) for message in messages]
    if not tools or not list_tools:
        return plain
    tool_list = format_tool_list(tools)
    if plain and plain[0]["role"] == "system":
        text = plain[0]["content"]
        content = f"{text}\n{tool_list}" if text else tool_list
        return [Message(role="system", content=content), *plain[1:]]
    return [Message(role="system", content=tool_list), *plain]


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
    """Return the members of a JSON object, with their values as text. Raise ValueError if ``text`` is not a
    JSON object."""
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
        raise ValueError("text after the object")
    return members


def _skip(text: str, position: int) -> int:
    while position < len(text) and text[position] in " \t\n\r":
        position += 1
    return position


def _expect(text: str, at: int, char: str) -> int:
    if text[at : at + 1] != char:
        raise ValueError(f"expected {char!r}")
    return at + 1


# --- streamed calls -----------------------------------------------------------------------------

_HEAD = re.compile(
    r"""[ \t\r\n]*\{[ \t\r\n]*"name"[ \t\r\n]*:[ \t\r\n]*("(?:[^"\\\x00-\x1f]|\\.)+")"""
    r"""[ \t\r\n]*,[ \t\r\n]*"arguments"[ \t\r\n]*:[ \t\r\n]*(?=\{)"""
)
_SCALAR = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?|true|false|null|NaN|-?Infinity")
_SCALAR_END = re.compile(r"[ \t\r\n,\]}]")
_PLAIN = re.compile(r'[^"\\]+')
_CONTROL = re.compile(r"[\x00-\x1f]")


class JsonObjectTracker:
    """Follows the text of one JSON object as it arrives, without building the object.

    A control character inside a string is invalid JSON, but it is still clear where the string ends. In this
    case ``is_flawed`` is set, and the text is followed further.
    """

    def __init__(self) -> None:
        self.has_value = False
        """True once the first value has begun."""
        self.is_complete = False
        """True once the object is closed."""
        self.is_broken = False
        """True if the text is not JSON, so the end of the object is unknown."""
        self.is_flawed = False
        self._closers: list[str] = []
        self._expected = "value"
        self._in_string = False
        self._is_key = False
        self._escaped = 0

    def feed(self, text: str) -> int:
        """Return how many characters of ``text`` were followed. The caller passes the rest again, with more
        text after it, unless the object is complete or broken."""
        at = 0
        while at < len(text) and not (self.is_complete or self.is_broken):
            moved = self._string(text, at) if self._in_string else self._token(text, at)
            if not moved:
                break
            at += moved
        return at

    def _string(self, text: str, at: int) -> int:
        char = text[at]
        if self._escaped:
            return self._escape(char)
        if char == '"':
            self._in_string = False
            return self._expect("colon") if self._is_key else self._end_value()
        self.has_value = self.has_value or not self._is_key
        if char == "\\":
            self._escaped = 5
            return 1
        match = _PLAIN.match(text, at)
        assert match
        self.is_flawed = self.is_flawed or _CONTROL.search(match[0]) is not None
        return len(match[0])

    def _escape(self, char: str) -> int:
        # self._escaped is 5 after the backslash, and 4 to 1 while that many hex digits are missing.
        if self._escaped == 5:
            self.is_flawed = self.is_flawed or char not in '"\\/bfnrtu'
            self._escaped = 4 if char == "u" else 0
            return 1
        if char not in "0123456789abcdefABCDEF":
            self.is_flawed, self._escaped = True, 0
            return self._string(char, 0)
        self._escaped -= 1
        return 1

    def _token(self, text: str, at: int) -> int:
        char, expected = text[at], self._expected
        if char in " \t\r\n":
            return 1
        if expected == "colon" and char == ":":
            return self._expect("value")
        if expected in ("next", "key or end", "value or end") and char == self._closers[-1]:
            self._closers.pop()
            return self._end_value()
        if expected == "next" and char == ",":
            return self._expect("key" if self._closers[-1] == "}" else "value")
        if expected in ("key", "key or end") and char == '"':
            self._in_string = self._is_key = True
            return 1
        if expected in ("value", "value or end"):
            return self._value(text, at)
        self.is_broken = True
        return 0

    def _value(self, text: str, at: int) -> int:
        char = text[at]
        if char == '"':
            self._in_string, self._is_key = True, False
            return 1
        if char in "{[":
            self._closers.append("}" if char == "{" else "]")
            return self._expect("key or end" if char == "{" else "value or end")
        end = _SCALAR_END.search(text, at)
        if end is None:
            return 0
        if not _SCALAR.fullmatch(text, at, end.start()):
            self.is_broken = True
            return 0
        self._end_value()
        return end.start() - at

    def _end_value(self) -> int:
        self.is_complete = not self._closers
        self.has_value = self.has_value or not self.is_complete
        return self._expect("next")

    def _expect(self, token: str) -> int:
        self._expected = token
        return 1


class PartialToolCall:
    """A call, ``{"name": ..., "arguments": {...}}``, while it is written. Its arguments are emitted as
    generated, starting with their first value.

    Once something was emitted, the call stays a call. If the arguments stop being JSON, all later text
    belongs to the arguments, because their end is unknown.
    """

    def __init__(self, name: str, index: int) -> None:
        self.call = ToolCall(id=new_id("call"), name=name, arguments="")
        self._index = index
        self._object = JsonObjectTracker()
        self._held = ""
        self._pieces: list[str] = []

    @staticmethod
    def try_start(text: str, index: int) -> tuple[PartialToolCall, list[ReplyDelta]] | None:
        """Return the call that ``text`` begins and the first deltas, or None while the first value of the
        arguments has not begun or is not JSON."""
        head = _HEAD.match(text)
        if head is None:
            return None
        trial = JsonObjectTracker()
        trial.feed(text[head.end() :])
        if not trial.has_value or trial.is_complete or trial.is_flawed or trial.is_broken:
            return None
        name = parse_call_name(head[1])
        if name is None:
            return None
        call = PartialToolCall(name, index)
        opening = ReplyDelta(call=ToolCallDelta(index, call.call["id"], name))
        return call, [opening, *call.feed(text[head.end() :])]

    def feed(self, text: str) -> list[ReplyDelta]:
        if self._object.is_complete:
            return []
        text = self._held + text
        followed = self._object.feed(text)
        if self._object.is_broken:
            followed = len(text)
        self._held = "" if self._object.is_complete else text[followed:]
        return self._emit(text[:followed])

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
