"""The background trainer."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from instar.config.backends import AdamConfig, LossConfig, LossName
from instar.config.base import NonNegative, Positive, Seconds, Section, Unit, type_shorthand
from instar.config.engines import EngineConfig, LocalEngineConfig
from instar.config.model import ModelConfig


class AdvantageConfig(Section):
    """From rewards to advantages, within a group."""

    estimator: Literal["grpo", "grpo_no_std", "rloo", "running", "reward"] = "grpo"
    """`grpo`: (r - mean) / std; `grpo_no_std`: r - mean; `rloo`: r - mean of the others;
    `running`: r - a running mean over sessions, for groups of one; `reward`: r itself, to imitate good data
    with the `cross_entropy` loss."""
    normalize: Literal["batch_tokens", "batch_sessions", "session_tokens", "none"] = "batch_sessions"
    """What a step's token sum is divided by: all trained tokens of the step, the sessions of the step, each
    session's own tokens and then the sessions, or nothing."""
    weight: Annotated[float, Field(ge=0)] = 1.0
    """What rewards count for. 0 trains on `trainer.reference` alone: on-policy distillation."""
    decay: Unit = 0.95
    """How slowly the `running` baseline moves."""


class BaseReferenceConfig(Section):
    """The model that training began with: the own one with its adapter off, or a frozen copy of it where all
    weights are trained."""

    type: Literal["base"] = "base"
    weight: Annotated[float, Field(ge=0)] = 0.0
    """What a token's log-ratio to the reference is weighted with in its advantage; 0 does without."""


class CompletionsReferenceConfig(Section):
    """A teacher behind an OpenAI-compatible `/v1/completions` that returns the logprobs of a prompt. It must
    have the model's own vocabulary."""

    type: Literal["completions"]
    base_url: str
    """Its address, with the `/v1`."""
    model: str
    """Its name there."""
    weight: Annotated[float, Field(ge=0)] = 1.0
    """What a token's log-ratio to the teacher is weighted with in its advantage; 0 does without."""
    api_key_env: str | None = None
    """Environment variable with its key."""
    max_in_flight: Positive = 16
    """Most requests at once."""
    timeout: Seconds = 120.0
    """Deadline of one request, with its retries."""


class EngineReferenceConfig(Section):
    """A teacher that an engine runs: one of its own beside the run's, in a process of its own. It must have
    the model's own vocabulary."""

    type: Literal["engine"]
    model: ModelConfig
    """The teacher."""
    engine: EngineConfig = LocalEngineConfig()
    """What runs it."""
    weight: Annotated[float, Field(ge=0)] = 1.0
    """What a token's log-ratio to the teacher is weighted with in its advantage; 0 does without."""


ReferenceConfig = Annotated[
    BaseReferenceConfig | CompletionsReferenceConfig | EngineReferenceConfig,
    Field(discriminator="type"),
    type_shorthand("base"),
]


class OffPolicyConfig(Section):
    """What is done about tokens that another policy than the trained one has sampled: an older version, or
    the same weights in an engine that computes a little differently."""

    proximal: Literal["behavior", "recompute"] = "behavior"
    """What the loss's ratio is taken to. `behavior`: the logprobs that the engine recorded. `recompute`:
    those of the trained policy as the step begins (decoupled PPO), computed by the backend; the rest of the
    way, from the engine's, is then an importance weight in the advantages."""
    truncate: Annotated[float, Field(gt=0)] | None = None
    """Largest importance weight of a token (truncated importance sampling); needs `proximal: recompute`.
    Default: 2."""
    drop_above: Annotated[float, Field(gt=1)] | None = None
    """Leave out tokens whose importance weight, before it is truncated, is above this or below its inverse;
    needs `proximal: recompute`. Default: none are."""

    @model_validator(mode="after")
    def _weights_are_computed(self) -> Self:
        for name in ("truncate", "drop_above"):
            if (given := getattr(self, name)) is not None and self.proximal != "recompute":
                raise ValueError(
                    f"{name}: given {given:g}, and proximal is {self.proximal!r}, which weighs nothing; "
                    f"leave {name} out, or set proximal to 'recompute'"
                )
        if self.truncate is not None and self.drop_above is not None and self.truncate >= self.drop_above:
            raise ValueError(
                f"truncate: given {self.truncate:g}, and drop_above is {self.drop_above:g}: what would be "
                "truncated is left out before. truncate must be below drop_above"
            )
        return self


class CorrectionsConfig(Section):
    """Answers that people corrected, trained as what should have been said there."""

    weight: Annotated[float, Field(ge=0)] = 1.0
    """What a corrected answer's tokens count for, beside the advantages of a step; 0 trains none."""
    per_step: Positive = 4
    """Most of them in one step, oldest first."""


class TrainerConfig(Section):
    """The background trainer."""

    mode: Literal["async", "sync"] = "async"
    """`async`: rollouts run ahead by at most `max_staleness` versions. `sync`: strict alternation,
    reproducible."""
    steps: Positive = 20
    """Optimizer steps of the run."""
    seconds: Seconds | None = None
    """Stop after this much time of training, evaluation apart, if `steps` is not reached before."""
    groups_per_step: Positive = 6
    """Groups consumed by one step."""
    max_staleness: NonNegative | None = None
    """Versions that a trained token may be behind; what becomes of older ones, `stale` says. Default: 1 in
    `async` mode; `sync` mode allows only 0."""
    stale: Literal["drop", "mask"] = "drop"
    """What becomes of a sample with tokens too old. `drop`: it is dropped with that reason. `mask`: its other
    tokens, sampled after a later update, are trained; it is dropped where there are none."""
    off_policy: OffPolicyConfig = OffPolicyConfig()
    loss: LossConfig = LossConfig()
    loss_fallback: LossName | None = None
    """The loss to take instead where the backend does not compute `loss`, with a warning in the log and the
    report. Default: such a loss is an error at start."""
    reference: ReferenceConfig = BaseReferenceConfig()
    """What the policy is held to, or learns from, token by token."""
    adam: AdamConfig = AdamConfig()
    advantage: AdvantageConfig = AdvantageConfig()
    corrections: CorrectionsConfig = CorrectionsConfig()
    warmup_steps: NonNegative = 3
    """Steps over which the learning rate rises to its value."""
    schedule: Literal["constant", "linear"] = "constant"
    """What the learning rate does after warm-up: stay, or fall towards zero at the end of `steps` or
    `seconds`, whichever is nearer."""
    checkpoint_every: Positive = 1
    """Steps between two checkpoints. Steps after the last one are trained again after a crash."""
    keep_checkpoints: Positive = 2
    """Checkpoints and published artifacts kept, newest first."""
    tensorboard: bool | None = None
    """Write TensorBoard event files beside metrics.jsonl. Default: where it is installed."""

    @model_validator(mode="after")
    def _loss_fits(self) -> Self:
        for loss in (self.loss.name, self.loss_fallback):
            if loss == "cross_entropy" and self.off_policy.proximal == "recompute":
                raise ValueError(
                    "off_policy.proximal: given 'recompute'; cross_entropy imitates what is there, whoever "
                    "sampled it. Leave it out, or take another loss"
                )
            if loss == "dro" and self.advantage.normalize == "session_tokens":
                raise ValueError(
                    "advantage.normalize: given 'session_tokens'; dro's distance has one weight for all "
                    "tokens of a step. Use batch_tokens or batch_sessions, or another loss"
                )
        return self
