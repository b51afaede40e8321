"""Judges that score individual sessions and calls, and the table of all judges."""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean
from typing import Generic, TypeVar

from instar.config.judge import JudgeRewardConfig
from instar.rewards.base import Transcript
from instar.rewards.judge import answers, session_steps
from instar.rewards.judge.answers import convert_answer, scale_to_unit
from instar.rewards.judge.judge import Judge, gather_all
from instar.rewards.judge.pairwise import PairwiseJudge
from instar.rewards.judge.rubric import JudgePromptPart, truncate_parts
from instar.rewards.judge.session_steps import SessionStep
from instar.types import Call, Json, Reward, Task

T = TypeVar("T")
StepAnswers = dict[int, tuple[T, str]]
"""The answer and the reasons for each step, by step number."""


class OutcomeJudge(Judge):
    """A judge that gives a session one score."""

    async def judge(self, task: Task, transcript: Transcript) -> list[Reward]:
        session = truncate_parts(session_steps.render_conversation(transcript.calls), self.max_session_chars)
        parts = [*self.build_task_parts(task), *session]
        votes = await self.ask(parts, self._parse_answer, transcript.session_id)
        scores = [vote.answer[0] for vote in votes]
        detail = _describe_votes(scores, [vote.answer[1] for vote in votes])
        cost = sum(vote.cost for vote in votes)
        return [self.build_reward(transcript.session_id, fmean(scores), detail, cost)]

    def _parse_answer(self, json_answer: Json) -> tuple[float, str]:
        answer = convert_answer(json_answer, answers.ScoreAnswer)
        return scale_to_unit(answer.score, self.config.scale), answer.reasons


class StepJudge(Judge, Generic[T]):
    """Base class for judges that score individual steps. Each prompt contains as many steps as fit."""

    include_followup = False
    """If True, prompts show what followed each step, and steps that nothing followed are not judged."""

    @abstractmethod
    def parse_answers(self, json_answer: Json) -> StepAnswers[T]: ...

    @abstractmethod
    def combine_votes(self, votes: Sequence[T], reasons: Sequence[str]) -> tuple[float, Json] | None:
        """Combine the votes on a step into a reward and its detail, or return None for no reward."""

    async def judge(self, task: Task, transcript: Transcript) -> list[Reward]:
        return await self._judge_steps(task, transcript, self._select_steps(transcript))

    def _select_steps(self, transcript: Transcript) -> list[SessionStep]:
        complete = [step for step in session_steps.build_steps(transcript.calls) if step.is_complete]
        return [step for step in complete if step.after] if self.include_followup else complete

    async def _judge_steps(
        self, task: Task, transcript: Transcript, steps: Sequence[SessionStep]
    ) -> list[Reward]:
        windows = session_steps.split_into_windows(steps, self._render_step, self.max_session_chars)
        task_parts = self.build_task_parts(task)
        rewards = await gather_all(
            [
                self._judge_window(transcript.session_id, window, [*task_parts, *parts])
                for window, parts in windows
            ]
        )
        return [reward for window_rewards in rewards for reward in window_rewards]

    def _render_step(self, step: SessionStep) -> list[JudgePromptPart]:
        return [*step.before, step.reply, *(step.after if self.include_followup else ())]

    async def _judge_window(
        self, session_id: str, steps: Sequence[SessionStep], parts: Sequence[JudgePromptPart]
    ) -> list[Reward]:
        def parse_complete(json_answer: Json) -> StepAnswers[T]:
            parsed = self.parse_answers(json_answer)
            if missing := [step.number for step in steps if step.number not in parsed]:
                raise answers.UnparseableAnswer(f"step {missing[0]} is missing")
            return parsed

        numbers = ", ".join(str(step.number) for step in steps)
        votes = await self.ask(parts, parse_complete, session_id, steps=numbers)
        cost = sum(vote.cost for vote in votes) / len(steps)
        rewards: list[Reward] = []
        for step in steps:
            values = [vote.answer[step.number][0] for vote in votes]
            combined = self.combine_votes(values, [vote.answer[step.number][1] for vote in votes])
            if combined is not None:
                value, detail = combined
                detail = {"step": step.number, **detail}
                rewards.append(self.build_reward(session_id, value, detail, cost, step.call))
        return rewards


class ProcessJudge(StepJudge[float]):
    """A judge that scores each call."""

    def parse_answers(self, json_answer: Json) -> StepAnswers[float]:
        return {
            answer.step: (scale_to_unit(answer.score, self.config.scale), answer.reasons)
            for answer in convert_answer(json_answer, answers.StepsAnswer[answers.StepScoreAnswer]).steps
        }

    def combine_votes(self, votes: Sequence[float], reasons: Sequence[str]) -> tuple[float, Json]:
        return fmean(votes), _describe_votes(votes, reasons)


class FollowupJudge(StepJudge[str]):
    """A judge that rates each call by what followed it. Ties and signals without a value give no reward."""

    include_followup = True
    scores_open_sessions = True

    async def judge(self, task: Task, transcript: Transcript) -> list[Reward]:
        assert self._context is not None
        rewards = await self._context.store.rewards(transcript.session_id)
        judged_ids = {reward.reward_id for reward in rewards}
        steps = [s for s in self._select_steps(transcript) if self._make_reward_id(s.call) not in judged_ids]
        return await self._judge_steps(task, transcript, steps)

    async def score_open(self, task: Task, transcript: Transcript) -> list[Reward]:
        """Judge the calls that a user message followed, because nothing later changes what a judge sees of
        them. Each is judged alone, so that its stored answer is found again when the session has more
        calls."""
        rewards: list[Reward] = []
        for step in self._select_steps(transcript):
            if step.is_answered_by_user:
                for reward in await self._judge_steps(task, transcript, [step]):
                    rewards.append(replace(reward, reward_id=self._make_reward_id(step.call)))
        return rewards

    def _make_reward_id(self, call: Call) -> str:
        """Return the id that the reward for the call also gets when the session is complete."""
        return f"{call.session_id}/{self.key}/{call.call_id}"

    def parse_answers(self, json_answer: Json) -> StepAnswers[str]:
        steps = convert_answer(json_answer, answers.StepsAnswer[answers.StepSignalAnswer]).steps
        return {answer.step: (str(answer.signal), answer.reasons) for answer in steps}

    def combine_votes(self, votes: Sequence[str], reasons: Sequence[str]) -> tuple[float, Json] | None:
        (signal, count), *others = Counter(votes).most_common()
        is_tie = bool(others) and others[0][1] == count
        if is_tie or signal == "unclear" or (value := getattr(self.config.signals, signal)) is None:
            return None
        return value, {"signal": signal, "votes": list(votes), "reasons": list(reasons)}


def _describe_votes(votes: Sequence[float], reasons: Sequence[str]) -> Json:
    """Describe the votes for a reward's detail. ``spread`` is the highest vote minus the lowest."""
    return {
        "votes": [round(vote, 6) for vote in votes],
        "spread": round(max(votes) - min(votes), 6),
        "reasons": list(reasons),
    }


JUDGES: dict[str, type[Judge]] = {
    "outcome": OutcomeJudge,
    "process": ProcessJudge,
    "pairwise": PairwiseJudge,
    "followup": FollowupJudge,
}


def create_judge(config: JudgeRewardConfig) -> Judge:
    return JUDGES[config.rubric](config)
