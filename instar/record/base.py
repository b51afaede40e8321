"""Between messages and tokens: what a renderer and a message graph are."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from instar.config import ModelConfig
from instar.types import Ids, Link, Message, Tool


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """A piece of a tool call. The first piece of a call has its id and name; the arguments of all its
    pieces add up to its own."""

    index: int
    """Which tool call of the reply, from 0."""
    id: str = ""
    name: str = ""
    arguments: str = ""


@dataclass(frozen=True, slots=True)
class ReplyDelta:
    """A piece of a reply. One of the three is set."""

    text: str = ""
    reasoning: str = ""
    call: ToolCallDelta | None = None


class StreamParser(ABC):
    """Sampled ids, as they come, → the reply. What the deltas add up to is exactly ``message``."""

    @abstractmethod
    def feed(self, ids: Sequence[int]) -> list[ReplyDelta]: ...

    @abstractmethod
    def finish(self) -> list[ReplyDelta]:
        """Release what was held back; nothing is fed after that."""

    @property
    @abstractmethod
    def message(self) -> Message:
        """The reply so far, whole after ``finish``."""


class Renderer(ABC):
    """Messages and tools ↔ tokens, for one model."""

    @staticmethod
    def load(folder: Path, model: ModelConfig) -> Renderer:
        """The renderer for a model's folder; imports transformers."""
        from instar.record.render import load_renderer

        return load_renderer(folder, model)

    @property
    @abstractmethod
    def stop_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a reply."""

    @abstractmethod
    def render(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> list[int]:
        """The prompt that asks for the next reply. Raises RenderError when the model's template refuses."""

    @abstractmethod
    def extend(
        self,
        prompt_ids: Sequence[int],
        sampled_ids: Sequence[int],
        new_messages: Sequence[Message],
        tools: Sequence[Tool] = (),
    ) -> list[int] | None:
        """``prompt_ids`` + ``sampled_ids`` + the new messages, the first two unchanged. A reply that was
        cut is closed first. None when this model's format cannot be continued exactly."""

    @abstractmethod
    def stream(
        self,
        tools: Sequence[Tool] = (),
        stop: Sequence[str] = (),
        prompt_ids: Sequence[int] = (),
        *,
        eager: bool = False,
    ) -> StreamParser:
        """``eager``: let the arguments of a tool call out as they come, not when the call is closed. What
        turns out malformed is plain text, unless a piece of it was let out already: then the call stands
        as it was written."""

    @abstractmethod
    def stream_text(self, stop: Sequence[str] = ()) -> StreamParser:
        """For a prompt that is no conversation: the reply is all text, as it is."""

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """Plain text → tokens, nothing added."""

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
        """One token, for showing."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a request belongs in its session's graph, and the prompt that follows from it. Where the tokens
    are another's business, the prompt is empty."""

    prompt_ids: Ids
    link: Link
    parent_id: str | None = None
    base_id: str | None = None
    base_tokens: int = 0
    base_messages: int = 0
    key: bytes = b""
    """Stands for the messages and tools, or the prompt: equal for the same request again."""
    first_redacted_message: int | None = None
    """The first of the messages left to the base that holds a redacted span."""
