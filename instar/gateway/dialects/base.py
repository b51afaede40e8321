"""What a dialect is: one API format, chosen by its route, translated to and from the canonical words."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from instar.gateway.base import ApiError
from instar.record.base import ReplyDelta
from instar.types import FinishReason, Floats, Ids, Message, Tool


@dataclass(frozen=True, slots=True)
class ModelRequest:
    """What an agent asks for, whatever the dialect. None: the agent did not say."""

    model: str
    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()
    prompt: str | tuple[int, ...] | None = None
    """In the place of messages: a prompt to be continued, as text or as token ids."""
    previous_response_id: str | None = None
    """The id of an earlier answer that these messages continue; its messages and reply go before them."""
    instruction_count: int = 0
    """How many of the leading messages are this request's own instructions: they stay in front of, and are
    not inherited from, the messages of ``previous``."""
    session_hints: tuple[str, ...] = ()
    """Ids in the body by which the agent may mean its session, the most telling first."""
    n: int = 1
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stream: bool = False
    include_usage: bool = False
    logprobs: bool = False
    score_prompt: bool = False
    """To be told the logprobs of the prompt's own tokens, and no reply."""
    unsupported_error: ApiError | None = None
    """What is asked for that only a provider could give: the answer where an engine of ours is asked."""
    parsed_body: Any = None
    """The decoded body, for what only its own dialect knows how to say back."""


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    text: str
    logprob: float
    """NaN when it is missing."""


@dataclass(frozen=True, slots=True)
class ReplyChoice:
    """One finished reply."""

    message: Message
    finish_reason: FinishReason
    prompt_tokens: int
    sampled_tokens: int
    logprobs: Sequence[TokenLogprob] = ()
    stop_string: str | None = None
    """The stop string that ended it."""
    cached_tokens: int | None = None
    """Prompt tokens that did not have to be computed, where that is known."""
    prompt_ids: Ids | None = None
    sampled_ids: Ids | None = None
    """The exact tokens, where they are known."""
    sampled_logprobs: Floats | None = None


class StreamWriter(ABC):
    """Writes one streamed answer."""

    @abstractmethod
    def begin(self, index: int) -> bytes: ...

    @abstractmethod
    def write_deltas(
        self, index: int, deltas: Sequence[ReplyDelta], logprobs: Sequence[TokenLogprob]
    ) -> bytes: ...

    @abstractmethod
    def finish(self, choices: Sequence[ReplyChoice]) -> bytes:
        """Everything that says the replies have ended."""

    @abstractmethod
    def write_error(self, error: ApiError) -> bytes:
        """The stream has begun and cannot go on."""


class Dialect(ABC):
    name: str
    path: str
    """Behind ``/v1``."""
    id_prefix: str
    """Answers are named by ids that begin so."""
    messages_param: str = "messages"
    """What the messages are called in its body."""
    count_path: str | None = None
    """Where it counts the tokens of a prompt, where it does."""
    parses_messages_independently: bool = False
    """Whether each item of the body's ``messages`` becomes one message, whatever stands before it."""

    @abstractmethod
    def parse_request(self, body: bytes) -> ModelRequest:
        """Raises ApiError (4xx) naming the fault's path."""

    @abstractmethod
    def format_response(
        self, request_id: str, request: ModelRequest, choices: Sequence[ReplyChoice]
    ) -> bytes: ...

    @abstractmethod
    def create_stream_writer(self, request_id: str, request: ModelRequest) -> StreamWriter: ...

    @abstractmethod
    def format_error(self, error: ApiError) -> bytes: ...

    def format_scores(self, request_id: str, request: ModelRequest, tokens: Sequence[TokenLogprob]) -> bytes:
        """The answer to a request that ``scores``: its prompt's tokens."""
        raise NotImplementedError

    def parse_count_request(self, body: bytes) -> ModelRequest:
        """A request to ``count_path``."""
        raise NotImplementedError

    def format_count(self, tokens: int) -> bytes:
        """The answer of ``count_path``."""
        raise NotImplementedError
