"""Config sections for the training backend, the loss and the optimizer."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, SecretStr

from instar.config.base import PluginConfig, PositiveInt, Seconds, Section, type_shorthand


class LoraConfig(Section):
    """A low-rank adapter on the base model."""

    rank: PositiveInt = 16
    """Rank of the adapter."""
    alpha: float = 32.0
    """Scale of the adapter: its output is multiplied by `alpha` / `rank`."""
    targets: list[str] | Literal["all-linear"] = "all-linear"
    """Names of the modules to adapt, or `all-linear` for all linear layers except the output layer. Experts
    whose weights are stored as one tensor cannot be adapted."""


class LocalBackendConfig(Section):
    """Trains with torch, in the trainer's process."""

    type: Literal["local"] = "local"
    lora: LoraConfig | None = LoraConfig()
    """The adapter; `null` trains all weights."""
    micro_batch_tokens: PositiveInt = 8192
    """Maximum number of tokens in one forward and backward pass. A prefix that several samples share counts
    once. A sample that exceeds the limit gets its own pass."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: slower, but needs less memory."""
    threads: PositiveInt | None = None
    """Number of torch CPU threads. Default: all cores, or half of them while a local engine is busy."""
    python: str | None = None
    """Python interpreter for the trainer process. Default: the running interpreter."""


class CloudSection(Section):
    """Settings shared by all training services."""

    base_url: str | None = None
    """URL of the service. Default: the value of `TINKER_BASE_URL`, `MINT_BASE_URL` or `WEAVER_BASE_URL`,
    depending on the service; if unset, the service's public URL."""
    api_key: SecretStr | None = None
    """API key. Default: the value of the environment variable named by `api_key_env`."""
    api_key_env: str | None = None
    """Environment variable with the key. Default: `TINKER_API_KEY`, `MINT_API_KEY` or `WEAVER_API_KEY`."""
    base_model: str | None = None
    """Name of the model on the service. Default: `model.name`."""
    rank: PositiveInt = 16
    """Rank of the adapter."""
    train_attn: bool = True
    """Adapt the attention layers."""
    train_mlp: bool = True
    """Adapt the MLP layers."""
    train_unembed: bool = False
    """Adapt the output layer."""
    deadline: Seconds = 600.0
    """Timeout for one call to the service, including retries, in seconds."""
    sampler_ttl: Seconds = 7 * 86400.0
    """Seconds that the service keeps a published sampler. A sampler in use is renewed before it expires."""
    python: str | None = None
    """Python interpreter for the trainer and the sampler, if the SDK is installed in a separate environment.
    Default: the running interpreter."""


class TinkerBackendConfig(CloudSection):
    """Trains on Tinker, or on a server that speaks its protocol. Needs `instar[tinker]`."""

    type: Literal["tinker"] = "tinker"


class MintBackendConfig(CloudSection):
    """Trains on MinT. Needs `instar[mint]`, in an environment without `instar[tinker]`, because MinT pins an
    older tinker. Set `python` to that environment's interpreter."""

    type: Literal["mint"] = "mint"


class WeaverBackendConfig(CloudSection):
    """Trains on Weaver, or on a server that speaks its protocol. Needs `instar[weaver]`."""

    type: Literal["weaver"] = "weaver"


class AutoBackendConfig(CloudSection):
    """Chooses the backend when the run starts: the service that `base_url`, `api_key` or `api_key_env`
    identifies, or else the one whose environment variables are set. If a URL or key does not identify a
    service, the only installed one is used. If there is no URL or key, `local` is used."""

    type: Literal["auto"] = "auto"


class VerlBackendConfig(Section):
    """Trains a sharded model (FSDP) with verl's workers on Ray. Needs verl in a separate environment; set
    `python` to its interpreter."""

    type: Literal["verl"] = "verl"
    lora: LoraConfig | None = LoraConfig()
    """The adapter; `null` trains all weights."""
    ranks: PositiveInt = 2
    """Number of processes (ranks) to shard the model over. On GPUs, each process has its own GPU."""
    micro_batch_tokens: PositiveInt = 8192
    """Maximum number of tokens per pass on each rank, or the length of the longest sample if that is more."""
    deadline: Seconds = 3600.0
    """Timeout for one call to the workers, in seconds. After a timeout, new workers are started and load the
    last saved state."""
    python: str | None = None
    """Python interpreter for the trainer process. Default: the running interpreter."""


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
    """Settings of the Adam optimizer. All are passed to the backend, so its own defaults never apply."""

    lr: Annotated[float, Field(gt=0, le=10)] = 3e-4
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
    """The loss, which is a sum over trained tokens. `trainer.advantage.normalize` sets its divisor."""

    name: LossName = "ppo"
    """Objective per token. `importance_sampling`: ratio · advantage. `ppo`: the minimum of that and clipped
    ratio · advantage. `cispo`: clipped ratio · advantage · logprob, without a gradient through the ratio.
    `cross_entropy`: advantage · logprob. `dro`: the same, minus a penalty on the squared log ratio."""
    clip_low: float | None = None
    """Lower bound of the importance ratio for `ppo` and `cispo`. Default: 0.8 for `ppo`, 0 for `cispo`."""
    clip_high: float | None = None
    """Upper bound of the importance ratio for `ppo` and `cispo`. Default: 1.2 for `ppo`, 4 for `cispo`."""
    beta: Annotated[float, Field(ge=0)] | None = None
    """Strength of the `dro` penalty. Default: 0.05."""
