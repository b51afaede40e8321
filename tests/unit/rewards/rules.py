"""Helpers for testing rules."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

from instar.config import RunConfig
from instar.rewards.base import Scorer, ScoringContext, Transcript
from instar.rewards.factory import create_scorers
from instar.store.base import Store
from instar.types import Message, Reward, RewardSource, Task
from tests.unit.data.builders import make_call

EMPTY_CONTEXT = ScoringContext("run", cast(Store, None))
"""A context for scorers that do not use the run."""


def make_transcript(text: str) -> Transcript:
    reply = Message(role="assistant", content=text)
    return Transcript("s", [make_call("a", [1], [5], reply=reply)], None)


@asynccontextmanager
async def start_scorer(**section: Any) -> AsyncIterator[Scorer]:
    (scorer,) = create_scorers(RunConfig.model_validate({"reward": section}))
    await scorer.start(EMPTY_CONTEXT)
    try:
        yield scorer
    finally:
        await scorer.close()


async def score_text(scorer: Scorer, data: dict[str, Any], text: str) -> Reward:
    (reward,) = await scorer.score(Task("t", data), make_transcript(text))
    assert (reward.session_id, reward.source) == ("s", RewardSource.RULE)
    assert (reward.scorer, reward.scorer_version) == (scorer.name, scorer.version)
    return reward
