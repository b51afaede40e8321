"""The interface of an upstream: a model that someone else serves behind their own API.

Calls to an upstream are recorded like all other calls. They are trainable if the provider returns the token
ids and logprobs that it sampled. Otherwise they are marked as not trainable, because text is never tokenized
again.
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
    """A part of a response. A response that is not streamed is one last chunk."""

    raw: bytes = b""
    """The bytes to pass on if the provider speaks the agent's dialect; otherwise empty."""
    deltas: Sequence[tuple[int, ReplyDelta]] = ()
    """Pairs of choice index and delta, if the provider speaks a different dialect from the agent."""
    choices: Sequence[ReplyChoice] | None = None
    """The complete replies, set on the last chunk only. The call is recorded before ``raw`` is passed on, so
    everything that tells the agent that the response has ended is in this chunk."""
    content_type: str | None = None
    """The content type of ``raw``, set on the first chunk."""
    response_id: str | None = None
    """The provider's id of the response, set on the last chunk if the agent sees the id. The agent may
    continue from it (``previous_response_id``), and people may give feedback on it."""


class UpstreamError(ApiError):
    """An error response of a provider, possibly in the middle of a stream. ``raw`` is the body of the error
    (usually JSON, never an event of a stream) if the provider speaks the agent's dialect."""

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
    """One response of a provider: an iterator over its chunks, which must be closed with ``aclose``."""

    def __aiter__(self) -> UpstreamResponse:
        return self

    @abstractmethod
    async def __anext__(self) -> UpstreamChunk:
        """Return the next chunk. Raise UpstreamError if the provider responds with an error, or
        EngineUnavailable if it cannot be reached or breaks off."""

    @abstractmethod
    async def aclose(self) -> None: ...

    @abstractmethod
    def partial_choices(self) -> list[ReplyChoice]:
        """Return the received parts of the replies, with the finish reason ``aborted``, after the response
        broke off or was closed. The list is empty if nothing of a reply was received."""


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
        """Send one call and return its response.

        ``body`` and ``headers`` (names in lower case, without our own keys) are the agent's. The messages of
        ``request`` are complete, with ``previous_response_id`` resolved. ``sampling_overrides`` replace the
        agent's settings (``SAMPLING_KEYS``).
        """

    @abstractmethod
    async def count_tokens(self, body: bytes, headers: Mapping[str, str]) -> bytes:
        """Forward a request to Anthropic's token counter and return the response. Raise ApiError if the
        provider has no token counter."""

    @abstractmethod
    async def close(self) -> None: ...
