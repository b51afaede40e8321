"""Limit how far generation may run ahead of training.

A step consumes ``groups_per_step`` groups, some of which may come from exported data. A group may start if
the groups before it fill at most ``max_staleness`` − (``sync.every`` − 1) steps that are not trained yet, so
at most that many steps are trained between its start and its use. The engines' version may be ``sync.every``
− 1 steps old at its start. If ``max_staleness`` is 0, generation and training alternate.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from instar.config import RunConfig
from instar.store.base import Progress, Store
from instar.types import SINGLE_EPOCH

MAX_STATE_AGE_SECONDS = 0.25
"""How long a computed state is used if the progress in the store does not change."""


@dataclass(frozen=True, slots=True)
class AdmissionState:
    next_group_index: int
    startable_groups: int
    is_finished: bool
    progress: Progress


class Admission:
    def __init__(self, config: RunConfig, store: Store, run_id: str) -> None:
        self.store = store
        self.run_id = run_id
        self.steps = config.trainer.steps
        self.count_groups = config.count_rollout_groups
        # Including the step that is trained next. The engines' version may be sync.every - 1 steps old.
        self.steps_ahead = config.max_staleness + 1 - (config.sync.every - 1)
        self._state: AdmissionState | None = None
        self._computed_at = 0.0

    async def read_state(self) -> AdmissionState:
        """Return the state, which is recomputed if the progress changed or MAX_STATE_AGE_SECONDS passed."""
        progress = await self.store.progress(self.run_id)
        is_old = time.monotonic() - self._computed_at > MAX_STATE_AGE_SECONDS
        if self._state is None or self._state.progress != progress or is_old:
            self._state = await self._compute_state()
            self._computed_at = time.monotonic()
        return self._state

    async def _compute_state(self) -> AdmissionState:
        details = await self.store.progress_details(self.run_id, SINGLE_EPOCH)
        progress, trained_steps = details.progress, details.trained_steps
        started_groups = progress.next_group_index
        # Groups that are neither running, nor waiting, nor in a step were dropped and must be replaced.
        in_steps = self.count_groups(details.steps)
        dropped_groups = max(0, started_groups - progress.groups_open - details.waiting_groups - in_steps)
        needed_groups = self.count_groups(min(trained_steps + self.steps_ahead, self.steps)) + dropped_groups
        return AdmissionState(
            next_group_index=started_groups,
            startable_groups=max(0, needed_groups - started_groups),
            is_finished=trained_steps >= self.steps,
            progress=progress,
        )
