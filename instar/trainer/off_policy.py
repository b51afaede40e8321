"""Applies `trainer.off_policy` to a batch whose tokens were sampled by a different policy."""

from __future__ import annotations

import time
from dataclasses import replace

from instar.backends.base import Backend
from instar.config import OffPolicyConfig
from instar.data.batcher import StepBatch
from instar.data.off_policy import compute_importance, decouple
from instar.types import Json


async def apply_off_policy(
    batch: StepBatch, backend: Backend, config: OffPolicyConfig
) -> tuple[StepBatch, Json]:
    """Return the corrected batch, without samples that have no tokens left to train, and metrics."""
    if config.proximal == "behavior":
        return batch, {}
    started = time.monotonic()
    proximal = await backend.forward(batch.samples)
    samples, scales, metrics = decouple(batch.samples, batch.scales, proximal, config)
    kept = [index for index, sample in enumerate(samples) if sample.trained_tokens]
    corrected = replace(
        batch, samples=[samples[index] for index in kept], scales=[scales[index] for index in kept]
    )
    importance = compute_importance(batch.samples, proximal)
    return corrected, {**metrics, **importance, "proximal_seconds": time.monotonic() - started}
