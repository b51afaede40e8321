"""Streamed replies of the model families that the `renderers` library supports.

The library parses complete replies, and its result for the complete reply is final. To stream before the end,
a reply is divided into runs of plain text between tokens that may have a meaning (`<think>`, `<tool_call>`,
...). At every such token the library parses the reply so far, and closed text and tool calls are emitted.
Within a run the library is called until it shows to which channel the run's text belongs; from then on the
text is emitted as it is decoded. The cost grows with the length of the reply and the number of such tokens.

Arguments are emitted as they are written if a call is `{"name": ..., "arguments": {...}}` between its own
tokens (Qwen3, Qwen3-VL). Other families write arguments in a form that becomes JSON only when it is complete,
or in another frame; their calls are emitted when they are closed. A call within unclosed reasoning is emitted
at the end, because it is a draft if the reasoning is closed after it. White space around reasoning and
content is dropped, because formats differ in how much of it they write themselves.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from instar.record.base import ReplyDelta, StreamParser
from instar.record.stream import Detokenizer, StopStringFilter, complete_call_delta, overlap_length
from instar.record.tool_calls import PartialToolCall, parse_call
from instar.types import Message, Tool, ToolCall, new_id

if TYPE_CHECKING:
    from renderers.base import ParsedResponse, ParsedToolCall

ParseReply = Callable[[list[int]], "ParsedResponse"]
MARKERS = ("<think>", "</think>", "<tool_call", "<|", "<｜")
"""Markers that a format may write as plain text if its tokenizer has no token for them."""
_MARKER = re.compile("|".join(map(re.escape, MARKERS)))


@dataclass(slots=True)
class ReplyChannel:
    """Reasoning or content: the text that was emitted, and the complete text when the current run began."""

    pieces: list[str] = field(default_factory=list[str])
    base: str = ""

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    def rest(self, complete_text: str) -> str:
        """Return the part of the complete text that was not emitted. Emitted text that is missing from the
        complete text cannot be taken back."""
        emitted = self.text
        if complete_text.startswith(emitted):
            return complete_text[len(emitted) :]
        pairs = enumerate(zip(emitted, complete_text, strict=False))
        return complete_text[next((i for i, (a, b) in pairs if a != b), len(complete_text)) :]

    def ends_with_run(self, now: str, run: str) -> bool:
        """Return True if this channel has grown since the run began and ends with the run's text."""
        if now == self.base or not now.startswith(self.base) or not now.endswith(run):
            return False
        return self.base.startswith(now[: len(now) - len(run)].rstrip())


