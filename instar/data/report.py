"""What a step's batch is made of, in figures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np

from instar.types import Claim, ClaimOutcome, Ids, Json, Sample


def batch_report(
    samples: Sequence[Sample],
    own: Sequence[Sample],
    claims: Sequence[Claim],
    drops: Sequence[Claim],
    version: int,
) -> Json:
    """Of the samples to train at this version: how many, how far the run's own are behind, and what was
    dropped and why."""
    trained = [sample.versions[sample.mask > 0] for sample in own]
    behind = version - np.concatenate([np.empty(0, np.int32), *trained])
    staleness = [version - int(versions.min()) for versions in trained]
    reasons = Counter(
        claim.reason or "unknown" for claim in (*claims, *drops) if claim.outcome is ClaimOutcome.DROPPED
    )
    return {
        "samples": len(samples),
        "data_samples": len(samples) - len(own),
        "tokens": sum(sample.trained_tokens for sample in samples),
        "sequence_tokens": sum(len(sample) for sample in samples),
        "dropped": dict(sorted(reasons.items())),
        "stale_dropped": reasons["stale"],
        "late_dropped": reasons["late"],
        "staleness_mean": float(np.mean(staleness)) if staleness else 0.0,
        "staleness_max": max(staleness, default=0),
        "staleness_samples": histogram(staleness),
        "staleness_tokens": histogram(behind),
        "version_shares": {
            str(version - int(away)): count / len(behind) for away, count in histogram(behind).items()
        },
    }


def ages(began: Sequence[float], now: float) -> Json:
    """How long ago the sessions of a batch began, in seconds."""
    seconds = [now - at for at in began]
    if not seconds:
        return {}
    return {"age_seconds_mean": sum(seconds) / len(seconds), "age_seconds_max": max(seconds)}


def histogram(values: Iterable[int] | Ids) -> dict[str, int]:
    """How often each value occurs, lowest first; the values are text, as JSON wants keys to be."""
    counted = Counter(int(value) for value in values)
    return {str(value): counted[value] for value in sorted(counted)}
