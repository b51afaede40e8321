"""Fixtures that run commands in this process, and a small run with a real store."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from instar.cli.main import main
from instar.cluster.layout import RunFolder
from instar.config import RunConfig
from instar.store.base import Run
from instar.store.factory import open_store
from instar.trainer.monitor import Monitor
from instar.types import (
    Call,
    Channel,
    Claim,
    ClaimOutcome,
    Group,
    GroupStatus,
    Link,
    Message,
    Reward,
    RewardSource,
    Session,
    SessionStatus,
    StepState,
    Task,
    ToolCall,
)

RUN = "small"


@dataclass(frozen=True)
class Result:
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


Instar = Callable[..., Result]


@pytest.fixture
def instar(capfd: pytest.CaptureFixture[str]) -> Iterator[Instar]:
    """Return a function that runs a command: ``instar("config", "check", path)``."""
    path, environment = list(sys.path), dict(os.environ)

    def run(*arguments: object) -> Result:
        capfd.readouterr()
        code: Any = 0
        try:
            main([str(argument) for argument in arguments])
        except SystemExit as exit_error:
            code = exit_error.code
        captured = capfd.readouterr()
        return Result(code or 0, captured.out, captured.err)

    yield run
    # Loading a config file adds its folder to sys.path and PYTHONPATH.
    sys.path[:] = path
    os.environ.clear()
    os.environ.update(environment)


# --- a finished run -------------------------------------------------------------------------------


@dataclass
class SmallRun:
    folder: Path
    sessions: dict[str, str] = field(default_factory=dict[str, str])
    """Session ids by test case."""


@pytest.fixture(scope="session")
def small_run(tmp_path_factory: pytest.TempPathFactory) -> SmallRun:
    """Create a run with a trained group, a group without signal, a waiting group and two evaluations."""
    small = SmallRun(tmp_path_factory.mktemp("runs") / RUN)
    config = RunConfig.model_validate(
        {
            "name": RUN,
            "dir": str(small.folder),
            "rollout": {
                "tasks": {"type": "python", "function": "instar.demo.tasks:train_tasks"},
                "agent": {"type": "function", "function": "instar.demo.agent:solve"},
                "group_size": 2,
            },
            "eval": {"tasks": {"type": "python", "function": "instar.demo.tasks:heldout_tasks"}},
        }
    )
    RunFolder(small.folder).create(config)
    asyncio.run(_fill_store(config, small))
    _write_metrics(small.folder)
    return small


async def _fill_store(config: RunConfig, small: SmallRun) -> None:
    store = open_store(config)
    await store.put_run(Run(RUN, RUN, config.model_dump(mode="json"), "finished"))

    async def add_group(
        group_id: str, index: int, rewards: list[float | None], channel: Channel
    ) -> list[str]:
        """Add a closed group with one session per reward, and return the session ids. A reward of None makes
        the session a failed one."""
        await store.open_group(Group(group_id, RUN, channel, index, 2, Task(f"task-{index}", {})))
        session_ids = [f"sess-{index}{slot}-{group_id.replace('/', '-')}" for slot in range(len(rewards))]
        for slot, (session_id, reward) in enumerate(zip(session_ids, rewards, strict=True)):
            await store.open_session(
                Session(
                    session_id,
                    RUN,
                    "default",
                    RUN,
                    channel,
                    group_id=group_id,
                    slot=slot,
                    task_id=f"task-{index}",
                )
            )
            await store.add_calls(_make_calls(session_id))
            session_rewards = (
                [] if reward is None else [Reward(session_id, reward, RewardSource.RULE, "rule")]
            )
            status = SessionStatus.FAILED if reward is None else SessionStatus.COMPLETED
            await store.end_session(
                session_id, status, "the agent crashed" if reward is None else None, session_rewards
            )
        await store.close_group(group_id, GroupStatus.READY)
        return session_ids

    trained = await add_group(f"{RUN}/train/000000", 0, [1.0, 0.0], Channel.TRAIN)
    equal = await add_group(f"{RUN}/train/000001", 1, [0.0, 0.0], Channel.TRAIN)
    waiting = await add_group(f"{RUN}/train/000002", 2, [1.0, None], Channel.TRAIN)
    small.sessions = {"trained": trained[0], "equal": equal[0], "waiting": waiting[0], "failed": waiting[1]}
    for label, reward in (("before", 0.0), ("after", 1.0)):
        session_ids = await add_group(f"{RUN}/val/{label}-greedy-v0/000000", 0, [reward], Channel.VAL)
        small.sessions[label] = session_ids[0]
    claims = [
        Claim(
            RUN,
            0,
            f"{s}/0",
            s,
            f"{RUN}/train/000000",
            ClaimOutcome.TRAINED,
            reward=r,
            advantage=a,
            staleness=1,
        )
        for s, r, a in zip(trained, (1.0, 0.0), (1.0, -1.0), strict=True)
    ]
    claims += [
        Claim(
            RUN, 0, f"{s}/0", s, f"{RUN}/train/000001", ClaimOutcome.DROPPED, reason="zero_signal", reward=0.0
        )
        for s in equal
    ]
    await store.claim_step(RUN, 1, claims)
    for state in (StepState.SUBMITTED, StepState.SAVED, StepState.COMMITTED):
        await store.advance_step(RUN, 1, state)
    await store.close()


def _make_calls(session_id: str) -> list[Call]:
    """Return two calls, the first with a tool call. The second lacks a logprob, so it is not trainable."""

    def make_numbered_call(number: int, messages: list[Message], reply: Message, **fields: Any) -> Call:
        return Call(
            call_id=f"{session_id}-{number}",
            session_id=session_id,
            run_id=RUN,
            agent_id="default",
            policy_id=RUN,
            request_id=f"{session_id}-{number}",
            sampled_ids=np.array([7, 8], np.int32),
            versions=np.array([9, 10], np.int32),
            messages=tuple(messages),
            reply=reply,
            finish_reason="stop",
            **fields,
        )

    question = Message(role="user", content="What is <2> plus 2?")
    tool_call = ToolCall(id="c1", name="calc", arguments='{"expression": "2 + 2"}')
    tool_reply = Message(role="assistant", content="", tool_calls=[tool_call])
    tool_result = Message(role="tool", content="4", tool_call_id="c1")
    first = make_numbered_call(
        1,
        [question],
        tool_reply,
        prompt_ids=np.array([1, 2], np.int32),
        logprobs=np.array([-0.5, -0.25], np.float32),
    )
    second = make_numbered_call(
        2,
        [question, tool_reply, tool_result],
        Message(role="assistant", content="4"),
        prompt_ids=np.array([1, 2, 7, 8, 3], np.int32),
        logprobs=np.array([np.nan, -0.25], np.float32),
        parent_id=first.call_id,
        link=Link.EXTENDS,
        base_id=first.call_id,
        base_tokens=4,
        base_messages=2,
        trainable=False,
        reason="logprobs are missing",
    )
    return [first, second]


def _write_metrics(folder: Path) -> None:
    monitor = Monitor(folder)
    for label, accuracy in (("before", 0.25), ("after", 0.75)):
        for mode in ("greedy", "sampled"):
            metrics = {"label": label, "mode": mode, "accuracy": accuracy, "n": 4, "failed": 0}
            monitor.record("eval", 0, {**metrics, "seconds": 1.0, "version": 0})
    for step, reward in ((1, 0.25), (2, None), (3, 0.75)):
        timing = {"step_seconds": 2.0, "wait_seconds": 1.0, "elapsed": 60.0 * step}
        staleness = {
            "staleness_mean": 0.5,
            "staleness_tokens": {"0": 150, "2": 50},
            "dropped": {"stale": step},
        }
        monitor.record("train", step, {"reward_mean": reward, "version": step, **staleness, **timing})
    monitor.close()
