"""The chunks and errors of a provider's response."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from instar.gateway.base import ApiError
from instar.gateway.dialects.base import ReplyChoices
from instar.record.base import ReplyDelta


@dataclass(frozen=True, slots=True)
class UpstreamChunk:
    """A part of a response. A response that is not streamed has one chunk."""

    raw: bytes = b""
    """The bytes to pass on; empty if the provider does not speak the agent's dialect."""
    deltas: Sequence[tuple[int, ReplyDelta]] = ()
    """Pairs of choice index and delta; empty if the provider speaks the agent's dialect."""
    choices: ReplyChoices | None = None
    """The complete replies, which only the last chunk has. The call is recorded before ``raw`` of the last
    chunk is passed on, so only the last chunk tells the agent that the response has ended."""
    content_type: str | None = None
    """The content type of ``raw``, which only the first chunk has."""
    response_id: str | None = None
    """The provider's id of the response, which only the last chunk has, and only if the agent sees the id.
    The agent may continue the response by its id, and people may give feedback on it."""


@dataclass(eq=False)
class UpstreamError(ApiError):
    """An error of a provider, possibly in the middle of a stream."""

    raw: bytes = b""
    """The body of the error, usually JSON; empty if the provider does not speak the agent's dialect."""
    content_type: str | None = None
