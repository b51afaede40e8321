"""Evaluate the policy on held-out tasks. Each task is attempted once per mode, on the `val` channel."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any

from instar.async_utils import gather_or_cancel
from instar.config import EvalMode, FunctionAgentConfig, RunConfig
from instar.errors import ConfigError
from instar.rewards.base import describe_error
from instar.rollout.agents import create_agent
from instar.rollout.base import Agent
from instar.rollout.slots import RolloutServices, RolloutSlot, SlotRunner, abandon_open_sessions
from instar.rollout.tasks import TaskSet
from instar.types import Channel, Group, GroupStatus, Json, Reward, Score, SessionStatus

logger = logging.getLogger(__name__)

RecordMetrics = Callable[[str, int, Mapping[str, Any]], None]
"""Called with the kind of record ("eval" or "warning"), the step and the values."""
ReportProgress = Callable[[int, int], None]
"""Called with the number of finished tasks and the total."""
CombineRewards = Callable[[Sequence[Reward], Sequence[Score]], float | None]
POLL_INTERVAL_SECONDS = 0.1
SCORING_GRACE_SECONDS = 60.0
"""Extra time to wait for the next score, on top of the time that all of a scorer's attempts may take."""


@dataclass(eq=False, repr=False)
class Evaluator:
    config: RunConfig
    tasks: TaskSet
    services: RolloutServices
    record: RecordMetrics | None = None
    _: KW_ONLY
    combine: CombineRewards

    def __post_init__(self) -> None:
        config = self.config
        if config.eval is None or config.rollout is None:
            missing = "eval.tasks" if config.eval is None else "rollout.agent"
            raise ConfigError(f"{missing} is missing; evaluations need eval.tasks and rollout.agent")
        self.eval = config.eval
        # A failed session counts as 0 in an evaluation, regardless of the settings for training.
        self.rollout = config.rollout.model_copy(update={"group_policy": "keep", "failed_reward": None})
        self.run_id = config.name
        self.store = self.services.store
        self.scoring = self.services.scoring
        self.activity = "evaluating"

    async def evaluate_all(self, label: str) -> list[Json]:
        return [await self.evaluate(mode, label) for mode in self.eval.modes]

    async def find_last_evaluated_version(self) -> int:
        """Return the newest version that was evaluated in all modes during training, or 0."""
        groups = await self.store.groups(self.run_id, Channel.VAL, GroupStatus.READY)
        task_counts = Counter(group.group_id.rpartition("/")[0] for group in groups)
        modes: dict[int, set[str]] = {}
        for name, count in task_counts.items():
            match = re.search(r"/val/v(\d+)-(.+)-v\d+$", name)
            if match and count == len(self.tasks):
                modes.setdefault(int(match[1]), set()).add(match[2])
        return max((version for version in modes if modes[version] >= set(self.eval.modes)), default=0)

    async def try_evaluate_all(self, label: str) -> None:
        """Evaluate all modes. Failures other than ConfigError become warnings, so that training continues."""
        try:
            await self.evaluate_all(label)
        except ConfigError:
            raise
        except Exception as error:  # any other failure of an evaluation is tolerated
            text = f"the evaluation {label!r} failed: {describe_error(error)}"
            logger.warning(text, exc_info=True)
            if self.record is not None:
                self.record("warning", 0, {"text": text})

    async def evaluate(self, mode: str, label: str, progress: ReportProgress | None = None) -> Json:
        """Attempt every task once and return the metrics. If an evaluation with the same label, mode and
        version was interrupted, its finished tasks are not repeated."""
        start_time = time.monotonic()
        services = replace(self.services, agent=self._agent_for(self.eval.modes[mode]))
        version = (await self.store.progress(self.run_id)).head_version
        slot_runner = SlotRunner(self.rollout, self.config.seed, services, self.eval.modes[mode])
        finished = 0

        async def run_task(index: int, group: Group) -> None:
            nonlocal finished
            if group.status is GroupStatus.OPEN:
                await self._run_group(slot_runner, group, index)
            finished += 1
            self.activity = f"evaluation ({label}, {mode}): {finished} of {len(self.tasks)} tasks"
            if progress is not None:
                progress(finished, len(self.tasks))

        groups = await self._open_groups(f"{label}-{mode}-v{version}")
        await gather_or_cancel(run_task(index, group) for index, group in enumerate(groups))
        if self.scoring.has_background_scorers:
            self.activity = f"evaluation ({label}, {mode}): waiting for rewards"
            await self._wait_for_scores({group.group_id for group in groups})
        rewards = [await self._load_reward(group) for group in groups]
        metrics: Json = {
            "label": label,
            "mode": mode,
            "accuracy": sum(reward or 0.0 for reward in rewards) / len(rewards),
            "n": len(rewards),
            "failed": sum(reward is None for reward in rewards),
            "seconds": time.monotonic() - start_time,
            "version": version,
        }
        if self.record is not None:
            self.record("eval", (await self.store.progress(self.run_id)).committed_steps, metrics)
        return metrics

    def _agent_for(self, mode: EvalMode) -> Agent:
        """Return the run's agent, or a new agent if the mode has its own ``agent_args``."""
        config = self.rollout.agent
        if not mode.agent_args:
            return self.services.agent
        if not isinstance(config, FunctionAgentConfig):
            raise ConfigError("eval.modes: agent_args is only allowed if rollout.agent.type is function")
        return create_agent(config.model_copy(update={"args": {**config.args, **mode.agent_args}}))

    async def _open_groups(self, name: str) -> list[Group]:
        """Return one group of size 1 for each task. The groups of an interrupted evaluation with this name
        are reused, and are already closed if their task is finished."""
        existing = {group.group_id: group for group in await self.store.groups(self.run_id, Channel.VAL)}
        first_index = max((group.index for group in existing.values()), default=-1) + 1
        ids = [f"{self.run_id}/val/{name}/{index:06d}" for index in range(len(self.tasks))]
        new_groups = {
            group_id: Group(group_id, self.run_id, Channel.VAL, first_index + index, 1, self.tasks[index])
            for index, group_id in enumerate(ids)
            if group_id not in existing
        }
        await gather_or_cancel(self.store.open_group(group) for group in new_groups.values())
        return [existing.get(group_id) or new_groups[group_id] for group_id in ids]

    async def _run_group(self, slot_runner: SlotRunner, group: Group, index: int) -> None:
        earlier = await abandon_open_sessions(self.store, group, self.config.agent_id, "interrupted")
        attempt = 1 + max((session.attempt for session in earlier), default=-1)
        await slot_runner.run(RolloutSlot(group, 0, attempt, seed_index=index))
        status = GroupStatus.SCORING if self.scoring.has_background_scorers else GroupStatus.READY
        await self.store.close_group(group.group_id, status)

    async def _wait_for_scores(self, group_ids: set[str]) -> None:
        """Wait until the groups are scored. Give up with a warning if no session is scored for longer than a
        scorer may take."""
        settings = self.config.scoring
        max_wait = SCORING_GRACE_SECONDS + (settings.retries + 1) * settings.deadline
        last_counts: dict[str, dict[str, int]] = {}
        last_change = time.monotonic()
        while True:
            scoring_groups = await self.store.groups(self.run_id, Channel.VAL, GroupStatus.SCORING)
            remaining = sum(group.group_id in group_ids for group in scoring_groups)
            if not remaining:
                return
            if (counts := await self.store.score_counts(self.run_id)) != last_counts:
                last_counts, last_change = counts, time.monotonic()
            elif time.monotonic() - last_change > max_wait:
                text = "stopped waiting for the scores of %d tasks: no session was scored for %.0f s"
                logger.warning(text, remaining, max_wait)
                return
            await asyncio.sleep(POLL_INTERVAL_SECONDS)

    async def _load_reward(self, group: Group) -> float | None:
        """Return the combined reward of the group's session, or None if it failed or has no reward."""
        sessions = (await self.store.group_sessions([group], self.config.agent_id))[group.group_id]
        completed = [s.session_id for s in sessions if s.status is SessionStatus.COMPLETED]
        if not completed:
            return None
        scores = await self.store.scores(completed[-1:])
        return self.combine(await self.store.rewards(completed[-1]), scores[completed[-1]])
