"""The sessions of a group against each other, two at a time and in both orders."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from statistics import fmean
from typing import Literal

from instar.rewards.base import GroupScorer, Transcript
from instar.rewards.judge.answers import ComparisonAnswer, convert_answer, truncate
from instar.rewards.judge.judge import Judge
from instar.rewards.judge.panel import JudgeVote, gather_all
from instar.rewards.judge.rubric import JudgePromptPart, truncate_parts
from instar.rewards.judge.run_model import is_judge_call
from instar.rewards.judge.session_steps import render_conversation
from instar.types import Json, Reward, Task

Winner = tuple[Literal["A", "B", "tie"], str]

PRIOR = 0.5
"""Games that each session is taken to have drawn against an average one: one that won all its games is not
without end better than the others."""
ROUNDS = 200


@dataclass(frozen=True, slots=True)
class PairComparison:
    """What came of comparing two sessions, by their places in the group."""

    first: int
    second: int
    points: float
    """Of the first, 0..1, the mean of the votes. Two orders that disagree are a draw."""
    agreed: int
    """Votes in which both orders said the same."""
    votes: int
    reasons: str = ""
    cost: float = 0.0


class PairwiseJudge(Judge, GroupScorer):
    async def score(self, task: Task, transcript: Transcript) -> list[Reward]:
        """One alone is neither better nor worse than others."""
        return await self.score_group(task, [transcript])

    async def score_group(self, task: Task, transcripts: Sequence[Transcript]) -> list[Reward]:
        ran = [t for t in transcripts if t.calls and not any(is_judge_call(call) for call in t.calls)]
        if len(ran) < 2:
            return []
        shown = [
            truncate_parts(render_conversation(transcript.calls), self.max_session_chars // 2)
            for transcript in ran
        ]
        games = await gather_all(
            [self._play(task, ran, shown, a, b) for a, b in choose_pairs(len(ran), self.config.pairs)]
        )
        strengths = expected_win_rates(len(ran), games)
        return [self._rewarded(ran, place, value, games) for place, value in enumerate(strengths)]

    async def _play(
        self, task: Task, ran: Sequence[Transcript], shown: Sequence[list[JudgePromptPart]], a: int, b: int
    ) -> PairComparison:
        if shown[a] == shown[b]:
            return PairComparison(a, b, 0.5, self.config.votes, self.config.votes, "the two are the same")
        asked, payer = self.task_parts(task), ran[a].session_id
        there, back = await gather_all(
            [
                self.panel.ask([*asked, *_beside(shown[x], shown[y])], _read, payer)
                for x, y in ((a, b), (b, a))
            ]
        )
        return _game(a, b, there, back)

    def _rewarded(
        self, ran: Sequence[Transcript], place: int, value: float, games: Sequence[PairComparison]
    ) -> Reward:
        own = [game for game in games if place in (game.first, game.second)]
        against: list[Json] = []
        for game in own:
            is_first = game.first == place
            other = game.second if is_first else game.first
            points = game.points if is_first else 1 - game.points
            against.append(
                {"session": ran[other].session_id, "points": round(points, 6), "reasons": game.reasons}
            )
        detail: Json = {
            "pairs": against,
            "orders": sum(game.votes for game in own),
            "orders_agreed": sum(game.agreed for game in own),
        }
        return self.reward(ran[place].session_id, value, detail, sum(game.cost / 2 for game in own))


def _beside(first: Sequence[JudgePromptPart], second: Sequence[JudgePromptPart]) -> list[JudgePromptPart]:
    return [
        *(JudgePromptPart(f"session A, {part.label}", part.text) for part in first),
        *(JudgePromptPart(f"session B, {part.label}", part.text) for part in second),
    ]


def _read(answer: Json) -> Winner:
    said = convert_answer(answer, ComparisonAnswer)
    return said.winner, truncate(said.reasons)


def _game(
    a: int, b: int, there: Sequence[JudgeVote[Winner]], back: Sequence[JudgeVote[Winner]]
) -> PairComparison:
    points: list[float] = []
    agreed = 0
    for one, other in zip(there, back, strict=True):
        forward = {"A": 1.0, "B": 0.0, "tie": 0.5}[one.answer[0]]
        backward = {"A": 0.0, "B": 1.0, "tie": 0.5}[other.answer[0]]
        agreed += forward == backward
        points.append(forward if forward == backward else 0.5)
    cost = sum(vote.cost for vote in (*there, *back))
    return PairComparison(a, b, fmean(points), agreed, len(points), there[0].answer[1], cost)


def choose_pairs(size: int, most: int) -> list[tuple[int, int]]:
    """All of them, or as many as may be, spread evenly: first each with its neighbour in a ring, so that
    everyone can be compared with everyone else by way of others. That takes one less than there are."""
    ring = (
        (place, (place + distance) % size)
        for distance in range(1, size // 2 + 1)
        for place in range(size)
        # In a ring of even size, half the way round is reached from both ends.
        if 2 * distance != size or place < distance
    )
    return list(islice(ring, max(most, size - 1)))


def expected_win_rates(size: int, games: Sequence[PairComparison]) -> list[float]:
    """Bradley-Terry: how often each would win against all the others. Where all pairs were played, that is
    the share of points that it made, a little nearer to a half."""
    points = [PRIOR / 2] * size
    met: dict[int, dict[int, int]] = defaultdict(lambda: defaultdict(int))
    for game in games:
        points[game.first] += game.points
        points[game.second] += 1 - game.points
        met[game.first][game.second] += 1
        met[game.second][game.first] += 1
    strength = [1.0] * size
    for _ in range(ROUNDS):
        strength = [points[i] / _resistance(i, strength, met[i]) for i in range(size)]
    return [
        fmean(strength[i] / (strength[i] + strength[j]) for j in range(size) if j != i) for i in range(size)
    ]


def _resistance(place: int, strength: Sequence[float], met: Mapping[int, int]) -> float:
    own = strength[place]
    return PRIOR / (own + 1) + sum(times / (own + strength[other]) for other, times in met.items())
