from __future__ import annotations

from typing import Any

import pytest

from instar.config import RunConfig
from instar.errors import ConfigError, InstarError
from instar.rewards.base import Scorer, Transcript
from instar.rewards.factory import create_scorers
from instar.rollout.tasks import TaskSet
from instar.types import Message, Reward, RewardSource, Task
from tests.unit.data.build import make_call

TASK = Task("t", {"answer": "yes"})
HERE = "tests.unit.rewards.test_rewards"


def exact(task: dict[str, Any], transcript: Transcript, worth: float = 1.0) -> float:
    return worth * (transcript.final_text == task["answer"])


async def exact_later(task: dict[str, Any], transcript: Transcript) -> float:
    return exact(task, transcript)


def nonsense(task: dict[str, Any], transcript: Transcript) -> float:
    return float("nan")


def transcript(text: str, returned: float | None = None) -> Transcript:
    reply = Message(role="assistant", content=text)
    return Transcript("s", [make_call("a", [1], [5], reply=reply)], returned)


def only(config: RunConfig, taskset: TaskSet | None = None) -> Scorer:
    (scorer,) = create_scorers(config, taskset)
    return scorer


def config(**reward: Any) -> RunConfig:
    return RunConfig.model_validate({"reward": reward})


async def test_a_rule_sync_or_async_with_arguments() -> None:
    scorer = only(config(type="rule", function=f"{HERE}:exact", args={"worth": 2}))
    assert await scorer.score(TASK, transcript("yes")) == [
        Reward("s", 2.0, RewardSource.RULE, scorer=f"{HERE}:exact")
    ]
    assert [r.value for r in await scorer.score(TASK, transcript("no"))] == [0.0]
    later = only(config(type="rule", function=f"{HERE}:exact_later"))
    assert [r.value for r in await later.score(TASK, transcript("yes"))] == [1.0]


async def test_the_task_sets_own_scorer() -> None:
    taskset = TaskSet([TASK], lambda task, text: float(len(text)))
    scorer = only(config(type="rule"), taskset)
    assert [r.value for r in await scorer.score(TASK, transcript("four"))] == [4.0]
    with pytest.raises(ConfigError, match=r"reward\.function"):
        only(config(type="rule"), TaskSet([TASK]))


async def test_a_rule_must_give_a_finite_number() -> None:
    scorer = only(config(type="rule", function=f"{HERE}:nonsense"))
    with pytest.raises(InstarError, match="nan"):
        await scorer.score(TASK, transcript("yes"))


async def test_the_agents_own_word() -> None:
    scorer = only(config(type="agent"))
    assert await scorer.score(TASK, transcript("x")) == []
    assert await scorer.score(TASK, transcript("x", 0.5)) == [
        Reward("s", 0.5, RewardSource.AGENT, scorer="returned")
    ]


async def test_an_agents_reward_that_is_no_number_fails_its_session_alone() -> None:
    with pytest.raises(InstarError, match="the agent returned nan as its reward"):
        await only(config(type="agent")).score(TASK, transcript("x", float("nan")))
