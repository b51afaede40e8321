"""What a step does about tokens that another policy has sampled, as `trainer.off_policy` says."""

from __future__ import annotations

import time
from dataclasses import replace

from instar.backends.base import Backend
from instar.config import OffPolicyConfig
from instar.data.batcher import Batch
from instar.data.off_policy import decouple, importance
from instar.types import Json


async def correct(batch: Batch, backend: Backend, config: OffPolicyConfig) -> tuple[Batch, Json]:
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
    figures = importance(batch.samples, proximal)
    return corrected, {**told, **figures, "proximal_seconds": time.monotonic() - began}
