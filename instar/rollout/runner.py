"""Runs groups of sessions for the trainer, as far ahead as admission allows."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from functools import lru_cache
from typing import Protocol

from instar.config import RunConfig
from instar.errors import AgentError, ConfigError
from instar.rewards.base import RolloutScoring
from instar.rollout.admission import Admission, AdmissionState
from instar.rollout.base import Agent
from instar.rollout.gateway_client import GatewayClient
from instar.rollout.slots import RolloutSlot, SlotResult, SlotRunner, gather_or_cancel
from instar.rollout.tasks import TaskSet
from instar.store.base import Store
from instar.types import Channel, Group, GroupStatus, Session, SessionStatus, Task

log = logging.getLogger(__name__)

POLL = 0.05
MAX_FAILED_GROUPS = 8
"""Groups in a row that may fail as a whole."""


class PeriodicEvaluator(Protocol):
    """What evaluates while training goes on, if anything."""

    @property
    def doing(self) -> str: ...

    async def last_evaluated_version(self) -> int:
        """Evaluated so far; 0 is none."""
        ...

    async def try_evaluate_all(self, label: str) -> None:
        """Raises nothing that training could go on without."""
        ...


class RolloutRunner:
    def __init__(
        self,
        config: RunConfig,
        store: Store,
        gateway: GatewayClient,
        tasks: TaskSet,
        agent: Agent,
        scoring: RolloutScoring,
    ) -> None:
        if config.rollout is None:
            raise ConfigError("rollout: this run has none")
        self.config = config
        self.rollout = config.rollout
        self.run_id = config.name
        self.store = store
        self.tasks = tasks
        self.slots = SlotRunner(config.rollout, config.seed, store, gateway, agent, scoring)
        self.scoring = scoring
        self.counters = self.slots.counters
        self.admission = Admission(config, store, self.run_id)
        self.evaluator: PeriodicEvaluator | None = None
        self.groups_done = 0
        self._order = lru_cache(maxsize=2)(self._shuffled)
        self._hopeless = 0
        """Groups in a row of which every session failed."""
        self._evaluated: int | None = None
        """The last version, once it is known."""
        self._evaluating = False
        self._draining = False
        self._unfinished = 0
        """Slots that have no final session yet."""
        self._freed = asyncio.Event()
        """A slot has ended: there may be room for another group."""
        self._running: set[asyncio.Task[None]] = set()

    # --- what the display shows ------------------------------------------------------------------

    @property
    def doing(self) -> str:
        if self._evaluating and self.evaluator is not None:
            return self.evaluator.doing
        counted = self.counters
        numbers = {"failed": counted.failed, "without a reward": counted.unscored}
        told = ", ".join(f"{number} {what}" for what, number in numbers.items() if number)
        failed = f", {told} ({counted.last_failure[:80]})" if told else ""
        if not self._running:
            return f"{'drained' if self._draining else 'waiting for the trainer'}{failed}"
        return f"{counted.running} sessions of {len(self._running)} groups, {counted.completed} done{failed}"

    def epoch_of(self, index: int) -> int:
        """How often the task set was walked through before the group of this index."""
        return index // len(self.tasks)

    # --- the run ---------------------------------------------------------------------------------

    async def run(self) -> None:
        """Until the trainer has its steps, or `drain` was called and what ran has ended. Cancelling stops
        at once: sessions under way are abandoned, and a later run starts them again."""
        try:
            await self._resume()
            while True:
                self._collect()
                state = await self.admission.read_state()
                if self._draining or state.is_finished:
                    self._draining = True
                    if not self._running:
                        return
                else:
                    await self._evaluate_if_due(state)
                    if state.startable_groups and self._unfinished < self.rollout.concurrency:
                        await self._start_group(state.next_group_index)
                        continue
                await self._pause()
        finally:
            for task in self._running:
                task.cancel()
            await asyncio.gather(*self._running, return_exceptions=True)

    def drain(self) -> None:
        """Start no further group; `run` returns when those under way have ended."""
        self._draining = True

    def _collect(self) -> None:
        for task in [task for task in self._running if task.done()]:
            self._running.discard(task)
            task.result()

    async def _pause(self) -> None:
        """Until a slot has ended, but not for long: the trainer makes room too."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(POLL):
                await self._freed.wait()
        self._freed.clear()

    async def _evaluate_if_due(self, state: AdmissionState) -> None:
        """No group starts meanwhile, so that evaluation and rollout do not slow each other down."""
        every = self.config.eval.every if self.config.eval else None
        version = state.progress.head_version
        if self.evaluator is None or every is None:
            return
        if self._evaluated is None:  # an earlier process may have been ended in the midst of one
            self._evaluated = await self.evaluator.last_evaluated_version()
        if version // every > self._evaluated // every:
            self._evaluated = version
            self._evaluating = True
            try:
                await self.evaluator.try_evaluate_all(f"v{version}")
            finally:
                self._evaluating = False

    # --- groups ----------------------------------------------------------------------------------

    def task_for(self, index: int) -> Task:
        """The task of a group: the set is walked through over and over, each time in another order."""
        epoch, place = divmod(index, len(self.tasks))
        return self.tasks[self._order(epoch)[place]]

    def _shuffled(self, epoch: int) -> list[int]:
        order = list(range(len(self.tasks)))
        if self.rollout.shuffle:
            random.Random(f"{self.config.seed}/{epoch}").shuffle(order)
        return order

    async def _start_group(self, index: int) -> None:
        group = Group(
            group_id=f"{self.run_id}/train/{index:06d}",
            run_id=self.run_id,
            channel=Channel.TRAIN,
            index=index,
            size=self.rollout.group_size,
            task=self.task_for(index),
        )
        await self.store.open_group(group)
        self._launch(group, [RolloutSlot(group, number) for number in range(group.size)])

    def _launch(self, group: Group, slots: list[RolloutSlot], failed: bool = False) -> None:
        self._unfinished += len(slots)
        self._running.add(asyncio.create_task(self._run_group(group, slots, failed), name=group.group_id))

    async def _run_group(self, group: Group, slots: list[RolloutSlot], failed: bool) -> None:
        """``failed``: a slot that was final before already failed."""
        outcomes = await gather_or_cancel(self._run_slot(slot) for slot in slots)
        self._note(outcomes)
        failed = failed or any(outcome.status is SessionStatus.FAILED for outcome in outcomes)
        await self._abandon_open(group, "superseded")
        if failed and self.rollout.group_policy == "drop":
            await self.store.close_group(group.group_id, GroupStatus.DROPPED, "session_failed")
        else:
            scored = GroupStatus.SCORING if self.scoring.has_background_scorers else GroupStatus.READY
            await self.store.close_group(group.group_id, scored)
        self.groups_done += 1

    def _note(self, outcomes: list[SlotResult]) -> None:
        """Stop a run that cannot come to anything: an agent that never works is a mistake in the config,
        and under `drop` it would be tried for ever."""
        if self.rollout.failed_reward is not None and self.rollout.group_policy != "drop":
            return
        if outcomes and all(outcome.is_lost for outcome in outcomes):
            self._hopeless += 1
        else:
            self._hopeless = 0
        if self._hopeless >= MAX_FAILED_GROUPS:
            raise AgentError(
                f"rollout.agent: every session of the last {MAX_FAILED_GROUPS} groups failed or got "
                f"no reward; the last one: {self.counters.last_failure}"
            )

    async def _run_slot(self, slot: RolloutSlot) -> SlotResult:
        try:
            return await self.slots.run(slot)
        finally:
            self._unfinished -= 1
            self._freed.set()

    # --- after a crash ---------------------------------------------------------------------------

    async def _resume(self) -> None:
        """Take up the groups that an earlier process left open: what was running is abandoned, and slots
        without a final session are run."""
        if not self.scoring.has_background_scorers:
            for group in await self.store.groups(self.run_id, Channel.TRAIN, GroupStatus.SCORING):
                await self.store.close_group(group.group_id, GroupStatus.READY)  # nobody is to score it now
        for group in await self.store.groups(self.run_id, Channel.TRAIN, GroupStatus.OPEN):
            sessions = await self._abandon_open(group, "interrupted")
            slots: list[RolloutSlot] = []
            failed = False
            for number in range(group.size):
                tried = [session for session in sessions if session.slot == number]
                slot = self._missing(group, number, tried)
                if slot is not None:
                    slots.append(slot)
                elif self._final(tried).status is SessionStatus.FAILED:
                    failed = True
            log.info("taking up %s: %d of %d sessions to run", group.group_id, len(slots), group.size)
            self._launch(group, slots, failed)

    def _missing(self, group: Group, number: int, tried: list[Session]) -> RolloutSlot | None:
        """What is left to run of a slot; None when it has its final session."""
        attempt = 1 + max((session.attempt for session in tried), default=-1)
        failures = sum(session.status is SessionStatus.FAILED for session in tried)
        if any(session.status is SessionStatus.COMPLETED for session in tried):
            return None
        refilling = self.rollout.group_policy == "refill" and failures <= self.rollout.refills
        if failures and not refilling:
            return None
        return RolloutSlot(group, number, attempt, failures)

    def _final(self, tried: list[Session]) -> Session:
        ended = (SessionStatus.COMPLETED, SessionStatus.FAILED)
        return max((s for s in tried if s.status in ended), key=lambda session: session.attempt)

    async def _abandon_open(self, group: Group, reason: str) -> list[Session]:
        """End the group's open sessions as abandoned; returns all its sessions as they were."""
        rows = await self.store.sessions(group_id=group.group_id)
        for row in rows:
            if row.session.status is SessionStatus.OPEN:
                await self.store.end_session(row.session.session_id, SessionStatus.ABANDONED, reason)
        return [row.session for row in rows]
