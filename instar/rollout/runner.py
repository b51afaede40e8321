"""Run groups of sessions for the trainer, as far ahead of training as admission allows."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from functools import lru_cache

from instar.async_utils import gather_or_cancel
from instar.config import RunConfig
from instar.errors import AgentError, ConfigError
from instar.rollout.admission import Admission, AdmissionState
from instar.rollout.base import find_next_attempt
from instar.rollout.evaluate import Evaluator
from instar.rollout.slots import RolloutServices, RolloutSlot, SlotResult, SlotRunner, abandon_open_sessions
from instar.rollout.tasks import TaskSet
from instar.types import Channel, Group, GroupStatus, Session, SessionStatus, Task

logger = logging.getLogger(__name__)

POLL_INTERVAL_SECONDS = 0.05
MAX_FAILED_GROUPS = 8
"""The run fails after this many consecutive groups without a usable session."""
FINAL_STATUSES = (SessionStatus.COMPLETED, SessionStatus.FAILED)


class RolloutRunner:
    def __init__(self, config: RunConfig, tasks: TaskSet, services: RolloutServices) -> None:
        if config.rollout is None:
            raise ConfigError("rollout: this section is missing; a run needs it to generate sessions")
        self.config = config
        self.rollout = config.rollout
        self.run_id = config.name
        self.store = services.store
        self.tasks = tasks
        self.slot_runner = SlotRunner(config.rollout, config.seed, services, config.rollout.sampling)
        self.scoring = services.scoring
        self.counters = self.slot_runner.counters
        self.admission = Admission(config, self.store, self.run_id)
        self.evaluator: Evaluator | None = None
        self.groups_done = 0
        self._shuffled_indices = lru_cache(maxsize=2)(self._shuffle_indices)
        self._consecutive_failed_groups = 0
        self._last_evaluated_version: int | None = None
        """The newest evaluated version, or None until it has been read from the store."""
        self._is_evaluating = False
        self._is_draining = False
        self._unfinished_slots = 0
        self._slot_done = asyncio.Event()
        """Set when a slot has finished, because that may allow the next group to start."""
        self._group_tasks: set[asyncio.Task[None]] = set()

    @property
    def activity(self) -> str:
        if self._is_evaluating and self.evaluator is not None:
            return self.evaluator.activity
        counters = self.counters
        problem_counts = {"failed": counters.failed, "without a reward": counters.unscored}
        problems = ", ".join(f"{count} {label}" for label, count in problem_counts.items() if count)
        suffix = f", {problems} ({counters.last_failure[:80]})" if problems else ""
        if not self._group_tasks:
            return f"{'drained' if self._is_draining else 'waiting for the trainer'}{suffix}"
        running = f"{counters.running} sessions in {len(self._group_tasks)} groups"
        return f"{running}, {counters.completed} done{suffix}"

    async def run(self) -> None:
        """Run groups until all steps are trained, or until `drain` is called and all started groups finish.

        On cancellation, open sessions are abandoned, and a later run repeats them.
        """
        try:
            await self._resume()
            while True:
                for task in [task for task in self._group_tasks if task.done()]:
                    self._group_tasks.discard(task)
                    task.result()
                state = await self.admission.read_state()
                if self._is_draining or state.is_finished:
                    self._is_draining = True
                    if not self._group_tasks:
                        return
                else:
                    await self._evaluate_if_due(state)
                    if state.startable_groups and self._unfinished_slots < self.rollout.concurrency:
                        await self._start_group(state.next_group_index)
                        continue
                await self._wait()
        finally:
            for task in self._group_tasks:
                task.cancel()
            await asyncio.gather(*self._group_tasks, return_exceptions=True)

    def drain(self) -> None:
        """Stop starting groups, so that `run` returns once the started groups have finished."""
        self._is_draining = True

    async def _wait(self) -> None:
        """Wait until a slot finishes, but at most POLL_INTERVAL_SECONDS: training may also admit a group."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(POLL_INTERVAL_SECONDS):
                await self._slot_done.wait()
        self._slot_done.clear()

    async def _evaluate_if_due(self, state: AdmissionState) -> None:
        """Evaluate the current version if an evaluation is due. No group starts during an evaluation, because
        they would slow each other down."""
        every = self.config.eval.every if self.config.eval else None
        version = state.progress.head_version
        if self.evaluator is None or every is None:
            return
        if self._last_evaluated_version is None:
            # An earlier process may have been interrupted during an evaluation.
            self._last_evaluated_version = await self.evaluator.find_last_evaluated_version()
        if version // every > self._last_evaluated_version // every:
            self._last_evaluated_version = version
            self._is_evaluating = True
            try:
                await self.evaluator.try_evaluate_all(f"v{version}")
            finally:
                self._is_evaluating = False

    def task_for(self, index: int) -> Task:
        """Return a group's task. Each epoch uses every task once, shuffled if `rollout.shuffle` is set."""
        epoch, position = divmod(index, len(self.tasks))
        return self.tasks[self._shuffled_indices(epoch)[position]]

    def _shuffle_indices(self, epoch: int) -> list[int]:
        order = list(range(len(self.tasks)))
        if self.rollout.shuffle:
            random.Random(f"{self.config.seed}/{epoch}").shuffle(order)
        return order

    async def _start_group(self, index: int) -> None:
        group_id, size = f"{self.run_id}/train/{index:06d}", self.rollout.group_size
        group = Group(group_id, self.run_id, Channel.TRAIN, index, size, self.task_for(index))
        await self.store.open_group(group)
        self._launch(group, [RolloutSlot(group, number) for number in range(group.size)])

    def _launch(self, group: Group, slots: list[RolloutSlot], has_failed: bool = False) -> None:
        self._unfinished_slots += len(slots)
        task = asyncio.create_task(self._run_group(group, slots, has_failed), name=group.group_id)
        self._group_tasks.add(task)

    async def _run_group(self, group: Group, slots: list[RolloutSlot], has_failed: bool) -> None:
        """Run the slots and close the group. ``has_failed`` is True if another slot has already failed."""
        results = await gather_or_cancel(self._run_slot(slot) for slot in slots)
        self._check_progress(results)
        has_failed = has_failed or any(result.status is SessionStatus.FAILED for result in results)
        if has_failed and self.rollout.group_policy == "drop":
            await self.store.close_group(group.group_id, GroupStatus.DROPPED, "session_failed")
        else:
            status = GroupStatus.SCORING if self.scoring.has_background_scorers else GroupStatus.READY
            await self.store.close_group(group.group_id, status)
        self.groups_done += 1

    def _check_progress(self, results: list[SlotResult]) -> None:
        """Raise AgentError after MAX_FAILED_GROUPS consecutive groups without a usable session, because the
        agent is probably misconfigured. A failed session is usable if it has a reward and is not dropped."""
        if self.rollout.failed_reward is not None and self.rollout.group_policy != "drop":
            return
        if results and all(result.is_unusable for result in results):
            self._consecutive_failed_groups += 1
        else:
            self._consecutive_failed_groups = 0
        if self._consecutive_failed_groups >= MAX_FAILED_GROUPS:
            raise AgentError(
                f"rollout.agent: every session of the last {MAX_FAILED_GROUPS} groups failed or got no "
                f"reward; the last failure was: {self.counters.last_failure}"
            )

    async def _run_slot(self, slot: RolloutSlot) -> SlotResult:
        try:
            return await self.slot_runner.run(slot)
        finally:
            self._unfinished_slots -= 1
            self._slot_done.set()

    async def _resume(self) -> None:
        """Continue the groups that an earlier process left open: abandon their open sessions, and run the
        slots without a final session."""
        if not self.scoring.has_background_scorers:
            for group in await self.store.groups(self.run_id, Channel.TRAIN, GroupStatus.SCORING):
                # The scorers that the group was waiting for are no longer configured.
                await self.store.close_group(group.group_id, GroupStatus.READY)
        for group in await self.store.groups(self.run_id, Channel.TRAIN, GroupStatus.OPEN):
            sessions = await abandon_open_sessions(self.store, group, self.config.agent_id, "interrupted")
            slots: list[RolloutSlot] = []
            has_failed = False
            for number in range(group.size):
                attempts = [session for session in sessions if session.slot == number]
                if slot := self._make_next_slot(group, number, attempts):
                    slots.append(slot)
                else:
                    ended = [s for s in attempts if s.status in FINAL_STATUSES]
                    final_session = max(ended, key=lambda session: session.attempt)
                    has_failed = has_failed or final_session.status is SessionStatus.FAILED
            logger.info("resuming %s: %d of %d sessions to run", group.group_id, len(slots), group.size)
            self._launch(group, slots, has_failed)

    def _make_next_slot(self, group: Group, number: int, attempts: list[Session]) -> RolloutSlot | None:
        """Return the slot with its next attempt, or None if the slot already has its final session."""
        next_attempt = find_next_attempt(attempts, self.rollout)
        return None if next_attempt is None else RolloutSlot(group, number, *next_attempt)
