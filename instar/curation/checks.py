"""Checks on session summaries. A check only returns findings and does not change anything."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import wraps

import numpy as np

from instar.curation.base import CurationFinding, SessionSummary, Thresholds
from instar.curation.text_similarity import find_near_duplicates, measure_repetition
from instar.types import Json, RewardSource

Check = Callable[[Sequence[SessionSummary], Thresholds], list[CurationFinding]]
Problem = tuple[str, str, Sequence[SessionSummary], Json]
"""The value of the tag, the reason, the sessions and the numbers of a finding."""
ProblemFinder = Callable[[Sequence[SessionSummary], Thresholds], Iterator[Problem]]

REWARD_TOLERANCE = 1e-8
MIN_SESSIONS_FOR_MEAN = 8

CHECKS: dict[str, Check] = {}
GROUP_CHECKS = ("identical", "zero_signal")
"""Checks that need complete groups. Their findings may be wrong if sessions of a group are missing."""


def _add_check(name: str, tag: str = "") -> Callable[[ProblemFinder], Check]:
    """Add a function to `CHECKS` as a check that returns a finding for each problem. The tag of the findings
    is the name of the check unless ``tag`` is set."""

    def decorate(find_problems: ProblemFinder) -> Check:
        @wraps(find_problems)
        def check(sessions: Sequence[SessionSummary], thresholds: Thresholds) -> list[CurationFinding]:
            findings: list[CurationFinding] = []
            for value, reason, affected, numbers in find_problems(sessions, thresholds):
                ids = tuple(summary.session.session_id for summary in affected)
                findings.append(CurationFinding(name, tag or name, value, reason, ids, numbers))
            return findings

        CHECKS[name] = check
        return check

    return decorate


@_add_check("duplicates", tag="duplicate")
def find_duplicates(sessions: Sequence[SessionSummary], thresholds: Thresholds) -> Iterator[Problem]:
    """Find sets of nearly identical outputs for different tasks. Either the model ignores the task, or the
    tasks are duplicates. A finding lists all sessions of a set except the first."""
    for indices in find_near_duplicates([summary.output for summary in sessions], thresholds.similarity):
        first, *others = similar = [sessions[index] for index in indices]
        task_count = len({summary.session.task_id for summary in similar})
        if task_count > 1 and first.output.strip():
            count, first_id = len(similar), first.session.session_id
            reason = f"{count} outputs for different tasks are nearly identical; the first one is {first_id}"
            yield first_id, reason, others, {"sessions": count, "tasks": task_count}


@_add_check("identical")
def find_identical(sessions: Sequence[SessionSummary], thresholds: Thresholds) -> Iterator[Problem]:
    """Find groups with many identical outputs, in which the policy hardly explores."""
    for group_id, members in _group_sessions(sessions).items():
        by_output: dict[str, list[SessionSummary]] = defaultdict(list)
        for summary in members:
            by_output[summary.output].append(summary)
        identical = max(by_output.values(), key=len)
        fraction = len(identical) / len(members)
        if len(identical) > 1 and fraction >= thresholds.identical_fraction:
            reason = f"{len(identical)} of {len(members)} outputs in group {group_id} are identical"
            yield group_id, reason, identical, {"share": fraction}


@_add_check("zero_signal")
def find_zero_signal(sessions: Sequence[SessionSummary], _: Thresholds) -> Iterator[Problem]:
    """Find groups with two or more rewards that are all equal, which give no training signal."""
    for group_id, members in _group_sessions(sessions).items():
        rewards = [summary.reward for summary in members if summary.reward is not None]
        if len(rewards) > 1 and max(rewards) - min(rewards) <= REWARD_TOLERANCE:
            reason = f"all {len(rewards)} rewards in group {group_id} are {rewards[0]:g}"
            yield group_id, reason, members, {"reward": rewards[0], "sessions": len(rewards)}


@_add_check("repetitive")
def find_repetitive(sessions: Sequence[SessionSummary], thresholds: Thresholds) -> Iterator[Problem]:
    """Find outputs that repeat themselves and have a reward above the mean."""
    rewards = [summary.reward for summary in sessions if summary.reward is not None]
    mean = float(np.mean(rewards)) if rewards else 0.0
    for summary in sessions:
        repetition = measure_repetition(summary.output)
        if repetition >= thresholds.repetition and summary.reward is not None and summary.reward > mean:
            reason = (
                f"{repetition:.0%} of the output is repeated text, but its reward is {summary.reward:g} "
                f"(mean {mean:g})"
            )
            numbers = {"repetition": repetition, "reward": summary.reward}
            yield f"{repetition:.2f}", reason, [summary], numbers


@_add_check("length_drift")
def find_length_drift(sessions: Sequence[SessionSummary], thresholds: Thresholds) -> Iterator[Problem]:
    """Find outputs that become much longer with newer versions. The reward may favor length."""
    lengths = [float(summary.tokens) for summary in sessions]
    return _find_drift("tokens", sessions, lengths, thresholds.drift_ratio, 1.0)


@_add_check("repetition_drift")
def find_repetition_drift(sessions: Sequence[SessionSummary], thresholds: Thresholds) -> Iterator[Problem]:
    """Find outputs that become more repetitive with newer versions."""
    values = [measure_repetition(summary.output) for summary in sessions]
    return _find_drift("repetition", sessions, values, thresholds.drift_ratio, 0.05)


@_add_check("disagreement")
def find_disagreement(sessions: Sequence[SessionSummary], thresholds: Thresholds) -> Iterator[Problem]:
    """Find sessions whose latest rewards from a rule and from a judge differ by at least
    ``thresholds.disagreement``. One of them is probably wrong."""
    for summary in sessions:
        latest = {reward.source: reward.value for reward in summary.rewards if reward.call_id is None}
        rule, judge = latest.get(RewardSource.RULE), latest.get(RewardSource.JUDGE)
        if rule is not None and judge is not None and abs(rule - judge) >= thresholds.disagreement:
            reason = f"the rule's reward is {rule:g}, the judge's reward is {judge:g}"
            value = "rule_higher" if rule > judge else "judge_higher"
            yield value, reason, [summary], {"rule": rule, "judge": judge}


def _find_drift(
    quantity: str,
    sessions: Sequence[SessionSummary],
    values: Sequence[float],
    min_ratio: float,
    floor: float,
) -> Iterator[Problem]:
    """Yield a problem if the mean of ``values`` (one per session) grows by at least ``min_ratio`` from the
    first to the last quarter of the versions. Means below ``floor`` count as ``floor``. The problem lists the
    last quarter's sessions with a value above the first quarter's mean. Nothing is reported if there is only
    one version, or if a quarter has fewer than MIN_SESSIONS_FOR_MEAN sessions."""
    versions = sorted({summary.version for summary in sessions})
    quarter = max(1, len(versions) // 4)
    pairs = list(zip(sessions, values, strict=True))
    early = [value for summary, value in pairs if summary.version in versions[:quarter]]
    late = [(summary, value) for summary, value in pairs if summary.version in versions[-quarter:]]
    if len(versions) < 2 or len(early) < MIN_SESSIONS_FOR_MEAN or len(late) < MIN_SESSIONS_FOR_MEAN:
        return
    before, after = float(np.mean(early)), float(np.mean([value for _, value in late]))
    ratio = max(after, floor) / max(before, floor)
    if ratio < min_ratio:
        return
    reason = f"{quantity} per session rose from {before:.3g} to {after:.3g} over the versions ({ratio:.1f}x)"
    numbers = {"before": before, "after": after, "ratio": ratio, "correlation": _correlate_with_reward(late)}
    yield f"{ratio:.1f}", reason, [summary for summary, value in late if value > before], numbers


def _correlate_with_reward(late: Sequence[tuple[SessionSummary, float]]) -> float | None:
    """Return the correlation between values and rewards, or None if there are too few rewards or one of the
    two does not vary. A correlation near 1 suggests that the reward favors high values."""
    pairs = np.array([(summary.reward, value) for summary, value in late if summary.reward is not None])
    if len(pairs) < MIN_SESSIONS_FOR_MEAN or not np.ptp(pairs, axis=0).all():
        return None
    return float(np.corrcoef(pairs, rowvar=False)[0, 1])


def _group_sessions(sessions: Sequence[SessionSummary]) -> dict[str, list[SessionSummary]]:
    groups: dict[str, list[SessionSummary]] = defaultdict(list)
    for summary in sessions:
        if summary.session.group_id is not None:
            groups[summary.session.group_id].append(summary)
    return groups
