from __future__ import annotations

import asyncio
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from instar.config import ReasoningGymTasksConfig, RunConfig, ScoringConfig
from instar.errors import ConfigError, InstarError
from instar.rewards.base import Scorer, ScoringContext, Transcript
from instar.rewards.factory import create_background_scorers, create_scorers
from instar.rewards.rules.worker_pool import build_bubblewrap_command
from instar.rewards.scoring import score_sessions
from instar.rewards.user_scorers import RuleReward
from instar.rollout.tasks import TaskSet, load_tasks
from instar.types import Message, Reward, RewardSource, ScoreState, Task
from tests.unit.data.builders import make_call

TASK = Task("t", {"answer": "yes"})
MODULE = "tests.unit.rewards.test_rewards"


def match_exactly(task: dict[str, Any], transcript: Transcript, points: float = 1.0) -> float:
    return points * (transcript.final_text == task["answer"])


async def match_exactly_async(task: dict[str, Any], transcript: Transcript) -> float:
    return match_exactly(task, transcript)


def score_slowly(task: dict[str, Any], transcript: Transcript) -> float:
    time.sleep(2)
    return 1.0


def score_main_thread(task: dict[str, Any], transcript: Transcript) -> float:
    """Return 1 in the main thread, otherwise 0."""
    return float(threading.current_thread() is threading.main_thread())


def return_nan(task: dict[str, Any], transcript: Transcript) -> float:
    return float("nan")


def make_transcript(text: str, returned: float | None = None) -> Transcript:
    reply = Message(role="assistant", content=text)
    return Transcript("s", [make_call("a", [1], [5], reply=reply)], returned)


def create_scorer(config: RunConfig, taskset: TaskSet | None = None) -> Scorer:
    (scorer,) = create_scorers(config, taskset)
    return scorer


def make_config(**reward: Any) -> RunConfig:
    return RunConfig.model_validate({"reward": reward})


async def test_rule_accepts_sync_and_async_functions_with_arguments() -> None:
    scorer = create_scorer(make_config(type="rule", function=f"{MODULE}:match_exactly", args={"points": 2}))
    assert await scorer.score(TASK, make_transcript("yes")) == [
        Reward("s", 2.0, RewardSource.RULE, scorer=f"{MODULE}:match_exactly")
    ]
    assert [r.value for r in await scorer.score(TASK, make_transcript("no"))] == [0.0]
    async_scorer = create_scorer(make_config(type="rule", function=f"{MODULE}:match_exactly_async"))
    assert [r.value for r in await async_scorer.score(TASK, make_transcript("yes"))] == [1.0]


async def test_rule_without_function_uses_task_set_scorer() -> None:
    taskset = TaskSet([TASK], lambda task, text: float(len(text)))
    scorer = create_scorer(make_config(type="rule"), taskset)
    assert [r.value for r in await scorer.score(TASK, make_transcript("four"))] == [4.0]
    with pytest.raises(ConfigError, match=r"reward\.function"):
        create_scorer(make_config(type="rule"), TaskSet([TASK]))


async def test_slow_rule_does_not_block_and_times_out() -> None:
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            await asyncio.sleep(0.01)
            ticks += 1

    async def load() -> list[Transcript]:
        return [make_transcript("yes")]

    tick_task = asyncio.create_task(tick())
    scorer = create_scorer(make_config(type="rule", function=f"{MODULE}:score_slowly"))
    result = await score_sessions(scorer, TASK, ["s"], load, ScoringConfig(deadline=0.3, retries=0))
    tick_task.cancel()
    assert "did not finish within 0.3 s" in (result.scores[0].reason or "")
    assert ticks > 5


async def test_rule_with_thread_false_runs_in_main_thread() -> None:
    for settings, value in (({}, 0.0), ({"thread": False}, 1.0)):
        config = make_config(type="rule", function=f"{MODULE}:score_main_thread", **settings)
        (reward,) = await create_scorer(config).score(TASK, make_transcript("x"))
        assert reward.value == value


