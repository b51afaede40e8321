"""One optimizer step: the gradients of a step's samples and lessons, applied together."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from instar.backends.base import DEFAULT_BETA, Backend, ForwardBackwardResult, OptimStepResult
from instar.config import AdamConfig, LossConfig
from instar.types import Sample

CORRECTION_LOSS = LossConfig(name="cross_entropy")


@dataclass(frozen=True, slots=True)
class UpdateResult:
    samples: ForwardBackwardResult | None
    """What the samples came to; None where there were none. So of the lessons."""
    corrections: ForwardBackwardResult | None
    optimizer: OptimStepResult


def scale_loss(loss: LossConfig, divisor: float) -> LossConfig:
    """The loss over advantages that are divided already: what else it sums up is divided alike."""
    if loss.name != "dro":
        return loss
    beta = DEFAULT_BETA if loss.beta is None else loss.beta
    return loss.model_copy(update={"beta": beta / divisor})


async def apply_update(
    backend: Backend, samples: Sequence[Sample], loss: LossConfig, lessons: Sequence[Sample], adam: AdamConfig
) -> UpdateResult:
    """Issue every call before awaiting the first: a remote backend pipelines them."""
    forward = await _submit(backend, samples, loss)
    lesson = await _submit(backend, lessons, CORRECTION_LOSS)
    optim = asyncio.ensure_future(backend.optim_step(adam))
    try:
        done = await forward if forward else None
        taught = await lesson if lesson else None
        return UpdateResult(done, taught, await optim)
    except BaseException:
        under_way: list[asyncio.Future[Any] | None] = [forward, lesson, optim]
        await asyncio.gather(*filter(None, under_way), return_exceptions=True)
        raise


async def _submit(
    backend: Backend, samples: Sequence[Sample], loss: LossConfig
) -> asyncio.Future[ForwardBackwardResult] | None:
    if not samples:
        return None
    call = asyncio.ensure_future(backend.forward_backward(samples, loss))
    await asyncio.sleep(0)
    return call
