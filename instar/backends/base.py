"""The training backend interface. Every backend must pass tests/unit/backends/conformance.py.

Losses are plain sums over tokens. Normalization and weighting are part of the samples' ``advantages``, so
that every backend computes the same value:

    cross_entropy        -Σ mask · A · lp
    importance_sampling  -Σ mask · A · r                       r = exp(lp - logprobs)
    ppo                  -Σ mask · min(r·A, clip(r, low, high)·A)
    cispo                -Σ mask · stop_gradient(clip(r, low, high)) · A · lp
    dro                  -Σ mask · (A · lp - beta/2 · (lp - logprobs)²)

lp is the logprob of a token under the current weights, given the tokens before it. A and logprobs are the
token's values in the sample's ``advantages`` and ``logprobs``. low, high and beta are loss settings.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from instar.config import AdamConfig, LoraConfig, LossConfig
from instar.config.model import AdapterSource
from instar.errors import BackendError
from instar.types import Artifact, ArtifactKind, Floats, Sample

if TYPE_CHECKING:
    from torch import Tensor

DEFAULT_BETA = 0.05
DEFAULT_CLIP: dict[str, tuple[float, float]] = {"ppo": (0.8, 1.2), "cispo": (0.0, 4.0)}
LOSSES = frozenset({"importance_sampling", "ppo", "cispo", "cross_entropy", "dro"})
NO_GRADIENT = "optim_step has no gradient to apply; first call forward_backward with a trained token"
ADAM_FIELDS = frozenset({"lr", "beta1", "beta2", "eps", "weight_decay", "grad_clip_norm"})


@dataclass(frozen=True, slots=True)
class BackendCapabilities:
    """The features that a backend supports. A run that needs any other feature is rejected at startup."""

    losses: frozenset[str]
    artifacts: frozenset[ArtifactKind]
    """The kinds of artifacts that ``publish`` can create."""
    supports_full_finetuning: bool = False
    optimizer_settings: frozenset[str] = ADAM_FIELDS
    """The supported optimizer settings. All other settings must have their neutral value."""
    has_reference: bool = False
    """True if ``reference_logprobs`` is supported."""
    can_sync_live: bool = False
    """True if ``tensors`` is supported, so that weights can be sent to running engines."""
    adapter_sources: frozenset[AdapterSource] = frozenset()
    """The kinds of adapters that ``load_adapter`` supports."""
    reports_grad_norm: bool = True
    """True if ``optim_step`` returns the gradient norm. Otherwise the norm is NaN."""


def make_cloud_capabilities(losses: frozenset[str], adapter_source: AdapterSource) -> BackendCapabilities:
    return BackendCapabilities(
        losses=losses,
        artifacts=frozenset({"remote"}),
        has_reference=True,
        adapter_sources=frozenset({adapter_source}),
    )


def make_torch_capabilities(
    lora: LoraConfig | None,
    *,
    has_reference: bool,
    can_sync_live: bool | None = None,
    loads_adapters: bool = False,
) -> BackendCapabilities:
    """Describe a torch backend. By default, it can sync live if its adapter can be merged."""
    if can_sync_live is None:
        # An adapter on the output layer cannot be merged if that layer is tied to the input embedding.
        can_sync_live = lora is None or "lm_head" not in lora.targets
    return BackendCapabilities(
        losses=LOSSES,
        artifacts=frozenset({"weights" if lora is None else "adapter"}),
        supports_full_finetuning=True,
        has_reference=has_reference,
        can_sync_live=can_sync_live,
        adapter_sources=frozenset({"folder"} if loads_adapters and lora is not None else ()),
    )


@dataclass(frozen=True, slots=True)
class ForwardBackwardResult:
    loss: float
    """The loss, summed over all trained tokens."""
    logprobs: list[Floats]
    """The logprobs under the current weights, one array per sample; NaN for tokens that are not trained."""
    metrics: dict[str, float] = field(default_factory=dict[str, float])


@dataclass(frozen=True, slots=True)
class OptimStepResult:
    grad_norm: float
    """The gradient norm before clipping; NaN if the backend does not report it."""
    metrics: dict[str, float] = field(default_factory=dict[str, float])

    @classmethod
    def from_norm(
        cls, adam: AdamConfig, grad_norm: float, metrics: Mapping[str, float] | None = None
    ) -> OptimStepResult:
        all_metrics = {**(metrics or {}), "lr": adam.lr}
        if not math.isnan(grad_norm):
            all_metrics["grad_clipped"] = float(0.0 < adam.grad_clip_norm < grad_norm)
        return cls(grad_norm, all_metrics)


class Backend(ABC):
    """A model in training. A cloud backend trains on a service such as Tinker, MinT or Weaver.

    Calls may be pipelined: they take effect in the order they were made, even if earlier calls have not been
    awaited. Any call may raise BackendUnavailable when its retries are exhausted, or BackendLost if the
    session is lost or its state is unknown. After BackendLost, call `load_state` (or `start` or
    `load_adapter`, if nothing was saved) to start a new session.
    """

    artifact_lifetime_seconds: float | None = None
    """Seconds until a published artifact expires, or None if it does not."""
    sent_tokens: int = 0
    """The number of tokens that were sent to a training service so far, in all passes over a sample."""

    @property
    @abstractmethod
    def capabilities(self) -> BackendCapabilities: ...

    async def start(self) -> None:  # noqa: B027 - a backend may be ready after construction
        """Start a new session with the base model and a new adapter, and abandon the current session, if any.
        Call this, `load_adapter` or `load_state` before any other method. The local backend ignores this
        call."""

    async def load_adapter(self, source: str) -> None:
        """Start a new session with the weights of an adapter that was not saved with `save_state`. ``source``
        is a PEFT folder, or the path of a state on the training service, which is loaded with its optimizer
        state if it has one. Supported if ``capabilities.adapter_sources`` contains the kind of ``source``."""
        raise BackendError("this backend cannot start from an adapter")

    async def reference_logprobs(self, samples: Sequence[Sample]) -> list[Floats]:
        """Return every token's logprob under the initial weights without an adapter (NaN at index 0)."""
        raise BackendError("this backend does not compute the base model's logprobs")

    @abstractmethod
    async def forward(self, samples: Sequence[Sample]) -> list[Floats]:
        """Return the logprob of every token of each sample, given the tokens before it (NaN at index 0)."""

    @abstractmethod
    async def forward_backward(self, samples: Sequence[Sample], loss: LossConfig) -> ForwardBackwardResult:
        """Accumulate the gradient of the loss. Raises BackendError if a sample is invalid, and NonFiniteError
        if the loss is not finite. The gradient is then unchanged. Exception: a service may already have
        accumulated a non-finite gradient, in which case later calls raise BackendLost."""

    @abstractmethod
    async def optim_step(self, adam: AdamConfig) -> OptimStepResult:
        """Apply the accumulated gradient and clear it. Raises BackendError if there is none, and
        NonFiniteError if it is not finite. The weights and moments are then unchanged. Exception: a service
        may already have applied a non-finite gradient, in which case later calls raise BackendLost. The local
        and verl backends also raise NonFiniteError if a weight is not finite after the step. They do not save
        or publish such weights; `load_state` recovers."""

    @abstractmethod
    async def publish(self, path: Path) -> Artifact:
        """Export the current weights for engines. ``path`` is the folder for the adapter or the full weights.
        A cloud backend stores the weights on the service, under a name derived from ``path``."""

    def tensors(self) -> AsyncGenerator[tuple[str, Tensor], None]:
        """Yield the weights for an engine to serve, in the compute dtype and with the names and shapes of the
        model's files. Adapters are merged in fp32, and sharded weights are gathered. Each tensor is valid
        until the next one is requested. No other call may run during the iteration."""
        raise BackendError("this backend does not export its weights as tensors")

    @abstractmethod
    async def save_state(self, path: Path) -> None:
        """Save the weights, optimizer and RNG state, so that training can resume bit-identically. Some
        backends do not save an unapplied gradient. ``path`` is created atomically, once its content is on
        disk. A cloud backend stores the state on the service, and only a reference to it in ``path``."""

    @abstractmethod
    async def load_state(self, path: Path, *, optimizer: bool = True) -> None:
        """Restore a saved state and drop the current gradient. If ``optimizer`` is False, only the weights
        are loaded, and the optimizer moments are reset. A cloud backend starts a new session, so that calls
        from earlier processes cannot affect it."""

    async def discard_state(self, path: Path) -> None:  # noqa: B027 - most backends store the state in `path`
        """Delete the parts of a saved state that are stored outside ``path``. The caller removes ``path``."""

    def use_cores(self, count: int) -> None:  # noqa: B027 - only the local backend can change it
        """Use ``count`` CPU cores from the next call on, unless the backend's config sets the number."""

    def set_pause(self, pause: Callable[[], None]) -> None:  # noqa: B027 - a service does not use this machine
        """Call ``pause`` often while gradients or logprobs are computed on this machine: the local backend
        between layers, verl between calls. It blocks while training must pause, and changes no result."""

    @abstractmethod
    async def close(self) -> None:
        """Release all resources except saved states, published artifacts and resumable sessions."""