@pytest.mark.parametrize("in_bubblewrap", [False, True], ids=["self-sandboxed", "bubblewrap"])
async def test_reasoning_gym_scorer_cannot_harm_the_machine(in_bubblewrap: bool, tmp_path: Path) -> None:
    """reasoning-gym's countdown evaluates the answer as Python."""
    pytest.importorskip("reasoning_gym")
    if in_bubblewrap and shutil.which("bwrap") is None:
        pytest.skip("bubblewrap is not installed")
    tasks = ReasoningGymTasksConfig(type="reasoning_gym", dataset="countdown", size=4)
    taskset = load_tasks(tasks)
    scorer = create_scorer(make_config(type="rule"), taskset)
    assert isinstance(scorer, RuleReward)
    assert scorer.workers is not None
    if in_bubblewrap:
        scorer.workers.command_prefix = build_bubblewrap_command()
    existing_file, created_file = tmp_path / "existing", tmp_path / "created"
    existing_file.touch()
    await scorer.start(ScoringContext("run", None))  # pyright: ignore[reportArgumentType]
    try:
        expression = taskset[1].data["metadata"]["expression"]
        assert [
            r.value for r in await scorer.score(taskset[1], make_transcript(f"Answer: {expression}"))
        ] == [1.0]
        for attack in (
            f"__import__('os').system('touch {created_file}')",
            f"open('{created_file}', 'w').close()",
            f"__import__('os').remove('{existing_file}')",
            f"__import__('subprocess').run(['/bin/rm', '{existing_file}'])",
            "__import__('os').fork()",
            "__import__('os').kill(__import__('os').getppid(), 9)",
            """print('{"ok": true, "value": 1.0}')""",
        ):
            (reward,) = await scorer.score(taskset[1], make_transcript(f"Answer: {attack}"))
            assert reward.value < 0.1
        assert existing_file.exists()
        assert not created_file.exists()
    finally:
        await scorer.close()


async def test_rule_that_returns_nan_raises() -> None:
    scorer = create_scorer(make_config(type="rule", function=f"{MODULE}:return_nan"))
    with pytest.raises(InstarError, match="nan"):
        await scorer.score(TASK, make_transcript("yes"))


def test_scorers_with_the_same_name_are_rejected() -> None:
    section = {"type": "rule", "function": f"{MODULE}:match_exactly"}
    sections = [section, section | {"args": {"points": 2}}]
    with pytest.raises(
        ConfigError,
        match=r"reward\.1: the name .*match_exactly' is already used by reward\.0; rename or remove one",
    ):
        create_scorers(RunConfig.model_validate({"reward": sections}))
    sections[1]["name"] = "double"
    first, second = create_scorers(RunConfig.model_validate({"reward": sections}))
    assert first.key == f"{MODULE}:match_exactly"
    assert second.name == "double"
    assert second.version, "different arguments give a different version"


async def test_reward_detail_that_is_not_json_fails_the_score() -> None:
    class UnserializableDetailScorer(Scorer):
        name = "unserializable_detail"

        async def score(self, task: Task, transcript: Transcript) -> list[Reward]:
            return [Reward("s", 1.0, RewardSource.RULE, detail={"p": {1, 2}})]

    async def load() -> list[Transcript]:
        return [make_transcript("yes")]

    result = await score_sessions(UnserializableDetailScorer(), TASK, ["s"], load, ScoringConfig(retries=0))
    (score,) = result.scores
    assert score.state is ScoreState.FALLBACK
    assert "cannot be encoded as JSON" in (score.reason or "")


async def test_agent_reward_is_the_returned_reward() -> None:
    scorer = create_scorer(make_config(type="agent"))
    assert await scorer.score(TASK, make_transcript("x")) == []
    assert await scorer.score(TASK, make_transcript("x", 0.5)) == [
        Reward("s", 0.5, RewardSource.AGENT, scorer="returned")
    ]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 10.5, -1000.0])
async def test_agent_reward_out_of_range_raises(value: float) -> None:
    message = rf"between -10 and 10 \(gateway.reward_range\), got {value}"
    with pytest.raises(InstarError, match=message):
        await create_scorer(make_config(type="agent")).score(TASK, make_transcript("x", value))


def test_rules_score_in_the_background_if_the_run_accepts_groups() -> None:
    section = {"type": "rule", "function": "instar.demo.tasks:score"}
    config = RunConfig.model_validate({"reward": [section, {"type": "agent"}]})
    assert create_background_scorers(config).rollout_scorers == []
    config = RunConfig.model_validate({"reward": [section, {"type": "agent"}], "groups": {}})
    (scorer,) = create_background_scorers(config).rollout_scorers
    assert scorer.name == "instar.demo.tasks:score"
    assert create_background_scorers(config).are_needed(serves_live=False)
    with pytest.raises(ConfigError, match=r"reward\.function is required"):
        create_background_scorers(RunConfig.model_validate({"reward": {"type": "rule"}, "groups": {}}))
