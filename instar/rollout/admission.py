"""How far generation may run ahead of training.

A step consumes ``groups_per_step`` groups. A group that starts while at most ``max_staleness`` steps'
worth of others is ahead of it is trained at most ``max_staleness`` versions later; with 0 the two
alternate strictly.
"""

from __future__ import annotations

from dataclasses import dataclass

from instar.config import RunConfig
from instar.store.base import Progress, Store
from instar.types import StepState


@dataclass(frozen=True, slots=True)
class Admitted:
    next_index: int
    """Of the next group to start."""
    room: int
    """Groups that may start right away."""
    finished: bool
    """Whether the steps of the run are all trained, so that nothing more is wanted."""
    progress: Progress


class Admission:
    def __init__(self, config: RunConfig, store: Store, run_id: str) -> None:
        self.store = store
        self.run_id = run_id
        self.steps = config.trainer.steps
        self.groups_per_step = config.trainer.groups_per_step
        self.ahead = (config.max_staleness + 1) * self.groups_per_step
        self._last: Admitted | None = None

    async def look(self) -> Admitted:
        """Where the run stands. Cheap when nothing changed."""
        progress = await self.store.progress(self.run_id)
        if self._last is None or self._last.progress != progress:
            self._last = await self._admit(progress)
        return self._last

    async def _admit(self, progress: Progress) -> Admitted:
        done = [
            step
            for step in await self.store.steps(self.run_id)
            if step.state is StepState.COMMITTED or step.version is not None
        ]
        # What was consumed beyond the steps' share was dropped outside of them, and is made up for.
        by_steps = len(done) * self.groups_per_step
        made_up = max(0, progress.groups_consumed - by_steps)
        started = progress.next_group_index
        wanted = self.steps * self.groups_per_step + made_up
        return Admitted(
            next_index=started,
            room=max(0, min(progress.groups_consumed + self.ahead, wanted) - started),
            finished=len(done) >= self.steps,
            progress=progress,
        )
