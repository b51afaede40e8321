"""What a step's batch is made of, in figures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np

from instar.data.staleness import Staleness
from instar.types import Claim, ClaimOutcome, Ids, Json, Sample

NGRAM_LENGTH = 4
"""Tokens in a row that are looked for again."""


def report_batch(
    samples: Sequence[Sample],
    own: Sequence[Sample],
    claims: Sequence[Claim],
    drops: Sequence[Claim],
    staleness: Staleness,
) -> Json:
    """Of the samples to train now: how many, how far the run's own are behind, and what was dropped and
    why."""
    versions = np.concatenate([np.empty(0, np.int32), *(sample.versions[sample.mask > 0] for sample in own)])
    per_sample = [staleness.of_sample(sample) for sample in own]
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
        "staleness_mean": float(np.mean(per_sample)) if per_sample else 0.0,
        "staleness_max": max(per_sample, default=0),
        "staleness_samples": histogram(per_sample),
        "staleness_tokens": histogram(staleness.of_tokens(versions)),
        "version_shares": {version: count / len(versions) for version, count in histogram(versions).items()},
    }


def report_outputs(groups: Sequence[Sequence[Sequence[Sample]]]) -> Json:
    """Of what was sampled, by group and session, whether it is trained or not: how long it is, how much of it
    repeats itself, and how many sessions said the very same as another of their group. What rises here with
    the reward is a sign that something else than the task is being learned."""
    outputs = [[_sampled(session) for session in group if session] for group in groups]
    every = [output for group in outputs for output in group]
    if not every:
        return {}
    same = 0
    for group in outputs:
        counted = Counter(output.tobytes() for output in group)
        same += sum(count for count in counted.values() if count > 1)
    return {
        "output_tokens_mean": float(np.mean([len(output) for output in every])),
        "output_repetition": float(np.mean([_repetition(output) for output in every])),
        "identical_share": same / len(every),
    }


def _sampled(samples: Sequence[Sample]) -> Ids:
    """By the calls of a session. One that several samples go on from counts once."""
    calls = {
        span.call_id: sample.token_ids[span.start : span.start + span.length]
        for sample in samples
        for span in sample.spans
    }
    return np.concatenate([np.empty(0, np.int32), *calls.values()])


def _repetition(tokens: Ids) -> float:
    """Share of the runs of four tokens that have been there before."""
    runs = len(tokens) - NGRAM_LENGTH + 1
    if runs < 1:
        return 0.0
    seen = np.unique(np.lib.stride_tricks.sliding_window_view(tokens, NGRAM_LENGTH), axis=0)
    return 1.0 - len(seen) / runs


def report_session_ages(began: Sequence[float], now: float) -> Json:
    """How long ago the sessions of a batch began, in seconds."""
    seconds = [now - at for at in began]
    if not seconds:
        return {}
    return {"age_seconds_mean": sum(seconds) / len(seconds), "age_seconds_max": max(seconds)}


def histogram(values: Iterable[int] | Ids) -> dict[str, int]:
    """How often each value occurs, lowest first; the values are text, as JSON wants keys to be."""
    counted = Counter(int(value) for value in values)
    return {str(value): counted[value] for value in sorted(counted)}
