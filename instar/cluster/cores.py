"""How an engine and a trainer share the cores of one machine.

Threads of two processes on the same cores slow each other down by far more than half: they wait for
one another in every operation. So each computes on half of the cores while the other is busy, and on
all of them while it is not. In sync mode the two take turns anyway, and the number of threads, which
can change the last bits of a sum, stays as it is.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable

from instar.config import RunConfig
from instar.store.base import Store
from instar.types import Endpoint

INTERVAL = 0.25
FRESH = 5.0
"""Seconds after which what a role said of itself no longer counts."""
BUSY = {"engine": "running", "trainer": "step "}
"""What a role's own words contain while it computes."""


def is_busy(endpoint: Endpoint, now: float) -> bool:
    return BUSY[endpoint.role] in endpoint.doing and now - endpoint.heartbeat < FRESH


async def share_cores(config: RunConfig, store: Store, other: str, use_cores: Callable[[int], None]) -> None:
    """Follow what the other role does, until cancelled."""
    cores = os.cpu_count() or 1
    granted = cores
    while config.trainer.mode == "async":
        endpoints = await store.endpoints(config.name)
        busy = any(e.role == other and is_busy(e, time.time()) for e in endpoints)
        wanted = max(1, cores // 2) if busy else cores
        if wanted != granted:
            use_cores(wanted)
            granted = wanted
        await asyncio.sleep(INTERVAL)
    await asyncio.Event().wait()
