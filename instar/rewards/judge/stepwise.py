"""Judges of single calls. One rates each step, the other rates what happened after it."""

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
"""The answer and the reasons for each step, by step number."""


class StepJudge(Judge):
    """A judge of single steps. One prompt contains as many steps as fit."""

    @abstractmethod
    def select_steps(self, steps: Sequence[SessionStep]) -> list[SessionStep]:
        """Return the steps to ask about."""

    @abstractmethod
    def render_step(self, step: SessionStep) -> list[JudgePromptPart]: ...

    @abstractmethod
    async def judge_window(
        self, session_id: str, steps: Sequence[SessionStep], parts: Sequence[JudgePromptPart]
    ) -> list[Reward]: ...

    async def judge(self, task: Task, transcript: Transcript) -> list[Reward]:
        task_parts, steps = self.task_parts(task), self.select_steps(build_steps(transcript.calls))
        windows = split_into_windows(steps, self.render_step, self.max_session_chars)
        rewards = await gather_all(
            [
                self.judge_window(transcript.session_id, window, [*task_parts, *parts])
                for window, parts in windows
            ]
        )
        return [reward for window_rewards in rewards for reward in window_rewards]


class ProcessJudge(StepJudge):
    def select_steps(self, steps: Sequence[SessionStep]) -> list[SessionStep]:
        return [step for step in steps if step.is_complete]

    def render_step(self, step: SessionStep) -> list[JudgePromptPart]:
        return [*step.before, step.reply]

    async def judge_window(
        self, session_id: str, steps: Sequence[SessionStep], parts: Sequence[JudgePromptPart]
    ) -> list[Reward]:
        def read(answer: Json) -> StepAnswers[float]:
            scores = convert_answer(answer, StepScoresAnswer).steps
            scale = self.config.scale
            return _check_complete(
                {each.step: (scale_to_unit(each.score, scale), truncate(each.reasons)) for each in scores},
                steps,
            )

        votes = await self.panel.ask(parts, read, session_id, steps=_list_numbers(steps))
        return [self._create_reward(session_id, step, votes, len(steps)) for step in steps]

    def _create_reward(
        self, session_id: str, step: SessionStep, votes: Sequence[JudgeVote[StepAnswers[float]]], count: int
    ) -> Reward:
        values = [vote.answer[step.number][0] for vote in votes]
        detail = votes_detail(values, [vote.answer[step.number][1] for vote in votes])
        cost = sum(vote.cost for vote in votes) / count
        return self.reward(session_id, fmean(values), {"step": step.number, **detail}, cost, step.call)


class FollowupJudge(StepJudge):
    """A judge that rates calls by what followed them. Calls that nothing followed are not judged."""

    def select_steps(self, steps: Sequence[SessionStep]) -> list[SessionStep]:
        return [step for step in steps if step.is_complete and step.after]

    def render_step(self, step: SessionStep) -> list[JudgePromptPart]:
        return [*step.before, step.reply, *step.after]

    async def judge_window(
        self, session_id: str, steps: Sequence[SessionStep], parts: Sequence[JudgePromptPart]
    ) -> list[Reward]:
        def read(answer: Json) -> StepAnswers[str]:
            signals = convert_answer(answer, StepSignalsAnswer).steps
            return _check_complete(
                {each.step: (str(each.signal), truncate(each.reasons)) for each in signals}, steps
            )

        votes = await self.panel.ask(parts, read, session_id, steps=_list_numbers(steps))
        rewards = [self._create_reward(session_id, step, votes, len(steps)) for step in steps]
        return [reward for reward in rewards if reward is not None]

    def _create_reward(
        self, session_id: str, step: SessionStep, votes: Sequence[JudgeVote[StepAnswers[str]]], count: int
    ) -> Reward | None:
        signals = [vote.answer[step.number][0] for vote in votes]
        signal = _majority_signal(signals)
        value = None if signal == "unclear" else getattr(self.config.signals, signal)
        if value is None:
            return None
        detail = {
            "step": step.number,
            "signal": signal,
            "votes": signals,
            "reasons": [vote.answer[step.number][1] for vote in votes],
        }
        return self.reward(session_id, value, detail, sum(vote.cost for vote in votes) / count, step.call)


def _list_numbers(steps: Sequence[SessionStep]) -> str:
    return ", ".join(str(step.number) for step in steps)


def _check_complete(answers: StepAnswers[T], steps: Sequence[SessionStep]) -> StepAnswers[T]:
    """Return the answers. Raises UnparseableAnswer if a step has none; answers to other steps are ignored."""
    missing = [step.number for step in steps if step.number not in answers]
    if missing:
        raise UnparseableAnswer(f"it has no answer for step {missing[0]}")
    return answers


def _majority_signal(signals: Sequence[str]) -> str:
    """Return the most frequent signal, or ``unclear`` on a tie."""
    (first, votes), *others = Counter(signals).most_common()
    return "unclear" if others and others[0][1] == votes else first
