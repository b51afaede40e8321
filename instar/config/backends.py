"""What trains: where gradients are computed, the loss, the optimizer."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, SecretStr

from instar.config.base import PluginConfig, Positive, Seconds, Section, Unit, type_shorthand


class LoraConfig(Section):
    """A low-rank adapter on the base model."""

    rank: Positive = 16
    """Rank of the update."""
    alpha: float = 32.0
    """The update is scaled by alpha / rank."""
    targets: list[str] | Literal["all-linear"] = "all-linear"
    """Names of the modules to adapt."""


class LocalBackendConfig(Section):
    """Trains with torch, in the trainer's process."""

    type: Literal["local"] = "local"
    lora: LoraConfig | None = LoraConfig()
    """The adapter; `null` trains all weights."""
    micro_batch_tokens: Positive = 8192
    """Most distinct tokens in one forward and backward pass. A prefix that samples share counts once."""
    gradient_checkpointing: bool = False
    """Trade time for memory."""
    threads: Positive | None = None
    """CPU threads of torch. Default: the cores there are, shared with an engine that runs beside it."""
    python: str | None = None
    """Interpreter to run the trainer with. Default: the running one."""


class CloudSection(Section):
    """What every training service is told."""

    base_url: str | None = None
    """Its address. Default: the environment's, then the service's own."""
    api_key: SecretStr | None = None
    """Its key. Better left out of the file: by default the service's own environment variable is read."""
    api_key_env: str | None = None
    """Environment variable that holds the key, where it is not the service's own."""
    base_model: str | None = None
    """The model's name at the service. Default: `model.name`."""
    rank: Positive = 16
    """Rank of the adapter."""
    train_attn: bool = True
    """Adapt the attention layers."""
    train_mlp: bool = True
    """Adapt the MLP layers."""
    train_unembed: bool = False
    """Adapt the output layer."""
    deadline: Seconds = 600.0
    """Of one call to the service, with its retries; then it is an error."""
    sampler_ttl: Seconds = 7 * 86400.0
    """How long a published sampler is kept there. One that is still in use is exported again before."""
    python: str | None = None
    """Interpreter to run the trainer and the sampler with, where the SDK lives in an environment of its own.
    Default: the running one."""


class TinkerBackendConfig(CloudSection):
    """Trains at Tinker, or at whatever serves its protocol. Needs `instar[tinker]`."""

    type: Literal["tinker"] = "tinker"


class MintBackendConfig(CloudSection):
    """Trains at MinT. Needs `instar[mint]`, in an environment without `instar[tinker]`: MinT pins an older
    tinker. Name that environment's interpreter as `python`."""

    type: Literal["mint"] = "mint"


class WeaverBackendConfig(CloudSection):
    """Trains at Weaver, or at whatever serves its protocol. Needs `instar[weaver]`."""

    type: Literal["weaver"] = "weaver"


class AutoBackendConfig(CloudSection):
    """Chosen at start: the service that the key, the URL or the environment names, else `local`."""

    type: Literal["auto"] = "auto"


class VerlBackendConfig(Section):
    """Trains sharded (FSDP) through verl's workers on Ray. Needs verl in an environment of its own, whose
    interpreter is `python`."""

    type: Literal["verl"] = "verl"
    lora: LoraConfig | None = LoraConfig()
    """The adapter; `null` trains all weights."""
    ranks: Positive = 2
    """Processes that the model is sharded over: one per GPU, or so many on the CPU."""
    micro_batch_tokens: Positive = 8192
    """Most tokens in one forward and backward pass of a rank; a longer sample has one to itself."""
    deadline: Seconds = 3600.0
    """Of one call to the workers; then they are given up, and new ones load the last saved state."""
    python: str | None = None
    """Interpreter to run the trainer with. Default: the running one."""


CloudConfig = TinkerBackendConfig | MintBackendConfig | WeaverBackendConfig
"""The training services."""

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


class AdamConfig(Section):
    """The optimizer. Every field is passed explicitly to every backend."""

    lr: Annotated[float, Field(gt=0)] = 2e-4
    """Learning rate after warm-up."""
    beta1: Unit = 0.9
    """Decay of the first moment."""
    beta2: Unit = 0.95
    """Decay of the second moment."""
    eps: Annotated[float, Field(gt=0)] = 1e-8
    """Added to the denominator."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Decoupled weight decay."""
    grad_clip_norm: Annotated[float, Field(ge=0)] = 1.0
    """Largest global gradient norm; 0 does not clip."""


LossName = Literal["importance_sampling", "ppo", "cispo", "cross_entropy", "dro"]


class LossConfig(Section):
    """What is minimised: a plain sum over trained tokens."""

    name: LossName = "importance_sampling"
    """The loss."""
    clip_low: float | None = None
    """Lowest importance ratio. Default: ppo 0.8, cispo 0."""
    clip_high: float | None = None
    """Highest importance ratio. Default: ppo 1.2, cispo 4."""
    beta: Annotated[float, Field(ge=0)] | None = None
    """How strongly dro holds to the old logprobs. Default: 0.05."""
