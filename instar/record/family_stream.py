"""Replies of the families that the `renderers` library knows, as they come.

The library parses whole replies, and its word on a reply is the last one. So that a stream need not wait for
the end, a reply is taken as runs of plain text between tokens that may mean something (`<think>`,
`<tool_call>`, ...). At every such token the library parses what there is: text and tool calls that are closed
come out. In a run it is asked until it shows where the run's text goes; from then on the text is let out
as it is decoded. The cost goes with the length of the reply, and with the number of such tokens.

Arguments come as they are written where a call is `{"name": ..., "arguments": {...}}` between tokens of its
own (Qwen3, Qwen3-VL). Other families write arguments in a form that becomes JSON only when it is whole, or
in a frame of their own; their calls come when they are closed. A call within reasoning that was not closed
comes at the end, for it is a draft if the reasoning is closed after it. White space around reasoning and
content is dropped: formats differ in which of it they write themselves.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from instar.record.arguments import PartialToolCall
from instar.record.base import ReplyDelta, StreamParser
from instar.record.stream import Detokenizer, StopStringFilter, complete_call_delta, overlap_length
from instar.record.tools import parse_call
from instar.types import Message, Tool, ToolCall, new_id

if TYPE_CHECKING:
    from renderers.base import ParsedResponse, ParsedToolCall

Parse = Callable[[list[int]], "ParsedResponse"]
MARKERS = ("<think>", "</think>", "<tool_call", "<|", "<｜")
"""What a format may write as plain text, where its tokenizer has no token for it."""
_MARKER = re.compile("|".join(map(re.escape, MARKERS)))


@dataclass(slots=True)
class ReplyChannel:
    """Reasoning, or content: what was let out of it, and what it was when a run began."""

    pieces: list[str] = field(default_factory=list[str])
    base: str = ""

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    def rest(self, whole: str) -> str:
        """What of the whole was not let out. What was let out and is not in it stands: it was seen."""
        said = self.text
        if whole.startswith(said):
            return whole[len(said) :]
        pairs = enumerate(zip(said, whole, strict=False))
        return whole[next((i for i, (a, b) in pairs if a != b), len(whole)) :]

    def holds(self, now: str, run: str) -> bool:
        """Whether a run of text is the end of this channel, which has grown since the run began."""
        if now == self.base or not now.startswith(self.base) or not now.endswith(run):
            return False
        return self.base.startswith(now[: len(now) - len(run)].rstrip())


class FamilyStreamParser(StreamParser):
    def __init__(
        self,
        parse: Parse,
        decode: Callable[[list[int]], str],
        tools: Sequence[Tool],
        stop: Sequence[str],
        *,
        boundaries: Collection[int],
        bare_calls: bool,
        eager: bool,
    ) -> None:
        """``boundaries``: tokens that may mean something. ``bare_calls``: the format writes a call as a
        reply that is nothing but JSON."""
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
        reasoning, content = self._told(parsed)
        malformed: list[str] = []
        for i, attempt in enumerate(parsed.tool_calls):
            if i in self._calls:
                continue
            if self._tools and (call := _valid(attempt)):
                deltas.append(self._let_call_out(i, call))
            else:
                malformed.append(self._written(attempt))
        content = _cut(content + "".join(malformed), self._stop)
        return [*self._let_out(reasoning, content), *deltas]

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
            return self._open.feed(self._cutter.feed(text))
        self._run += text
        if self._channel is not None:
            return self._flow(self._channel)
        if self._attempt is not None:
            return self._begin_call(self._attempt)
        return self._place_run()

    def _place_run(self) -> list[ReplyDelta]:
        """Ask where the run's text goes, less and less often."""
        run = self._run.strip()
        self._tried += bool(run)
        if not run or self._tried < self._try_at:
            return []
        self._try_at *= 2
        reasoning, content = self._told(self._parse(self._ids), cut=False)
        if self._bare_calls and content.startswith("{"):
            return []
        for channel, now in ((self._content, content), (self._reasoning, reasoning)):
            if channel.holds(now.rstrip("\ufffd"), run):
                self._channel = channel
                self._run = channel.rest(now.rstrip("\ufffd")) + self._run[len(self._run.rstrip()) :]
                return self._flow(channel)
        return []

    def _flow(self, channel: ReplyChannel) -> list[ReplyDelta]:
        """Let out what cannot be the start of a stop string or of a marker."""
        if self._ended:
            return []
        text = _cut(self._run, self._stop)
        if len(text) < len(self._run):
            self._ended = True
            return self._say(channel, text.rstrip())
        if marker := _MARKER.search(text):
            said = self._say(channel, text[: marker.start()].rstrip())
            return said + self._at_boundary(text[marker.end() :])
        sure = self._settled(text)
        self._run = text[len(sure) :]
        return self._say(channel, sure)

    def _settled(self, text: str) -> str:
        return text[: len(text) - max(overlap_length(text, held) for held in self._held_for)].rstrip()

    def _say(self, channel: ReplyChannel, text: str) -> list[ReplyDelta]:
        if not text:
            return []
        channel.pieces.append(text)
        return [ReplyDelta(text=text) if channel is self._content else ReplyDelta(reasoning=text)]

    # --- what the library says --------------------------------------------------------------------

    def _at_boundary(self, text: str = "") -> list[ReplyDelta]:
        """``text``: of the next run, where a boundary was within a token."""
        deltas = self._close_call()
        self._begin_run(text)
        if self._ended:
            return deltas
        parsed = self._parse(self._ids)
        self._reasoning.base, self._content.base = self._told(parsed, cut=False)
        deltas += self._let_out(*map(self._settled, self._told(parsed)))
        if parsed.tool_calls and self._tools and self._calls_are_safe():
            deltas += self._closed_calls(parsed.tool_calls)
        return deltas

    def _calls_are_safe(self) -> bool:
        """Whether the first call began outside of reasoning."""
        if self._safe_calls is None:
            self._safe_calls = self._parse(self._ids[:-1]).reasoning_complete is not False
        return self._safe_calls

    def _closed_calls(self, attempts: Sequence[ParsedToolCall]) -> list[ReplyDelta]:
        deltas: list[ReplyDelta] = []
        for i, attempt in enumerate(attempts):
            if i in self._calls or attempt.token_span is None:
                continue
            if call := _valid(attempt):
                deltas.append(self._let_call_out(i, call))
            elif self._eager and attempt.status == "unclosed_block" and i == len(attempts) - 1:
                self._attempt = i
        return deltas

    def _let_call_out(self, attempt: int, call: ToolCall) -> ReplyDelta:
        delta = complete_call_delta(len(self._calls), call)
        self._calls[attempt] = call
        return delta

    def _begin_call(self, attempt: int) -> list[ReplyDelta]:
        cutter = StopStringFilter(self._stop)
        begun = PartialToolCall.try_start(cutter.feed(self._run), len(self._calls))
        if begun is None:
            return []
        self._cutter = cutter
        self._open, deltas = begun
        self._calls[attempt] = self._open.call
        return deltas

    def _close_call(self) -> list[ReplyDelta]:
        if self._open is None:
            return []
        call, self._open = self._open, None
        rest = self._cutter.feed(self._detokenizer.finish()) + self._cutter.finish()
        return [*call.feed(rest), *call.finish()]

    def _told(self, parsed: ParsedResponse, *, cut: bool = True) -> tuple[str, str]:
        """Reasoning and content. With ``cut``, up to a stop string."""
        told = (parsed.reasoning_content or "").strip(), (parsed.content or "").strip()
        return (_cut(told[0], self._stop), _cut(told[1], self._stop)) if cut else told

    def _let_out(self, reasoning: str, content: str) -> list[ReplyDelta]:
        thought = self._say(self._reasoning, self._reasoning.rest(reasoning))
        return thought + self._say(self._content, self._content.rest(content))

    def _written(self, attempt: ParsedToolCall) -> str:
        """What is no valid call, as the model wrote it."""
        if attempt.token_span is None:
            return attempt.raw
        start, end = attempt.token_span
        return self._decode(self._ids[start:end])


def _cut(text: str, stop: Sequence[str]) -> str:
    found = [at for at in map(text.find, stop) if at >= 0]
    return text[: min(found)] if found else text


def _valid(attempt: ParsedToolCall) -> ToolCall | None:
    if attempt.status != "ok" or not attempt.name or not _is_text(attempt.name):
        return None
    return ToolCall(id=attempt.id or new_id("call"), name=attempt.name, arguments=_arguments(attempt))


def _arguments(attempt: ParsedToolCall) -> str:
    """As they were generated, where the library shows them so; else the value it read, written as JSON."""
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
    """Not so with half a surrogate pair, which JSON can write."""
    try:
        return bool(text.encode())
    except UnicodeEncodeError:
        return False
