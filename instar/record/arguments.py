"""A tool call whose arguments are let out while they are written."""

from __future__ import annotations

import re

from instar.record.base import ReplyDelta, ToolCallDelta
from instar.record.tools import parse_call_name
from instar.types import ToolCall, new_id

_HEAD = re.compile(
    r"""[ \t\r\n]*\{[ \t\r\n]*"name"[ \t\r\n]*:[ \t\r\n]*("(?:[^"\\\x00-\x1f]|\\.)+")"""
    r"""[ \t\r\n]*,[ \t\r\n]*"arguments"[ \t\r\n]*:[ \t\r\n]*(?=\{)"""
)
_SCALAR = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?|true|false|null|NaN|-?Infinity")
_SCALAR_END = re.compile(r"[ \t\r\n,\]}]")
_PLAIN = re.compile(r'[^"\\]+')
_CONTROL = re.compile(r"[\x00-\x1f]")


class JsonObjectTracker:
    """Follows the text of one JSON object as it comes, without building it.

    A control character inside a string is a fault of JSON but leaves no doubt where the string ends, so
    it is noted as ``flawed`` and followed on.
    """

    def __init__(self) -> None:
        self.has_value = False
        """A first value has begun."""
        self.is_complete = False
        """The object has been closed."""
        self.is_broken = False
        """What comes next cannot be followed."""
        self.is_flawed = False
        self._closers: list[str] = []
        self._wanted = "value"
        self._in_string = False
        self._is_key = False
        self._escaped = 0

    def feed(self, text: str) -> int:
        """How much of ``text`` was followed. The rest is to be given again, with more behind it, unless
        the object is done or broken."""
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
            return self._want("colon") if self._is_key else self._end_value()
        self.has_value = self.has_value or not self._is_key
        if char == "\\":
            self._escaped = 5
            return 1
        found = _PLAIN.match(text, at)
        assert found
        self.is_flawed = self.is_flawed or _CONTROL.search(found[0]) is not None
        return len(found[0])

    def _escape(self, char: str) -> int:
        """5: behind the backslash; 4 to 1: hex digits to come."""
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
        char, wanted = text[at], self._wanted
        if char in " \t\r\n":
            return 1
        if wanted == "colon" and char == ":":
            return self._want("value")
        if wanted in ("next", "key or end", "value or end") and char == self._closers[-1]:
            self._closers.pop()
            return self._end_value()
        if wanted == "next" and char == ",":
            return self._want("key" if self._closers[-1] == "}" else "value")
        if wanted in ("key", "key or end") and char == '"':
            self._in_string = self._is_key = True
            return 1
        if wanted in ("value", "value or end"):
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
            return self._want("key or end" if char == "{" else "value or end")
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
        return self._want("next")

    def _want(self, what: str) -> int:
        self._wanted = what
        return 1


class PartialToolCall:
    """A call, ``{"name": ..., "arguments": {...}}``, as it is written. Its arguments are let out from their
    first value on, each character as it was generated.

    Once something was let out, the call stands. Where the arguments stop being JSON, all that follows is
    taken for a part of them, for no one can tell where they end.
    """

    def __init__(self, name: str, index: int) -> None:
        self.call = ToolCall(id=new_id("call"), name=name, arguments="")
        self._index = index
        self._object = JsonObjectTracker()
        self._held = ""
        self._pieces: list[str] = []

    @staticmethod
    def try_start(text: str, index: int) -> tuple[PartialToolCall, list[ReplyDelta]] | None:
        """None as long as the first value of the arguments has not begun, or is not JSON."""
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
        return self._let_out(text[:followed])

    def finish(self) -> list[ReplyDelta]:
        held, self._held = self._held, ""
        deltas = self._let_out(held)
        self.call["arguments"] = "".join(self._pieces)
        return deltas

    def _let_out(self, text: str) -> list[ReplyDelta]:
        if not text:
            return []
        self._pieces.append(text)
        return [ReplyDelta(call=ToolCallDelta(self._index, arguments=text))]
