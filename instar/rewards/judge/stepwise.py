"""Judges of every call: how good a step it was, or what happened next."""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from collections.abc import Sequence
from statistics import fmean
from typing import TypeVar

from instar.rewards.base import Transcript
from instar.rewards.judge.answers import (
    StepScoresAnswer,
    StepSignalsAnswer,
    UnparseableAnswer,
    convert_answer,
    scale_to_unit,
    truncate,
)
from instar.rewards.judge.judge import Judge, votes_detail
from instar.rewards.judge.panel import JudgeVote, gather_all
from instar.rewards.judge.rubric import JudgePromptPart
from instar.rewards.judge.session_steps import SessionStep, build_steps, split_into_windows
from instar.types import Json, Reward, Task

T = TypeVar("T")
StepAnswers = dict[int, tuple[T, str]]
"""Step → (what was said of it, why)."""


class StepJudge(Judge):
    """Asks about as many steps at once as there is room for."""

    @abstractmethod
    def select_steps(self, steps: Sequence[SessionStep]) -> list[SessionStep]:
        """Those to ask about."""

    @abstractmethod
    def render_step(self, step: SessionStep) -> list[JudgePromptPart]: ...

    @abstractmethod
    async def judge_window(
        self, session_id: str, steps: Sequence[SessionStep], parts: Sequence[JudgePromptPart]
    ) -> list[Reward]: ...

    async def judge(self, task: Task, transcript: Transcript) -> list[Reward]:
        asked, steps = self.task_parts(task), self.select_steps(build_steps(transcript.calls))
        rewards = await gather_all(
            [
                self.judge_window(transcript.session_id, some, [*asked, *parts])
                for some, parts in split_into_windows(steps, self.render_step, self.max_session_chars)
            ]
        )
        return [reward for some in rewards for reward in some]


class ProcessJudge(StepJudge):
    def select_steps(self, steps: Sequence[SessionStep]) -> list[SessionStep]:
        return [step for step in steps if step.is_complete]

    def render_step(self, step: SessionStep) -> list[JudgePromptPart]:
        return [*step.before, step.reply]

    async def judge_window(
        self, session_id: str, steps: Sequence[SessionStep], parts: Sequence[JudgePromptPart]
    ) -> list[Reward]:
        def read(answer: Json) -> StepAnswers[float]:
            given = convert_answer(answer, StepScoresAnswer).steps
            said = {
                one.step: (scale_to_unit(one.score, self.config.scale), truncate(one.reasons))
                for one in given
            }
            return _of_all(said, steps)

        votes = await self.panel.ask(parts, read, session_id, steps=_numbers(steps))
        return [self._rewarded(session_id, step, votes, len(steps)) for step in steps]

    def _rewarded(
        self, session_id: str, step: SessionStep, votes: Sequence[JudgeVote[StepAnswers[float]]], of: int
    ) -> Reward:
        values = [vote.answer[step.number][0] for vote in votes]
        detail = votes_detail(values, [vote.answer[step.number][1] for vote in votes])
        cost = sum(vote.cost for vote in votes) / of
        return self.reward(session_id, fmean(values), {"step": step.number, **detail}, cost, step.call)


class FollowupJudge(StepJudge):
    """Nothing is asked about a call after which nothing came."""

    def select_steps(self, steps: Sequence[SessionStep]) -> list[SessionStep]:
        return [step for step in steps if step.is_complete and step.after]

    def render_step(self, step: SessionStep) -> list[JudgePromptPart]:
        return [*step.before, step.reply, *step.after]

    async def judge_window(
        self, session_id: str, steps: Sequence[SessionStep], parts: Sequence[JudgePromptPart]
    ) -> list[Reward]:
        def read(answer: Json) -> StepAnswers[str]:
            given = convert_answer(answer, StepSignalsAnswer).steps
            return _of_all({one.step: (str(one.signal), truncate(one.reasons)) for one in given}, steps)

        votes = await self.panel.ask(parts, read, session_id, steps=_numbers(steps))
        rewards = [self._rewarded(session_id, step, votes, len(steps)) for step in steps]
        return [reward for reward in rewards if reward is not None]

    def _rewarded(
        self, session_id: str, step: SessionStep, votes: Sequence[JudgeVote[StepAnswers[str]]], of: int
    ) -> Reward | None:
        signals = [vote.answer[step.number][0] for vote in votes]
        signal = _most(signals)
        value = None if signal == "unclear" else getattr(self.config.signals, signal)
        if value is None:
            return None
        detail = {
            "step": step.number,
            "signal": signal,
            "votes": signals,
            "reasons": [vote.answer[step.number][1] for vote in votes],
        }
        return self.reward(session_id, value, detail, sum(vote.cost for vote in votes) / of, step.call)


def _numbers(steps: Sequence[SessionStep]) -> str:
    return ", ".join(str(step.number) for step in steps)


def _of_all(said: StepAnswers[T], steps: Sequence[SessionStep]) -> StepAnswers[T]:
    """What was said of steps that nobody asked about is passed over."""
    missing = [step.number for step in steps if step.number not in said]
    if missing:
        raise UnparseableAnswer(f"it says nothing of step {missing[0]}")
    return said


def _most(signals: Sequence[str]) -> str:
    """What most votes say; where two are level, nobody can tell."""
    (first, votes), *others = Counter(signals).most_common()
    return "unclear" if others and others[0][1] == votes else first
