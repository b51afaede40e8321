"""Types shared by the Tinker and Weaver protocols, and the conversion of exceptions to client errors."""

from __future__ import annotations

import logging
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from instar.errors import (
    BackendError,
    BackendUnavailable,
    EngineUnavailable,
    InstarError,
    NonFiniteError,
    PromptTooLong,
)

logger = logging.getLogger(__name__)


class ProtocolError(InstarError):
    """An error that is sent to the client with the HTTP ``status``. ``category`` says who caused it."""

    def __init__(self, message: str, status: int = 400, category: Literal["user", "server"] = "user") -> None:
        super().__init__(message)
        self.status = status
        self.category: Literal["user", "server"] = category


def to_protocol_error(error: Exception) -> ProtocolError:
    """Convert an exception to the error that is sent to the client, and log it if it is unexpected. If it is
    not an InstarError, the client gets only its type, because the message may contain internals."""
    if isinstance(error, ProtocolError):
        return error
    if isinstance(error, (EngineUnavailable, BackendUnavailable)):
        return ProtocolError(str(error), 503, "server")
    if isinstance(error, (NonFiniteError, PromptTooLong, BackendError)):
        return ProtocolError(str(error))
    logger.error("a request failed with an unexpected error", exc_info=error)
    text = str(error) if isinstance(error, InstarError) else f"internal error: {type(error).__name__}"
    return ProtocolError(text, 500, "server")


@contextmanager
def convert_errors() -> Generator[None]:
    """Re-raise every exception in the block as a ProtocolError."""
    try:
        yield
    except Exception as error:  # every exception is converted
        raise to_protocol_error(error) from error


@dataclass(frozen=True, slots=True)
class ServiceLimits:
    max_body: int = 256 * 1024 * 1024
    """The maximum size of a request body, in bytes."""
    max_models: int = 8
    """The maximum number of models in training, across all sessions."""
    max_samplers: int = 8
    """The maximum number of sampling policies in memory. The least recently used policy is evicted first."""
    max_operations: int = 1024
    """The maximum number of waiting and running operations, and of samples per request."""
    max_rank: int = 256
    session_ttl: float = 600.0
    """A session and its models end after this many seconds without a heartbeat or another request."""
    eviction_idle_seconds: float = 90.0
    """After this many seconds without a heartbeat, a session may be ended to make room for a new model.
    Clients send a heartbeat every 10 or 30 seconds."""
    result_ttl: float = 3600.0
    """An undelivered result is kept for this many seconds after its operation has finished."""
    sequence_gap_timeout: float = 120.0
    """If a sequence id is missing for this many seconds, the operations waiting for it fail."""


TRAINED_PARTS = ("train_unembed", "train_mlp", "train_attn")


class AdapterSpec(msgspec.Struct, frozen=True):
    rank: int
    seed: int | None = None
    """None for a random seed."""
    train_attn: bool = True
    train_mlp: bool = True
    train_unembed: bool = False


@dataclass(frozen=True, slots=True)
class SampledSequence:
    token_ids: list[int]
    logprobs: list[float]
    """The logprobs under the full softmax at temperature 1."""
    stop_reason: Literal["stop", "length"]
    text: str

    def to_fields(self) -> dict[str, Any]:
        """Return the fields of a response that both protocols have."""
        return {"tokens": self.token_ids, "logprobs": self.logprobs, "stop_reason": self.stop_reason}


@dataclass(frozen=True, slots=True)
class CheckpointInfo:
    """A checkpoint on the server's disk. Training can resume from a "state", but not from a "sampler"."""

    path: str
    """The path in the `CheckpointStore`, such as `tinker://<model>/weights/<name>`."""
    kind: Literal["state", "sampler"]
    model_id: str
    base_model: str
    rank: int
    created_at: float
    """A Unix timestamp in seconds."""
    size_bytes: int
    expires_at: float | None = None
    """A Unix timestamp, or None if the checkpoint does not expire."""
    has_optimizer: bool = False
    extra: dict[str, Any] = field(default_factory=dict[str, Any])
    """The adapter's `TRAINED_PARTS` flags."""
