"""A trainer with a planted bug, for the simulation and for real runs."""

from __future__ import annotations

from instar.trainer.loop import Trainer
from instar.types import StepState


class LatestStateTrainer(Trainer):
    """Recovers from the newest state on disk, even if the store does not refer to it."""

    async def recover(self) -> None:
        await super().recover()
        latest = self.config.run_dir / "latest"
        if latest.exists():
            await self.backend.load_state(latest)

    async def _save_and_commit(self, step: int, step_state: StepState = StepState.SAVED) -> int:
        await self.backend.save_state(self.config.run_dir / "latest")
        return await super()._save_and_commit(step, step_state)
