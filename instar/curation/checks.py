"""Checks on session summaries. A check only returns findings and does not change anything."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from instar.curation.base import CurationFinding, SessionSummary, Thresholds
from instar.curation.text_similarity import find_near_duplicates, measure_repetition
from instar.types import RewardSource

Check = Callable[[Sequence[SessionSummary], Thresholds], list[CurationFinding]]

REWARD_TOLERANCE = 1e-8
MIN_SESSIONS_FOR_MEAN = 8


def find_duplicates(sessions: Sequence[SessionSummary], thresholds: Thresholds) -> list[CurationFinding]:
    """Find sets of nearly identical outputs for different tasks. Either the model ignores the task, or the
    tasks are duplicates. A finding lists all sessions of a set except the first."""
    texts = [summary.output for summary in sessions]
    findings: list[CurationFinding] = []
    for indices in find_near_duplicates(texts, thresholds.similarity):
        similar = [sessions[index] for index in indices]
        if len({summary.session.task_id for summary in similar}) < 2 or not similar[0].output.strip():
            continue
        first_id = similar[0].session.session_id
        reason = (
            f"{len(similar)} outputs for different tasks are nearly identical; the first one is {first_id}"
        )
        numbers = {"sessions": len(similar), "tasks": len({summary.session.task_id for summary in similar})}
        findings.append(_make_finding("duplicates", "duplicate", first_id, reason, similar[1:], numbers))
    return findings


def find_identical(sessions: Sequence[SessionSummary], thresholds: Thresholds) -> list[CurationFinding]:
    """Find groups with many identical outputs, in which the policy hardly explores."""
    findings: list[CurationFinding] = []
    for group_id, members in _group_sessions(sessions).items():
        by_output: dict[str, list[SessionSummary]] = defaultdict(list)
        for summary in members:
            by_output[summary.output].append(summary)
        identical = max(by_output.values(), key=len)
        fraction = len(identical) / len(members)
        if len(identical) > 1 and fraction >= thresholds.identical_fraction:
            reason = f"{len(identical)} of {len(members)} outputs in group {group_id} are identical"
            numbers = {"share": fraction}
            findings.append(_make_finding("identical", "identical", group_id, reason, identical, numbers))
    return findings


def find_zero_signal(sessions: Sequence[SessionSummary], thresholds: Thresholds) -> list[CurationFinding]:
    """Find groups with two or more rewards that are all equal, which give no training signal."""
    del thresholds  # this check has none
    findings: list[CurationFinding] = []
    for group_id, members in _group_sessions(sessions).items():
        rewards = [summary.reward for summary in members if summary.reward is not None]
        if len(rewards) > 1 and max(rewards) - min(rewards) <= REWARD_TOLERANCE:
            reason = f"all {len(rewards)} rewards in group {group_id} are {rewards[0]:g}"
            numbers = {"reward": rewards[0], "sessions": len(rewards)}
            findings.append(_make_finding("zero_signal", "zero_signal", group_id, reason, members, numbers))
    return findings


def find_repetitive(sessions: Sequence[SessionSummary], thresholds: Thresholds) -> list[CurationFinding]:
    """Find outputs that repeat themselves and have a reward above the mean."""
    rewards = [summary.reward for summary in sessions if summary.reward is not None]
    mean = float(np.mean(rewards)) if rewards else 0.0
    findings: list[CurationFinding] = []
    for summary in sessions:
        repetition = measure_repetition(summary.output)
        if repetition >= thresholds.repetition and summary.reward is not None and summary.reward > mean:
            reason = (
                f"{repetition:.0%} of the output is repeated text, but its reward is {summary.reward:g} "
                f"(mean {mean:g})"
            )
            numbers = {"repetition": repetition, "reward": summary.reward}
            findings.append(
                _make_finding("repetitive", "repetitive", f"{repetition:.2f}", reason, [summary], numbers)
            )
    return findings


def find_length_drift(sessions: Sequence[SessionSummary], thresholds: Thresholds) -> list[CurationFinding]:
    """Find outputs that become much longer with newer versions. The reward may favor length."""
    lengths = [float(summary.tokens) for summary in sessions]
    return _find_drift("length_drift", "tokens", sessions, lengths, thresholds.drift_ratio, 1.0)


def find_repetition_drift(
    sessions: Sequence[SessionSummary], thresholds: Thresholds
) -> list[CurationFinding]:
    """Find outputs that become more repetitive with newer versions."""
    values = [measure_repetition(summary.output) for summary in sessions]
    return _find_drift("repetition_drift", "repetition", sessions, values, thresholds.drift_ratio, 0.05)


def find_disagreement(sessions: Sequence[SessionSummary], thresholds: Thresholds) -> list[CurationFinding]:
    """Find sessions whose latest rewards from a rule and from a judge differ by at least
    ``thresholds.disagreement``. One of them is probably wrong."""
    findings: list[CurationFinding] = []
    for summary in sessions:
        rule = _find_last_reward(summary, RewardSource.RULE)
        judge = _find_last_reward(summary, RewardSource.JUDGE)
        if rule is not None and judge is not None and abs(rule - judge) >= thresholds.disagreement:
            reason = f"the rule's reward is {rule:g}, the judge's reward is {judge:g}"
            numbers = {"rule": rule, "judge": judge}
            value = "rule_higher" if rule > judge else "judge_higher"
            findings.append(_make_finding("disagreement", "disagreement", value, reason, [summary], numbers))
    return findings


CHECKS: dict[str, Check] = {
    "duplicates": find_duplicates,
    "identical": find_identical,
    "zero_signal": find_zero_signal,
    "repetitive": find_repetitive,
    "length_drift": find_length_drift,
    "repetition_drift": find_repetition_drift,
    "disagreement": find_disagreement,
}

GROUP_CHECKS = ("identical", "zero_signal")
"""Checks that need complete groups. Their findings may be wrong if sessions of a group are missing."""


def _find_drift(
    check: str,
    quantity: str,
    sessions: Sequence[SessionSummary],
    values: Sequence[float],
    min_ratio: float,
    floor: float,
) -> list[CurationFinding]:
    """Return a finding if the mean of ``values`` (one per session) grows by at least ``min_ratio`` from the
    first to the last quarter of the versions. Means below ``floor`` count as ``floor``.

    The finding lists the last quarter's sessions with a value above the first quarter's mean. Nothing is
    reported if there is only one version, or if a quarter has fewer than MIN_SESSIONS_FOR_MEAN sessions.
    """
    versions = sorted({summary.version for summary in sessions})
    quarter = max(1, len(versions) // 4)
    pairs = list(zip(sessions, values, strict=True))
    early = [value for summary, value in pairs if summary.version in versions[:quarter]]
    late = [(summary, value) for summary, value in pairs if summary.version in versions[-quarter:]]
    if len(versions) < 2 or len(early) < MIN_SESSIONS_FOR_MEAN or len(late) < MIN_SESSIONS_FOR_MEAN:
        return []
    before, after = float(np.mean(early)), float(np.mean([value for _, value in late]))
    if max(after, floor) < min_ratio * max(before, floor):
        return []
    ratio = max(after, floor) / max(before, floor)
    reason = f"{quantity} per session rose from {before:.3g} to {after:.3g} over the versions ({ratio:.1f}x)"
    numbers = {"before": before, "after": after, "ratio": ratio, "correlation": _correlate_with_reward(late)}
    above = [summary for summary, value in late if value > before]
    return [_make_finding(check, check, f"{ratio:.1f}", reason, above, numbers)]


def _correlate_with_reward(late: Sequence[tuple[SessionSummary, float]]) -> float | None:
    """Return the correlation between values and rewards, or None if there are too few rewards or one of the
    two does not vary. A correlation near 1 suggests that the reward favors high values."""
    pairs = [(summary.reward, value) for summary, value in late if summary.reward is not None]
    rewards, values = np.array([reward for reward, _ in pairs]), np.array([value for _, value in pairs])
    if len(pairs) < MIN_SESSIONS_FOR_MEAN or not rewards.std() or not values.std():
        return None
    return float(np.corrcoef(rewards, values)[0, 1])


def _find_last_reward(summary: SessionSummary, source: RewardSource) -> float | None:
    values = [
        reward.value for reward in summary.rewards if reward.source is source and reward.call_id is None
    ]
    return values[-1] if values else None


def _group_sessions(sessions: Sequence[SessionSummary]) -> dict[str, list[SessionSummary]]:
    groups: dict[str, list[SessionSummary]] = defaultdict(list)
    for summary in sessions:
        if summary.session.group_id is not None:
            groups[summary.session.group_id].append(summary)
    return groups


def _make_finding(
    check: str,
    tag: str,
    value: str,
    reason: str,
    sessions: Sequence[SessionSummary],
    numbers: Mapping[str, object],
) -> CurationFinding:
    ids = tuple(summary.session.session_id for summary in sessions)
    return CurationFinding(check, tag, value, reason, ids, dict(numbers))
