"""One optimizer step: the gradients of a step's samples and corrections, applied together."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from instar.backends.base import DEFAULT_BETA, Backend, ForwardBackwardResult, OptimStepResult
from instar.config import AdamConfig, LossConfig, TrainerConfig
from instar.types import Sample

CORRECTION_LOSS = LossConfig(name="cross_entropy")


@dataclass(frozen=True, slots=True)
class UpdateResult:
    """The result of one optimizer step. ``samples`` and ``corrections`` are None if the step had none."""

    samples: ForwardBackwardResult | None
    corrections: ForwardBackwardResult | None
    optimizer: OptimStepResult


def scale_loss(loss: LossConfig, divisor: float) -> LossConfig:
    """Return the loss for advantages that are already divided: its other terms are divided as well."""
    if loss.name != "dro":
        return loss
    beta = DEFAULT_BETA if loss.beta is None else loss.beta
    return loss.model_copy(update={"beta": beta / divisor})


def schedule_adam(settings: TrainerConfig, step: int, seconds: float) -> AdamConfig:
    """Return the optimizer's settings for a step that begins after ``seconds`` of training. The learning rate
    includes the warm-up and the schedule."""
    factor = min(1.0, step / (settings.warmup_steps + 1))
    if settings.schedule == "linear":
        used = (step - 1) / settings.steps
        if settings.seconds is not None:
            used = max(used, seconds / settings.seconds)
        factor *= max(0.05, 1.0 - used)
    return settings.adam.model_copy(update={"lr": settings.adam.lr * factor})


async def apply_update(
    backend: Backend,
    samples: Sequence[Sample],
    loss: LossConfig,
    corrections: Sequence[Sample],
    adam: AdamConfig,
) -> UpdateResult:
    # Every call is issued before the first is awaited, because a remote backend pipelines them.
    sample_pass = await _submit(backend, samples, loss)
    correction_pass = await _submit(backend, corrections, CORRECTION_LOSS)
    optimizer_step = asyncio.ensure_future(backend.optim_step(adam))
    try:
        return UpdateResult(
            await sample_pass if sample_pass else None,
            await correction_pass if correction_pass else None,
            await optimizer_step,
        )
    except BaseException:  # also on cancellation, no call may still be running when the error is handled
        calls: list[asyncio.Future[Any] | None] = [sample_pass, correction_pass, optimizer_step]
        await asyncio.gather(*filter(None, calls), return_exceptions=True)
        raise


async def _submit(
    backend: Backend, samples: Sequence[Sample], loss: LossConfig
) -> asyncio.Future[ForwardBackwardResult] | None:
    if not samples:
        return None
    call = asyncio.ensure_future(backend.forward_backward(samples, loss))
    await asyncio.sleep(0)
    return call
