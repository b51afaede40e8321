"""Correct a batch for off-policy tokens, and update the weights with it in one optimizer step."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from instar.backends.base import DEFAULT_BETA, Backend, ForwardBackwardResult, OptimStepResult
from instar.config import AdamConfig, LossConfig, OffPolicyConfig, TrainerConfig
from instar.data.batcher import StepBatch
from instar.data.off_policy import apply_decoupled_ppo, compute_importance_metrics
from instar.types import Json, Sample

CORRECTION_LOSS = LossConfig(name="cross_entropy")


@dataclass(frozen=True, slots=True)
class UpdateResult:
    """The results of one training step."""

    samples: ForwardBackwardResult | None
    """None if the step had no samples."""
    corrections: ForwardBackwardResult | None
    """The result for replies that users corrected, or None if the step had no corrections."""
    optimizer: OptimStepResult


async def correct_off_policy(
    batch: StepBatch, backend: Backend, config: OffPolicyConfig
) -> tuple[StepBatch, Json]:
    """Apply the off-policy correction, unless `proximal` is `behavior`. Return the corrected batch and its
    metrics. Samples that have no trained tokens left are removed from the batch."""
    if config.proximal == "behavior":
        return batch, {}
    started = time.monotonic()
    proximal = await backend.forward(batch.samples)
    samples, scales, metrics = apply_decoupled_ppo(batch.samples, batch.scales, proximal, config)
    trained = [index for index, sample in enumerate(samples) if sample.trained_tokens]
    corrected = replace(batch, samples=[samples[i] for i in trained], scales=[scales[i] for i in trained])
    importance = compute_importance_metrics(batch.samples, proximal)
    return corrected, {**metrics, **importance, "proximal_seconds": time.monotonic() - started}


def scale_loss(loss: LossConfig, divisor: float) -> LossConfig:
    """Return the loss with the `beta` of `dro` divided by ``divisor``, as the advantages already are."""
    if loss.name != "dro":
        return loss
    beta = DEFAULT_BETA if loss.beta is None else loss.beta
    return loss.model_copy(update={"beta": beta / divisor})


def schedule_adam(settings: TrainerConfig, step: int, seconds: float, scale: float = 1.0) -> AdamConfig:
    """Return the optimizer's settings for ``step``, which starts after ``seconds`` of training. ``scale`` is
    the effect of rewinds on the learning rate."""
    scale *= min(1.0, step / (settings.warmup_steps + 1))
    if settings.schedule == "linear":
        progress = (step - 1) / settings.steps
        if settings.seconds is not None:
            progress = max(progress, seconds / settings.seconds)
        scale *= max(0.05, 1.0 - progress)
    return settings.adam.model_copy(update={"lr": settings.adam.lr * scale})


async def apply_update(
    backend: Backend,
    samples: Sequence[Sample],
    loss: LossConfig,
    corrections: Sequence[Sample],
    adam: AdamConfig,
) -> UpdateResult:
    # All calls are submitted before the first one is awaited, because a remote backend pipelines them.
    sample_pass = await _submit(backend, samples, loss)
    correction_pass = await _submit(backend, corrections, CORRECTION_LOSS)
    optimizer_step = asyncio.ensure_future(backend.optim_step(adam))
    try:
        return UpdateResult(
            await sample_pass if sample_pass else None,
            await correction_pass if correction_pass else None,
            await optimizer_step,
        )
    except BaseException:  # including cancellation: no call may outlive this function
        calls: list[asyncio.Future[Any] | None] = [sample_pass, correction_pass, optimizer_step]
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
