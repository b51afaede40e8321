"""Bugs planted in the processes of a run, to show that the torture tests find them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from instar.types import Call

COMMIT_DELAY_SECONDS = 0.3


@dataclass(frozen=True)
class PlantedBug:
    role: str
    plant: Callable[[], None]


def acknowledge_before_commit() -> None:
    """Make the gateway acknowledge calls before they are stored."""
    from instar.store.base import Store

    add_calls: Any = Store.add_calls
    commits: set[asyncio.Task[None]] = set()

    async def add_calls_later(self: Store, calls: Sequence[Call], **options: Any) -> None:
        async def commit() -> None:
            await asyncio.sleep(COMMIT_DELAY_SECONDS)
            await add_calls(self, calls, **options)

        commits.add(asyncio.create_task(commit()))

    setattr(Store, "add_calls", add_calls_later)  # noqa: B010 - a type checker would reject the assignment


def load_unrecorded_state() -> None:
    """Make the trainer resume from the newest state on disk, even if the store does not refer to it."""
    from instar.cluster.roles import trainer as role
    from tests.torture.broken_trainer import LatestStateTrainer

    setattr(role, "Trainer", LatestStateTrainer)  # noqa: B010 - a type checker would reject the assignment


BUGS = {
    "early-acknowledgement": PlantedBug("gateway", acknowledge_before_commit),
    "unrecorded-state": PlantedBug("trainer", load_unrecorded_state),
}


def plant_bug(name: str, role: str) -> None:
    """Plant the bug in this process if it belongs to the role."""
    if BUGS[name].role == role:
        BUGS[name].plant()
