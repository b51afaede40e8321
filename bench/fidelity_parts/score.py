"""Compute the metrics from the recorded calls."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from instar.types import Call
from tests.integration.clients.recorded_sessions import (
    RecordedSession,
    count_sampled_tokens,
    count_trained_tokens,
    find_continued_call,
    is_exact,
)

UNEXPLAINED = "UNEXPLAINED"


@dataclass
class Score:
    """Counts that can be added up, and the reasons for fractions below 1 with their counts."""

    calls: int = 0
    linked: int = 0
    """The number of calls in their conversation's session."""
    turns: int = 0
    """The number of turns that extend their history."""
    exact: int = 0
    """The number of these turns whose prompt extends the earlier tokens exactly."""
    sampled: int = 0
    """The number of sampled tokens."""
    trained: int = 0
    """The number of sampled tokens that the mask of a training sample includes."""
    rewritten: int = 0
    """The number of turns that continue a conversation but change its earlier messages."""
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
    def fractions(self) -> dict[str, float | None]:
        return {
            "linked": _divide(self.linked, self.calls),
            "exact_prefix": _divide(self.exact, self.turns),
            "trained": _divide(self.trained, self.sampled),
        }

    @property
    def has_unexplained(self) -> bool:
        return UNEXPLAINED in self.reasons


def _divide(numerator: int, denominator: int) -> float | None:
    return numerator / denominator if denominator else None


def add_scores(scores: Iterable[Score]) -> Score:
    return sum(scores, Score())


def score_conversation(
    sessions: Sequence[RecordedSession],
    *,
    session_id: str,
    drops_reasoning: bool,
    is_text_completion: bool = False,
) -> Score:
    """Return the score of one conversation, whose calls are in ``sessions``.

    ``session_id`` is the session that should contain all calls. If it is empty, the session with the most
    calls is used. With ``is_text_completion``, each prompt continues the text of the previous one. Without
    it, calls that continue no earlier call count as rewritten.
    """
    result = Score(calls=sum(len(recorded.calls) for recorded in sessions))
    main = max(sessions, key=lambda r: (r.session.session_id == session_id, len(r.calls)), default=None)
    if main is not None and session_id in ("", main.session.session_id):
        result.linked = len(main.calls)
    if result.linked < result.calls:
        result.reasons[UNEXPLAINED] += 1
    calls = sorted(
        (call for recorded in sessions for call in recorded.calls), key=lambda call: call.started_at
    )
    for i, call in enumerate(calls[1:], start=1):
        parent = calls[i - 1] if is_text_completion else find_continued_call(call, calls[:i])
        if parent is None:
            result.rewritten += 1
            continue
        result.turns += 1
        if is_exact(call, parent):
            result.exact += 1
        elif drops_reasoning and _has_new_user_message(call, parent):
            result.reasons["the format drops earlier reasoning after a new user message"] += 1
        else:
            result.reasons[UNEXPLAINED] += 1
    result.sampled = count_sampled_tokens(calls)
    result.trained = sum(map(count_trained_tokens, sessions))
    if result.trained < result.sampled:
        result.reasons[UNEXPLAINED] += 1
    return result


def _has_new_user_message(call: Call, parent: Call) -> bool:
    return any(message["role"] == "user" for message in call.messages[len(parent.messages) + 1 :])
