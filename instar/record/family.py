"""Renderers from the `renderers` library, which has a renderer, a bridge and a parser for each model
family."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

from instar.errors import RenderError
from instar.record.base import StreamParser
from instar.record.bridge import PROBE_TOOL
from instar.record.family_stream import FamilyStreamParser
from instar.record.render import TokenizerRenderer, to_template_message
from instar.types import Message, Tool

if TYPE_CHECKING:
    from renderers.base import Renderer as LibraryRenderer
    from transformers import PreTrainedTokenizerFast


_RENDER_ERRORS = (ValueError, TypeError, LookupError, AttributeError, RecursionError)
"""The errors that the library raises for messages and tools that the format of a family cannot express."""


class FamilyRenderer(TokenizerRenderer):
    def __init__(self, tokenizer: PreTrainedTokenizerFast, family: str) -> None:
        from renderers.base import create_renderer
        from renderers.configs import config_from_name

        super().__init__(tokenizer)
        self._library: LibraryRenderer = create_renderer(tokenizer, cast(Any, config_from_name(family)))
        self._boundaries = frozenset(tokenizer.added_tokens_decoder)
        self._hidden_ids = frozenset({*tokenizer.all_special_ids, *self.stop_token_ids})
        probe = self._library.parse_response(self.encode('{"name": "probe", "arguments": {}}'))
        self._bare_calls = bool(probe.tool_calls)

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        return tuple(self._library.get_stop_token_ids())

    def render(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> list[int]:
        try:
            return self._render(messages, tools)
        except RenderError:
            # Some formats allow only one system message, so the first system messages are joined.
            roles = [message["role"] for message in messages]
            count = next((i for i, role in enumerate(roles) if role != "system"), len(roles))
            if count < 2:
                raise
            text = "\n\n".join(message["content"] for message in messages[:count])
            return self._render([Message(role="system", content=text), *messages[count:]], tools)

    def _render(self, messages: Sequence[Message], tools: Sequence[Tool]) -> list[int]:
        try:
            library_messages, library_tools = _to_library_messages(messages), _to_library_tools(tools)
            return list(
                self._library.render_ids(library_messages, tools=library_tools, add_generation_prompt=True)
            )
        except _RENDER_ERRORS as error:
            raise RenderError(f"the model's format rejects these messages: {error}") from error

    def lists_tools(self) -> bool:
        """Return True if the format of the family lists tools in the prompt."""
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
                list(prompt_ids),
                list(sampled_ids),
                _to_library_messages(new_messages),
                tools=_to_library_tools(tools),
            )
        except _RENDER_ERRORS:
            return None
        # A bridge may drop tokens that were sampled after the end of a turn. Then the prefix differs.
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
        library_tools, prompt = _to_library_tools(tools), list(prompt_ids) or None
        return FamilyStreamParser(
            lambda ids: self._library.parse_response(ids, tools=library_tools, prompt_ids=prompt),
            self._decode,
            tools,
            stop,
            boundaries=self._boundaries,
            bare_calls=self._bare_calls,
            eager=eager,
        )

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)


def _to_library_messages(messages: Sequence[Message]) -> Any:
    return [to_template_message(message) for message in messages]


def _to_library_tools(tools: Sequence[Tool]) -> Any:
    return [dict(tool) for tool in tools] or None
