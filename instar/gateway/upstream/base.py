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
    """The complete replies. Only the last chunk has them, and only its ``raw`` tells the agent that the
    response has ended. The call is recorded before this ``raw`` is passed on."""
    content_type: str | None = None
    """The content type of ``raw``. Only the first chunk has it."""
    response_id: str | None = None
    """The provider's response id. Only the last chunk has it, and only if the agent sees the id."""


@dataclass(eq=False)
class UpstreamError(ApiError):
    """An error that a provider reported, possibly in the middle of a stream."""

    raw: bytes = b""
    """The error body, usually JSON; empty if the provider does not speak the agent's dialect."""
    content_type: str | None = None
