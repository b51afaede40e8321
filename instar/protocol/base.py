"""What stands behind both wire protocols: a workshop with several models in training and samplers over one
base model, and operations that run in the order their clients numbered them.

A protocol's app translates requests into these calls and nothing else: it holds no models.
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
    """Something a client is told. ``status`` is HTTP's; ``category`` says whose fault it is."""

    def __init__(self, message: str, status: int = 400, category: Literal["user", "server"] = "user") -> None:
        super().__init__(message)
        self.status = status
        self.category: Literal["user", "server"] = category


@dataclass(frozen=True, slots=True)
class ServiceLimits:
    """What one client may take. Beyond it a request is refused with a clear error."""

    max_body: int = 256 * 1024 * 1024
    max_models: int = 8
    """Models in training at once, over all sessions."""
    max_samplers: int = 8
    """Sampling policies held at once; the one unused longest makes room, and comes back when asked for."""
    max_operations: int = 1024
    """Operations waiting or running at once."""
    max_rank: int = 256
    session_ttl: float = 600.0
    """Seconds without a heartbeat after which a session ends and its models are let go."""
    idle_before_eviction: float = 90.0
    """Seconds without a heartbeat after which a session gives up its models for another's. Clients send one
    every 10 or 30 seconds."""
    result_ttl: float = 3600.0
    """Seconds that the result of an operation is kept after it is done."""
    sequence_gap_timeout: float = 120.0
    """Seconds to wait for a missing sequence id before the operations after it fail."""


@dataclass(frozen=True, slots=True)
class AdapterSpec:
    """The adapter of a new model."""

    rank: int = 16
    seed: int | None = None
    train_attn: bool = True
    train_mlp: bool = True
    train_unembed: bool = False


@dataclass(frozen=True, slots=True)
class SampledSequence:
    token_ids: list[int]
    logprobs: list[float]
    """Of the full softmax at temperature 1."""
    stop_reason: Literal["stop", "length"]
    text: str


@dataclass(frozen=True, slots=True)
class CheckpointInfo:
    """A folder on the server's disk. ``kind`` "state" can be trained on, "sampler" can be sampled from."""

    path: str
    """`tinker://<model>/weights/<name>` and the like: what clients name it by."""
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
    """One adapter in training. Its calls take effect in the order they are made."""

    model_id: str
    session_id: str
    adapter: AdapterSpec

    @abstractmethod
    async def forward(self, samples: Sequence[Sample]) -> list[Floats]:
        """Per sample, the logprob of every token given those before; NaN at index 0."""

    @abstractmethod
    async def forward_backward(
        self, samples: Sequence[Sample], loss: LossConfig
    ) -> ForwardBackwardResult: ...

    @abstractmethod
    async def optim_step(self, adam: AdamConfig) -> OptimStepResult: ...

    @abstractmethod
    async def save(self, name: str, *, optimizer: bool, ttl: float | None = None) -> CheckpointInfo:
        """To the server's disk, atomically. The same name again replaces it."""

    @abstractmethod
    async def load(self, path: str, *, optimizer: bool) -> None: ...

    @abstractmethod
    async def export(self, name: str, *, ttl: float | None = None) -> CheckpointInfo:
        """Make the current weights a sampler."""


class TrainingService(ABC):
    """Over one base model, whose weights every model and sampler shares."""

    base_model: str
    """The name that clients ask for."""
    max_context: int
    vocab_size: int
    tokenizer_path: str
    limits: ServiceLimits

    @abstractmethod
    async def create_session(self, owner: str) -> str:
        """``owner`` is a hash of the key that made it: other keys do not find it."""

    @abstractmethod
    def heartbeat(self, session_id: str, owner: str) -> None:
        """Raises ProtocolError 404 for one that is unknown, ended or another owner's."""

    @abstractmethod
    async def end_session(self, session_id: str, owner: str) -> None: ...

    @abstractmethod
    async def create_model(
        self, session_id: str, owner: str, base_model: str, adapter: AdapterSpec
    ) -> TrainingModel:
        """Raises ProtocolError when the base model is another one, or a limit is reached."""

    @abstractmethod
    def model(self, model_id: str, owner: str) -> TrainingModel:
        """Raises ProtocolError 404 for one that is gone: the server was restarted, or it was ended."""

    @abstractmethod
    async def end_model(self, model_id: str, owner: str) -> None: ...

    @abstractmethod
    async def sample(
        self, sampler: str | None, owner: str, prompt: Sequence[int], params: SamplingParams, count: int
    ) -> list[SampledSequence]:
        """From a sampler's path, or the base model (None). A state's path can be sampled from too."""

    @abstractmethod
    async def logprobs(self, sampler: str | None, owner: str, tokens: Sequence[int]) -> Floats:
        """Of every token given those before; NaN at index 0."""

    @abstractmethod
    def checkpoint(self, path: str, owner: str) -> CheckpointInfo:
        """Raises ProtocolError 404 when it is not there, is another owner's, or has expired."""

    @abstractmethod
    def checkpoints(self, owner: str, model_id: str | None = None) -> list[CheckpointInfo]: ...

    @abstractmethod
    def delete_checkpoint(self, path: str, owner: str) -> None: ...

    @abstractmethod
    async def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class OperationResult:
    """How an operation ended: a value, or an error."""

    value: Any = None
    error: ProtocolError | None = None


class OperationScheduler(ABC):
    """Work that clients submit and ask for later.

    Work of one ``lane`` (a model) with sequence ids runs in the order of the ids, from 1 on, whatever order
    they arrive in; without an id, at once. The same ``key`` (an idempotency key, scoped by its owner), or the
    same lane and sequence id, submitted again is the same operation.
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
        """Returns the operation's id. Raises ProtocolError 429 over the limit, 409 for a sequence id of
        another kind."""

    @abstractmethod
    async def wait(self, operation_id: str, owner: str, timeout: float) -> OperationResult | None:
        """Its outcome; None when it is not done after ``timeout`` seconds. May be asked for again. Raises
        ProtocolError 404 when it is unknown."""

    @abstractmethod
    def close_queue(self, queue: str) -> None:
        """What waits there fails."""

    @abstractmethod
    async def close(self) -> None: ...
