"""Adds a penalty for diverging from the reference to the advantages.

The penalty of a trained token is ``-weight · (sample's logprob - reference logprob)``, scaled like the
advantages of the step. Used as an advantage, it gives a gradient that reduces the reverse KL, KL(policy ‖
reference). With rewards, the penalty keeps the policy close to the reference. Without rewards, training is
on-policy distillation.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from instar.errors import InstarError
from instar.reference.base import Reference
from instar.types import Floats, Json, Sample

AUX_KEY = "reference"
"""The key of the reference's logprobs in a sample's ``aux``."""


class ReferencePenalty:
    def __init__(self, reference: Reference, weight: float) -> None:
        self._reference = reference
        self._weight = weight

    async def start(self) -> None:
        await self._reference.start()

    async def apply(self, samples: Sequence[Sample], scales: Sequence[Floats]) -> tuple[list[Sample], Json]:
        """Add the penalty, multiplied by the tokens' ``scales``, to the advantages. Return the new samples
        and the metrics. Raises InstarError if the reference returns the wrong number of logprobs, or if a
        trained token has no finite logprob."""
        started = time.monotonic()
        scored = list(zip(samples, await self._reference.logprobs(samples), strict=True))
        for sample, logprobs in scored:
            _check_logprobs(sample, logprobs)
        penalized: list[Sample] = []
        log_ratios: list[Floats] = []
        for (sample, logprobs), scale in zip(scored, scales, strict=True):
            trained = sample.mask > 0
            log_ratio = sample.logprobs[trained] - logprobs[trained]
            penalty = np.zeros(len(sample), np.float32)
            penalty[trained] = -self._weight * log_ratio * scale[trained]
            aux = {**sample.aux, AUX_KEY: logprobs}
            penalized.append(replace(sample, advantages=sample.advantages + penalty, aux=aux))
            log_ratios.append(log_ratio)
        kl = float(np.concatenate(log_ratios).mean())
        return penalized, {"reference_kl": kl, "reference_seconds": time.monotonic() - started}

    async def close(self) -> None:
        await self._reference.close()


def _check_logprobs(sample: Sample, logprobs: Floats) -> None:
    if logprobs.shape != sample.token_ids.shape:
        raise InstarError(
            f"sample {sample.sample_key}: the reference returned {len(logprobs)} logprobs for "
            f"{len(sample)} tokens"
        )
    for name, values in (("reference's ", logprobs), ("", sample.logprobs)):
        missing = np.flatnonzero((sample.mask > 0) & ~np.isfinite(values))
        if len(missing):
            raise InstarError(
                f"sample {sample.sample_key}: the {name}logprob of the trained token at index "
                f"{missing[0]} is missing or not finite"
            )
