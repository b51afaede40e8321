"""Divides the CPU cores of one machine between the engines and the trainer.

Threads of two processes on the same cores slow each other down by far more than half, because they wait for
one another in every operation. So each side computes on half of the cores while the other may be busy: the
engines as long as a trainer is up, the trainer whenever replies are being sampled. In sync mode the two take
turns and the number of threads does not change, because it can affect the last bits of a sum. Several engines
share the cores of their side.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable

from instar.cluster.supervisor import HOST_ENV
from instar.config import RunConfig
from instar.models import usable_cores
from instar.store.base import Store
from instar.types import Endpoint

INTERVAL = 0.25
HEARTBEAT_EXPIRY = 5.0
"""Seconds after which the state that a role announced is ignored."""
IDLE_STATES = {"engine": "idle", "trainer": "finished"}
"""The state that a role announces when it does not use its cores."""


def is_busy(endpoint: Endpoint, now: float) -> bool:
    return endpoint.doing != IDLE_STATES[endpoint.role] and now - endpoint.heartbeat < HEARTBEAT_EXPIRY


def _is_here(endpoint: Endpoint) -> bool:
    """Return True if the role runs on this machine."""
    host = os.environ.get(HOST_ENV)
    return host is None or endpoint.log.startswith(f"{host}:")


async def share_cores(
    config: RunConfig, store: Store, other: str, use_cores: Callable[[int], None], *, process_count: int = 1
) -> None:
    """Adjust the number of cores to the activity of the role ``other`` until cancelled. ``process_count``
    processes of this role share the cores."""
    cores = usable_cores()
    granted = cores
    if process_count > 1:
        granted = max(1, cores // process_count)
        use_cores(granted)
    while config.trainer.mode == "async":
        endpoints = await store.endpoints(config.name)
        busy = any(e.role == other and _is_here(e) and is_busy(e, time.time()) for e in endpoints)
        share = max(1, (cores // 2 if busy else cores) // process_count)
        if share != granted:
            use_cores(share)
            granted = share
        await asyncio.sleep(INTERVAL)
    await asyncio.Event().wait()
