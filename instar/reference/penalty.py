"""A token's log-ratio to the reference, as a penalty in its advantage.

For a trained token, ``-weight · (logprob at sampling - reference logprob)`` is added, scaled as the step
scales its advantages. In expectation over what the policy samples this is the gradient of the reverse KL:
with rewards, it holds the policy to the reference; without, it is on-policy distillation.
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
"""Under this name a sample keeps the reference's logprobs."""


class ReferencePenalty:
    def __init__(self, reference: Reference, weight: float) -> None:
        self._reference = reference
        self._weight = weight

    async def start(self) -> None:
        await self._reference.start()

    async def apply(self, samples: Sequence[Sample], scales: Sequence[Floats]) -> tuple[list[Sample], Json]:
        """The samples with the penalty in their advantages, and what to report. The same samples and the same
        reference make the same advantages."""
        began = time.monotonic()
        told = await self._reference.logprobs(samples)
        for sample, logprobs in zip(samples, told, strict=True):
            _require(sample, logprobs)
        penalised = [
            replace(
                sample,
                advantages=sample.advantages + self._penalty(sample, logprobs, scale),
                aux={**sample.aux, AUX_KEY: logprobs},
            )
            for sample, logprobs, scale in zip(samples, told, scales, strict=True)
        ]
        ratios = np.concatenate(
            [_log_ratio(sample, logprobs) for sample, logprobs in zip(samples, told, strict=True)]
        )
        return penalised, {
            "reference_kl": float(ratios.mean()),
            "reference_seconds": time.monotonic() - began,
        }

    def _penalty(self, sample: Sample, logprobs: Floats, scale: Floats) -> Floats:
        penalty = np.zeros(len(sample), np.float32)
        trained = sample.mask > 0
        penalty[trained] = -self._weight * _log_ratio(sample, logprobs) * scale[trained]
        return penalty

    async def close(self) -> None:
        await self._reference.close()


def _log_ratio(sample: Sample, logprobs: Floats) -> Floats:
    """Of the trained tokens: how much likelier the policy found them."""
    trained = sample.mask > 0
    return sample.logprobs[trained] - logprobs[trained]


def _require(sample: Sample, logprobs: Floats) -> None:
    if logprobs.shape != sample.token_ids.shape:
        raise InstarError(
            f"sample {sample.sample_key}: the reference told {len(logprobs)} logprobs for {len(sample)} "
            "tokens"
        )
    for name, values in (("reference's ", logprobs), ("", sample.logprobs)):
        missing = np.flatnonzero((sample.mask > 0) & ~np.isfinite(values))
        if len(missing):
            raise InstarError(
                f"sample {sample.sample_key}: no {name}logprob for the token trained at {missing[0]}"
            )
