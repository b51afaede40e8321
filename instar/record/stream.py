"""Parses sampled tokens into a reply as they arrive.

There are three stages. The first converts tokens to text, the second cuts the text at a stop string, and the
third splits the text into reasoning, content and tool calls. Each stage holds back text that may still
change: an incomplete character, a possible start of a stop string, or a possible tool call.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from instar.record.base import ReplyDelta, StreamParser, ToolCallDelta, Tools
from instar.record.tool_calls import PartialToolCall
from instar.record.tool_formats import HERMES, THINK, ReasoningFormat, ToolFormat
from instar.types import Message, ToolCall

_REPLACEMENT_CHARACTER = "\ufffd"


class TokenDecoder:
    """Converts complete token sequences to text, including special tokens."""

    def __init__(self, backend: Any) -> None:
        """Create a decoder for a tokenizer of the `tokenizers` library."""
        self._backend = backend
        byte_ids = [backend.token_to_id(f"<0x{byte:02X}>") for byte in range(256)]
        has_bytes = None not in byte_ids and self([byte_ids[ord("A")]]) == "A"
        self.byte_ids = frozenset[int](byte_ids if has_bytes else ())
        """The tokens that encode single bytes of characters outside the vocabulary, as in SentencePiece. In a
        run of such tokens, every byte is replaced by U+FFFD unless the complete run is valid UTF-8."""

    def __call__(self, ids: list[int]) -> str:
        return self._backend.decode(ids, skip_special_tokens=False)


class Detokenizer:
    """Converts tokens to text as they arrive. All pieces together equal the decoded text of all tokens. Only
    the latest tokens are decoded, so the cost per token is constant."""

    _MAX_WINDOW_TOKENS, _KEPT_TOKENS = 32, 8

    def __init__(self, decode: TokenDecoder, hidden_ids: Collection[int]) -> None:
        self._decode = decode
        self._hidden_ids = hidden_ids
        self._window: list[int] = []
        self._byte_run: list[int] = []
        """The byte tokens after the window. Their text is not known before the end of the run."""
        self._emitted_chars = 0

    def feed(self, ids: Sequence[int]) -> str:
        window_length = len(self._window)
        for token_id in ids:
            if token_id in self._decode.byte_ids:
                self._byte_run.append(token_id)
            elif token_id not in self._hidden_ids:
                self._window += [*self._byte_run, token_id]
                self._byte_run.clear()
        if len(self._window) == window_length:
            return ""
        text = self._decode(self._window)
        # Up to three bytes of an incomplete character decode to as many replacement characters.
        end = len(text)
        while end > len(text) - 3 and text[end - 1 : end] == _REPLACEMENT_CHARACTER:
            end -= 1
        piece = text[self._emitted_chars : end]
        self._emitted_chars = max(self._emitted_chars, end)
        if end == len(text) and len(self._window) > self._MAX_WINDOW_TOKENS:
            self._window = self._window[-self._KEPT_TOKENS :]
            self._emitted_chars = len(self._decode(self._window))
        return piece

    def finish(self) -> str:
        """Return the text held back. Another call returns nothing."""
        text = self._decode([*self._window, *self._byte_run])
        piece = text[self._emitted_chars :]
        self._emitted_chars = len(text)
        return piece


class StopStringFilter:
    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = stop
        self._held = ""
        self._is_stopped = False

    def feed(self, text: str) -> str:
        if not self._stop:
            return text
        if self._is_stopped:
            return ""
        text = self._held + text
        before_stop = cut_at_stop(text, self._stop)
        if len(before_stop) < len(text):
            self._is_stopped, self._held = True, ""
            return before_stop
        held_length = max(overlap_length(text, stop) for stop in self._stop)
        self._held = text[len(text) - held_length :]
        return text[: len(text) - held_length]

    def finish(self) -> str:
        """Return the text held back. Another call returns nothing: a reply that is complete is finished again
        if it is recorded because another reply of its request failed."""
        held, self._held = self._held, ""
        return held


def cut_at_stop(text: str, stop: Sequence[str]) -> str:
    positions = [position for position in map(text.find, stop) if position >= 0]
    return text[: min(positions)] if positions else text


def overlap_length(text: str, marker: str) -> int:
    """Return the length of the longest suffix of ``text`` that is a proper prefix of ``marker``."""
    for length in range(min(len(text), len(marker) - 1), 0, -1):
        if text.endswith(marker[:length]):
            return length
    return 0


def build_reply(content: str, reasoning: str, tool_calls: Iterable[ToolCall]) -> Message:
    message = Message(role="assistant", content=content)
    if reasoning:
        message["reasoning"] = reasoning
    if calls := list(tool_calls):
        message["tool_calls"] = calls
    return message


def build_call_delta(index: int, call: ToolCall) -> ReplyDelta:
    return ReplyDelta(call=ToolCallDelta(index, call["id"], call["name"], call["arguments"]))


class ReplyScanner:
    """Splits text into reasoning, content and tool calls. Whitespace after reasoning and next to a call is
    dropped. Without ``tool_format``, calls are part of the content. With ``plain_text``, nothing is split."""

    def __init__(
        self,
        *,
        tool_format: ToolFormat | None = None,
        tools: Tools = (),
        reasoning_format: ReasoningFormat = THINK,
        starts_in_reasoning: bool = False,
        eager: bool = False,
        plain_text: bool = False,
    ) -> None:
        self._format = tool_format
        self._tools = tools
        self._reasoning_format = reasoning_format
        self._eager = eager
        self._open_call: PartialToolCall | None = None
        self._state = "plain text" if plain_text else "reasoning" if starts_in_reasoning else "start"
        self._buffer = ""
        self._held_space = ""
        self._trim_next = False
        self._skipped = [*reasoning_format.frames, *(tool_format.wrappers if tool_format else ())]
        self._content_markers = list(self._skipped)
        if tool_format and tool_format.begin:
            self._content_markers.append(tool_format.begin)
        if reasoning_format.frames:
            self._content_markers.append(reasoning_format.begin)
        longest_first = sorted(self._content_markers, key=len, reverse=True)
        self._content_pattern = re.compile("|".join(map(re.escape, longest_first)) or r"\Z\A")
        self.content: list[str] = []
        self.reasoning: list[str] = []
        self.tool_calls: list[ToolCall] = []
        self._deltas: list[ReplyDelta] = []

    def feed(self, text: str) -> list[ReplyDelta]:
        self._buffer += text
        while self._advance():
            pass
        return self._take_deltas()

    def finish(self) -> list[ReplyDelta]:
        if self._state == "call" and self._open_call is None:
            self._finish_call()
        rest, self._buffer = self._buffer, ""
        if self._state == "reasoning":
            self._emit_reasoning(rest)
        elif self._open_call is not None:
            self._deltas += self._open_call.feed(rest)
            self._close_call(self._open_call)
        else:
            self._add_content(rest)
            if not self.tool_calls:
                space, self._held_space = self._held_space, ""
                self._emit_text(space)
        return self._take_deltas()

    def _take_deltas(self) -> list[ReplyDelta]:
        out, self._deltas = self._deltas, []
        return out

    def _advance(self) -> bool:
        """Process the start of the buffer. Return False if the rest must wait for more text."""
        if not self._buffer:
            return False
        if self._state == "plain text":
            self._emit_text(self._buffer)
            self._buffer = ""
            return False
        if self._state == "start":
            return self._scan_start()
        if self._state == "reasoning":
            return self._scan_reasoning()
        if self._open_call is not None:
            return self._scan_open_call(self._open_call)
        if self._state == "call":
            assert self._format is not None
            return self._scan_call(self._format)
        return self._scan_content()

    def _scan_start(self) -> bool:
        text = self._buffer.lstrip()
        reasoning_begin = self._reasoning_format.begin
        if text.startswith(reasoning_begin):
            self._state, self._buffer = "reasoning", text[len(reasoning_begin) :]
            return True
        if any(marker.startswith(text) for marker in (reasoning_begin, *self._skipped)):
            return False
        if skipped := next((marker for marker in self._skipped if text.startswith(marker)), None):
            self._buffer = text[len(skipped) :]
        elif self._format and not self._format.begin and text.startswith(("{", "[{")):
            self._state = "call"
        elif self._format and not self._format.begin and text == "[":
            return False
        else:
            self._state = "content"
        return True

    def _scan_reasoning(self) -> bool:
        reasoning_end = self._reasoning_format.end
        before, closed, after = self._buffer.partition(reasoning_end)
        if closed:
            self._emit_reasoning(before)
            self._buffer, self._trim_next = after, True
            self._state = "start" if self._format and not self._format.begin else "content"
            return True
        held_length = overlap_length(self._buffer, reasoning_end)
        self._emit_reasoning(self._buffer[: len(self._buffer) - held_length])
        self._buffer = self._buffer[len(self._buffer) - held_length :]
        return False

    def _scan_content(self) -> bool:
        match = self._content_pattern.search(self._buffer)
        if match is None:
            held_length = max((overlap_length(self._buffer, m) for m in self._content_markers), default=0)
            self._add_content(self._buffer[: len(self._buffer) - held_length])
            self._buffer = self._buffer[len(self._buffer) - held_length :]
            return False
        self._add_content(self._buffer[: match.start()])
        self._buffer = self._buffer[match.end() :]
        if match[0] in self._skipped:
            self._held_space, self._trim_next = "", True
        elif match[0] == self._reasoning_format.begin and self._reasoning_format.frames:
            self._state = "reasoning"
        else:
            self._state = "call"
        return True

    def _scan_call(self, tool_format: ToolFormat) -> bool:
        """Parse the call after its beginning, which is not in the buffer any more."""
        body, closed, after = self._buffer.partition(tool_format.end or tool_format.begin or "\0")
        if not closed:
            if tool_format is HERMES and body.strip() and not body.lstrip().startswith("{"):
                return self._reject_call(tool_format)
            return self._eager and tool_format.head is not None and self._begin_call(tool_format, body)
        if not self._add_calls(tool_format, body):
            return self._reject_call(tool_format)
        self._buffer = after if tool_format.end else closed + after
        self._state = "content"
        return True

    def _finish_call(self) -> None:
        """Parse a call that ends with the reply."""
        assert self._format is not None
        if not self._format.end and self._add_calls(self._format, self._buffer):
            self._buffer = ""
        elif self._format.begin:
            self._add_content(self._format.begin)
        self._state = "content"

    def _add_calls(self, tool_format: ToolFormat, body: str) -> bool:
        try:
            calls = tool_format.parse(body, self._tools)
        except (ValueError, LookupError, RecursionError):
            return False
        for call in calls:
            self._deltas.append(build_call_delta(len(self.tool_calls), call))
            self._add_call(call)
        return True

    def _reject_call(self, tool_format: ToolFormat) -> bool:
        self._add_content(tool_format.begin)
        self._state = "content"
        return True

    def _begin_call(self, tool_format: ToolFormat, body: str) -> bool:
        emittable_length = len(body) - overlap_length(body, tool_format.end or tool_format.begin)
        index = len(self.tool_calls)
        if started := PartialToolCall.try_start(body[:emittable_length], index, tool_format.head):
            self._open_call, deltas = started
            self._deltas += deltas
            self._add_call(self._open_call.call)
            self._buffer = body[emittable_length:]
        return False

    def _scan_open_call(self, call: PartialToolCall) -> bool:
        assert self._format is not None
        marker = self._format.end or self._format.begin
        body, closed, after = self._buffer.partition(marker)
        emittable_length = len(body) if closed else len(body) - overlap_length(body, marker)
        self._deltas += call.feed(body[:emittable_length])
        self._buffer = body[emittable_length:]
        if closed:
            self._buffer = after if self._format.end else closed + after
            self._close_call(call)
        return bool(closed)

    def _close_call(self, call: PartialToolCall) -> None:
        self._deltas += call.finish()
        self._open_call = None
        self._state = "content"

    def _add_call(self, call: ToolCall) -> None:
        self.tool_calls.append(call)
        self._held_space, self._trim_next = "", True

    def _emit_reasoning(self, text: str) -> None:
        if text:
            self.reasoning.append(text)
            self._deltas.append(ReplyDelta(reasoning=text))

    def _add_content(self, text: str) -> None:
        if self._trim_next:
            text = text.lstrip()
            if not text:
                return
            self._trim_next = False
        text = self._held_space + text
        visible = text.rstrip()
        self._held_space = text[len(visible) :]
        self._emit_text(visible)

    def _emit_text(self, text: str) -> None:
        if text:
            self.content.append(text)
            self._deltas.append(ReplyDelta(text=text))


class TextStreamParser(StreamParser):
    def __init__(self, detokenizer: Detokenizer, stop: Sequence[str], scanner: ReplyScanner) -> None:
        self._detokenizer = detokenizer
        self._stop_filter = StopStringFilter(stop)
        self._scanner = scanner

    def feed(self, ids: Sequence[int]) -> list[ReplyDelta]:
        return self._scanner.feed(self._stop_filter.feed(self._detokenizer.feed(ids)))

    def finish(self) -> list[ReplyDelta]:
        last = self._stop_filter.feed(self._detokenizer.finish()) + self._stop_filter.finish()
        return self._scanner.feed(last) + self._scanner.finish()

    @property
    def message(self) -> Message:
        scanner = self._scanner
        return build_reply("".join(scanner.content), "".join(scanner.reasoning), scanner.tool_calls)
