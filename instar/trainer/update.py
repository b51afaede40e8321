"""Correct a batch for off-policy tokens, and update the weights with it once or several times."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from instar.backends.base import DEFAULT_BETA, Backend, ForwardBackwardResult, OptimStepResult
from instar.config import AdamConfig, LossConfig, OffPolicyConfig, RunConfig, TrainerConfig
from instar.data.batcher import StepBatch
from instar.data.corrections import report_corrections
from instar.data.off_policy import apply_decoupled_ppo, compute_importance_metrics, estimate_kl
from instar.data.supervised import SupervisedBatch
from instar.reference.penalty import ReferencePenalty
from instar.trainer.preferences import weigh_preferences
from instar.types import Floats, Json, Sample

SUPERVISED_LOSS = LossConfig(name="cross_entropy")
MIN_LR_CHANGE, MAX_LR_CHANGE = 0.5, 1.1
"""The limits of the factor by which the KL of one step changes the learning rate."""
MIN_LR_SCALE = 0.01
"""The minimum of the learning rate's scale, so that training continues even if the KL does not fall."""
MIN_KL = 1e-9
MAX_BASE_WEIGHT = 64.0
"""The maximum weight of the KL to the base model. It starts at 1, the weight of a large advantage."""
MAX_MEASURED_SAMPLES = 8
"""The maximum number of samples on which the KL of a step is measured."""


@dataclass(frozen=True, slots=True)
class StepSamples:
    own: Sequence[Sample]
    """The samples of the step's groups, for the run's loss."""
    supervised: Sequence[Sample] = ()
    """Weighted samples for the cross-entropy loss."""
    replies: Sequence[Sample] = ()
    """Replies of the policy on which the KL is measured, in addition to the step's groups."""


@dataclass(frozen=True, slots=True)
class UpdateResult:
    """The results of the first update of a training step."""

    samples: ForwardBackwardResult | None
    """None if the step had no samples."""
    supervised: ForwardBackwardResult | None
    """The result for the samples with the cross-entropy loss, or None if the step had none."""
    optimizer: OptimStepResult


async def correct_off_policy(
    batch: StepBatch, backend: Backend, config: OffPolicyConfig
) -> tuple[StepBatch, Json]:
    """Apply the off-policy correction to the samples in ``batch.recomputed``. Return the corrected batch and
    its metrics. Samples that have no trained tokens left are removed from the batch."""
    indices = [i for i, sample in enumerate(batch.samples) if sample.sample_key in batch.recomputed]
    if not indices:
        return batch, {}
    started = time.monotonic()
    samples, scales = list(batch.samples), list(batch.scales)
    recomputed = [samples[i] for i in indices]
    proximal = await backend.forward(recomputed)
    results = apply_decoupled_ppo(recomputed, [scales[i] for i in indices], proximal, config)
    metrics = results[2]
    for i, sample, scale in zip(indices, *results[:2], strict=True):
        samples[i], scales[i] = sample, scale
    trained = [index for index, sample in enumerate(samples) if sample.trained_tokens]
    corrected = replace(batch, samples=[samples[i] for i in trained], scales=[scales[i] for i in trained])
    importance = compute_importance_metrics(recomputed, proximal)
    return corrected, {**metrics, **importance, "proximal_seconds": time.monotonic() - started}


async def reweight(
    batch: StepBatch, backend: Backend, penalty: ReferencePenalty | None, config: OffPolicyConfig
) -> tuple[StepBatch, Json]:
    """Apply the off-policy correction and the reference penalty. Return the new batch and its metrics."""
    batch, metrics = await correct_off_policy(batch, backend, config)
    if batch.samples and penalty is not None:
        samples, penalty_metrics = await penalty.apply(batch.samples, batch.scales)
        batch = replace(batch, samples=samples)
        metrics |= penalty_metrics
    return batch, metrics


def scale_loss(loss: LossConfig, divisor: float) -> LossConfig:
    """Return the loss with the `beta` of `dro` divided by ``divisor``, as the advantages already are."""
    if loss.name != "dro":
        return loss
    beta = DEFAULT_BETA if loss.beta is None else loss.beta
    return loss.model_copy(update={"beta": beta / (divisor or 1.0)})  # 0 if the step has no groups


def schedule_adam(settings: TrainerConfig, step: int, seconds: float, scale: float = 1.0) -> AdamConfig:
    """Return the optimizer's settings for ``step``, which starts after ``seconds`` of training. ``scale`` is
    the effect of rewinds on the learning rate."""
    scale *= min(1.0, step / (settings.warmup_steps + 1))
    if settings.schedule == "linear":
        progress = (step - 1) / settings.steps
        if settings.seconds is not None:
            progress = max(progress, seconds / settings.seconds)
        scale *= max(0.05, 1.0 - progress)
    return _scale_lr(settings.adam, scale)


