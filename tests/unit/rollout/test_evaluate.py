from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from instar.config import CommandAgentConfig
from instar.errors import ConfigError
from instar.rollout.gateway_client import GatewayClient
from instar.store.base import SessionRow
from instar.types import Channel, SessionStatus
from tests.unit.rollout import harness as harness_module
from tests.unit.rollout.harness import (
    KEY,
    RUN,
    RolloutHarness,
    attempts,
    make_config,
    open_harness,
    wait_until,
)


async def list_evaluation_sessions(harness: RolloutHarness) -> list[SessionRow]:
    """Return the evaluation sessions, ordered by evaluation and task."""
    rows = await harness.store.sessions(RUN, channel=Channel.VAL)
    return sorted(rows, key=lambda row: row.session.group_id or "")


async def test_evaluation_attempts_every_task_once_per_mode(harness: RolloutHarness) -> None:
    recorded: list[tuple[str, int, Any]] = []
    evaluator = harness.create_evaluator(make_config(harness.folder), lambda *record: recorded.append(record))
    metrics = await evaluator.evaluate_all("before")
    assert [(m["mode"], m["n"], m["failed"], m["version"]) for m in metrics] == [
        ("greedy", 4, 0, 0),
        ("sampled", 4, 0, 0),
    ]
    assert [(kind, step, values["label"]) for kind, step, values in recorded] == [("eval", 0, "before")] * 2
    rows = await list_evaluation_sessions(harness)
    assert len(rows) == 8
    assert {row.session.sampling["temperature"] for row in rows[:4]} == {0.0}
    assert metrics[0]["accuracy"] == sum(row.reward or 0 for row in rows[:4]) / 4
    assert rows[0].session.group_id == f"{RUN}/val/before-greedy-v0/000000"
    for row in rows[:4]:
        (call,) = await harness.store.calls(row.session.session_id)
        assert call.params.temperature == 0.0
    assert (await harness.store.progress(RUN)).next_group_index == 0, (
        "evaluation must not create training groups"
    )


async def test_evaluation_uses_the_same_seeds_each_time(harness: RolloutHarness) -> None:
    evaluator = harness.create_evaluator(make_config(harness.folder))
    await evaluator.evaluate("sampled", "before")
    await evaluator.evaluate("sampled", "after")
    seeds = [row.session.seed for row in await list_evaluation_sessions(harness)]
    assert seeds[:4] == seeds[4:]
    assert len(set(seeds)) == 4


async def test_evaluation_counts_failed_sessions_as_zero(harness: RolloutHarness) -> None:
    config = make_config(harness.folder, agent="fail_on_task", failed_reward=5.0, group_policy="refill")
    metrics = await harness.create_evaluator(config).evaluate("greedy", "x")
    assert metrics["failed"] == 1
    assert metrics["accuracy"] <= 0.75
    assert attempts["number 0"] == 1


async def test_interrupted_evaluation_is_resumed(harness: RolloutHarness) -> None:
    harness_module.gate = asyncio.Event()
    config = make_config(harness.folder, agent="wait_for_gate", concurrency=2)
    running = asyncio.create_task(harness.create_evaluator(config).evaluate("greedy", "x"))
    await wait_until(lambda: sum(attempts.values()) >= 2)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    harness_module.gate.set()
    progress: list[tuple[int, int]] = []
    resumed = await harness.create_evaluator(config).evaluate(
        "greedy", "x", lambda *counts: progress.append(counts)
    )
    assert progress[-1] == (4, 4)
    assert resumed["failed"] == 0
    attempt_count = sum(attempts.values())
    assert attempt_count == 6
    repeated = await harness.create_evaluator(config).evaluate("greedy", "x")
    assert repeated["accuracy"] == resumed["accuracy"]
    assert sum(attempts.values()) == attempt_count, "finished evaluations are not repeated"
    statuses = [row.session.status for row in await harness.store.sessions(RUN, channel=Channel.VAL)]
    assert statuses.count(SessionStatus.COMPLETED) == 4


async def test_failed_evaluation_is_reported_as_warning(harness: RolloutHarness) -> None:
    recorded: list[tuple[str, int, Any]] = []
    gateway = GatewayClient("http://127.0.0.1:9", KEY, max_wait=0.1)
    evaluator = harness.create_evaluator(
        make_config(harness.folder), lambda *record: recorded.append(record), gateway
    )
    await evaluator.try_evaluate_all("v4")
    await gateway.close()
    ((kind, _, metrics),) = recorded
    assert kind == "warning"
    assert metrics["text"].startswith("the evaluation 'v4' failed: ")
    assert "127.0.0.1:9" in metrics["text"]


async def test_config_error_in_evaluation_is_raised(harness: RolloutHarness) -> None:
    config = make_config(harness.folder)
    assert config.eval is not None
    assert config.rollout is not None
    modes = {"other": config.eval.modes["greedy"].model_copy(update={"agent_args": {"x": 1}})}
    command = CommandAgentConfig(type="command", command=["true"])
    changes = {
        "eval": config.eval.model_copy(update={"modes": modes}),
        "rollout": config.rollout.model_copy(update={"agent": command}),
    }
    with pytest.raises(ConfigError, match=r"eval\.modes: agent_args"):
        await harness.create_evaluator(config.model_copy(update=changes)).try_evaluate_all("v4")


@pytest.mark.parametrize(("tool", "accuracy"), [("calc", 1.0), ("random", 0.0)])
async def test_demo_agent_solves_tasks_only_with_the_calculator(
    tmp_path: Path, tool: str, accuracy: float
) -> None:
    """The agent uses the OpenAI SDK with tool calls. With random tool results, no answer is correct."""
    async with open_harness(tmp_path, script="reply_with_calculator") as harness:
        held_out = {"type": "python", "function": "instar.demo.tasks:heldout_tasks", "args": {"size": 12}}
        config = make_config(
            tmp_path,
            held_out=held_out,
            agent="instar.demo.agent:solve",
            args={"tool": tool},
            reward={"type": "rule", "function": "instar.demo.tasks:score"},
        )
        evaluator = harness.create_evaluator(config)
        metrics = await evaluator.evaluate("greedy", "x")
        await evaluator.services.agent.close()
        assert metrics["accuracy"] == accuracy
        rows = await harness.store.sessions(RUN, channel=Channel.VAL)
        assert {row.call_count for row in rows} == {2}
        for row in rows[:3]:
            first, second = await harness.store.calls(row.session.session_id)
            assert second.prompt_ids[: len(first.sequence)].tolist() == first.sequence.tolist()
