"""The measured run: an `instar train` process on a virtual clock, which can be killed and resumed."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gateway_parts.processes import MeasurementError, find_free_port

from instar.config import RunConfig
from instar.gateway.auth import create_key
from instar.live.decision import HELD_OUT
from instar.store.base import Store
from instar.store.factory import open_store
from instar.types import Artifact, PolicyStage
from live_parts.owner import DAYS_PER_WEEK_ENV, WEEKS_ENV
from live_parts.schedule import Plan
from live_parts.users import RESAMPLED_AGENT
from tests.torture.faults import HOOKS, Clock
from tests.torture.run_process import (
    ROOT,
    RunProcess,
    is_alive,
    list_descendants,
    list_pids,
    read_arguments,
)

NAME = "month"
BENCH = Path(__file__).parents[1]
GROUPS_PER_STEP = 24
"""The number of sessions in a training step, with which an agent gets at most 12 candidates in a month."""
RESAMPLED_GROUPS_PER_STEP = 36
"""The same for the resampled agent, whose rule scores every session, also in the week without feedback."""
RESAMPLED_REPLIES = 4
START_TIMEOUT_SECONDS = 300.0
STOP_TIMEOUT_SECONDS = 180.0
QUIET_SECONDS = 6.0
"""The time without any change after which the background work of a night is done."""
SETTLE_TIMEOUT_SECONDS = 1800.0
POLL_SECONDS = 0.5
SERVING_ROLES = ("engine", "gateway", "supervisor")
BUSY = re.compile(r"(?<!for )\bstep \d|recovering|starting|loading|evaluating|sampling")
"""Matches the activity of a trainer or gate that has work to do."""


def make_settings(
    folder: Path, model: str, agents: Sequence[str], *, groups_per_step: int, has_gate: bool
) -> dict[str, Any]:
    """Return the settings of the run. Those that concern learning have their defaults, except the numbers of
    sessions and corrections in a step and the range of the ratings. Resampling is set for the entire run, and
    needs a rule, so that a run with the resampled agent has no other agent."""
    settings: dict[str, Any] = {
        "name": NAME,
        "dir": str(folder / "run"),
        "seed": 0,
        "model": {"name": model, "device": "cpu", "max_context": 384},
        "engine": {"type": "local", "max_batch": 16, "kv_tokens": 4096, "max_adapters": 4 * len(agents)},
        "backend": {"type": "local"},
        "agents": {agent: {"mode": "learn"} for agent in agents},
        "data": "live",
        "live": {"gate": {"mode": "auto" if has_gate else "off", "max_tokens": 32, "concurrency": 8}},
        "gateway": {"port": find_free_port(), "reward_range": [0, 1]},
        "trainer": {
            "steps": 10_000,
            "groups_per_step": groups_per_step,
            "corrections": {"per_step": groups_per_step},
            "tensorboard": False,
        },
    }
    if RESAMPLED_AGENT in agents:
        settings["live"]["resample"] = RESAMPLED_REPLIES
        settings["trainer"]["groups_per_step"] = max(groups_per_step, RESAMPLED_GROUPS_PER_STEP)
        settings["reward"] = {"type": "rule", "function": "live_parts.owner:score"}
    return settings


class LiveRun:
    """The run, its keys and its store."""

    def __init__(self, folder: Path, settings: dict[str, Any], plan: Plan, clock: Clock) -> None:
        self.config = RunConfig.model_validate(settings)
        self._clock = clock
        weeks = {WEEKS_ENV: ",".join(plan.weeks), DAYS_PER_WEEK_ENV: str(plan.days_per_week)}
        path = os.pathsep.join(map(str, (HOOKS, ROOT, BENCH)))
        self._env = {**clock.env, **weeks, "PYTHONPATH": path, "TZ": "UTC"}
        self.url = f"http://127.0.0.1:{self.config.gateway.port}"
        self._process = RunProcess(folder, settings)
        gate = [] if self.config.live.gate.mode == "off" else ["gate"]
        self._process.roles = ("engine", "gateway", "trainer", *gate)
        self._stop_leftovers()
        self._store: Store | None = None

    @property
    def store(self) -> Store:
        self._store = self._store or open_store(self.config)
        return self._store

    def set_time(self, timestamp: float) -> None:
        """Change the clock of this process and of all processes of the run."""
        self._clock.jump(timestamp - time.time())

    def _stop_leftovers(self) -> None:
        """Kill the processes of an earlier measurement that was killed."""
        config_path, run_dir = str(self._process.config_path), str(self._process.run_dir)
        leftovers = {pid for pid in list_pids() if config_path in read_arguments(pid)}
        for pid in list(leftovers):
            leftovers |= list_descendants(pid)
        leftovers |= {
            pid
            for pid in list_pids()
            if run_dir in (arguments := read_arguments(pid)) and "instar.cluster.role" in arguments
        }
        for pid in leftovers - {os.getpid()}:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        while any(map(is_alive, leftovers - {os.getpid()})):
            time.sleep(0.1)

    async def start(self) -> None:
        """Start or resume the run, and wait until it is ready."""
        is_resumed = (self._process.run_dir / "config.json").exists()
        self._process.start(resume=is_resumed, **self._env)
        await self.wait_until_ready()

    async def wait_until_ready(self) -> None:
        deadline = time.monotonic() + START_TIMEOUT_SECONDS
        while not self._process.is_ready():
            self._check(deadline, "did not start")
            await asyncio.sleep(POLL_SECONDS)

    def _check(self, deadline: float, problem: str) -> None:
        if self._process.has_exited():
            raise MeasurementError(f"the run exited:\n{self._process.collect_logs()}")
        if time.monotonic() > deadline:
            raise MeasurementError(f"the run {problem} in time:\n{self._process.collect_logs()}")

    async def stop(self) -> None:
        """Stop the run as Ctrl-C does."""
        assert self._process.process is not None
        os.kill(self._process.supervisor_pid, signal.SIGINT)
        deadline = time.monotonic() + STOP_TIMEOUT_SECONDS
        while not self._process.has_exited():
            if time.monotonic() > deadline:
                raise MeasurementError(f"the run did not stop in time:\n{self._process.collect_logs()}")
            await asyncio.sleep(POLL_SECONDS)

    async def kill(self, role: str) -> None:
        """Kill a role, which the supervisor starts again, or `all` processes, and then resume the run."""
        if role == "all":
            self.kill_all()
            await self.start()
        else:
            await self.wait_until_ready()
            self._process.kill_role(role)

    def kill_all(self) -> None:
        if self._process.process is not None:
            self._process.kill_tree()

    async def create_keys(self, saved: dict[str, list[str]]) -> dict[str, list[str]]:
        """Return the agent key and the feedback key of every agent. Create those that are not ``saved``."""
        keys = dict(saved)
        for agent in self.config.learning_agents:
            if agent not in keys:
                keys[agent] = [await create_key(self.store, kind, agent) for kind in ("agent", "feedback")]
        return keys

    async def settle(self) -> None:
        """Wait until the trainer and the evaluation have nothing more to do."""
        deadline = time.monotonic() + SETTLE_TIMEOUT_SECONDS
        last, changed_at = await self._read_progress(), time.monotonic()
        while time.monotonic() < changed_at + QUIET_SECONDS or not last[0]:
            self._check(deadline, "did not finish its background work")
            await asyncio.sleep(POLL_SECONDS)
            progress = await self._read_progress()
            if progress != last:
                last, changed_at = progress, time.monotonic()

    async def _read_progress(self) -> tuple[bool, object]:
        """Return whether no role reports any background work, and a value that changes with the progress."""
        activities = [
            (row.name, row.doing) for row in await self.store.endpoints(NAME) if row.role not in SERVING_ROLES
        ]
        is_idle = bool(activities) and not any(BUSY.search(doing) for _, doing in activities)
        versions = [
            (row.policy.version, row.state, row.stage)
            for policy_id in self.config.policy_ids
            for row in await self.store.policy_versions(policy_id)
        ]
        return is_idle, (activities, versions)

    async def find_serving_version(self, agent: str) -> int:
        return (await self.store.latest_policy(self.config.get_policy_id(agent))).version

    async def find_undecided(self, agent: str) -> int | None:
        """Return the newest candidate if only the agent's owner can promote it, or else None."""
        policy_id, gate = self.config.get_policy_id(agent), self.config.live.gate
        rows = await self.store.policy_versions(policy_id)
        pending = [row.policy.version for row in rows if row.stage is PolicyStage.CANDIDATE]
        if not pending or gate.mode == "off":
            return pending[-1] if pending else None
        evaluations = [e for e in await self.store.evaluations(policy_id) if e.version == pending[-1]]
        if not evaluations or evaluations[-1].decision != "more data":
            return None
        compared = evaluations[-1].results.get(HELD_OUT, {}).get("items", 0)
        return pending[-1] if compared < gate.min_prompts else None

    async def find_artifact(self, agent: str, version: int) -> Artifact:
        for row in await self.store.policy_versions(self.config.get_policy_id(agent)):
            if row.policy.version == version:
                return row.policy.artifact
        return Artifact("base")

    async def promote(self, agent: str, version: int) -> None:
        """Serve a candidate, as `instar versions promote` does, and wait until the engine has loaded it."""
        await self.store.promote_version(self.config.get_policy_id(agent), version)
        await self.settle()

    async def close(self) -> None:
        if self._store is not None:
            await self._store.close()
        self.kill_all()
