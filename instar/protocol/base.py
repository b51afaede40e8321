"""The interfaces behind both wire protocols: a service with several models in training and samplers over one
base model, and operations that run in the order of their sequence ids.

The app of a protocol translates requests into these calls and holds no models itself.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from instar.backends.base import ForwardBackwardResult, OptimStepResult
from instar.config import AdamConfig, LossConfig
from instar.errors import InstarError
from instar.types import Floats, Sample, SamplingParams


class ProtocolError(InstarError):
    """An error that is reported to the client. ``category`` says who caused it."""

    def __init__(self, message: str, status: int = 400, category: Literal["user", "server"] = "user") -> None:
        super().__init__(message)
        self.status = status
        self.category: Literal["user", "server"] = category


@dataclass(frozen=True, slots=True)
class ServiceLimits:
    """The limits of a server. Requests that exceed them are rejected."""

    max_body: int = 256 * 1024 * 1024
    max_models: int = 8
    """Models in training at the same time, over all sessions."""
    max_samplers: int = 8
    """Sampling policies in memory. The least recently used one is evicted, and loaded again when it is
    needed."""
    max_operations: int = 1024
    """Operations that are waiting or running."""
    max_rank: int = 256
    session_ttl: float = 600.0
    """A session without a heartbeat for this many seconds ends, and its models are freed."""
    idle_before_eviction: float = 90.0
    """A session without a heartbeat for this many seconds may be ended to make room for models of another
    session. Clients send a heartbeat every 10 or 30 seconds."""
    result_ttl: float = 3600.0
    """Seconds that the result of a finished operation is kept."""
    sequence_gap_timeout: float = 120.0
    """Seconds to wait for a missing sequence id before the operations that follow it fail."""


@dataclass(frozen=True, slots=True)
class AdapterSpec:
    rank: int = 16
    seed: int | None = None
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


@dataclass(frozen=True, slots=True)
class CheckpointInfo:
    """A checkpoint on the server's disk. A "state" can be trained further; a "sampler" can be sampled
    from."""

    path: str
    """The path that clients use, such as `tinker://<model>/weights/<name>`."""
    kind: Literal["state", "sampler"]
    model_id: str
    base_model: str
    rank: int
    created_at: float
    size_bytes: int
    expires_at: float | None = None
    has_optimizer: bool = False
    extra: dict[str, Any] = field(default_factory=dict[str, Any])


class TrainingModel(ABC):
    """An adapter in training. Calls take effect in the order in which they are made."""

    model_id: str
    session_id: str
    adapter: AdapterSpec

    @abstractmethod
    async def forward(self, samples: Sequence[Sample]) -> list[Floats]:
        """Return the logprob of every token of each sample (NaN at index 0)."""

    @abstractmethod
    async def forward_backward(
        self, samples: Sequence[Sample], loss: LossConfig
    ) -> ForwardBackwardResult: ...

    @abstractmethod
    async def optim_step(self, adam: AdamConfig) -> OptimStepResult: ...

    @abstractmethod
    async def save(self, name: str, *, optimizer: bool, ttl: float | None = None) -> CheckpointInfo:
        """Save the model to the server's disk, atomically. An existing checkpoint with this name is
        replaced."""

    @abstractmethod
    async def load(self, path: str, *, optimizer: bool) -> None: ...

    @abstractmethod
    async def export(self, name: str, *, ttl: float | None = None) -> CheckpointInfo:
        """Save the current weights as a sampler."""


class TrainingService(ABC):
    """Models and samplers over one base model, whose weights they share."""

    base_model: str
    """The name that clients use for the base model."""
    max_context: int
    vocab_size: int
    tokenizer_path: str
    limits: ServiceLimits

    @abstractmethod
    async def create_session(self, owner: str) -> str:
        """Create a session and return its id. ``owner`` is the hash of the client's key; clients with other
        keys have no access."""

    @abstractmethod
    def heartbeat(self, session_id: str, owner: str) -> None:
        """Record that the session is alive. Raises ProtocolError 404 if it is unknown, has ended or belongs
        to a different owner."""

    @abstractmethod
    async def end_session(self, session_id: str, owner: str) -> None: ...

    @abstractmethod
    async def create_model(
        self, session_id: str, owner: str, base_model: str, adapter: AdapterSpec
    ) -> TrainingModel:
        """Return a new model. Raises ProtocolError if ``base_model`` is not the served one, or if a limit is
        reached."""

    @abstractmethod
    def model(self, model_id: str, owner: str) -> TrainingModel:
        """Return the model with this id. Raises ProtocolError 404 if it has ended or the server was
        restarted."""

    @abstractmethod
    async def end_model(self, model_id: str, owner: str) -> None: ...

    @abstractmethod
    async def sample(
        self, sampler: str | None, owner: str, prompt: Sequence[int], params: SamplingParams, count: int
    ) -> list[SampledSequence]:
        """Return ``count`` sequences sampled from the sampler or state at the path ``sampler``, or from the
        base model (None)."""

    @abstractmethod
    async def logprobs(self, sampler: str | None, owner: str, tokens: Sequence[int]) -> Floats:
        """Return the logprob of every token (NaN at index 0)."""

    @abstractmethod
    def checkpoint(self, path: str, owner: str) -> CheckpointInfo:
        """Return the checkpoint at a path. Raises ProtocolError 404 if it is missing, has expired or belongs
        to a different owner."""

    @abstractmethod
    def checkpoints(self, owner: str, model_id: str | None = None) -> list[CheckpointInfo]: ...

    @abstractmethod
    def delete_checkpoint(self, path: str, owner: str) -> None: ...

    @abstractmethod
    async def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class OperationResult:
    """The value or the error of a finished operation."""

    value: Any = None
    error: ProtocolError | None = None


class OperationScheduler(ABC):
    """Runs operations that clients submit; clients retrieve the results later.

    The operations of a ``queue`` (a model) run in the order of their sequence ids, which start at 1, whatever
    order they arrive in. An operation without a sequence id runs at once. Submitting the same ``key`` (an
    idempotency key of the owner) again, or the same queue and sequence id, returns the same operation.
    """

    @abstractmethod
    def submit(
        self,
        kind: str,
        owner: str,
        work: Callable[[], Awaitable[Any]],
        *,
        queue: str | None = None,
        seq: int | None = None,
        key: str | None = None,
    ) -> str:
        """Return the operation's id. Raises ProtocolError 429 if there are too many operations, and 409 if
        the sequence id belongs to an operation of a different kind."""

    @abstractmethod
    async def wait(self, operation_id: str, owner: str, timeout: float) -> OperationResult | None:
        """Return the operation's result, or None if it is not done after ``timeout`` seconds. Raises
        ProtocolError 404 if the operation is unknown."""

    @abstractmethod
    def close_queue(self, queue: str) -> None:
        """Fail the operations that are waiting in the queue."""

    @abstractmethod
    async def close(self) -> None: ...
