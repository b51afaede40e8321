"""Config sections for the trainer, the advantages and the reference model."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self, cast

from pydantic import Field, field_validator, model_validator

from instar.config.backends import AdamConfig, LossConfig, LossName
from instar.config.base import NonNegativeFloat, NonNegativeInt, PositiveInt, Seconds, Section, type_shorthand
from instar.config.engines import EngineConfig, LocalEngineConfig
from instar.config.model import ModelConfig

CLIPPED_LOSSES = ("ppo", "cispo")
DEFAULT_LOSS_FALLBACK = "importance_sampling"
"""Replaces the default loss on backends that do not support it."""
PRESETS: dict[str, dict[str, Any]] = {"fast": {"groups_per_step": 3}, "careful": {"adam": {"lr": 1e-4}}}
"""The settings of each `trainer.preset` that differ from the defaults."""


class AdvantageConfig(Section):
    """How the advantages of a group are computed from the rewards of its sessions."""

    estimator: Literal["grpo", "grpo_no_std", "rloo", "running", "reward"] = "grpo"
    """Advantage of a session with reward r. `grpo`: (r - mean) / std; `grpo_no_std`: r - mean; `rloo`: r
    minus the mean of the other sessions; `running`: r minus a running mean over sessions, for groups of one;
    `reward`: r itself, to imitate good data with the `cross_entropy` loss."""
    normalize: Literal["batch_tokens", "batch_sessions", "session_tokens", "none"] = "batch_sessions"
    """Divisor of the loss, which is a sum over the tokens of a step. `batch_tokens`: the number of trained
    tokens in the step. `batch_sessions`: the number of sessions in the step. `session_tokens`: the number of
    trained tokens in the token's session, times the number of sessions. `none`: 1."""
    weight: NonNegativeFloat = 1.0
    """Weight of the advantages. 0 trains on `trainer.reference` alone, which is on-policy distillation."""
    decay: Annotated[float, Field(ge=0, le=1)] = 0.95
    """Decay of the `running` baseline, which changes more slowly the closer the decay is to 1."""


class BaseReferenceConfig(Section):
    """Uses the base model as the reference: the trained model without its adapter, or a frozen copy if all
    weights are trained."""

    type: Literal["base"] = "base"
    weight: NonNegativeFloat = 0.0
    """Coefficient of the KL penalty that is subtracted from the advantages; 0 disables the reference."""


class CompletionsReferenceConfig(Section):
    """Uses a teacher behind an OpenAI-compatible `/v1/completions` endpoint that returns prompt logprobs. The
    teacher must have the same vocabulary as the model."""

    type: Literal["completions"]
    base_url: str
    """Base URL of the teacher, including `/v1`."""
    model: str
    """Name of the teacher's model on that server."""
    weight: NonNegativeFloat = 1.0
    """Coefficient of the KL penalty that is subtracted from the advantages; 0 disables the teacher."""
    api_key_env: str | None = None
    """Environment variable with the API key. Default: requests are sent without a key."""
    max_in_flight: PositiveInt = 16
    """Maximum number of concurrent requests."""
    timeout: Seconds = 120.0
    """Timeout for one request, including retries, in seconds."""


class EngineReferenceConfig(Section):
    """Uses a teacher in an additional engine. The teacher must have the same vocabulary as the model."""

    type: Literal["engine"]
    model: ModelConfig
    """Model of the teacher."""
    engine: EngineConfig = LocalEngineConfig()
    """Engine that runs the teacher."""
    weight: NonNegativeFloat = 1.0
    """Coefficient of the KL penalty that is subtracted from the advantages; 0 disables the teacher."""

    @field_validator("model")
    @classmethod
    def _reject_adapter(cls, model: ModelConfig) -> ModelConfig:
        if model.adapter is not None:
            raise ValueError(
                f"adapter: a teacher is served without an adapter, got {model.adapter!r}; merge it into the "
                "teacher's weights"
            )
        return model


ReferenceConfig = Annotated[
    BaseReferenceConfig | CompletionsReferenceConfig | EngineReferenceConfig,
    Field(discriminator="type"),
    type_shorthand("base"),
]


