"""Creates the judge that a section of the config describes."""

from __future__ import annotations

from instar.config.judge import JudgeRewardConfig
from instar.rewards.judge.judge import Judge
from instar.rewards.judge.outcome import OutcomeJudge
from instar.rewards.judge.pairwise import PairwiseJudge
from instar.rewards.judge.stepwise import FollowupJudge, ProcessJudge

JUDGES: dict[str, type[Judge]] = {
    "outcome": OutcomeJudge,
    "process": ProcessJudge,
    "pairwise": PairwiseJudge,
    "followup": FollowupJudge,
}


def create_judge(config: JudgeRewardConfig) -> Judge:
    return JUDGES[config.rubric](config)
