"""From what was recorded to the three shares."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from instar.types import Call
from tests.integration.clients.accounts import (
    Recorded,
    continued,
    is_exact,
    sampled_tokens,
    trained_tokens,
)

UNEXPLAINED = "UNEXPLAINED"


@dataclass
class Score:
    """Counts, which add up, and why they fall short."""

    calls: int = 0
    linked: int = 0
    turns: int = 0
    """Which extend their history."""
    exact: int = 0
    sampled: int = 0
    trained: int = 0
    rewritten: int = 0
    """Turns that go on from another and say otherwise what was said."""
    reasons: Counter[str] = field(default_factory=Counter[str])

    def __add__(self, other: Score) -> Score:
        return Score(
            self.calls + other.calls,
            self.linked + other.linked,
            self.turns + other.turns,
            self.exact + other.exact,
            self.sampled + other.sampled,
            self.trained + other.trained,
            self.rewritten + other.rewritten,
            self.reasons + other.reasons,
        )

    @property
    def shares(self) -> dict[str, float | None]:
        return {
            "linked": _share(self.linked, self.calls),
            "exact_prefix": _share(self.exact, self.turns),
            "trained": _share(self.trained, self.sampled),
        }

    @property
    def unexplained(self) -> bool:
        return UNEXPLAINED in self.reasons


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def total(scores: Iterable[Score]) -> Score:
    return sum(scores, Score())


def score(own: Sequence[Recorded], *, session: str, drops_reasoning: bool, prompts: bool = False) -> Score:
    """Of one conversation. ``own``: the sessions that hold calls of it. ``session``: the right one, where it
    is known; else the one with the most of them. ``prompts``: each continues the text of the one before."""
    found = Score(calls=sum(len(one.calls) for one in own))
    right = max(own, key=lambda one: (one.session.session_id == session, len(one.calls)), default=None)
    if right is not None and session in ("", right.session.session_id):
        found.linked = len(right.calls)
    if found.linked < found.calls:
        found.reasons[UNEXPLAINED] += 1
    calls = sorted((call for one in own for call in one.calls), key=lambda call: call.started_at)
    for i, call in enumerate(calls[1:], start=1):
        parent = calls[i - 1] if prompts else continued(call, calls[:i])
        if parent is None:
            found.rewritten += 1
            continue
        found.turns += 1
        if is_exact(call, parent):
            found.exact += 1
        elif drops_reasoning and _asks_anew(call, parent):
            found.reasons["the format drops earlier reasoning when the user asks anew"] += 1
        else:
            found.reasons[UNEXPLAINED] += 1
    found.sampled = sampled_tokens(calls)
    found.trained = sum(map(trained_tokens, own))
    if found.trained < found.sampled:
        found.reasons[UNEXPLAINED] += 1
    return found


def _asks_anew(call: Call, parent: Call) -> bool:
    return any(message["role"] == "user" for message in call.messages[len(parent.messages) + 1 :])
