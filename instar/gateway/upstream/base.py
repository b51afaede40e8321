"""What an upstream is: a model that someone else serves, behind an API of their own.

Calls to it are recorded like any others. They are trainable where the provider returns the token ids
and logprobs it sampled, and marked not trainable where it does not: nothing is tokenized again.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from instar.gateway.base import ApiError
from instar.gateway.dialects.base import ModelRequest, ReplyChoice
from instar.record.base import ReplyDelta


@dataclass(frozen=True, slots=True)
class UpstreamChunk:
    """What came of an answer. A whole answer that was not streamed is one last piece."""

    raw: bytes = b""
    """To be passed on as it is, when the provider speaks the agent's dialect; else empty."""
    deltas: Sequence[tuple[int, ReplyDelta]] = ()
    """(index of the choice, delta), when it does not."""
    choices: Sequence[ReplyChoice] | None = None
    """Set on the last piece alone: the whole replies. The call is recorded before ``raw`` is passed on, so
    everything that says the answer has ended is in this piece."""
    content_type: str | None = None
    """Of ``raw``; set on the first piece."""
    response_id: str | None = None
    """On the last piece: what the provider calls the answer, where the agent is told so. It may go on from it
    by that name (``previous_response_id``), and people give feedback by it."""


class UpstreamError(ApiError):
    """The provider answered with an error. ``raw`` is its body (JSON, as a rule; never an event of a
    stream), when it speaks the agent's dialect. It may come in the midst of a stream."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        retry_after: int | None = None,
        raw: bytes = b"",
        content_type: str | None = None,
    ) -> None:
        super().__init__(status, message, code=code, param=param, retry_after=retry_after)
        self.raw = raw
        self.content_type = content_type


class UpstreamResponse(ABC):
    """The pieces of one answer, as they come. Closed by ``aclose``, read to its end or not."""

    def __aiter__(self) -> UpstreamResponse:
        return self

    @abstractmethod
    async def __anext__(self) -> UpstreamChunk:
        """Raises UpstreamRefused, or EngineUnavailable when the provider cannot be reached or breaks off."""

    @abstractmethod
    async def aclose(self) -> None: ...

    @abstractmethod
    def partial_choices(self) -> list[ReplyChoice]:
        """The replies as far as they have come, ended as ``aborted``: for an answer that broke off or was
        closed. Empty when nothing of a reply has come."""


class Upstream(ABC):
    @abstractmethod
    def send(
        self,
        request: ModelRequest,
        dialect: str,
        body: bytes,
        headers: Mapping[str, str],
        sampling_overrides: Mapping[str, Any] | None = None,
    ) -> UpstreamResponse:
        """One call. ``body`` and ``headers`` (names in lower case, keys of ours taken out) are those of the
        agent; ``request.messages`` are whole, ``previous`` resolved. ``forced``: sampling settings over
        the agent's own (`SAMPLING_KEYS`)."""

    @abstractmethod
    async def count_tokens(self, body: bytes, headers: Mapping[str, str]) -> bytes:
        """Anthropic's count of a prompt, passed through. Raises ApiError where the provider has none."""

    @abstractmethod
    async def close(self) -> None: ...
