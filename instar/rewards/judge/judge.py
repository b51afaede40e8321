"""The base class of all judges."""

from __future__ import annotations

from instar.config.judge import JudgeRewardConfig
from instar.errors import ScoreError
from instar.rewards.base import Scorer, ScoringContext, Transcript
from instar.rewards.judge.endpoint import is_judge_call
from instar.rewards.judge.panel import JudgePanel
from instar.rewards.judge.rubric import JudgePromptPart, Rubric
from instar.rewards.judge.session_steps import render_task
from instar.types import Call, Json, Reward, RewardSource, Task


class Judge(Scorer):
    background = True

    def __init__(self, config: JudgeRewardConfig) -> None:
        self.config = config
        self.panel = JudgePanel(config, Rubric.load(config.rubric, config.criteria))
        self.name = f"judge:{config.name or config.rubric}"
        self.version = self.panel.version
        self.max_session_chars = config.max_prompt_chars * 3 // 4

    async def start(self, context: ScoringContext) -> None:
        await self.panel.start(context)

    async def close(self) -> None:
        await self.panel.close()

    async def score(self, task: Task, transcript: Transcript) -> list[Reward]:
        if not transcript.calls:
            raise ScoreError("the session has no calls, so it cannot be judged")
        # If the run's model is the judge, its own answers are recorded as sessions, too.
        if any(is_judge_call(call) for call in transcript.calls):
            return []
        return await self.judge(task, transcript)

    async def judge(self, task: Task, transcript: Transcript) -> list[Reward]:
        raise NotImplementedError

    def task_parts(self, task: Task) -> list[JudgePromptPart]:
        """Return the prompt parts that describe the task, limited to a quarter of the prompt."""
        return render_task(task, self.config.max_prompt_chars // 4)

    def reward(
        self, session_id: str, value: float, detail: Json, cost: float, call: Call | None = None
    ) -> Reward:
        return Reward(
            session_id,
            value,
            RewardSource.JUDGE,
            scorer=self.name,
            call_id=call.call_id if call else None,
            detail=detail,
            scorer_version=self.version,
            cost=cost,
        )
