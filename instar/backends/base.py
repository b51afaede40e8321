"""What a training backend is. Every variant passes tests/unit/backends/conformance.py.

Losses are plain sums over tokens; whatever normalises or reweights them is in the sample's
``advantages`` already, so that every backend computes the same number:

    cross_entropy        -Σ mask · A · lp
    importance_sampling  -Σ mask · A · r                       r = exp(lp - logprobs)
    ppo                  -Σ mask · min(r·A, clip(r, low, high)·A)
    cispo                -Σ mask · stop_gradient(clip(r, low, high)) · A · lp
    dro                  -Σ mask · (A · lp - beta/2 · (lp - logprobs)²)

where lp is the new logprob of token i given the tokens before it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from instar.config import AdamConfig, LoraConfig, LossConfig
from instar.errors import BackendError
from instar.types import Artifact, ArtifactKind, Floats, Sample

if TYPE_CHECKING:
    from torch import Tensor

DEFAULT_BETA = 0.05
DEFAULT_CLIP: dict[str, tuple[float, float]] = {"ppo": (0.8, 1.2), "cispo": (0.0, 4.0)}


ADAM_FIELDS = frozenset({"lr", "beta1", "beta2", "eps", "weight_decay", "grad_clip_norm"})


@dataclass(frozen=True, slots=True)
class BackendCapabilities:
    """What a backend computes. What is not named here is refused at start."""

    losses: frozenset[str]
    artifacts: frozenset[ArtifactKind]
    """Kinds of artifact that ``publish`` makes."""
    full_finetuning: bool = False
    optimizer: frozenset[str] = ADAM_FIELDS
    """Fields of the optimizer that it honours; another one must have its neutral value."""
    reference: bool = False
    """Whether ``reference_logprobs`` works."""
    live: bool = False
    """Whether ``tensors`` works."""
    grad_norm: bool = True
    """Whether ``optim_step`` reports it; NaN otherwise."""


def cloud_capabilities(losses: frozenset[str]) -> BackendCapabilities:
    """Return the capabilities of a training service that computes ``losses``."""
    return BackendCapabilities(losses=losses, artifacts=frozenset({"remote"}), reference=True)


def is_mergeable(lora: LoraConfig | None) -> bool:
    """Whether `Backend.tensors` can hand out one set of weights: an adapter on an output layer that is tied
    to the input's cannot be merged."""
    return lora is None or "lm_head" not in lora.targets


@dataclass(frozen=True, slots=True)
class ForwardBackwardResult:
    loss: float
    """The sum over tokens."""
    logprobs: list[Floats]
    """Per sample, the new logprob of every trained token; NaN elsewhere."""
    metrics: dict[str, float] = field(default_factory=dict[str, float])


@dataclass(frozen=True, slots=True)
class OptimStepResult:
    grad_norm: float
    """Before clipping; NaN where the backend does not say."""
    metrics: dict[str, float] = field(default_factory=dict[str, float])


class Backend(ABC):
    """Calls may be pipelined: they take effect in the order they were made, whether or not the one before
    was awaited. Any of them may raise BackendUnavailable after its retries, and BackendLost when the session
    is gone: then `load_state`, or `start` where nothing was saved, begins another one."""

    @property
    @abstractmethod
    def capabilities(self) -> BackendCapabilities: ...

    async def start(self) -> None:  # noqa: B027 - a backend may be ready once it is made
        """Begin a session on the base model with a fresh adapter, drawn from the seed. One under way is given
        up. Called before anything else, and after BackendLost."""

    async def reference_logprobs(self, samples: Sequence[Sample]) -> list[Floats]:
        """As `forward`, under the base model: the adapter off, or the weights that training began with."""
        raise BackendError("this backend does not compute the base model's logprobs")

    @abstractmethod
    async def forward(self, samples: Sequence[Sample]) -> list[Floats]:
        """Per sample, the logprob of every token given those before; NaN at index 0."""

    @abstractmethod
    async def forward_backward(self, samples: Sequence[Sample], loss: LossConfig) -> ForwardBackwardResult:
        """Add the loss's gradient to what is accumulated. Raises NonFiniteError, with nothing added, when the
        loss is not finite, and BackendError when a trained token lacks an advantage, or a logprob that the
        loss asks for."""

    @abstractmethod
    async def optim_step(self, adam: AdamConfig) -> OptimStepResult:
        """Apply the accumulated gradient and clear it. ``adam.lr`` is the rate of this very step. Raises
        NonFiniteError, with weights and moments untouched and the gradient cleared, when it is not finite."""

    @abstractmethod
    async def publish(self, path: Path) -> Artifact:
        """Make the current weights something that engines can load: an adapter folder or full weights at
        ``path``, or a sampler at a service, named after it."""

    def tensors(self) -> AsyncGenerator[tuple[str, Tensor], None]:
        """The weights an engine would serve, one after another: named and shaped as in the model's own files,
        an adapter merged in from full precision, in the model's dtype, whole on this process where they are
        sharded. Each is valid until the next is asked for. No other call may be under way meanwhile."""
        raise BackendError("this backend does not hand out its weights")

    @abstractmethod
    async def save_state(self, path: Path) -> None:
        """Write weights, optimizer and RNG so that ``load_state`` continues bit for bit. Atomic: ``path``
        exists only when it is complete and on disk. A service keeps the state
        itself, and ``path`` says where."""

    @abstractmethod
    async def load_state(self, path: Path, *, optimizer: bool = True) -> None:
        """Continue from a saved state; gradients not yet applied are given up. At a service this begins a new
        session, so that what an earlier process left in the old one does not count."""

    async def discard_state(self, path: Path) -> None:  # noqa: B027 - most keep it all in the folder
        """Free what a saved state takes beyond its folder, which is removed afterwards."""

    def use_cores(self, count: int) -> None:  # noqa: B027 - a hint
        """Compute on so many CPU cores from the next call on. Backends elsewhere ignore it."""

    @abstractmethod
    async def close(self) -> None:
        """Let go of it. What was saved or published stays, and so does a session that could be resumed."""
