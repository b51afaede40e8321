"""Turns preferences into weighted samples for the cross-entropy loss, whose gradient is that of DPO.

For a preferred reply a, another reply b and the base model as the reference, the loss of a pair is::

    margin = beta · ((logprob(a) - base logprob(a)) - (logprob(b) - base logprob(b)))
    loss   = -weight / beta · log sigmoid(margin)

Its gradient is that of ``-w · logprob(a) + w · logprob(b)`` with ``w = weight · sigmoid(-margin)``. The
margin is computed before the update, so the gradient is exact for one update of the weights. Every backend
supports it, because it is a sum over tokens. Without the division by ``beta``, the weight of preferences
relative to other data would depend on it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from instar.backends.base import Backend
from instar.config import PreferencesConfig
from instar.data.supervised import PreferencePair
from instar.types import Floats, Json, Sample

MAX_MARGIN = 50.0
"""Margins are clipped to this, because a larger one changes nothing and could overflow."""


async def weigh_preferences(
    pairs: Sequence[PreferencePair], backend: Backend, config: PreferencesConfig
) -> tuple[list[Sample], Json]:
    """Return the weighted samples of the pairs, and metrics. The loss is the mean over the pairs."""
    if not pairs:
        return [], {}
    samples = [sample for pair in pairs for sample in pair.samples]
    current = _sum_trained(samples, await backend.forward(samples))
    base = _sum_trained(samples, await backend.reference_logprobs(samples))
    shifts = [new - old for new, old in zip(current, base, strict=True)]
    margins = [chosen - rejected for chosen, rejected in zip(shifts[::2], shifts[1::2], strict=True)]
    weighted: list[Sample] = []
    losses: list[float] = []
    for pair, margin in zip(pairs, margins, strict=True):
        scaled = max(-MAX_MARGIN, min(MAX_MARGIN, config.beta * margin))
        weight = config.weight / (1.0 + math.exp(scaled)) / len(pairs)
        weighted.append(replace(pair.chosen, advantages=pair.chosen.mask * np.float32(weight)))
        weighted.append(replace(pair.rejected, advantages=pair.rejected.mask * np.float32(-weight)))
        losses.append(math.log1p(math.exp(-scaled)))
    return weighted, {
        "preferences": len(pairs),
        "preference_margin": float(np.mean(margins)),
        "preference_accuracy": float(np.mean([margin > 0 for margin in margins])),
        "preference_loss": float(np.mean(losses)),
    }


def _sum_trained(samples: Sequence[Sample], logprobs: Sequence[Floats]) -> list[float]:
    """Return the logprob of each sample's reply."""
    rows = zip(samples, logprobs, strict=True)
    return [float(values[sample.mask > 0].astype(np.float64).sum()) for sample, values in rows]
