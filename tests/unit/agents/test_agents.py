"""Tests for the built-in agents, with a real gateway and a scripted engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from instar.types import Channel, RewardSource, SessionStatus
from tests.unit.rollout.harness import RUN, RolloutHarness, make_config, open_harness

REPLIES = "tests.unit.agents.scripted_replies"
SYNTHETIC_TASKS = {"type": "gsm8k", "synthetic": {"split": "heldout", "size": 7}}


async def evaluate(
    harness: RolloutHarness, tasks: dict[str, Any], agent: str, reward: Any, **args: Any
) -> Any:
    """Evaluate every task once and return the metrics."""
    config = make_config(
        harness.folder, held_out=tasks, agent=f"instar.agents.{agent}", args=args, reward=reward, retries=0
    )
    evaluator = harness.create_evaluator(config)
    try:
        return await evaluator.evaluate("greedy", label="test")
    finally:
        await evaluator.services.agent.close()


async def load_rewards(harness: RolloutHarness) -> list[list[Any]]:
    """Return the rewards of each evaluation session. All sessions must be completed."""
    rows = await harness.store.sessions(RUN, channel=Channel.VAL)
    assert {row.session.status for row in rows} == {SessionStatus.COMPLETED}
    return [list(await harness.store.rewards(row.session.session_id)) for row in rows]


async def test_gsm8k_text_agent_is_scored_by_its_last_number(tmp_path: Path) -> None:
    async with open_harness(tmp_path, script=f"{REPLIES}:write_calculation") as harness:
        metrics = await evaluate(harness, SYNTHETIC_TASKS, "gsm8k:solve", {"type": "rule"})
        assert metrics["accuracy"] == 1.0
        for rewards in await load_rewards(harness):
            assert [reward.source for reward in rewards] == [RewardSource.RULE]
        rows = await harness.store.sessions(RUN, channel=Channel.VAL)
        assert {row.call_count for row in rows} == {2}


async def test_gsm8k_answer_without_number_scores_zero(tmp_path: Path) -> None:
    async with open_harness(tmp_path, script=f"{REPLIES}:reply_without_answer") as harness:
        assert (await evaluate(harness, SYNTHETIC_TASKS, "gsm8k:solve", {"type": "rule"}))["accuracy"] == 0.0


@pytest.mark.parametrize(("script", "reward"), [("write_calculation", 1.0), ("reply_without_answer", 0.0)])
async def test_gsm8k_single_turn_agent_is_scored_by_its_calculation(
    tmp_path: Path, script: str, reward: float
) -> None:
    async with open_harness(tmp_path, script=f"{REPLIES}:{script}") as harness:
        metrics = await evaluate(harness, SYNTHETIC_TASKS, "gsm8k:solve_in_one_turn", {"type": "agent"})
        assert metrics["accuracy"] == reward
        rows = await harness.store.sessions(RUN, channel=Channel.VAL)
        assert {row.call_count for row in rows} == {1}


@pytest.mark.parametrize(
    ("script", "reward", "calls"), [("check_calculated_answer", 1.0, 2), ("check_wrong_answer_first", 0.5, 3)]
)
async def test_gsm8k_tool_agent_reward_halves_with_every_failed_check(
    tmp_path: Path, script: str, reward: float, calls: int
) -> None:
    async with open_harness(tmp_path, script=f"{REPLIES}:{script}") as harness:
        metrics = await evaluate(
            harness, SYNTHETIC_TASKS, "gsm8k:solve_with_tools", {"type": "agent"}, max_tokens=200
        )
        assert metrics["accuracy"] == reward
        for rewards in await load_rewards(harness):
            assert [reward.source for reward in rewards] == [RewardSource.AGENT]
        rows = await harness.store.sessions(RUN, channel=Channel.VAL)
        assert {row.call_count for row in rows} == {calls}
        assert {row.session.metadata.get("turns") for row in rows} == {calls}


async def test_textarena_agent_plays_games_to_the_end(tmp_path: Path) -> None:
    async with open_harness(tmp_path, script=f"{REPLIES}:guess_by_bisection") as harness:
        tasks = {"type": "textarena", "games": ["GuessTheNumber-v0"], "size": 6}
        metrics = await evaluate(harness, tasks, "textarena:play", {"type": "agent"})
        assert metrics["accuracy"] == 1.0
        rows = await harness.store.sessions(RUN, channel=Channel.VAL)
        assert len({row.call_count for row in rows}) > 1


async def test_textarena_two_player_rewards_do_not_depend_on_other_games(tmp_path: Path) -> None:
    rewards_by_run: list[list[float]] = []
    for index, games in enumerate((["KuhnPoker-v0"], ["KuhnPoker-v0", "KuhnPoker-v0-short"])):
        folder = tmp_path / str(index)
        async with open_harness(folder, script=f"{REPLIES}:play_poker") as harness:
            tasks = {"type": "textarena", "games": games, "size": 8}
            await evaluate(harness, tasks, "textarena:play", {"type": "agent"}, max_turns=40)
            groups = {group.group_id: group.task for group in await harness.store.groups(RUN, Channel.VAL)}
            rows = await harness.store.sessions(RUN, channel=Channel.VAL)
            rewards = {groups[row.session.group_id or ""].task_id: row.reward for row in rows}
            rewards_by_run.append([rewards[f"KuhnPoker-v0-{seed}"] or 0.0 for seed in range(0, 8, 2)])
    assert rewards_by_run[0] == rewards_by_run[1]
    assert {abs(reward) for reward in rewards_by_run[0]} <= {0.0, 1.0}


async def test_textarena_unfinished_game_gets_configured_reward(tmp_path: Path) -> None:
    async with open_harness(tmp_path, script=f"{REPLIES}:guess_by_bisection") as harness:
        tasks = {
            "type": "textarena",
            "games": ["GuessTheNumber-v0"],
            "size": 3,
            "args": {"max_number": 10**6},
        }
        args = {"max_turns": 2, "unfinished": -0.25}
        metrics = await evaluate(harness, tasks, "textarena:play", {"type": "agent"}, **args)
        assert metrics["accuracy"] == -0.25


async def test_verifiers_agent_returns_rubric_reward(tmp_path: Path) -> None:
    tasks = {
        "type": "verifiers",
        "environment": "recipes.calculator_env:load_environment",
        "args": {"size": 7},
    }
    for script, accuracy, calls in (("solve_with_calculator", 1.0, 2), ("reply_without_answer", 0.0, 1)):
        async with open_harness(tmp_path / script, script=f"{REPLIES}:{script}") as harness:
            metrics = await evaluate(harness, tasks, "verifiers:run", {"type": "agent"}, max_tokens=200)
            assert metrics["accuracy"] == accuracy
            rows = await harness.store.sessions(RUN, channel=Channel.VAL)
            assert {row.call_count for row in rows} == {calls}


async def test_verifiers_agent_with_failing_calls_fails_the_session(tmp_path: Path) -> None:
    tasks = {
        "type": "verifiers",
        "environment": "recipes.calculator_env:load_environment",
        "args": {"size": 7},
    }
    async with open_harness(tmp_path, script=f"{REPLIES}:solve_with_calculator") as harness:
        # The gateway rejects calls with a negative max_tokens.
        await evaluate(harness, tasks | {"limit": 2}, "verifiers:run", {"type": "agent"}, max_tokens=-1)
        rows = await harness.store.sessions(RUN, channel=Channel.VAL)
        assert {row.session.status for row in rows} == {SessionStatus.FAILED}


@pytest.mark.parametrize(
    ("script", "reward"),
    [
        ("call_triangle_area", 1.0),
        ("call_triangle_area_with_wrong_height", 0.0),
        ("reply_without_answer", 0.0),
    ],
)
async def test_bfcl_calls_are_scored_by_the_checker(tmp_path: Path, script: str, reward: float) -> None:
    pytest.importorskip("bfcl_eval")
    async with open_harness(tmp_path, script=f"{REPLIES}:{script}") as harness:
        rule = {"type": "rule", "function": "instar.rollout.tasksets.bfcl:score"}
        metrics = await evaluate(harness, {"type": "bfcl", "limit": 1}, "ask:ask", rule, max_tokens=200)
        assert metrics["failed"] == 0
        assert metrics["accuracy"] == reward
