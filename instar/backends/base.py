"""What a training backend is. Every variant passes tests/unit/backends/conformance.py.

Losses are plain sums over tokens; whatever normalises or reweights them is in the sample's
``advantages`` already, so that every backend computes the same number:

    cross_entropy        -Σ mask · A · lp
    importance_sampling  -Σ mask · A · r                       r = exp(lp - logprobs)
    ppo                  -Σ mask · min(r·A, clip(r, low, high)·A)
    cispo                -Σ mask · stop_gradient(clip(r, low, high)) · A · lp

where lp is the new logprob of token i given the tokens before it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from instar.config import AdamConfig, LossConfig
from instar.types import Artifact, ArtifactKind, Floats, Sample

DEFAULT_CLIP: dict[str, tuple[float, float]] = {"ppo": (0.8, 1.2), "cispo": (0.0, 4.0)}


@dataclass(frozen=True, slots=True)
class BackendCapabilities:
    losses: frozenset[str]
    artifacts: frozenset[ArtifactKind]
    """Kinds of artifact that ``publish`` makes."""
    full_finetuning: bool = False


@dataclass(frozen=True, slots=True)
class ForwardBackward:
    loss: float
    """The sum over tokens."""
    logprobs: list[Floats]
    """Per sample, the new logprob of every trained token; NaN elsewhere."""
    metrics: dict[str, float] = field(default_factory=dict[str, float])


@dataclass(frozen=True, slots=True)
class OptimStep:
    grad_norm: float
    """Before clipping."""
    metrics: dict[str, float] = field(default_factory=dict[str, float])


class Backend(ABC):
    @property
    @abstractmethod
    def capabilities(self) -> BackendCapabilities: ...

    @abstractmethod
    async def forward(self, samples: Sequence[Sample]) -> list[Floats]:
        """Per sample, the logprob of every token given those before; NaN at index 0."""

    @abstractmethod
    async def forward_backward(self, samples: Sequence[Sample], loss: LossConfig) -> ForwardBackward:
        """Add the loss's gradient to what is accumulated. Raises NonFinite, with nothing added, when the
        loss is not finite, and BackendError when a trained token lacks an advantage, or a logprob that the
        loss asks for."""

    @abstractmethod
    async def optim_step(self, adam: AdamConfig) -> OptimStep:
        """Apply the accumulated gradient and clear it. ``adam.lr`` is the rate of this very step. Raises
        NonFinite, with weights and moments untouched and the gradient cleared, when it is not finite."""

    @abstractmethod
    async def publish(self, path: Path) -> Artifact:
        """Write the current weights for engines to load: an adapter folder, or full weights."""

    @abstractmethod
    async def save_state(self, path: Path) -> None:
        """Write weights, optimizer and RNG so that ``load_state`` continues bit for bit. Atomic: ``path``
        exists only when it is complete and on disk."""

    @abstractmethod
    async def load_state(self, path: Path, *, optimizer: bool = True) -> None: ...

    def use_cores(self, count: int) -> None:  # noqa: B027 - a hint
        """Compute on so many CPU cores from the next call on. Backends elsewhere ignore it."""

    @abstractmethod
    async def close(self) -> None: ...
