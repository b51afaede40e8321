"""Adds a penalty to the advantages, based on the log-ratio of policy and reference.

For a trained token, ``-weight · (logprob at sampling - reference logprob)`` is added, scaled like the step's
advantages. In expectation over the policy's samples this is the gradient of the reverse KL: with rewards, it
keeps the policy close to the reference; without, it is on-policy distillation.
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
"""The name of the reference's logprobs in a sample's ``aux``."""


class ReferencePenalty:
    def __init__(self, reference: Reference, weight: float) -> None:
        self._reference = reference
        self._weight = weight

    async def start(self) -> None:
        await self._reference.start()

    async def apply(self, samples: Sequence[Sample], scales: Sequence[Floats]) -> tuple[list[Sample], Json]:
        """Return the samples with the penalty added to their advantages, and metrics. The result is
        deterministic for the same samples and reference."""
        started = time.monotonic()
        scored = list(zip(samples, await self._reference.logprobs(samples), strict=True))
        for sample, logprobs in scored:
            _check_logprobs(sample, logprobs)
        penalized = [
            replace(
                sample,
                advantages=sample.advantages + self._penalty(sample, logprobs, scale),
                aux={**sample.aux, AUX_KEY: logprobs},
            )
            for (sample, logprobs), scale in zip(scored, scales, strict=True)
        ]
        ratios = np.concatenate([_log_ratio(sample, logprobs) for sample, logprobs in scored])
        return penalized, {
            "reference_kl": float(ratios.mean()),
            "reference_seconds": time.monotonic() - started,
        }

    def _penalty(self, sample: Sample, logprobs: Floats, scale: Floats) -> Floats:
        penalty = np.zeros(len(sample), np.float32)
        trained = sample.mask > 0
        penalty[trained] = -self._weight * _log_ratio(sample, logprobs) * scale[trained]
        return penalty

    async def close(self) -> None:
        await self._reference.close()


def _log_ratio(sample: Sample, logprobs: Floats) -> Floats:
    """Return log(policy / reference) of the trained tokens."""
    trained = sample.mask > 0
    return sample.logprobs[trained] - logprobs[trained]


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
                f"sample {sample.sample_key}: no {name}logprob for the token trained at {missing[0]}"
            )
