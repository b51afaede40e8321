"""A tool call whose arguments are let out while they are written."""

from __future__ import annotations

import re

from instar.record.base import CallDelta, Delta
from instar.record.tools import call_name
from instar.types import ToolCall, new_id

_HEAD = re.compile(
    r"""[ \t\r\n]*\{[ \t\r\n]*"name"[ \t\r\n]*:[ \t\r\n]*("(?:[^"\\\x00-\x1f]|\\.)+")"""
    r"""[ \t\r\n]*,[ \t\r\n]*"arguments"[ \t\r\n]*:[ \t\r\n]*(?=\{)"""
)
_SCALAR = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?|true|false|null|NaN|-?Infinity")
_SCALAR_END = re.compile(r"[ \t\r\n,\]}]")
_PLAIN = re.compile(r'[^"\\]+')
_CONTROL = re.compile(r"[\x00-\x1f]")


class JsonObject:
    """Follows the text of one JSON object as it comes, without building it.

    A control character inside a string is a fault of JSON but leaves no doubt where the string ends, so
    it is noted as ``flawed`` and followed on.
    """

    def __init__(self) -> None:
        self.begun = False
        """A first value has begun."""
        self.done = False
        """The object has been closed."""
        self.broken = False
        """What comes next cannot be followed."""
        self.flawed = False
        self._closers: list[str] = []
        self._wanted = "value"
        self._in_string = False
        self._is_key = False
        self._escaped = 0

    def feed(self, text: str) -> int:
        """How much of ``text`` was followed. The rest is to be given again, with more behind it, unless
        the object is done or broken."""
        at = 0
        while at < len(text) and not (self.done or self.broken):
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
        self.begun = self.begun or not self._is_key
        if char == "\\":
            self._escaped = 5
            return 1
        found = _PLAIN.match(text, at)
        assert found
        self.flawed = self.flawed or _CONTROL.search(found[0]) is not None
        return len(found[0])

    def _escape(self, char: str) -> int:
        """5: behind the backslash; 4 to 1: hex digits to come."""
        if self._escaped == 5:
            self.flawed = self.flawed or char not in '"\\/bfnrtu'
            self._escaped = 4 if char == "u" else 0
            return 1
        if char not in "0123456789abcdefABCDEF":
            self.flawed, self._escaped = True, 0
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
        self.broken = True
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
            self.broken = True
            return 0
        self._end_value()
        return end.start() - at

    def _end_value(self) -> int:
        self.done = not self._closers
        self.begun = self.begun or not self.done
        return self._want("next")

    def _want(self, what: str) -> int:
        self._wanted = what
        return 1


class EagerCall:
    """A call, ``{"name": ..., "arguments": {...}}``, as it is written. Its arguments are let out from their
    first value on, each character as it was generated.

    Once something was let out, the call stands. Where the arguments stop being JSON, all that follows is
    taken for a part of them, for no one can tell where they end.
    """

    def __init__(self, name: str, index: int) -> None:
        self.call = ToolCall(id=new_id("call"), name=name, arguments="")
        self._index = index
        self._object = JsonObject()
        self._held = ""
        self._pieces: list[str] = []

    @staticmethod
    def begin(text: str, index: int) -> tuple[EagerCall, list[Delta]] | None:
        """None as long as the first value of the arguments has not begun, or is not JSON."""
        head = _HEAD.match(text)
        if head is None:
            return None
        trial = JsonObject()
        trial.feed(text[head.end() :])
        if not trial.begun or trial.done or trial.flawed or trial.broken:
            return None
        name = call_name(head[1])
        if name is None:
            return None
        call = EagerCall(name, index)
        opening = Delta(call=CallDelta(index, call.call["id"], name))
        return call, [opening, *call.feed(text[head.end() :])]

    def feed(self, text: str) -> list[Delta]:
        if self._object.done:
            return []
        text = self._held + text
        followed = self._object.feed(text)
        if self._object.broken:
            followed = len(text)
        self._held = "" if self._object.done else text[followed:]
        return self._let_out(text[:followed])

    def finish(self) -> list[Delta]:
        held, self._held = self._held, ""
        deltas = self._let_out(held)
        self.call["arguments"] = "".join(self._pieces)
        return deltas

    def _let_out(self, text: str) -> list[Delta]:
        if not text:
            return []
        self._pieces.append(text)
        return [Delta(call=CallDelta(self._index, arguments=text))]
