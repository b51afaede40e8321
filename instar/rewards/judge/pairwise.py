"""A judge that compares the sessions in a group in pairs, each pair in both orders."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from statistics import fmean
from typing import Literal

from instar.rewards.base import GroupScorer, Transcript
from instar.rewards.judge.answers import ComparisonAnswer, convert_answer
from instar.rewards.judge.judge import Judge, JudgeVote, gather_all
from instar.rewards.judge.rubric import JudgePromptPart, truncate_parts
from instar.rewards.judge.session_steps import render_conversation
from instar.types import Json, Reward, Task

PromptParts = list[JudgePromptPart]
Verdict = tuple[Literal["A", "B", "tie"], str]
"""The winner and the reasons."""
PRIOR_DRAWS = 0.5
"""Each session gets this many virtual draws against an average session. Without them, a session that won all
its comparisons would have infinite strength."""
FIT_ITERATIONS = 200


@dataclass(frozen=True, slots=True)
class PairComparison:
    """The result of comparing two sessions, which are identified by their index in the group."""

    first: int
    second: int
    points: float
    """The first session's mean points, 0..1. A vote counts as a draw if the two orders disagree."""
    agreed_votes: int
    """The number of votes with the same result in both orders."""
    vote_count: int
    reasons: str = ""
    cost: float = 0.0


class PairwiseJudge(GroupScorer, Judge):
    async def score_group(self, task: Task, transcripts: Sequence[Transcript]) -> list[Reward]:
        sessions = [transcript for transcript in transcripts if transcript.calls]
        if len(sessions) < 2:
            return []
        max_chars = self.max_session_chars // 2
        rendered = [truncate_parts(render_conversation(session.calls), max_chars) for session in sessions]
        pairs = choose_pairs(len(sessions), self.config.pairs)
        comparisons = await gather_all([self._compare(task, sessions, rendered, a, b) for a, b in pairs])
        win_rates = compute_expected_win_rates(len(sessions), comparisons)
        return [self._create_reward(sessions, i, value, comparisons) for i, value in enumerate(win_rates)]

    async def _compare(
        self, task: Task, sessions: Sequence[Transcript], rendered: Sequence[PromptParts], a: int, b: int
    ) -> PairComparison:
        if rendered[a] == rendered[b]:
            votes = self.config.votes
            return PairComparison(a, b, 0.5, votes, votes, "the two sessions are identical")
        forward, backward = await gather_all(
            [
                self.ask(
                    [
                        *self.build_task_parts(task),
                        *(JudgePromptPart(f"session A, {part.label}", part.text) for part in rendered[x]),
                        *(JudgePromptPart(f"session B, {part.label}", part.text) for part in rendered[y]),
                    ],
                    _parse_answer,
                    sessions[a].session_id,
                )
                for x, y in ((a, b), (b, a))
            ]
        )
        return _combine_orders(a, b, forward, backward)

    def _create_reward(
        self, sessions: Sequence[Transcript], index: int, value: float, comparisons: Sequence[PairComparison]
    ) -> Reward:
        own = [comparison for comparison in comparisons if index in (comparison.first, comparison.second)]
        pairs: list[Json] = []
        for comparison in own:
            opponent, points = comparison.second, comparison.points
            if opponent == index:
                opponent, points = comparison.first, 1 - points
            opponent_id = sessions[opponent].session_id
            pairs.append({"session": opponent_id, "points": round(points, 6), "reasons": comparison.reasons})
        detail: Json = {
            "pairs": pairs,
            "orders": sum(comparison.vote_count for comparison in own),
            "orders_agreed": sum(comparison.agreed_votes for comparison in own),
        }
        cost = sum(comparison.cost / 2 for comparison in own)
        return self.build_reward(sessions[index].session_id, value, detail, cost)


def _parse_answer(json_answer: Json) -> Verdict:
    answer = convert_answer(json_answer, ComparisonAnswer)
    return answer.winner, answer.reasons


def _combine_orders(
    a: int, b: int, forward: Sequence[JudgeVote[Verdict]], backward: Sequence[JudgeVote[Verdict]]
) -> PairComparison:
    points: list[float] = []
    agreed_votes = 0
    for forward_vote, backward_vote in zip(forward, backward, strict=True):
        forward_points = {"A": 1.0, "B": 0.0, "tie": 0.5}[forward_vote.answer[0]]
        backward_points = {"A": 0.0, "B": 1.0, "tie": 0.5}[backward_vote.answer[0]]
        agreed_votes += forward_points == backward_points
        points.append(forward_points if forward_points == backward_points else 0.5)
    cost = sum(vote.cost for vote in (*forward, *backward))
    return PairComparison(a, b, fmean(points), agreed_votes, len(points), forward[0].answer[1], cost)


def choose_pairs(size: int, max_pairs: int) -> list[tuple[int, int]]:
    """Return at most ``max_pairs`` pairs of session indices, but enough pairs to connect all sessions."""
    # The sessions form a ring. Neighbours come first, so that any two sessions are connected through others.
    ring = (
        (start, (start + distance) % size)
        for distance in range(1, size // 2 + 1)
        for start in range(size)
        # In a ring of even size, opposite sessions would be paired twice.
        if 2 * distance != size or start < distance
    )
    return list(islice(ring, max(max_pairs, size - 1)))


def compute_expected_win_rates(size: int, comparisons: Sequence[PairComparison]) -> list[float]:
    """Return each session's mean probability of winning against the other sessions, in the Bradley-Terry
    model. If all pairs were compared, this is the fraction of points won, shrunk slightly towards 0.5."""
    points = [PRIOR_DRAWS / 2] * size
    opponents: list[list[int]] = [[] for _ in range(size)]
    for comparison in comparisons:
        points[comparison.first] += comparison.points
        points[comparison.second] += 1 - comparison.points
        opponents[comparison.first].append(comparison.second)
        opponents[comparison.second].append(comparison.first)
    strength = [1.0] * size
    for _ in range(FIT_ITERATIONS):
        strength = [
            points[i]
            / (PRIOR_DRAWS / (strength[i] + 1) + sum(1 / (strength[i] + strength[j]) for j in opponents[i]))
            for i in range(size)
        ]
    return [
        fmean(strength[i] / (strength[i] + strength[j]) for j in range(size) if j != i) for i in range(size)
    ]
