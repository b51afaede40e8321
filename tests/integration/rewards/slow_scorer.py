"""A slow background scorer whose first attempt at each session fails."""

from __future__ import annotations

import asyncio

from instar.config import PluginConfig
from instar.errors import ScoreError
from instar.rewards.base import Scorer, Transcript
from instar.types import Reward, RewardSource, Task
from tests.torture.workload import score_answer


class SlowRule(Scorer):
    name = "slow"
    version = "1"
    background = True

    def __init__(self, config: PluginConfig) -> None:
        self.attempted_session_ids: set[str] = set()

    async def score(self, task: Task, transcript: Transcript) -> list[Reward]:
        await asyncio.sleep(0.05)
        if transcript.session_id not in self.attempted_session_ids:
            self.attempted_session_ids.add(transcript.session_id)
            raise ScoreError("the first attempt fails", retryable=True)
        return [Reward(transcript.session_id, score_answer(task.data, transcript), RewardSource.RULE)]
