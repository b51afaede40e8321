"""Checks of sessions: each is a function of what was seen to what it finds. None changes anything."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from instar.curation.base import CurationFinding, CurationLimits, SessionSummary
from instar.curation.text_similarity import find_near_duplicates, repetition_ratio
from instar.types import RewardSource

Check = Callable[[Sequence[SessionSummary], CurationLimits], list[CurationFinding]]

SAME_REWARD = 1e-8
MIN_SESSIONS = 8
"""Sessions of a version, or of a part of the run, that its mean is believed of."""


def find_duplicates(seen: Sequence[SessionSummary], limits: CurationLimits) -> list[CurationFinding]:
    """Outputs to different tasks that are nearly the same: the model says the same whatever it is asked, or
    the tasks repeat each other."""
    texts = [each.output for each in seen]
    findings: list[CurationFinding] = []
    for places in find_near_duplicates(texts, limits.similarity):
        those = [seen[place] for place in places]
        if len({each.session.task_id for each in those}) < 2 or not those[0].output.strip():
            continue
        first = those[0].session.session_id
        reason = f"{len(those)} outputs to different tasks are nearly the same, the first is {first}"
        numbers = {"sessions": len(those), "tasks": len({each.session.task_id for each in those})}
        findings.append(_finding("duplicates", "duplicate", first, reason, those[1:], numbers))
    return findings


def find_identical(seen: Sequence[SessionSummary], limits: CurationLimits) -> list[CurationFinding]:
    """Groups in which many sessions have the very same output: nothing is explored. Of whole groups."""
    findings: list[CurationFinding] = []
    for group_id, those in _groups(seen).items():
        by_output: dict[str, list[SessionSummary]] = defaultdict(list)
        for each in those:
            by_output[each.output].append(each)
        most = max(by_output.values(), key=len)
        share = len(most) / len(those)
        if len(most) > 1 and share >= limits.identical:
            reason = f"{len(most)} of {len(those)} outputs of group {group_id} are the same"
            findings.append(_finding("identical", "identical", group_id, reason, most, {"share": share}))
    return findings


def find_zero_signal(seen: Sequence[SessionSummary], limits: CurationLimits) -> list[CurationFinding]:
    """Groups whose sessions all have the same reward: they teach nothing. Of whole groups."""
    del limits
    findings: list[CurationFinding] = []
    for group_id, those in _groups(seen).items():
        rewards = [each.reward for each in those if each.reward is not None]
        if len(rewards) > 1 and max(rewards) - min(rewards) <= SAME_REWARD:
            reason = f"all {len(rewards)} rewards of group {group_id} are {rewards[0]:g}"
            numbers = {"reward": rewards[0], "sessions": len(rewards)}
            findings.append(_finding("zero_signal", "zero_signal", group_id, reason, those, numbers))
    return findings


def find_repetitive(seen: Sequence[SessionSummary], limits: CurationLimits) -> list[CurationFinding]:
    """Outputs that repeat themselves, and are rewarded above the average all the same."""
    rewards = [each.reward for each in seen if each.reward is not None]
    mean = float(np.mean(rewards)) if rewards else 0.0
    findings: list[CurationFinding] = []
    for each in seen:
        share = repetition_ratio(each.output)
        if share >= limits.repetition and each.reward is not None and each.reward > mean:
            reason = f"{share:.0%} of it was in it before, and its reward is {each.reward:g} (mean {mean:g})"
            numbers = {"repetition": share, "reward": each.reward}
            findings.append(_finding("repetitive", "repetitive", f"{share:.2f}", reason, [each], numbers))
    return findings


def find_length_drift(seen: Sequence[SessionSummary], limits: CurationLimits) -> list[CurationFinding]:
    """Outputs that grow with the versions much faster than the tasks do: length may be what is rewarded."""
    return _drift("length_drift", "tokens", seen, [float(each.tokens) for each in seen], limits.drift, 1.0)


def find_repetition_drift(seen: Sequence[SessionSummary], limits: CurationLimits) -> list[CurationFinding]:
    """Outputs that repeat themselves more and more with the versions."""
    shares = [repetition_ratio(each.output) for each in seen]
    return _drift("repetition_drift", "repetition", seen, shares, limits.drift, 0.05)


def find_disagreement(seen: Sequence[SessionSummary], limits: CurationLimits) -> list[CurationFinding]:
    """Sessions of which rules and judges think otherwise: one of them is fooled."""
    findings: list[CurationFinding] = []
    for each in seen:
        rule, judge = _latest(each, RewardSource.RULE), _latest(each, RewardSource.JUDGE)
        if rule is not None and judge is not None and abs(rule - judge) >= limits.disagreement:
            reason = f"the rule gives {rule:g}, the judge {judge:g}"
            numbers = {"rule": rule, "judge": judge}
            value = "rule_higher" if rule > judge else "judge_higher"
            findings.append(_finding("disagreement", "disagreement", value, reason, [each], numbers))
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
"""Checks that are right of whole groups only: shown a part of one, they would find what is not so."""


def _drift(
    check: str, what: str, seen: Sequence[SessionSummary], values: Sequence[float], limit: float, floor: float
) -> list[CurationFinding]:
    """The first quarter of the versions against the last; what is found are the last one's sessions above the
    first one's mean. ``floor``: no mean counts as less."""
    versions = sorted({each.version for each in seen})
    part = max(1, len(versions) // 4)
    early = [value for each, value in zip(seen, values, strict=True) if each.version in versions[:part]]
    late = [(each, v) for each, v in zip(seen, values, strict=True) if each.version in versions[-part:]]
    if len(versions) < 2 or len(early) < MIN_SESSIONS or len(late) < MIN_SESSIONS:
        return []
    before, after = float(np.mean(early)), float(np.mean([value for _, value in late]))
    if max(after, floor) < limit * max(before, floor):
        return []
    ratio = max(after, floor) / max(before, floor)
    reason = f"{what} per session went from {before:.3g} to {after:.3g} with the versions ({ratio:.1f} times)"
    numbers = {"before": before, "after": after, "ratio": ratio, "correlation": _with_reward(late)}
    above = [each for each, value in late if value > before]
    return [_finding(check, check, f"{ratio:.1f}", reason, above, numbers)]


def _with_reward(late: Sequence[tuple[SessionSummary, float]]) -> float | None:
    """How far rewards go along with the values: near 1, the value itself seems to be what pays."""
    pairs = [(each.reward, value) for each, value in late if each.reward is not None]
    rewards, values = np.array([r for r, _ in pairs]), np.array([v for _, v in pairs])
    if len(pairs) < MIN_SESSIONS or not rewards.std() or not values.std():
        return None
    return float(np.corrcoef(rewards, values)[0, 1])


def _latest(seen: SessionSummary, source: RewardSource) -> float | None:
    given = [r.value for r in seen.rewards if r.source is source and r.call_id is None]
    return given[-1] if given else None


def _groups(seen: Sequence[SessionSummary]) -> dict[str, list[SessionSummary]]:
    groups: dict[str, list[SessionSummary]] = defaultdict(list)
    for each in seen:
        if each.session.group_id is not None:
            groups[each.session.group_id].append(each)
    return groups


def _finding(
    check: str,
    tag: str,
    value: str,
    reason: str,
    seen: Sequence[SessionSummary],
    numbers: Mapping[str, object],
) -> CurationFinding:
    ids = tuple(each.session.session_id for each in seen)
    return CurationFinding(check, tag, value, reason, ids, dict(numbers))
