"""What a step does about tokens that another policy has sampled, as `trainer.off_policy` says."""

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
    """The batch as the loss is to see it, and what to report. Samples that have no token left to train are
    not in it."""
    if config.proximal == "behavior":
        return batch, {}
    began = time.monotonic()
    proximal = await backend.forward(batch.samples)
    samples, scales, told = decouple(batch.samples, batch.scales, proximal, config)
    kept = [place for place, sample in enumerate(samples) if sample.trained_tokens]
    corrected = replace(
        batch, samples=[samples[place] for place in kept], scales=[scales[place] for place in kept]
    )
    figures = compute_importance(batch.samples, proximal)
    return corrected, {**told, **figures, "proximal_seconds": time.monotonic() - began}
