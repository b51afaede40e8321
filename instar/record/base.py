"""The interface of renderers, which convert between messages and tokens, and of the message graph."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from instar.config import ModelConfig
from instar.types import Ids, Link, Message, Tool


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """A piece of a tool call. The first piece has the id and the name of the call; the arguments of all
    pieces, concatenated, are the arguments of the call."""

    index: int
    """The index of the tool call in the reply."""
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
    """Parses sampled ids into a reply as they arrive. The deltas add up to exactly ``message``."""

    @abstractmethod
    def feed(self, ids: Sequence[int]) -> list[ReplyDelta]: ...

    @abstractmethod
    def finish(self) -> list[ReplyDelta]:
        """Return the text that was held back. Nothing may be fed afterwards."""

    @property
    @abstractmethod
    def message(self) -> Message:
        """The reply so far, complete after ``finish``."""


class Renderer(ABC):
    """Converts messages and tools to tokens, and tokens to replies, for one model."""

    @staticmethod
    def load(folder: Path, model: ModelConfig) -> Renderer:
        """Return the renderer for the model in a folder. This imports transformers."""
        from instar.record.render import load_renderer

        return load_renderer(folder, model)

    @property
    @abstractmethod
    def stop_token_ids(self) -> tuple[int, ...]:
        """The tokens that end a reply."""

    @abstractmethod
    def render(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> list[int]:
        """Return the prompt for the next reply. Raise RenderError if the model's template rejects the
        messages."""

    @abstractmethod
    def extend(
        self,
        prompt_ids: Sequence[int],
        sampled_ids: Sequence[int],
        new_messages: Sequence[Message],
        tools: Sequence[Tool] = (),
    ) -> list[int] | None:
        """Return ``prompt_ids`` and ``sampled_ids``, unchanged, followed by the new messages. A truncated
        reply is closed first. Return None if a conversation in this model's format cannot be continued
        exactly."""

    @abstractmethod
    def stream(
        self,
        tools: Sequence[Tool] = (),
        stop: Sequence[str] = (),
        prompt_ids: Sequence[int] = (),
        *,
        eager: bool = False,
    ) -> StreamParser:
        """Return a parser for a reply. With ``eager``, the arguments of a tool call are emitted while they
        are written, and not only when the call is closed. A malformed call becomes plain text, unless a piece
        of it was already emitted: then it stays a call with the arguments as written."""

    @abstractmethod
    def stream_text(self, stop: Sequence[str] = ()) -> StreamParser:
        """Return a parser for the reply to a prompt that is not a conversation. The reply is plain text."""

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """Return the tokens of plain text, without added special tokens."""

    def parse(
        self,
        sampled_ids: Sequence[int],
        tools: Sequence[Tool] = (),
        stop: Sequence[str] = (),
        prompt_ids: Sequence[int] = (),
    ) -> Message:
        parser = self.stream(tools, stop, prompt_ids)
        parser.feed(sampled_ids)
        parser.finish()
        return parser.message

    @abstractmethod
    def token_text(self, token_id: int) -> str:
        """Return the text of one token, for display."""


@dataclass(frozen=True, slots=True)
class Placement:
    """The place of a request in its session's graph, and the prompt that results from it. The prompt is empty
    if a provider renders it."""

    prompt_ids: Ids
    link: Link
    parent_id: str | None = None
    base_id: str | None = None
    base_tokens: int = 0
    base_messages: int = 0
    key: bytes = b""
    """A hash of the messages and tools, or of the prompt. Equal requests have equal keys."""
    first_redacted_message: int | None = None
    """The index of the first redacted message among the messages shared with the base."""