class FamilyStreamParser(StreamParser):
    def __init__(
        self,
        parse: ParseReply,
        decode: Callable[[list[int]], str],
        tools: Sequence[Tool],
        stop: Sequence[str],
        *,
        boundaries: Collection[int],
        bare_calls: bool,
        eager: bool,
    ) -> None:
        """``boundaries`` are the tokens that may have a meaning. ``bare_calls`` is True if the format writes
        a call as a reply that is only JSON."""
        self._parse = parse
        self._decode = decode
        self._tools = tools
        self._stop = tuple(stop)
        self._boundaries = boundaries
        self._bare_calls = bare_calls and bool(tools)
        self._eager = eager
        self._held_for = (*MARKERS, *stop)
        self._ids: list[int] = []
        self._reasoning, self._content = ReplyChannel(), ReplyChannel()
        self._calls: dict[int, ToolCall] = {}
        self._safe_calls: bool | None = None
        self._ended = False
        self._begin_run()

    # --- feeding ----------------------------------------------------------------------------------

    def feed(self, ids: Sequence[int]) -> list[ReplyDelta]:
        deltas: list[ReplyDelta] = []
        for token in ids:
            self._ids.append(token)
            if token in self._boundaries:
                deltas += self._at_boundary()
            elif text := self._detokenizer.feed([token]):
                deltas += self._take(text)
        return deltas

    def finish(self) -> list[ReplyDelta]:
        deltas = self._close_call()
        parsed = self._parse(self._ids)
        reasoning, content = self._texts(parsed)
        malformed: list[str] = []
        for i, attempt in enumerate(parsed.tool_calls):
            if i in self._calls:
                continue
            if self._tools and (call := _to_tool_call(attempt)):
                deltas.append(self._emit_call(i, call))
            else:
                malformed.append(self._raw_text(attempt))
        content = _cut(content + "".join(malformed), self._stop)
        return [*self._emit_rest(reasoning, content), *deltas]

    @property
    def message(self) -> Message:
        message = Message(role="assistant", content=self._content.text)
        if reasoning := self._reasoning.text:
            message["reasoning"] = reasoning
        if self._calls:
            message["tool_calls"] = list(self._calls.values())
        return message

    # --- runs of text -----------------------------------------------------------------------------

    def _begin_run(self, text: str = "") -> None:
        self._detokenizer = Detokenizer(self._decode, ())
        self._run = text
        self._channel: ReplyChannel | None = None
        self._attempt: int | None = None
        self._open: PartialToolCall | None = None
        self._tried, self._try_at = 0, 1

    def _take(self, text: str) -> list[ReplyDelta]:
        if self._open is not None:
            return self._open.feed(self._stop_filter.feed(text))
        self._run += text
        if self._channel is not None:
            return self._flow(self._channel)
        if self._attempt is not None:
            return self._begin_call(self._attempt)
        return self._place_run()

    def _place_run(self) -> list[ReplyDelta]:
        """Find the channel of the run's text and return the text that can be emitted. The library is called
        less and less often."""
        run = self._run.strip()
        self._tried += bool(run)
        if not run or self._tried < self._try_at:
            return []
        self._try_at *= 2
        reasoning, content = self._texts(self._parse(self._ids), cut=False)
        if self._bare_calls and content.startswith("{"):
            return []
        for channel, now in ((self._content, content), (self._reasoning, reasoning)):
            if channel.ends_with_run(now.rstrip("\ufffd"), run):
                self._channel = channel
                self._run = channel.rest(now.rstrip("\ufffd")) + self._run[len(self._run.rstrip()) :]
                return self._flow(channel)
        return []

    def _flow(self, channel: ReplyChannel) -> list[ReplyDelta]:
        """Return the text that cannot be the start of a stop string or of a marker."""
        if self._ended:
            return []
        text = _cut(self._run, self._stop)
        if len(text) < len(self._run):
            self._ended = True
            return self._emit(channel, text.rstrip())
        if marker := _MARKER.search(text):
            deltas = self._emit(channel, text[: marker.start()].rstrip())
            return deltas + self._at_boundary(text[marker.end() :])
        decided = self._decided(text)
        self._run = text[len(decided) :]
        return self._emit(channel, decided)

    def _decided(self, text: str) -> str:
        return text[: len(text) - max(overlap_length(text, held) for held in self._held_for)].rstrip()

    def _emit(self, channel: ReplyChannel, text: str) -> list[ReplyDelta]:
        if not text:
            return []
        channel.pieces.append(text)
        return [ReplyDelta(text=text) if channel is self._content else ReplyDelta(reasoning=text)]

    # --- results of the library -------------------------------------------------------------------

    def _at_boundary(self, text: str = "") -> list[ReplyDelta]:
        """Return the deltas that are certain at a boundary. ``text`` begins the next run if the boundary was
        inside a token."""
        deltas = self._close_call()
        self._begin_run(text)
        if self._ended:
            return deltas
        parsed = self._parse(self._ids)
        self._reasoning.base, self._content.base = self._texts(parsed, cut=False)
        deltas += self._emit_rest(*map(self._decided, self._texts(parsed)))
        if parsed.tool_calls and self._tools and self._calls_are_safe():
            deltas += self._closed_calls(parsed.tool_calls)
        return deltas

    def _calls_are_safe(self) -> bool:
        """Return True if the first call began outside of reasoning."""
        if self._safe_calls is None:
            self._safe_calls = self._parse(self._ids[:-1]).reasoning_complete is not False
        return self._safe_calls

    def _closed_calls(self, attempts: Sequence[ParsedToolCall]) -> list[ReplyDelta]:
        deltas: list[ReplyDelta] = []
        for i, attempt in enumerate(attempts):
            if i in self._calls or attempt.token_span is None:
                continue
            if call := _to_tool_call(attempt):
                deltas.append(self._emit_call(i, call))
            elif self._eager and attempt.status == "unclosed_block" and i == len(attempts) - 1:
                self._attempt = i
        return deltas

    def _emit_call(self, attempt: int, call: ToolCall) -> ReplyDelta:
        delta = complete_call_delta(len(self._calls), call)
        self._calls[attempt] = call
        return delta

    def _begin_call(self, attempt: int) -> list[ReplyDelta]:
        stop_filter = StopStringFilter(self._stop)
        started = PartialToolCall.try_start(stop_filter.feed(self._run), len(self._calls))
        if started is None:
            return []
        self._stop_filter = stop_filter
        self._open, deltas = started
        self._calls[attempt] = self._open.call
        return deltas

    def _close_call(self) -> list[ReplyDelta]:
        if self._open is None:
            return []
        call, self._open = self._open, None
        rest = self._stop_filter.feed(self._detokenizer.finish()) + self._stop_filter.finish()
        return [*call.feed(rest), *call.finish()]

    def _texts(self, parsed: ParsedResponse, *, cut: bool = True) -> tuple[str, str]:
        """Return the reasoning and the content. With ``cut``, each ends at the first stop string."""
        texts = (parsed.reasoning_content or "").strip(), (parsed.content or "").strip()
        return (_cut(texts[0], self._stop), _cut(texts[1], self._stop)) if cut else texts

    def _emit_rest(self, reasoning: str, content: str) -> list[ReplyDelta]:
        deltas = self._emit(self._reasoning, self._reasoning.rest(reasoning))
        return deltas + self._emit(self._content, self._content.rest(content))

    def _raw_text(self, attempt: ParsedToolCall) -> str:
        """Return the text of an invalid call as the model wrote it."""
        if attempt.token_span is None:
            return attempt.raw
        start, end = attempt.token_span
        return self._decode(self._ids[start:end])


def _cut(text: str, stop: Sequence[str]) -> str:
    positions = [at for at in map(text.find, stop) if at >= 0]
    return text[: min(positions)] if positions else text


def _to_tool_call(attempt: ParsedToolCall) -> ToolCall | None:
    if attempt.status != "ok" or not attempt.name or not _is_text(attempt.name):
        return None
    return ToolCall(id=attempt.id or new_id("call"), name=attempt.name, arguments=_arguments(attempt))


def _arguments(attempt: ParsedToolCall) -> str:
    """Return the arguments as generated if the library provides them, or else the parsed value as JSON."""
    arguments: Any = attempt.arguments
    if isinstance(arguments, str):
        return arguments
    call = parse_call(attempt.raw)
    for text in (attempt.raw.strip(), call["arguments"] if call else ""):
        try:
            if isinstance(arguments, dict) and json.loads(text) == arguments:
                return text
        except (ValueError, RecursionError):
            continue
    written = json.dumps(arguments or {}, ensure_ascii=False)
    return written if _is_text(written) else json.dumps(arguments)


def _is_text(text: str) -> bool:
    """Return True if the text can be encoded. JSON can contain half a surrogate pair, which cannot be
    encoded."""
    try:
        return bool(text.encode())
    except UnicodeEncodeError:
        return False
