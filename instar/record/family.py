"""Renderers of the `renderers` library, which has a renderer, a bridge and a parser per model family."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

from instar.errors import RenderError
from instar.record.base import Renderer, StreamParser
from instar.record.bridge import PROBE_TOOL
from instar.record.family_stream import FamilyStreamParser
from instar.record.render import to_template_message
from instar.record.stream import Detokenizer, PlainTextScanner, TextStreamParser
from instar.types import Message, Tool

if TYPE_CHECKING:
    from renderers.base import Renderer as LibraryRenderer
    from transformers import PreTrainedTokenizerFast


_RENDER_ERRORS = (ValueError, TypeError, LookupError, AttributeError, RecursionError)
"""The errors that the library raises for messages and tools that a family's format cannot express."""


class FamilyRenderer(Renderer):
    def __init__(self, tokenizer: PreTrainedTokenizerFast, family: str) -> None:
        from renderers.base import create_renderer
        from renderers.configs import config_from_name

        self._tokenizer = tokenizer
        self._library: LibraryRenderer = create_renderer(tokenizer, cast(Any, config_from_name(family)))
        self._boundaries = frozenset(tokenizer.added_tokens_decoder)
        probe = self._library.parse_response(self.encode('{"name": "probe", "arguments": {}}'))
        self._bare_calls = bool(probe.tool_calls)

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        return tuple(self._library.get_stop_token_ids())

    def render(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> list[int]:
        try:
            return self._render(messages, tools)
        except RenderError:
            # Some formats allow only one system message.
            if (joined := join_system_messages(messages)) is messages:
                raise
            return self._render(joined, tools)

    def _render(self, messages: Sequence[Message], tools: Sequence[Tool]) -> list[int]:
        try:
            return list(
                self._library.render_ids(_messages(messages), tools=_specs(tools), add_generation_prompt=True)
            )
        except _RENDER_ERRORS as error:
            raise RenderError(f"the model's format rejects these messages: {error}") from error

    def lists_tools(self) -> bool:
        """Return True if the family's format lists tools at all."""
        question = [Message(role="user", content="Hi")]
        return self._render(question, (PROBE_TOOL,)) != self._render(question, ())

    def extend(
        self,
        prompt_ids: Sequence[int],
        sampled_ids: Sequence[int],
        new_messages: Sequence[Message],
        tools: Sequence[Tool] = (),
    ) -> list[int] | None:
        before = [*prompt_ids, *sampled_ids]
        try:
            bridged = self._library.bridge_to_next_turn(
                list(prompt_ids), list(sampled_ids), _messages(new_messages), tools=_specs(tools)
            )
        except _RENDER_ERRORS:
            return None
        # A bridge may trim tokens sampled after the end of a turn. Then the prefix differs from the sampled
        # tokens.
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
        specs, prompt = _specs(tools), list(prompt_ids) or None
        return FamilyStreamParser(
            lambda ids: self._library.parse_response(ids, tools=specs, prompt_ids=prompt),
            self._decode,
            tools,
            stop,
            boundaries=self._boundaries,
            bare_calls=self._bare_calls,
            eager=eager,
        )

    def stream_text(self, stop: Sequence[str] = ()) -> StreamParser:
        hidden = {*self._tokenizer.all_special_ids, *self.stop_token_ids}
        return TextStreamParser(Detokenizer(self._decode, hidden), stop, PlainTextScanner())

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)

    def token_text(self, token_id: int) -> str:
        return self._decode([token_id])

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.backend_tokenizer.decode(ids, skip_special_tokens=False)


def join_system_messages(messages: Sequence[Message]) -> Sequence[Message]:
    """Return the messages with the leading system messages joined by an empty line, or the same object if
    there is at most one leading system message."""
    count = next((i for i, message in enumerate(messages) if message["role"] != "system"), len(messages))
    if count < 2:
        return messages
    text = "\n\n".join(message["content"] for message in messages[:count])
    return [Message(role="system", content=text), *messages[count:]]


def _messages(messages: Sequence[Message]) -> Any:
    return [to_template_message(message) for message in messages]


def _specs(tools: Sequence[Tool]) -> Any:
    return [dict(tool) for tool in tools] or None
