"""The renderer and stream parser for the model families that the `renderers` library supports.

The library parses only complete replies. For streaming, a reply is divided into runs of plain text between
boundary tokens such as `<think>` and `<tool_call>`. At every boundary token, the library parses the reply so
far, and complete text and tool calls are emitted. Within a run, the library is called until its result shows
whether the run is reasoning or content. The rest of the run is emitted as it is decoded.

Arguments are streamed for families that write a call as `{"name": ..., "arguments": {...}}` between boundary
tokens (Qwen3, Qwen3-VL). Other families' calls are emitted once they are complete. A call inside unclosed
reasoning is held back until the end of the reply: if the reasoning is closed later, the call was only a
draft. Whitespace around reasoning and content is dropped.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from instar.errors import RenderError
from instar.record.base import Messages, ReplyDelta, StreamParser, Tools, to_template_message
from instar.record.bridge import name_results
from instar.record.content import ContentTokenizer
from instar.record.render import TokenizerRenderer
from instar.record.stream import (
    Detokenizer,
    StopStringFilter,
    TokenDecoder,
    build_call_delta,
    build_reply,
    cut_at_stop,
    overlap_length,
)
from instar.record.template_kwargs import check_template_kwargs
from instar.record.tool_calls import PartialToolCall, can_encode, parse_call
from instar.types import Json, Message, ToolCall, new_id

if TYPE_CHECKING:
    from renderers.base import ParsedResponse, ParsedToolCall
    from renderers.base import Renderer as LibraryRenderer
    from transformers import PreTrainedTokenizerFast

_RENDER_ERRORS = (ValueError, TypeError, LookupError, AttributeError, RecursionError)
"""Errors that the library raises if a family's format cannot express the messages or tools."""
ParseReply = Callable[[list[int]], "ParsedResponse"]
MARKERS = ("<think>", "</think>", "<tool_call", "<|", "<｜")
"""Markers that a model writes as plain text if its tokenizer has no token for them."""
_MARKER_PATTERN = re.compile("|".join(map(re.escape, MARKERS)))


@dataclass(slots=True)
class ReplyChannel:
    pieces: list[str] = field(default_factory=list[str])
    """The pieces of reasoning or content emitted so far."""
    base: str = ""
    """The text parsed by the library up to the start of the current run."""

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    def get_unemitted(self, complete_text: str) -> str:
        """Return the complete text without the prefix that it shares with the emitted text."""
        emitted = self.text
        if complete_text.startswith(emitted):
            return complete_text[len(emitted) :]
        pairs = enumerate(zip(emitted, complete_text, strict=False))
        return complete_text[next((i for i, (a, b) in pairs if a != b), len(complete_text)) :]

    def ends_with_run(self, text: str, run: str) -> bool:
        """Return True if ``text`` is ``base`` followed by the run, apart from whitespace between them."""
        if text == self.base or not text.startswith(self.base) or not text.endswith(run):
            return False
        return self.base.startswith(text[: len(text) - len(run)].rstrip())