@dataclass
class KlLimiter:
    """Lowers the learning rate while steps change the policy by more than `trainer.max_kl`, and pulls it back
    to the base model while all steps together have changed it by more than `live.replay.max_base_kl`."""

    max_kl: float | None
    lr_scale: float = 1.0
    max_base_kl: float | None = None
    base_weight: float = 0.0
    """The weight of the KL to the base model in the loss."""

    @classmethod
    def from_config(cls, config: RunConfig) -> KlLimiter:
        is_imitation = config.trainer.loss.name == "cross_entropy"
        return cls(None if is_imitation else config.trainer.max_kl, max_base_kl=config.max_base_kl)

    def restore(self, lr_scale: float, base_weight: float) -> None:
        self.lr_scale, self.base_weight = lr_scale, base_weight

    @property
    def is_active(self) -> bool:
        return self.max_kl is not None or self.max_base_kl is not None

    async def penalize_base_kl(
        self, samples: Sequence[Sample], logprobs: Sequence[Floats], backend: Backend
    ) -> tuple[list[Sample], Json]:
        """Measure the KL between the base model and the policy, whose logprobs of the samples are given, and
        adapt its weight. Return the metrics, and samples whose cross-entropy loss has the gradient of the KL
        as `estimate_kl` computes it, or none if the weight is 0."""
        if self.max_base_kl is None or not samples:
            return [], {}
        base = await backend.reference_logprobs(samples)
        kl = estimate_kl(samples, base, logprobs)
        if kl is None:
            return [], {}
        if kl > self.max_base_kl:
            self.base_weight = min(max(2 * self.base_weight, 1.0), MAX_BASE_WEIGHT)
        else:
            self.base_weight = self.base_weight / 2 if self.base_weight > 1.0 else 0.0
        penalties: list[Sample] = []
        for sample, reference, current in zip(samples, base, logprobs, strict=True):
            pull = np.where(sample.mask > 0, reference - current, 0.0) * self.base_weight / len(samples)
            penalties.append(replace(sample, advantages=pull.astype(np.float32)))
        metrics: Json = {"base_kl": kl, "base_kl_weight": self.base_weight}
        return penalties if self.base_weight else [], metrics

    def adapt(self, kl: float | None) -> None:
        """Adapt the scale after a step with this KL, which grows with the square of the learning rate."""
        if self.max_kl is not None and kl is not None:
            change = math.sqrt(self.max_kl / max(kl, MIN_KL))
            scale = self.lr_scale * min(max(change, MIN_LR_CHANGE), MAX_LR_CHANGE)
            self.lr_scale = min(max(scale, MIN_LR_SCALE), 1.0)


async def weigh_supervised(
    batch: SupervisedBatch, backend: Backend, settings: TrainerConfig
) -> tuple[list[Sample], Json]:
    """Return the samples for the cross-entropy loss, corrections first, and the metrics of preferences and
    replay."""
    preferences, metrics = await weigh_preferences(batch.pairs, backend, settings.preferences)
    metrics |= {"replayed": len(batch.replayed)} if batch.replayed else {}
    return [*batch.corrections, *preferences, *batch.replayed], metrics


async def apply_updates(
    backend: Backend,
    samples: StepSamples,
    loss: LossConfig,
    adam: AdamConfig,
    count: int,
    limiter: KlLimiter,
) -> tuple[UpdateResult, Json]:
    """Update the weights ``count`` times, the first time also with the supervised samples. ``adam`` does not
    include the limiter's scale. Return the results of the first update, and the KL of all updates together if
    it is limited."""
    measured = select_measured([*samples.own, *samples.replies]) if limiter.is_active else []
    before = await backend.forward(measured) if measured else []
    penalties, metrics = await limiter.penalize_base_kl(measured, before, backend)
    scaled_adam = _scale_lr(adam, limiter.lr_scale)
    first = await apply_update(backend, samples.own, loss, [*samples.supervised, *penalties], scaled_adam)
    for _ in range(count - 1 if samples.own else 0):
        await apply_update(backend, samples.own, loss, [], scaled_adam)
    if not measured or limiter.max_kl is None:
        return first, metrics
    # `forward_backward` may round differently, so its logprobs cannot be compared with those of `forward`.
    kl = estimate_kl(measured, before, await backend.forward(measured))
    limiter.adapt(kl)
    return first, metrics | ({} if kl is None else {"step_kl": kl, "kl_lr_scale": limiter.lr_scale})


def report_update(batch: StepBatch, result: UpdateResult, settings: TrainerConfig) -> Json:
    """Return the metrics of a step's first update."""
    metrics: Json = {}
    if result.samples is not None:
        if settings.off_policy.proximal == "behavior":
            metrics |= compute_importance_metrics(batch.samples, result.samples.logprobs)
        metrics |= {**result.samples.metrics, "loss": result.samples.loss}
    if result.supervised is not None:
        metrics |= report_corrections(batch.supervised.corrections, result.supervised.logprobs)
    return {**metrics, **result.optimizer.metrics, "grad_norm": result.optimizer.grad_norm}


def select_measured(samples: Sequence[Sample]) -> list[Sample]:
    """Return up to MAX_MEASURED_SAMPLES samples, spread evenly over the groups of the step."""
    return list(samples[:: -(-len(samples) // MAX_MEASURED_SAMPLES) or 1])


def _scale_lr(adam: AdamConfig, scale: float) -> AdamConfig:
    return adam.model_copy(update={"lr": adam.lr * scale})


async def apply_update(
    backend: Backend,
    samples: Sequence[Sample],
    loss: LossConfig,
    supervised: Sequence[Sample],
    adam: AdamConfig,
) -> UpdateResult:
    # All calls are submitted before the first one is awaited, because a remote backend pipelines them.
    sample_pass = await _submit(backend, samples, loss)
    supervised_pass = await _submit(backend, supervised, SUPERVISED_LOSS)
    optimizer_step = asyncio.ensure_future(backend.optim_step(adam))
    try:
        return UpdateResult(
            await sample_pass if sample_pass else None,
            await supervised_pass if supervised_pass else None,
            await optimizer_step,
        )
    except BaseException:  # including cancellation: no call may outlive this function
        calls: list[asyncio.Future[Any] | None] = [sample_pass, supervised_pass, optimizer_step]
        await asyncio.gather(*filter(None, calls), return_exceptions=True)
        raise


async def _submit(
    backend: Backend, samples: Sequence[Sample], loss: LossConfig
) -> asyncio.Future[ForwardBackwardResult] | None:
    if not samples:
        return None
    call = asyncio.ensure_future(backend.forward_backward(samples, loss))
    await asyncio.sleep(0)  # let the call start, so that the backend receives the calls in order
    return call
