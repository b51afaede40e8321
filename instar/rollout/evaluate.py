"""Held-out tasks, each tried once on the `val` channel, by every configured way of sampling."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from instar.config import EvalMode, FunctionAgentConfig, RunConfig
from instar.errors import ConfigError
from instar.rewards.base import RolloutScoring
from instar.rollout.agents import create_agent
from instar.rollout.base import Agent
from instar.rollout.gateway_client import GatewayClient
from instar.rollout.slots import RolloutSlot, SlotRunner, describe_error, gather_or_cancel
from instar.rollout.tasks import TaskSet
from instar.store.base import Store
from instar.types import Channel, Group, GroupStatus, Json, Reward, Score, SessionStatus

log = logging.getLogger(__name__)

RecordMetrics = Callable[[str, int, Mapping[str, Any]], None]
"""Takes ("eval", step, figures)."""
ReportProgress = Callable[[int, int], None]
"""Takes (tasks done, tasks in all)."""
CombineRewards = Callable[[Sequence[Reward], Sequence[Score]], float | None]
"""What the rewards of a session come to."""
POLL = 0.1
PATIENCE = 60.0
"""Seconds beyond all attempts of a scorer in which not one session of the run was scored."""


class Evaluator:
    def __init__(
        self,
        config: RunConfig,
        store: Store,
        gateway: GatewayClient,
        tasks: TaskSet,
        agent: Agent,
        scoring: RolloutScoring,
        record: RecordMetrics | None = None,
        *,
        combine: CombineRewards,
    ) -> None:
        if config.eval is None or config.rollout is None:
            raise ConfigError("eval: needs held-out tasks (eval.tasks) and an agent (rollout.agent)")
        self.config = config
        self.eval = config.eval
        # A failed session counts as 0 here, whatever training makes of it.
        self.rollout = config.rollout.model_copy(update={"group_policy": "keep", "failed_reward": None})
        self.run_id = config.name
        self.store = store
        self.gateway = gateway
        self.tasks = tasks
        self.agent = agent
        self.scoring = scoring
        self.combine = combine
        self.record = record
        self.doing = "evaluating"

    async def evaluate_all(self, label: str) -> list[Json]:
        """In every mode, one after the other."""
        return [await self.evaluate(mode, label) for mode in self.eval.modes]

    async def last_evaluated_version(self) -> int:
        """The newest version that was evaluated to the end, in every mode, while training went on; 0 where
        none was."""
        groups = await self.store.groups(self.run_id, Channel.VAL, GroupStatus.READY)
        tried = Counter(group.group_id.rpartition("/")[0] for group in groups)
        modes: dict[int, set[str]] = {}
        for name, count in tried.items():
            found = re.search(r"/val/v(\d+)-(.+)-v\d+$", name)
            if found and count == len(self.tasks):
                modes.setdefault(int(found[1]), set()).add(found[2])
        return max((version for version in modes if modes[version] >= set(self.eval.modes)), default=0)

    async def try_evaluate_all(self, label: str) -> None:
        """`evaluate_all`, but a failure is only reported: training goes on without these figures."""
        try:
            await self.evaluate_all(label)
        except ConfigError:
            raise
        except Exception as error:  # whatever it is, it kept tasks from being tried, and no more
            text = f"the evaluation {label!r} failed: {describe_error(error)}"
            log.warning(text, exc_info=True)
            if self.record is not None:
                self.record("warning", 0, {"text": text})

    async def evaluate(self, mode: str, label: str, progress: ReportProgress | None = None) -> Json:
        """Try every task once. What an interrupted evaluation of the same label, mode and version has
        finished is kept."""
        began = time.monotonic()
        agent = self._agent_for(self.eval.modes[mode])
        version = (await self.store.progress(self.run_id)).head_version
        slots = SlotRunner(
            self.rollout,
            self.config.seed,
            self.store,
            self.gateway,
            agent,
            self.scoring,
            sampling=self.eval.modes[mode],
        )
        done = 0

        async def one(place: int, group: Group) -> None:
            nonlocal done
            if group.status is GroupStatus.OPEN:
                await self._try(slots, group, place)
            done += 1
            self.doing = f"evaluating {label}, {mode}: {done} of {len(self.tasks)}"
            if progress is not None:
                progress(done, len(self.tasks))

        groups = await self._groups(f"{label}-{mode}-v{version}")
        await gather_or_cancel(one(place, group) for place, group in enumerate(groups))
        if self.scoring.has_background_scorers:
            self.doing = f"evaluating {label}, {mode}: waiting for rewards"
            await self._until_scored({group.group_id for group in groups})
        rewards = [await self._reward_of(group) for group in groups]
        figures: Json = {
            "label": label,
            "mode": mode,
            "accuracy": sum(reward or 0.0 for reward in rewards) / len(rewards),
            "n": len(rewards),
            "failed": sum(reward is None for reward in rewards),
            "seconds": time.monotonic() - began,
            "version": version,
        }
        if self.record is not None:
            self.record("eval", (await self.store.progress(self.run_id)).committed_steps, figures)
        return figures

    def _agent_for(self, mode: EvalMode) -> Agent:
        """The run's agent, or another of its kind where the mode gives it other arguments."""
        config = self.rollout.agent
        if not mode.agent_args:
            return self.agent
        if not isinstance(config, FunctionAgentConfig):
            raise ConfigError("eval.modes: agent_args are for an agent of type function")
        return create_agent(config.model_copy(update={"args": {**config.args, **mode.agent_args}}))

    async def _groups(self, name: str) -> list[Group]:
        """A group of one per task; closed where it was evaluated before."""
        there = {group.group_id: group for group in await self.store.groups(self.run_id, Channel.VAL)}
        first = max((group.index for group in there.values()), default=-1) + 1
        ids = [f"{self.run_id}/val/{name}/{index:06d}" for index in range(len(self.tasks))]
        fresh = {
            group_id: Group(group_id, self.run_id, Channel.VAL, first + index, 1, self.tasks[index])
            for index, group_id in enumerate(ids)
            if group_id not in there
        }
        await gather_or_cancel(self.store.open_group(group) for group in fresh.values())
        return [there.get(group_id) or fresh[group_id] for group_id in ids]

    async def _try(self, slots: SlotRunner, group: Group, place: int) -> None:
        earlier = [row.session for row in await self.store.sessions(group_id=group.group_id)]
        for session in earlier:
            if session.status is SessionStatus.OPEN:
                await self.store.end_session(session.session_id, SessionStatus.ABANDONED, "interrupted")
        attempt = 1 + max((session.attempt for session in earlier), default=-1)
        await slots.run(RolloutSlot(group, 0, attempt, seed_index=place))
        scored = GroupStatus.SCORING if self.scoring.has_background_scorers else GroupStatus.READY
        await self.store.close_group(group.group_id, scored)

    async def _until_scored(self, group_ids: set[str]) -> None:
        """Or until nothing at all was scored for longer than a scorer may take."""
        settings = self.config.scoring
        patience = PATIENCE + (settings.retries + 1) * settings.deadline
        seen: dict[str, dict[str, int]] = {}
        since = time.monotonic()
        while True:
            waiting = await self.store.groups(self.run_id, Channel.VAL, GroupStatus.SCORING)
            left = sum(group.group_id in group_ids for group in waiting)
            if not left:
                return
            if (counts := await self.store.score_counts(self.run_id)) != seen:
                seen, since = counts, time.monotonic()
            elif time.monotonic() - since > patience:
                log.warning("%d tasks were not scored: nothing was for %.0f s", left, patience)
                return
            await asyncio.sleep(POLL)

    async def _reward_of(self, group: Group) -> float | None:
        """None when the session failed, or nothing scored it."""
        rows = await self.store.sessions(group_id=group.group_id)
        done = [row.session.session_id for row in rows if row.session.status is SessionStatus.COMPLETED]
        if not done:
            return None
        scores = await self.store.scores(done[-1:])
        return self.combine(await self.store.rewards(done[-1]), scores[done[-1]])