class FamilyStreamParser(StreamParser):
    def __init__(
        self,
        parse: ParseReply,
        decode: TokenDecoder,
        tools: Tools,
        stop: Sequence[str],
        *,
        boundaries: Collection[int],
        has_bare_calls: bool,
        eager: bool,
    ) -> None:
        """Create a parser. ``has_bare_calls`` is True if the format writes calls as JSON without markers."""
        self._parse = parse
        self._decode = decode
        self._tools = tools
        self._stop = tuple(stop)
        self._boundaries = boundaries
        self._has_bare_calls = has_bare_calls and bool(tools)
        self._eager = eager
        self._holdback_strings = (*MARKERS, *stop)
        self._ids: list[int] = []
        self._reasoning, self._content = ReplyChannel(), ReplyChannel()
        self._calls: dict[int, ToolCall] = {}
        self._has_call_in_reasoning: bool | None = None
        """True if the first call began inside reasoning, or None before the first call."""
        self._has_ended = False
        self._begin_run()

    def feed(self, ids: Sequence[int]) -> list[ReplyDelta]:
        deltas: list[ReplyDelta] = []
        for token in ids:
            self._ids.append(token)
            if token in self._boundaries:
                deltas += self._process_boundary()
            elif text := self._detokenizer.feed([token]):
                deltas += self._process_text(text)
        return deltas

    def finish(self) -> list[ReplyDelta]:
        deltas = self._close_call()
        parsed = self._parse(self._ids)
        reasoning, content = self._get_texts(parsed)
        malformed: list[str] = []
        for i, parsed_call in enumerate(parsed.tool_calls):
            if i in self._calls:
                continue
            if self._tools and (call := _to_tool_call(parsed_call)):
                deltas.append(self._emit_call(i, call))
            elif parsed_call.token_span is None:
                malformed.append(parsed_call.raw)
            else:
                start, end = parsed_call.token_span
                malformed.append(self._decode(self._ids[start:end]))
        content = cut_at_stop(content + "".join(malformed), self._stop)
        return [*self._emit_rest(reasoning, content), *deltas]

    @property
    def message(self) -> Message:
        return build_reply(self._content.text, self._reasoning.text, self._calls.values())

    def _begin_run(self, text: str = "") -> None:
        self._detokenizer = Detokenizer(self._decode, ())
        self._run = text
        self._channel: ReplyChannel | None = None
        self._open_call_index: int | None = None
        self._open_call: PartialToolCall | None = None
        self._pieces_seen, self._next_parse_at = 0, 1

    def _process_text(self, text: str) -> list[ReplyDelta]:
        if self._open_call is not None:
            return self._open_call.feed(self._stop_filter.feed(text))
        self._run += text
        if self._channel is not None:
            return self._emit_run(self._channel)
        if self._open_call_index is not None:
            return self._begin_call(self._open_call_index)
        return self._detect_channel()

    def _detect_channel(self) -> list[ReplyDelta]:
        run = self._run.strip()
        self._pieces_seen += bool(run)
        if not run or self._pieces_seen < self._next_parse_at:
            return []
        self._next_parse_at *= 2  # call the library less often as the run grows
        reasoning, content = self._get_texts(self._parse(self._ids), apply_stop=False)
        if self._has_bare_calls and content.startswith("{"):
            return []
        for channel, text in ((self._content, content), (self._reasoning, reasoning)):
            decoded = text.rstrip("\ufffd")
            if channel.ends_with_run(decoded, run):
                self._channel = channel
                self._run = channel.get_unemitted(decoded) + self._run[len(self._run.rstrip()) :]
                return self._emit_run(channel)
        return []

    def _emit_run(self, channel: ReplyChannel) -> list[ReplyDelta]:
        if self._has_ended:
            return []
        text = cut_at_stop(self._run, self._stop)
        if len(text) < len(self._run):
            self._has_ended = True
            return self._emit(channel, text.rstrip())
        if marker := _MARKER_PATTERN.search(text):
            deltas = self._emit(channel, text[: marker.start()].rstrip())
            return deltas + self._process_boundary(text[marker.end() :])
        text_to_emit = self._emittable_prefix(text)
        self._run = text[len(text_to_emit) :]
        return self._emit(channel, text_to_emit)

    def _emittable_prefix(self, text: str) -> str:
        return text[: len(text) - max(overlap_length(text, held) for held in self._holdback_strings)].rstrip()

    def _emit(self, channel: ReplyChannel, text: str) -> list[ReplyDelta]:
        if not text:
            return []
        channel.pieces.append(text)
        return [ReplyDelta(text=text) if channel is self._content else ReplyDelta(reasoning=text)]

    def _process_boundary(self, text: str = "") -> list[ReplyDelta]:
        """Return the deltas that are final at a boundary. ``text`` follows the boundary."""
        deltas = self._close_call()
        self._begin_run(text)
        if self._has_ended:
            return deltas
        parsed = self._parse(self._ids)
        self._reasoning.base, self._content.base = self._get_texts(parsed, apply_stop=False)
        deltas += self._emit_rest(*map(self._emittable_prefix, self._get_texts(parsed)))
        if parsed.tool_calls and self._tools:
            if self._has_call_in_reasoning is None:
                before_call = self._parse(self._ids[:-1])
                self._has_call_in_reasoning = before_call.reasoning_complete is False
            if not self._has_call_in_reasoning:
                deltas += self._emit_closed_calls(parsed.tool_calls)
        return deltas

    def _emit_closed_calls(self, parsed_calls: Sequence[ParsedToolCall]) -> list[ReplyDelta]:
        deltas: list[ReplyDelta] = []
        for i, parsed_call in enumerate(parsed_calls):
            if i in self._calls or parsed_call.token_span is None:
                continue
            if call := _to_tool_call(parsed_call):
                deltas.append(self._emit_call(i, call))
            elif self._eager and parsed_call.status == "unclosed_block" and i == len(parsed_calls) - 1:
                self._open_call_index = i
        return deltas

    def _emit_call(self, index: int, call: ToolCall) -> ReplyDelta:
        delta = build_call_delta(len(self._calls), call)
        self._calls[index] = call
        return delta

    def _begin_call(self, index: int) -> list[ReplyDelta]:
        stop_filter = StopStringFilter(self._stop)
        started = PartialToolCall.try_start(stop_filter.feed(self._run), len(self._calls))
        if started is None:
            return []
        self._stop_filter = stop_filter
        self._open_call, deltas = started
        self._calls[index] = self._open_call.call
        return deltas

    def _close_call(self) -> list[ReplyDelta]:
        if self._open_call is None:
            return []
        call, self._open_call = self._open_call, None
        rest = self._stop_filter.feed(self._detokenizer.finish()) + self._stop_filter.finish()
        return [*call.feed(rest), *call.finish()]

    def _get_texts(self, parsed: ParsedResponse, *, apply_stop: bool = True) -> tuple[str, str]:
        texts = (parsed.reasoning_content or "").strip(), (parsed.content or "").strip()
        return (cut_at_stop(texts[0], self._stop), cut_at_stop(texts[1], self._stop)) if apply_stop else texts

    def _emit_rest(self, reasoning: str, content: str) -> list[ReplyDelta]:
        deltas = self._emit(self._reasoning, self._reasoning.get_unemitted(reasoning))
        return deltas + self._emit(self._content, self._content.get_unemitted(content))


