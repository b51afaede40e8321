"""Limits how far generation may run ahead of training.

A step consumes ``groups_per_step`` groups, of which exported data may take a share. A group that starts while
at most ``max_staleness`` steps' worth of other groups is ahead of it is trained on at most ``max_staleness``
versions later. If ``max_staleness`` is 0, generation and training alternate strictly.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from instar.config import RunConfig
from instar.store.base import Progress, Store
from instar.types import Channel, GroupStatus, StepState

EPOCH = 0
"""Training claims every group once, so all claims are in this epoch."""
MAX_AGE_SECONDS = 0.25
"""Seconds after which the state is read again even if the counts in the store have not changed."""


@dataclass(frozen=True, slots=True)
class AdmissionState:
    next_group_index: int
    startable_groups: int
    """The number of groups that may start now."""
    is_finished: bool
    """True if all steps of the run are trained."""
    progress: Progress


class Admission:
    def __init__(self, config: RunConfig, store: Store, run_id: str) -> None:
        self.store = store
        self.run_id = run_id
        self.steps = config.trainer.steps
        self.count_groups = config.count_live_groups
        self.steps_ahead = config.max_staleness + 1
        self._last: AdmissionState | None = None
        self._last_read = 0.0

    async def read_state(self) -> AdmissionState:
        """Return the current state. This call is cheap while nothing changes."""
        progress = await self.store.progress(self.run_id)
        is_old = time.monotonic() - self._last_read > MAX_AGE_SECONDS
        if self._last is None or self._last.progress != progress or is_old:
            self._last = await self._compute(progress)
            self._last_read = time.monotonic()
        return self._last

    async def _compute(self, progress: Progress) -> AdmissionState:
        # These reads are not atomic. A change between them makes the number of startable groups too small,
        # never too large, until the next read.
        waiting = await self.store.groups(
            self.run_id, Channel.TRAIN, GroupStatus.READY, unclaimed_in_epoch=EPOCH
        )
        steps = await self.store.steps(self.run_id)
        done = sum(step.state is StepState.COMMITTED or step.version is not None for step in steps)
        started = progress.next_group_index
        # Groups that are neither running, nor waiting, nor in a step were dropped and must be replaced.
        in_steps = self.count_groups(len(steps))
        dropped = max(0, started - progress.groups_open - len(waiting) - in_steps)
        needed = self.count_groups(min(done + self.steps_ahead, self.steps)) + dropped
        return AdmissionState(
            next_group_index=started,
            startable_groups=max(0, needed - started),
            is_finished=done >= self.steps,
            progress=progress,
        )