class OffPolicyConfig(Section):
    """Corrections for tokens sampled by an older policy version or with slightly different numerics."""

    proximal: Literal["behavior", "recompute"] = "behavior"
    """Denominator of the importance ratio in the loss. `behavior`: the logprobs recorded by the engine.
    `recompute`: the logprobs of the trained policy at the start of the step (decoupled PPO), computed by the
    backend. Their ratio to the engine's logprobs becomes an importance weight in the advantages."""
    truncate: Annotated[float, Field(gt=0)] | None = None
    """Maximum importance weight of a token (truncated importance sampling); needs `proximal: recompute`.
    Default: 2."""
    drop_above: Annotated[float, Field(gt=1)] | None = None
    """Drop tokens whose importance weight, before truncation, is above this value or below its inverse; needs
    `proximal: recompute`. Default: no tokens are dropped."""

    @model_validator(mode="after")
    def _check_importance_settings(self) -> Self:
        for name in ("truncate", "drop_above"):
            if getattr(self, name) is not None and self.proximal != "recompute":
                raise ValueError(
                    f"{name}: needs proximal 'recompute', because {self.proximal!r} has no importance weights"
                )
        if self.truncate is not None and self.drop_above is not None and self.truncate >= self.drop_above:
            raise ValueError(
                f"truncate: must be below drop_above ({self.drop_above:g}), got {self.truncate:g}, because "
                "tokens are dropped before weights are truncated"
            )
        return self


class CorrectionsConfig(Section):
    """Trains on replies that people corrected."""

    weight: NonNegativeFloat = 1.0
    """Weight of the tokens in a corrected reply, relative to a step's advantages; 0 disables corrections."""
    per_step: PositiveInt = 4
    """Maximum number of corrections in one step, oldest first."""


class PreferencesConfig(Section):
    """Trains on pairs of replies of which people preferred one (DPO)."""

    weight: NonNegativeFloat = 1.0
    """Weight of the tokens in both replies, relative to a step's advantages. It is multiplied by the
    probability that the policy would choose the other reply, which is 1/2 at first; 0 disables
    preferences."""
    beta: Annotated[float, Field(gt=0)] = 0.1
    """How far the policy may move from the base model to satisfy a preference: further if it is lower."""
    per_step: PositiveInt = 4
    """Maximum number of preferences in one step, oldest first."""


