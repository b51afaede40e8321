"""What a dialect is: one API format, chosen by its route, translated to and from the canonical words."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from instar.gateway.base import ApiError
from instar.record.base import Delta
from instar.types import FinishReason, Floats, Ids, Message, Tool


@dataclass(frozen=True, slots=True)
class Request:
    """What an agent asks for, whatever the dialect. None: the agent did not say."""

    model: str
    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()
    prompt: str | tuple[int, ...] | None = None
    """In the place of messages: a prompt to be continued, as text or as token ids."""
    previous: str | None = None
    """The id of an earlier answer that these messages continue; its messages and reply go before them."""
    instructions: int = 0
    """How many of the leading messages are this request's own instructions: they stay in front of, and are
    not inherited from, the messages of ``previous``."""
    identity: tuple[str, ...] = ()
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
    scores: bool = False
    """To be told the logprobs of the prompt's own tokens, and no reply."""
    refusal: ApiError | None = None
    """What is asked for that only a provider could give: the answer where an engine of ours is asked."""
    wire: Any = None
    """The decoded body, for what only its own dialect knows how to say back."""


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    text: str
    logprob: float
    """NaN when it is missing."""


@dataclass(frozen=True, slots=True)
class Choice:
    """One finished reply."""

    message: Message
    finish_reason: FinishReason
    prompt_tokens: int
    sampled_tokens: int
    logprobs: Sequence[TokenLogprob] = ()
    stop: str | None = None
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
    def delta(self, index: int, deltas: Sequence[Delta], logprobs: Sequence[TokenLogprob]) -> bytes: ...

    @abstractmethod
    def end(self, choices: Sequence[Choice]) -> bytes:
        """Everything that says the replies have ended."""

    @abstractmethod
    def failure(self, error: ApiError) -> bytes:
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
    plain_messages: bool = False
    """Whether each item of the body's ``messages`` becomes one message, whatever stands before it."""

    @abstractmethod
    def read(self, body: bytes) -> Request:
        """Raises ApiError (4xx) naming the fault's path."""

    @abstractmethod
    def answer(self, request_id: str, request: Request, choices: Sequence[Choice]) -> bytes: ...

    @abstractmethod
    def writer(self, request_id: str, request: Request) -> StreamWriter: ...

    @abstractmethod
    def error(self, error: ApiError) -> bytes: ...

    def scored(self, request_id: str, request: Request, tokens: Sequence[TokenLogprob]) -> bytes:
        """The answer to a request that ``scores``: its prompt's tokens."""
        raise NotImplementedError

    def read_count(self, body: bytes) -> Request:
        """A request to ``count_path``."""
        raise NotImplementedError

    def count(self, tokens: int) -> bytes:
        """The answer of ``count_path``."""
        raise NotImplementedError
