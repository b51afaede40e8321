"""One score of a whole session."""

from __future__ import annotations

from statistics import fmean

from instar.rewards.base import Transcript
from instar.rewards.judge.answers import Scored, convert, short, unit
from instar.rewards.judge.base import Judge, votes_detail
from instar.rewards.judge.session_steps import conversation
from instar.rewards.judge.rubric import fit
from instar.types import Json, Reward, Task


class OutcomeJudge(Judge):
    async def judge(self, task: Task, transcript: Transcript) -> list[Reward]:
        parts = [*self.asked(task), *fit(conversation(transcript.calls), self.room)]
        votes = await self.panel.ask(parts, self._read, transcript.session_id)
        values = [vote.said[0] for vote in votes]
        detail = votes_detail(values, [vote.said[1] for vote in votes])
        cost = sum(vote.cost for vote in votes)
        return [self.reward(transcript.session_id, fmean(values), detail, cost)]

    def _read(self, answer: Json) -> tuple[float, str]:
        said = convert(answer, Scored)
        return unit(said.score, self.config.scale), short(said.reasons)
