"""What an upstream is: a model that someone else serves, behind an API of their own.

Calls to it are recorded like any others. They are trainable where the provider returns the token ids
and logprobs it sampled, and marked not trainable where it does not: nothing is tokenized again.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass

from instar.gateway.base import ApiError
from instar.gateway.dialects.base import Choice, Request
from instar.record.base import Delta


@dataclass(frozen=True, slots=True)
class Piece:
    """What came of an answer. A whole answer that was not streamed is one last piece."""

    raw: bytes = b""
    """To be passed on as it is, when the provider speaks the agent's dialect; else empty."""
    deltas: Sequence[tuple[int, Delta]] = ()
    """(index of the choice, delta), when it does not."""
    choices: Sequence[Choice] | None = None
    """Set on the last piece alone: the whole replies. The call is recorded before ``raw`` is passed on, so
    everything that says the answer has ended is in this piece."""
    content_type: str | None = None
    """Of ``raw``; set on the first piece."""


class UpstreamRefused(ApiError):
    """The provider answered with an error. ``raw`` is its body, when it speaks the agent's dialect."""

    raw: bytes = b""


class Upstream(ABC):
    @abstractmethod
    def send(
        self, request: Request, dialect: str, body: bytes, headers: Mapping[str, str]
    ) -> AsyncGenerator[Piece, None]:
        """One call. ``body`` and ``headers`` are those of the agent. Raises UpstreamRefused, or
        EngineUnavailable when the provider cannot be reached."""

    @abstractmethod
    async def close(self) -> None: ...
