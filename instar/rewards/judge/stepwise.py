"""Judges of every call: how good a step it was, or what happened next."""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from collections.abc import Sequence
from statistics import fmean
from typing import TypeVar

from instar.rewards.base import Transcript
from instar.rewards.judge.answers import FollowedSteps, Garbage, ScoredSteps, convert, short, unit
from instar.rewards.judge.base import Judge, votes_detail
from instar.rewards.judge.panel import Vote, all_of
from instar.rewards.judge.session_steps import Step, steps_of, windows
from instar.rewards.judge.rubric import Part
from instar.types import Json, Reward, Task

T = TypeVar("T")
Said = dict[int, tuple[T, str]]
"""Step → (what was said of it, why)."""


class StepJudge(Judge):
    """Asks about as many steps at once as there is room for."""

    @abstractmethod
    def told(self, steps: Sequence[Step]) -> list[Step]:
        """Those to ask about."""

    @abstractmethod
    def shown(self, step: Step) -> list[Part]: ...

    @abstractmethod
    async def window(self, session_id: str, steps: Sequence[Step], parts: Sequence[Part]) -> list[Reward]: ...

    async def judge(self, task: Task, transcript: Transcript) -> list[Reward]:
        asked, steps = self.asked(task), self.told(steps_of(transcript.calls))
        rewards = await all_of(
            [
                self.window(transcript.session_id, some, [*asked, *parts])
                for some, parts in windows(steps, self.shown, self.room)
            ]
        )
        return [reward for some in rewards for reward in some]


class ProcessJudge(StepJudge):
    def told(self, steps: Sequence[Step]) -> list[Step]:
        return [step for step in steps if step.whole]

    def shown(self, step: Step) -> list[Part]:
        return [*step.before, step.reply]

    async def window(self, session_id: str, steps: Sequence[Step], parts: Sequence[Part]) -> list[Reward]:
        def read(answer: Json) -> Said[float]:
            given = convert(answer, ScoredSteps).steps
            said = {one.step: (unit(one.score, self.config.scale), short(one.reasons)) for one in given}
            return _of_all(said, steps)

        votes = await self.panel.ask(parts, read, session_id, steps=_numbers(steps))
        return [self._rewarded(session_id, step, votes, len(steps)) for step in steps]

    def _rewarded(self, session_id: str, step: Step, votes: Sequence[Vote[Said[float]]], of: int) -> Reward:
        values = [vote.said[step.number][0] for vote in votes]
        detail = votes_detail(values, [vote.said[step.number][1] for vote in votes])
        cost = sum(vote.cost for vote in votes) / of
        return self.reward(session_id, fmean(values), {"step": step.number, **detail}, cost, step.call)


class FollowupJudge(StepJudge):
    """Nothing is asked about a call after which nothing came."""

    def told(self, steps: Sequence[Step]) -> list[Step]:
        return [step for step in steps if step.whole and step.after]

    def shown(self, step: Step) -> list[Part]:
        return [*step.before, step.reply, *step.after]

    async def window(self, session_id: str, steps: Sequence[Step], parts: Sequence[Part]) -> list[Reward]:
        def read(answer: Json) -> Said[str]:
            given = convert(answer, FollowedSteps).steps
            return _of_all({one.step: (str(one.signal), short(one.reasons)) for one in given}, steps)

        votes = await self.panel.ask(parts, read, session_id, steps=_numbers(steps))
        rewards = [self._rewarded(session_id, step, votes, len(steps)) for step in steps]
        return [reward for reward in rewards if reward is not None]

    def _rewarded(
        self, session_id: str, step: Step, votes: Sequence[Vote[Said[str]]], of: int
    ) -> Reward | None:
        signals = [vote.said[step.number][0] for vote in votes]
        signal = _most(signals)
        value = None if signal == "unclear" else getattr(self.config.signals, signal)
        if value is None:
            return None
        detail = {
            "step": step.number,
            "signal": signal,
            "votes": signals,
            "reasons": [vote.said[step.number][1] for vote in votes],
        }
        return self.reward(session_id, value, detail, sum(vote.cost for vote in votes) / of, step.call)


def _numbers(steps: Sequence[Step]) -> str:
    return ", ".join(str(step.number) for step in steps)


def _of_all(said: Said[T], steps: Sequence[Step]) -> Said[T]:
    """What was said of steps that nobody asked about is passed over."""
    missing = [step.number for step in steps if step.number not in said]
    if missing:
        raise Garbage(f"it says nothing of step {missing[0]}")
    return said


def _most(signals: Sequence[str]) -> str:
    """What most votes say; where two are level, nobody can tell."""
    (first, votes), *others = Counter(signals).most_common()
    return "unclear" if others and others[0][1] == votes else first
