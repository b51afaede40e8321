"""The training backend, the loss and the optimizer."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, SecretStr

from instar.config.base import PluginConfig, Positive, Seconds, Section, type_shorthand


class LoraConfig(Section):
    """A low-rank adapter on the base model."""

    rank: Positive = 16
    """Rank of the update."""
    alpha: float = 32.0
    """Scale of the update, which is multiplied by alpha / rank."""
    targets: list[str] | Literal["all-linear"] = "all-linear"
    """Names of the modules to adapt, or all linear layers."""


class LocalBackendConfig(Section):
    """Trains with torch, in the trainer's process."""

    type: Literal["local"] = "local"
    lora: LoraConfig | None = LoraConfig()
    """The adapter; `null` trains all weights."""
    micro_batch_tokens: Positive = 8192
    """Maximum number of distinct tokens in one forward and backward pass. A prefix that several samples share
    counts once."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: slower, but needs less memory."""
    threads: Positive | None = None
    """Number of CPU threads that torch uses. Default: all cores, shared with a local engine."""
    python: str | None = None
    """Python interpreter of the trainer's process. Default: the running interpreter."""


class CloudSection(Section):
    """Settings that all training services share."""

    base_url: str | None = None
    """URL of the service. Default: the URL in the environment, or else the service's own URL."""
    api_key: SecretStr | None = None
    """API key. By default, the key is read from the service's own environment variable."""
    api_key_env: str | None = None
    """Environment variable with the API key, if it is not the service's own variable."""
    base_model: str | None = None
    """Name of the model on the service. Default: `model.name`."""
    rank: Positive = 16
    """Rank of the adapter."""
    train_attn: bool = True
    """Adapt the attention layers."""
    train_mlp: bool = True
    """Adapt the MLP layers."""
    train_unembed: bool = False
    """Adapt the output layer."""
    deadline: Seconds = 600.0
    """Timeout of one call to the service, including retries, in seconds."""
    sampler_ttl: Seconds = 7 * 86400.0
    """Time for which the service stores a published sampler, in seconds. A sampler in use is exported again
    before it expires."""
    python: str | None = None
    """Python interpreter of the trainer and the sampler, if the SDK is installed in a separate environment.
    Default: the running interpreter."""


class TinkerBackendConfig(CloudSection):
    """Trains on Tinker, or on a server that speaks its protocol. Needs `instar[tinker]`."""

    type: Literal["tinker"] = "tinker"


class MintBackendConfig(CloudSection):
    """Trains on MinT. Needs `instar[mint]`, in an environment without `instar[tinker]`, because MinT pins an
    older tinker. Set `python` to the interpreter of that environment."""

    type: Literal["mint"] = "mint"


class WeaverBackendConfig(CloudSection):
    """Trains on Weaver, or on a server that speaks its protocol. Needs `instar[weaver]`."""

    type: Literal["weaver"] = "weaver"


class AutoBackendConfig(CloudSection):
    """Chooses the backend at the start: the service that the key, the URL or the environment selects, or else
    `local`."""

    type: Literal["auto"] = "auto"


class VerlBackendConfig(Section):
    """Trains a sharded model (FSDP) with verl's workers on Ray. Needs verl in a separate environment; set
    `python` to the interpreter of that environment."""

    type: Literal["verl"] = "verl"
    lora: LoraConfig | None = LoraConfig()
    """The adapter; `null` trains all weights."""
    ranks: Positive = 2
    """Number of processes that the model is sharded over: one per GPU, or this many on the CPU."""
    micro_batch_tokens: Positive = 8192
    """Maximum number of tokens in a forward and backward pass of a rank. A longer sample has its own pass."""
    deadline: Seconds = 3600.0
    """Timeout of one call to the workers, in seconds. After a timeout, new workers are started and load the
    last saved state."""
    python: str | None = None
    """Python interpreter of the trainer's process. Default: the running interpreter."""


CloudConfig = TinkerBackendConfig | MintBackendConfig | WeaverBackendConfig

BackendConfig = Annotated[
    LocalBackendConfig
    | TinkerBackendConfig
    | MintBackendConfig
    | WeaverBackendConfig
    | AutoBackendConfig
    | VerlBackendConfig
    | PluginConfig,
    Field(discriminator="type"),
    type_shorthand("local"),
]


DecayRate = Annotated[float, Field(ge=0, lt=1)]


class AdamConfig(Section):
    """The Adam optimizer. Every field is passed explicitly to every backend."""

    lr: Annotated[float, Field(gt=0, le=10)] = 2e-4
    """Learning rate after warm-up, at most 10."""
    beta1: DecayRate = 0.9
    """Decay rate of the first moment, below 1."""
    beta2: DecayRate = 0.95
    """Decay rate of the second moment, below 1."""
    eps: Annotated[float, Field(ge=1e-30, le=1)] = 1e-8
    """Term added to the denominator, from 1e-30 to 1."""
    weight_decay: Annotated[float, Field(ge=0, le=10)] = 0.0
    """Decoupled weight decay, at most 10."""
    grad_clip_norm: Annotated[float, Field(ge=0)] = 1.0
    """Maximum global gradient norm; 0 disables clipping."""


LossName = Literal["importance_sampling", "ppo", "cispo", "cross_entropy", "dro"]


class LossConfig(Section):
    """The loss, which is a plain sum over trained tokens."""

    name: LossName = "importance_sampling"
    """Name of the loss."""
    clip_low: float | None = None
    """Lower bound of the importance ratio. Default: ppo 0.8, cispo 0."""
    clip_high: float | None = None
    """Upper bound of the importance ratio. Default: ppo 1.2, cispo 4."""
    beta: Annotated[float, Field(ge=0)] | None = None
    """Strength of the regularization of `dro` towards the old logprobs. Default: 0.05."""
