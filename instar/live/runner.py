"""Runs the gates of all lineages of a run in turns."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping

from instar.errors import EngineError
from instar.live.base import MayRun, may_always_run
from instar.live.gate import Gate

logger = logging.getLogger(__name__)

POLL_SECONDS = 1.0


class GateRunner:
    """Lets each gate do a small piece of work in turn. Candidates are only evaluated while ``may_run`` allows
    it, and shadow and canary versions are decided at any time."""

    def __init__(self, gates: Mapping[str, Gate], *, may_run: MayRun = may_always_run) -> None:
        """``gates`` are the gates by policy id."""
        self._gates = gates
        self._may_run = may_run
        self._is_paused = False

    @property
    def activity(self) -> str:
        """The activity that the role announces."""
        if self._is_paused:
            return "waiting for a time at which evaluation may run"
        if len(self._gates) == 1:
            return next(iter(self._gates.values())).activity
        return "; ".join(f"{policy_id}: {gate.activity}" for policy_id, gate in self._gates.items())

    async def run(self) -> None:
        """Run until cancelled. Raises StoreError if the store fails."""
        while True:
            has_more = False
            for gate in self._gates.values():
                self._is_paused = not await self._may_run()
                has_more |= await _try_advance(gate, may_evaluate=not self._is_paused)
            if not has_more:
                await asyncio.sleep(POLL_SECONDS)


async def _try_advance(gate: Gate, *, may_evaluate: bool) -> bool:
    try:
        return await gate.advance(may_evaluate=may_evaluate)
    except EngineError as error:  # the engine may be restarting; the next attempt repeats what is missing
        activity = f"waiting for the engine: {error}"
        if gate.activity != activity:
            logger.warning(activity)
        gate.activity = activity
        return False
