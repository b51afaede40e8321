"""How far generation may run ahead of training.

A step consumes ``groups_per_step`` groups, of which exported data may take a share. A group that starts
while at most ``max_staleness`` steps' worth of others is ahead of it is trained at most ``max_staleness``
versions later; with 0 the two alternate strictly.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from instar.config import RunConfig
from instar.store.base import Progress, Store
from instar.types import Channel, GroupStatus, StepState

EPOCH = 0
"""Training claims every group once."""
MAX_AGE = 0.25
"""Seconds after which the store is asked again even if its counts are the same."""


@dataclass(frozen=True, slots=True)
class AdmissionState:
    next_group_index: int
    """Of the next group to start."""
    startable_groups: int
    """Groups that may start right away."""
    is_finished: bool
    """Whether the steps of the run are all trained, so that nothing more is wanted."""
    progress: Progress


class Admission:
    def __init__(self, config: RunConfig, store: Store, run_id: str) -> None:
        self.store = store
        self.run_id = run_id
        self.steps = config.trainer.steps
        self.groups_of = config.count_live_groups
        self.steps_ahead = config.max_staleness + 1
        self._last: AdmissionState | None = None
        self._looked = 0.0

    async def read_state(self) -> AdmissionState:
        """Where the run stands. Cheap while nothing changes."""
        progress = await self.store.progress(self.run_id)
        aged = time.monotonic() - self._looked > MAX_AGE
        if self._last is None or self._last.progress != progress or aged:
            self._last = await self._admit(progress)
            self._looked = time.monotonic()
        return self._last

    async def _admit(self, progress: Progress) -> AdmissionState:
        """The three reads are of different moments. Whatever happens between them makes the room smaller
        than it is, never larger, until the next look."""
        waiting = await self.store.groups(
            self.run_id, Channel.TRAIN, GroupStatus.READY, unclaimed_in_epoch=EPOCH
        )
        steps = await self.store.steps(self.run_id)
        done = sum(step.state is StepState.COMMITTED or step.version is not None for step in steps)
        started = progress.next_group_index
        # Neither running, nor waiting, nor in a step: dropped outside of the steps, and made up for.
        in_steps = self.groups_of(len(steps))
        made_up = max(0, started - progress.groups_open - len(waiting) - in_steps)
        wanted = self.groups_of(min(done + self.steps_ahead, self.steps)) + made_up
        return AdmissionState(
            next_group_index=started,
            startable_groups=max(0, wanted - started),
            is_finished=done >= self.steps,
            progress=progress,
        )
