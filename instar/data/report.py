"""Computes the metrics of a step's batch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np

from instar.data.group_loader import LoadedGroup, LoadedSession
from instar.data.off_policy import get_behavior_logprobs
from instar.data.staleness import Staleness
from instar.types import Claim, ClaimOutcome, Ids, Json, Sample

NGRAM_LENGTH = 4


def report_groups(groups: Sequence[LoadedGroup]) -> Json:
    """Return the mean reward and the numbers of groups, sessions and failed sessions. Exported sessions are
    reported separately, because the policy did not sample them; ``groups`` counts all groups."""
    own = [session for group in groups if group.epoch is None for session in group.sessions]
    exported = [session for group in groups if group.epoch is not None for session in group.sessions]
    exported_metrics = {"data_reward_mean": _average_reward(exported), "data_sessions": len(exported)}
    return {
        "reward_mean": _average_reward(own),
        "groups": len(groups),
        "sessions": len(own),
        "failed": sum(session.is_failed for session in own),
        **(exported_metrics if exported else {}),
    }


def _average_reward(sessions: Sequence[LoadedSession]) -> float | None:
    rewards = [session.reward for session in sessions if session.reward is not None]
    return float(np.mean(rewards)) if rewards else None


def report_batch(
    samples: Sequence[Sample], own_samples: Sequence[Sample], claims: Iterable[Claim], staleness: Staleness
) -> Json:
    """Return the size of the batch, the drops by reason, and the staleness and versions of ``own_samples``,
    which are all samples except exported ones."""
    versions = np.concatenate(
        [np.empty(0, np.int32), *(sample.versions[sample.mask > 0] for sample in own_samples)]
    )
    sample_staleness = [staleness.of_sample(sample) for sample in own_samples]
    reasons = Counter(claim.reason or "unknown" for claim in claims if claim.outcome is ClaimOutcome.DROPPED)
    return {
        "samples": len(samples),
        "data_samples": len(samples) - len(own_samples),
        "tokens": sum(sample.trained_tokens for sample in samples),
        "entropy": _estimate_entropy(own_samples),
        "sequence_tokens": sum(len(sample) for sample in samples),
        "dropped": dict(sorted(reasons.items())),
        "stale_dropped": reasons["stale"],
        "late_dropped": reasons["late"],
        "staleness_mean": float(np.mean(sample_staleness)) if sample_staleness else 0.0,
        "staleness_max": max(sample_staleness, default=0),
        "staleness_samples": tally(sample_staleness),
        "staleness_tokens": tally(staleness.of_tokens(versions)),
        "version_shares": {version: count / len(versions) for version, count in tally(versions).items()},
    }


def _estimate_entropy(samples: Sequence[Sample]) -> float | None:
    """Return the mean negative logprob of the sampled tokens, which estimates the entropy of the policy that
    sampled them. Return None if there are no logprobs."""
    parts = [get_behavior_logprobs(sample)[sample.mask > 0] for sample in samples]
    logprobs = np.concatenate([np.empty(0, np.float32), *parts])
    logprobs = logprobs[np.isfinite(logprobs)]
    return -float(logprobs.mean()) if len(logprobs) else None


def report_outputs(groups: Sequence[Sequence[Sequence[Sample]]]) -> Json:
    """Return the mean length and repetition of the outputs, and the fraction of sessions that have the same
    output as another session in their group.

    If these values rise with the reward, the policy may be learning something other than the task. ``groups``
    contains the samples of each session in each group. The result is empty if there are no samples.
    """
    outputs = [[_join_sampled_tokens(session) for session in group if session] for group in groups]
    flat = [output for group in outputs for output in group]
    if not flat:
        return {}
    counters = [Counter(output.tobytes() for output in group) for group in outputs]
    identical = sum(count for counter in counters for count in counter.values() if count > 1)
    return {
        "output_tokens_mean": float(np.mean([len(output) for output in flat])),
        "output_repetition": float(np.mean([_compute_repetition(output) for output in flat])),
        "identical_share": identical / len(flat),
    }


def _join_sampled_tokens(samples: Sequence[Sample]) -> Ids:
    """Concatenate the sampled tokens of a session's calls. A call in several samples is included once."""
    calls = {
        span.call_id: sample.token_ids[span.start : span.start + span.length]
        for sample in samples
        for span in sample.spans
    }
    return np.concatenate([np.empty(0, np.int32), *calls.values()])


def _compute_repetition(tokens: Ids) -> float:
    """Return the fraction of n-grams (NGRAM_LENGTH tokens) that repeat an earlier one."""
    count = len(tokens) - NGRAM_LENGTH + 1
    if count < 1:
        return 0.0
    distinct = np.unique(np.lib.stride_tricks.sliding_window_view(tokens, NGRAM_LENGTH), axis=0)
    return 1.0 - len(distinct) / count


def report_session_ages(starts: Sequence[float], now: float) -> Json:
    ages = [now - start for start in starts]
    return {"age_seconds_mean": sum(ages) / len(ages), "age_seconds_max": max(ages)} if ages else {}


def tally(values: Iterable[int] | Ids) -> dict[str, int]:
    """Count each value. The result is sorted by value and has strings as keys, for JSON."""
    counts = Counter(int(value) for value in values)
    return {str(value): counts[value] for value in sorted(counts)}
