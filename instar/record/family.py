"""Renderers that the `renderers` library wrote by hand for a model family, bridge and parsers included."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

from instar.errors import RenderError
from instar.record.base import Delta, Renderer, StreamParser
from instar.record.render import template_message
from instar.record.stream import Detokenizer, PlainText, TextStreamParser, whole_call
from instar.types import Message, Tool, ToolCall, new_id

if TYPE_CHECKING:
    from renderers.base import ParsedToolCall
    from renderers.base import Renderer as LibraryRenderer
    from transformers import PreTrainedTokenizerFast


class FamilyRenderer(Renderer):
    def __init__(self, tokenizer: PreTrainedTokenizerFast, family: str) -> None:
        from renderers.base import create_renderer
        from renderers.configs import config_from_name

        self._tokenizer = tokenizer
        self._library: LibraryRenderer = create_renderer(tokenizer, cast(Any, config_from_name(family)))

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        return tuple(self._library.get_stop_token_ids())

    def render(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> list[int]:
        try:
            return list(
                self._library.render_ids(_messages(messages), tools=_specs(tools), add_generation_prompt=True)
            )
        except (ValueError, TypeError, KeyError) as error:
            # What the library raises for a conversation that its family's format cannot write.
            raise RenderError(f"the model's format refuses these messages: {error}") from error

    def extend(
        self,
        prompt_ids: Sequence[int],
        sampled_ids: Sequence[int],
        new_messages: Sequence[Message],
        tools: Sequence[Tool] = (),
    ) -> list[int] | None:
        before = [*prompt_ids, *sampled_ids]
        bridged = self._library.bridge_to_next_turn(
            list(prompt_ids), list(sampled_ids), _messages(new_messages), tools=_specs(tools)
        )
        # A bridge may trim what was sampled behind a turn's end; then the prefix is not the sampled one.
        if bridged is None or bridged.token_ids[: len(before)] != before:
            return None
        return list(bridged.token_ids)

    def stream(
        self,
        tools: Sequence[Tool] = (),
        stop: Sequence[str] = (),
        prompt_ids: Sequence[int] = (),
        *,
        eager: bool = False,
    ) -> StreamParser:
        return FamilyStreamParser(self._library, self._decode, tools, stop, prompt_ids)

    def stream_text(self, stop: Sequence[str] = ()) -> StreamParser:
        hidden = {*self._tokenizer.all_special_ids, *self.stop_token_ids}
        return TextStreamParser(Detokenizer(self._decode, hidden), stop, PlainText())

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)

    def token_text(self, token_id: int) -> str:
        return self._decode([token_id])

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.backend_tokenizer.decode(ids, skip_special_tokens=False)


class FamilyStreamParser(StreamParser):
    """The library parses whole replies only, so the reply so far is parsed again as it grows, at lengths
    that grow with it. Text that two parses in a row agree on is let out, up to the first tool call; the
    rest comes at the end. White space around reasoning and content is dropped, as the formats differ in
    which of it they write themselves."""

    def __init__(
        self,
        library: LibraryRenderer,
        decode: Callable[[list[int]], str],
        tools: Sequence[Tool],
        stop: Sequence[str],
        prompt_ids: Sequence[int],
    ) -> None:
        self._library = library
        self._decode = decode
        self._tools = tools
        self._stop = stop
        self._prompt_ids = list(prompt_ids)
        self._ids: list[int] = []
        self._parse_at = 1
        self._last = ("", "")
        self._sent = ("", "")
        self._message = Message(role="assistant", content="")

    def feed(self, ids: Sequence[int]) -> list[Delta]:
        self._ids += ids
        if len(self._ids) < self._parse_at:
            return []
        self._parse_at = len(self._ids) + max(1, len(self._ids) // 16)
        reasoning, content, _ = self._parse(final=False)
        agreed = (_common(self._last[0], reasoning), _common(self._last[1], content))
        self._last = (reasoning, content)
        deltas = self._let_out(_settled(agreed[0], self._stop), _settled(agreed[1], self._stop))
        self._message = Message(role="assistant", content=self._sent[1])
        return deltas

    def finish(self) -> list[Delta]:
        reasoning, content, calls = self._parse(final=True)
        deltas = self._let_out(reasoning, content)
        # What was let out stands: it is what the agent saw.
        self._message = Message(role="assistant", content=self._sent[1])
        if self._sent[0]:
            self._message["reasoning"] = self._sent[0]
        if calls:
            self._message["tool_calls"] = calls
        return [*deltas, *(whole_call(i, call) for i, call in enumerate(calls))]

    @property
    def message(self) -> Message:
        return self._message

    def _let_out(self, reasoning: str, content: str) -> list[Delta]:
        deltas: list[Delta] = []
        thought, said = self._sent
        if len(reasoning) > len(thought) and reasoning.startswith(thought):
            deltas.append(Delta(reasoning=reasoning[len(thought) :]))
            thought = reasoning
        if len(content) > len(said) and content.startswith(said):
            deltas.append(Delta(text=content[len(said) :]))
            said = content
        self._sent = (thought, said)
        return deltas

    def _parse(self, *, final: bool) -> tuple[str, str, list[ToolCall]]:
        parsed = self._library.parse_response(
            self._ids, tools=_specs(self._tools), prompt_ids=self._prompt_ids or None
        )
        content = (parsed.content or "").strip()
        calls: list[ToolCall] = []
        for attempt in parsed.tool_calls if final else ():
            if self._tools and (call := _valid(attempt)):
                calls.append(call)
            else:
                content += self._written(attempt)
        found = [at for at in map(content.find, self._stop) if at >= 0]
        content = content[: min(found)] if found else content
        return (parsed.reasoning_content or "").strip(), content, calls

    def _written(self, attempt: ParsedToolCall) -> str:
        """What is no valid call, as the model wrote it."""
        if attempt.token_span is None:
            return attempt.raw
        start, end = attempt.token_span
        return self._decode(self._ids[start:end])


def _valid(attempt: ParsedToolCall) -> ToolCall | None:
    if attempt.status != "ok" or not attempt.name:
        return None
    arguments = attempt.arguments
    text = arguments if isinstance(arguments, str) else json.dumps(arguments or {}, ensure_ascii=False)
    return ToolCall(id=attempt.id or new_id("call"), name=attempt.name, arguments=text)


def _messages(messages: Sequence[Message]) -> Any:
    return [template_message(message) for message in messages]


def _specs(tools: Sequence[Tool]) -> Any:
    return [dict(tool) for tool in tools] or None


def _common(a: str, b: str) -> str:
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return a[:i]
    return a[: min(len(a), len(b))]


def _settled(text: str, stop: Sequence[str]) -> str:
    """Without an end that may yet turn out to be a stop string, a marker or half a character."""
    held = max((len(s) for s in stop), default=0)
    text = text.rstrip("\ufffd").rstrip()
    marker = text.rfind("<")
    text = text[:marker] if marker >= 0 else text
    return text[: max(0, len(text) - held)]
