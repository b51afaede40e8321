"""The scorer that uses the reward that the agent returned. The gateway records rewards sent on completion."""

from __future__ import annotations

import math

from instar.config import AgentRewardConfig
from instar.errors import InstarError
from instar.rewards.base import Scorer, Transcript
from instar.types import Reward, RewardSource, Task


class AgentReward(Scorer):
    name = "returned"

    def __init__(self, config: AgentRewardConfig | None = None) -> None:
        del config  # this scorer has no settings

    async def score(self, task: Task, transcript: Transcript) -> list[Reward]:
        if transcript.returned is None:
            return []
        if not math.isfinite(transcript.returned):
            raise InstarError(
                f"the agent returned {transcript.returned} as its reward; it must be a finite number"
            )
        return [Reward(transcript.session_id, transcript.returned, RewardSource.AGENT, scorer=self.name)]
