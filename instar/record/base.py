"""The interfaces of renderers and stream parsers, and the position of a request in the message graph."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from instar.config import ModelConfig
from instar.record.hashing import parse_arguments
from instar.types import Ids, Json, Link, Message, OutputConstraint, Tool

Messages = Sequence[Message]
Tools = Sequence[Tool]


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """A piece of a tool call. ``index`` is the position of the call in the reply. Only the first piece has
    the call's id and name. The arguments of all pieces are concatenated."""

    index: int
    id: str = ""
    name: str = ""
    arguments: str = ""


@dataclass(frozen=True, slots=True)
class ReplyDelta:
    """A piece of a reply. Exactly one field is set."""

    text: str = ""
    reasoning: str = ""
    call: ToolCallDelta | None = None


class StreamParser(ABC):
    """Parses sampled tokens into a reply as they arrive. All deltas together equal ``message``."""

    @abstractmethod
    def feed(self, ids: Sequence[int]) -> list[ReplyDelta]: ...

    @abstractmethod
    def finish(self) -> list[ReplyDelta]:
        """Return the deltas that ``feed`` held back. ``feed`` must not be called afterwards."""

    @property
    @abstractmethod
    def message(self) -> Message:
        """The reply so far. The arguments of its tool calls may be missing until ``finish`` is called."""


class Renderer(ABC):
    """Converts messages and tools to tokens, and tokens to replies, for one model."""

    max_prompt_tokens: int | None = None
    """If set, `render`, `extend` and `encode` raise PromptTooLong for prompts that certainly exceed it."""

    template_variables: frozenset[str] = frozenset()
    """The variables of the format that a request can set, such as ``enable_thinking``."""

    drops_reasoning = False
    """True if the format drops the reasoning of earlier replies after a new user message. `extend` then needs
    the complete prompt instead of its end."""

    def with_template_kwargs(self, kwargs: Json) -> Renderer:
        """Return this renderer with other values of its ``template_variables``. Raises RenderError if a value
        is not valid."""
        if not kwargs:
            return self
        from instar.record.template_kwargs import get_variant

        return get_variant(self, kwargs)

    def create_variant(self, kwargs: Json) -> Renderer:
        """Create the renderer for `with_template_kwargs`, which caches it."""
        raise NotImplementedError

    def check_messages(self, messages: Messages) -> None:  # noqa: B027 - optional
        """Raise PromptTooLong if the messages certainly exceed ``max_prompt_tokens``. This is fast."""

    @staticmethod
    def load(folder: Path, model: ModelConfig) -> Renderer:
        """Load the renderer for the model in ``folder``. Imports transformers, which is slow."""
        from instar.record.render import load_renderer

        return load_renderer(folder, model)

    @property
    @abstractmethod
    def stop_token_ids(self) -> tuple[int, ...]:
        """The tokens that end a reply."""

    @abstractmethod
    def render(self, messages: Messages, tools: Tools = ()) -> list[int]:
        """Return the prompt for the next reply. Raises RenderError if the template rejects the messages."""

    @abstractmethod
    def extend(
        self,
        prompt_ids: Sequence[int],
        sampled_ids: Sequence[int],
        new_messages: Messages,
        tools: Tools = (),
        reply: Message | None = None,
    ) -> list[int] | None:
        """Return the next prompt: ``prompt_ids``, ``sampled_ids``, the tokens that close a truncated reply,
        and the tokens of the new messages. Return None if the model's format has no exact continuation.
        ``reply`` is the message of the sampled tokens; some formats name its tools in their results."""

    @abstractmethod
    def stream(
        self,
        tools: Tools = (),
        stop: Sequence[str] = (),
        prompt_ids: Sequence[int] = (),
        *,
        eager: bool = False,
    ) -> StreamParser:
        """Return a parser for a reply to ``prompt_ids``. The reply ends before the first ``stop`` string.

        With ``eager``, the arguments of a tool call may be emitted before the call is complete. A malformed
        call becomes plain text, unless part of it was already emitted.
        """

    @abstractmethod
    def stream_text(self, stop: Sequence[str] = ()) -> StreamParser:
        """Return a parser that treats a reply as plain text, for prompts without messages."""

    def constrain(
        self,
        schema: Json | None,
        tools: Tools,
        prompt_ids: Sequence[int] = (),
        *,
        is_single_call: bool = False,
    ) -> OutputConstraint:
        """Return the constraint for a reply to ``prompt_ids`` that is JSON with this schema, if it is not
        None, or calls of these tools. Raises RenderError if the model's format does not support it."""
        from instar.record.constraints import build_constraint

        return build_constraint(self, schema, tools, prompt_ids, is_single_call=is_single_call)

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """Tokenize text without adding start or end tokens."""

    def parse(
        self,
        sampled_ids: Sequence[int],
        tools: Tools = (),
        stop: Sequence[str] = (),
        prompt_ids: Sequence[int] = (),
    ) -> Message:
        parser = self.stream(tools, stop, prompt_ids)
        parser.feed(sampled_ids)
        parser.finish()
        return parser.message

    @abstractmethod
    def decode_token(self, token_id: int) -> str:
        """Return the text of one token, for display."""


@dataclass(frozen=True, slots=True)
class Placement:
    """The position of a request in its session's graph. If a provider renders the prompt, ``prompt_ids`` is
    empty until `MessageGraph.attach_prompt`."""

    prompt_ids: Ids
    link: Link
    parent_id: str | None = None
    base_id: str | None = None
    """The recorded call with the same first ``base_tokens`` tokens and ``base_messages`` messages, if any."""
    base_tokens: int = 0
    base_messages: int = 0
    key: bytes = b""
    """A hash of the messages and tools, or of the prompt. Equal requests have equal keys."""
    first_redacted_message: int | None = None
    """The index of the base call's first redacted message if the request shares it, else None."""


def contains_any(value: object, texts: Sequence[str]) -> bool:
    """Return True if a string in the JSON value contains one of the texts."""
    if isinstance(value, str):
        return any(text in value for text in texts)
    if isinstance(value, dict):
        items = cast(dict[str, object], value).items()
        return any(contains_any(key, texts) or contains_any(item, texts) for key, item in items)
    if isinstance(value, list | tuple):
        return any(contains_any(item, texts) for item in cast(Sequence[object], value))
    return False


def to_template_message(
    message: Message, reasoning_key: str = "reasoning_content", arguments_as_text: bool = False
) -> Json:
    """Return a message in the format that chat templates and the `renderers` library expect."""
    out: Json = {"role": message["role"], "content": message["content"]}
    if reasoning := message.get("reasoning"):
        if reasoning_key != "reasoning_content" and message.get("tool_calls") and out["content"]:
            # Such templates have one place for the text before a call.
            reasoning, out["content"] = f"{reasoning}\n\n{out['content']}", ""
        out[reasoning_key] = reasoning
    if calls := message.get("tool_calls"):
        out["tool_calls"] = [
            {
                "id": call["id"],
                "type": "function",
                "function": {
                    "name": call["name"],
                    "arguments": call["arguments"] if arguments_as_text else parse_arguments(call),
                },
            }
            for call in calls
        ]
    return out | {name: value for name, value in message.items() if name in ("tool_call_id", "name")}
