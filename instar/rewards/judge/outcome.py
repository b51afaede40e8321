"""A judge that gives one score to a session."""

from __future__ import annotations

from statistics import fmean

from instar.rewards.base import Transcript
from instar.rewards.judge.answers import ScoreAnswer, convert_answer, scale_to_unit, truncate
from instar.rewards.judge.judge import Judge, votes_detail
from instar.rewards.judge.rubric import truncate_parts
from instar.rewards.judge.session_steps import render_conversation
from instar.types import Json, Reward, Task


class OutcomeJudge(Judge):
    async def judge(self, task: Task, transcript: Transcript) -> list[Reward]:
        session = truncate_parts(render_conversation(transcript.calls), self.max_session_chars)
        votes = await self.panel.ask([*self.task_parts(task), *session], self._read, transcript.session_id)
        values = [vote.answer[0] for vote in votes]
        detail = votes_detail(values, [vote.answer[1] for vote in votes])
        cost = sum(vote.cost for vote in votes)
        return [self.reward(transcript.session_id, fmean(values), detail, cost)]

    def _read(self, json_answer: Json) -> tuple[float, str]:
        answer = convert_answer(json_answer, ScoreAnswer)
        return scale_to_unit(answer.score, self.config.scale), truncate(answer.reasons)