def _to_tool_call(parsed_call: ParsedToolCall) -> ToolCall | None:
    if parsed_call.status != "ok" or not parsed_call.name or not can_encode(parsed_call.name):
        return None
    return ToolCall(
        id=parsed_call.id or new_id("call"), name=parsed_call.name, arguments=_format_arguments(parsed_call)
    )


def _format_arguments(parsed_call: ParsedToolCall) -> str:
    """Return the arguments exactly as generated if the library provides that text, or else as JSON."""
    arguments: Any = parsed_call.arguments
    if isinstance(arguments, str):
        return arguments
    call = parse_call(parsed_call.raw)
    for text in (parsed_call.raw.strip(), call["arguments"] if call else ""):
        try:
            if isinstance(arguments, dict) and json.loads(text) == arguments:
                return text
        except (ValueError, RecursionError):
            continue
    text = json.dumps(arguments or {}, ensure_ascii=False)
    return text if can_encode(text) else json.dumps(arguments)


class FamilyRenderer(TokenizerRenderer):
    def __init__(
        self, tokenizer: PreTrainedTokenizerFast, family: str, *, allow_special_tokens: bool = False
    ) -> None:
        from renderers.base import create_renderer
        from renderers.configs import config_from_name

        super().__init__(tokenizer, allow_special_tokens=allow_special_tokens)
        self._content_tokenizer: Any = (
            tokenizer if self._escaper is None else ContentTokenizer(tokenizer, self._escaper)
        )
        self._config: Any = config_from_name(family)
        self.template_variables = self._config.template_field_names()
        self._renderer: LibraryRenderer = create_renderer(self._content_tokenizer, self._config)
        self._boundaries = frozenset(tokenizer.added_tokens_decoder)
        self._stop_token_ids = tuple(self._renderer.get_stop_token_ids())
        self._hidden_ids = frozenset({*tokenizer.all_special_ids, *self._stop_token_ids})
        probe = self._renderer.parse_response(self.encode('{"name": "probe", "arguments": {}}'))
        self._has_bare_calls = bool(probe.tool_calls)

    def create_variant(self, kwargs: Json) -> FamilyRenderer:
        from renderers.base import create_renderer

        check_template_kwargs(self._tokenizer, kwargs, allow_special_tokens=self._escaper is None)
        variant = copy.copy(self)
        try:
            variant._config = type(self._config)(**kwargs)
            variant._renderer = create_renderer(self._content_tokenizer, variant._config)
        except ValueError as error:
            raise RenderError(f"the model's format rejects {kwargs}: {error}") from error
        return variant

    def render(self, messages: Messages, tools: Tools = ()) -> list[int]:
        try:
            return self._render(messages, tools)
        except RenderError:
            # Some formats allow only one system message, so system messages at the start are joined.
            texts = [m["content"] for m in takewhile(lambda m: m["role"] == "system", messages)]
            if len(texts) < 2:
                raise
            system = Message(role="system", content="\n\n".join(texts))
            return self._render([system, *messages[len(texts) :]], tools)

    def _render(self, messages: Messages, tools: Tools) -> list[int]:
        self.check_messages(messages)
        return self._render_as_text(self._render_ids, messages, tools)

    def _render_ids(self, messages: Messages, tools: Tools) -> list[int]:
        try:
            library_messages, library_tools = _to_library_format(name_results(messages), tools)
            return list(
                self._renderer.render_ids(library_messages, tools=library_tools, add_generation_prompt=True)
            )
        except _RENDER_ERRORS as error:
            raise RenderError(f"the model's format rejects these messages: {error}") from error

    def extend(
        self,
        prompt_ids: Sequence[int],
        sampled_ids: Sequence[int],
        new_messages: Messages,
        tools: Tools = (),
        reply: Message | None = None,
    ) -> list[int] | None:
        self.check_messages(new_messages)
        if reply is not None:
            (_, *new_messages) = name_results([reply, *new_messages])
        return self._render_as_text(partial(self._extend, prompt_ids, sampled_ids), new_messages, tools)

    def _extend(
        self, prompt_ids: Sequence[int], sampled_ids: Sequence[int], new_messages: Messages, tools: Tools
    ) -> list[int] | None:
        prefix = [*prompt_ids, *sampled_ids]
        try:
            library_messages, library_tools = _to_library_format(new_messages, tools)
            bridged = self._renderer.bridge_to_next_turn(
                list(prompt_ids), list(sampled_ids), library_messages, tools=library_tools
            )
        except _RENDER_ERRORS:
            return None
        # A bridge may drop tokens that were sampled after the end of a turn, which changes the prefix.
        if bridged is None or bridged.token_ids[: len(prefix)] != prefix:
            return None
        return list(bridged.token_ids)

    def stream(
        self,
        tools: Tools = (),
        stop: Sequence[str] = (),
        prompt_ids: Sequence[int] = (),
        *,
        eager: bool = False,
    ) -> StreamParser:
        _, library_tools = _to_library_format((), tools)
        prompt = list(prompt_ids) or None
        return FamilyStreamParser(
            lambda ids: self._renderer.parse_response(ids, tools=library_tools, prompt_ids=prompt),
            self._decode,
            tools,
            stop,
            boundaries=self._boundaries,
            has_bare_calls=self._has_bare_calls,
            eager=eager,
        )

    def encode(self, text: str) -> list[int]:
        self._check_length(text)
        return self._tokenizer.encode(text, add_special_tokens=False)


def _to_library_format(messages: Messages, tools: Tools) -> tuple[Any, Any]:
    specs = [{"type": "function", "function": dict(tool)} for tool in tools] or None
    return [to_template_message(message) for message in messages], specs
