"""What a dialect is: one API format, chosen by its route, translated to and from the canonical words."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from instar.gateway.base import ApiError
from instar.record.base import Delta
from instar.types import FinishReason, Message, Tool


@dataclass(frozen=True, slots=True)
class Request:
    """What an agent asks for, whatever the dialect. None: the agent did not say."""

    model: str
    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()
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

    @abstractmethod
    def read(self, body: bytes) -> Request:
        """Raises ApiError (4xx) naming the fault's path."""

    @abstractmethod
    def answer(self, request_id: str, request: Request, choices: Sequence[Choice]) -> bytes: ...

    @abstractmethod
    def writer(self, request_id: str, request: Request) -> StreamWriter: ...

    @abstractmethod
    def error(self, error: ApiError) -> bytes: ...