class TrainerConfig(Section):
    """Settings of the trainer."""

    preset: Literal["fast", "careful"] | None = None
    """Values of settings that are not given. `fast`: 3 groups per step, which learns most from the first
    hundreds of samples, but stops learning earlier. `careful`: a learning rate of 1e-4, which is slower and
    ends higher in long runs. Default: the defaults below."""
    mode: Literal["async", "sync"] = "async"
    """`async`: rollouts run ahead of the trainer by at most `max_staleness` steps. `sync`: rollouts and
    training strictly alternate, which makes the run reproducible."""
    steps: PositiveInt = 20
    """Number of training steps. Each has `updates_per_step` optimizer updates. In a run on live traffic, each
    policy is trained for this many steps, and the other settings of this section apply to each as well."""
    seconds: Seconds | None = None
    """Maximum training time in seconds, excluding the evaluations before and after. Default: no maximum."""
    groups_per_step: PositiveInt = 6
    """Number of groups in one step."""
    max_staleness: NonNegativeInt | None = None
    """Maximum number of training steps between the policy that sampled a token and the policy that trains on
    it. `stale` sets what happens to older tokens. Default: 1 in `async` mode; `sync` mode allows only 0."""
    stale: Literal["drop", "mask"] = "drop"
    """How to handle samples that contain tokens older than `max_staleness`. `drop`: drop the samples, with
    the reason `stale`. `mask`: train only on their newer tokens, and drop samples that have none."""
    off_policy: OffPolicyConfig = OffPolicyConfig()
    loss: LossConfig = LossConfig()
    loss_fallback: LossName | None = None
    """Loss to use if the backend does not support `loss`. The log and the report then contain a warning.
    Default: `importance_sampling` if `loss` is not given; otherwise none, so that a run with an unsupported
    loss does not start."""
    reference: ReferenceConfig = BaseReferenceConfig()
    """Model that the policy stays close to or learns from, token by token."""
    adam: AdamConfig = AdamConfig()
    advantage: AdvantageConfig = AdvantageConfig()
    corrections: CorrectionsConfig = CorrectionsConfig()
    preferences: PreferencesConfig = PreferencesConfig()
    updates_per_step: PositiveInt | None = None
    """Number of optimizer updates on the samples of a step. Each update computes the gradient again, with
    ratios between the current policy and the one that sampled or, with `off_policy.proximal: recompute`, the
    policy at the start of the step. Default: 2 for losses that clip these ratios (`ppo` and `cispo`), else
    1."""
    max_kl: Annotated[float, Field(gt=0)] | None = 0.03
    """Maximum KL divergence per token between the policies before and after a step. The learning rate is
    lowered while steps exceed it, to at least 1%, and rises again to at most `adam.lr`. The KL is measured by
    forward passes over up to 8 samples before and after the step. Imitation (`cross_entropy`) is not
    limited. null: no maximum."""
    warmup_steps: NonNegativeInt = 0
    """Number of initial steps in which the learning rate rises linearly towards `adam.lr`."""
    schedule: Literal["constant", "linear"] = "constant"
    """Learning rate after warm-up. `constant`: `adam.lr`. `linear`: falls linearly until the end of `steps`
    or `seconds`, whichever comes first, but not below 5% of `adam.lr`."""
    checkpoint_every: PositiveInt = 1
    """Number of steps between checkpoints. In a run on live traffic, a policy is also saved before another
    one is trained. After a crash, the steps since the last one are trained again."""
    keep_checkpoints: PositiveInt = 2
    """Number of checkpoints and published artifacts to keep, newest first. If the newest checkpoint is
    damaged, the run resumes from the next older one, so keep at least 2."""
    on_collapse: Literal["warn", "stop", "rewind"] = "warn"
    """Reaction to a collapse: most outputs of a group become identical while the tasks are not solved, or the
    held-out score falls. `warn`: only show a warning. `stop`: save and stop the run. `rewind`: restore the
    checkpoint with the best recent reward, halve the learning rate and continue, up to three times."""
    stop_timeout: Seconds = 60.0
    """Seconds that the trainer has to finish and save the current step after Ctrl-C. After that, it is
    killed, and `--resume` repeats the step."""
    tensorboard: bool | None = None
    """Write TensorBoard event files next to metrics.jsonl. Default: true if TensorBoard is installed."""

    @model_validator(mode="before")
    @classmethod
    def _apply_preset(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        settings = cast(dict[str, Any], data)
        preset = PRESETS.get(str(settings.get("preset")), {})
        merged = {**preset, **settings}
        adam = settings.get("adam")
        if isinstance(adam, AdamConfig):
            adam = adam.model_dump(exclude_unset=True)
        if "adam" in preset and isinstance(adam, dict):
            merged["adam"] = {**preset["adam"], **cast(dict[str, Any], adam)}
        if "loss" not in settings:
            merged.setdefault("loss_fallback", DEFAULT_LOSS_FALLBACK)
        return merged

    @property
    def update_count(self) -> int:
        """The number of updates per step, with the default of the loss."""
        return self.updates_per_step or (2 if self.loss.name in CLIPPED_LOSSES else 1)

    @model_validator(mode="after")
    def _check_loss(self) -> Self:
        for loss in (self.loss.name, self.loss_fallback):
            if loss == "cross_entropy" and self.off_policy.proximal == "recompute":
                raise ValueError(
                    "off_policy.proximal: 'recompute' cannot be used with cross_entropy, which has no "
                    "importance ratio"
                )
            if loss == "dro" and self.advantage.normalize == "session_tokens":
                raise ValueError(
                    "advantage.normalize: 'session_tokens' cannot be used with dro, which needs the same "
                    "weight for all tokens of a step. Use batch_tokens or batch_sessions"
                )
        return self
