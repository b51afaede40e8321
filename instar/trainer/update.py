"""One optimizer step: the gradients of a step's samples and lessons, applied together."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from instar.backends.base import DEFAULT_BETA, Backend, ForwardBackward, OptimStep
from instar.config import AdamConfig, LossConfig
from instar.types import Sample

LESSON_LOSS = LossConfig(name="cross_entropy")


@dataclass(frozen=True, slots=True)
class Update:
    done: ForwardBackward | None
    """What the samples came to; None where there were none. So of the lessons."""
    taught: ForwardBackward | None
    moved: OptimStep


def divided(loss: LossConfig, divisor: float) -> LossConfig:
    """The loss over advantages that are divided already: what else it sums up is divided alike."""
    if loss.name != "dro":
        return loss
    beta = DEFAULT_BETA if loss.beta is None else loss.beta
    return loss.model_copy(update={"beta": beta / divisor})


async def update(
    backend: Backend, samples: Sequence[Sample], loss: LossConfig, lessons: Sequence[Sample], adam: AdamConfig
) -> Update:
    """Issue every call before awaiting the first: a remote backend pipelines them."""
    forward = await _issued(backend, samples, loss)
    lesson = await _issued(backend, lessons, LESSON_LOSS)
    optim = asyncio.ensure_future(backend.optim_step(adam))
    try:
        done = await forward if forward else None
        taught = await lesson if lesson else None
        return Update(done, taught, await optim)
    except BaseException:
        under_way: list[asyncio.Future[Any] | None] = [forward, lesson, optim]
        await asyncio.gather(*filter(None, under_way), return_exceptions=True)
        raise


async def _issued(
    backend: Backend, samples: Sequence[Sample], loss: LossConfig
) -> asyncio.Future[ForwardBackward] | None:
    if not samples:
        return None
    call = asyncio.ensure_future(backend.forward_backward(samples, loss))
    await asyncio.sleep(0)
    return call
