"""How the engines and a trainer share the cores of one machine.

Threads of two processes on the same cores slow each other down by far more than half: they wait for
one another in every operation. So each side computes on half of the cores while the other may be busy: the
engines as long as a trainer is up, the trainer whenever replies are being sampled. In sync mode the two
take turns anyway, and the number of threads, which can change the last bits of a sum, stays as it is.
Several engines divide what is theirs among them.
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
"""Seconds after which what a role said of itself no longer counts."""
IDLE_STATES = {"engine": "idle", "trainer": "finished"}
"""What a role says of itself when it leaves the cores to others."""


def is_busy(endpoint: Endpoint, now: float) -> bool:
    return endpoint.doing != IDLE_STATES[endpoint.role] and now - endpoint.heartbeat < HEARTBEAT_EXPIRY


def _is_here(endpoint: Endpoint) -> bool:
    """Whether it is on this machine, of several."""
    host = os.environ.get(HOST_ENV)
    return host is None or endpoint.log.startswith(f"{host}:")


async def share_cores(
    config: RunConfig, store: Store, other: str, use_cores: Callable[[int], None], *, among: int = 1
) -> None:
    """Follow what the other role does, until cancelled. ``among``: processes of this role."""
    cores = usable_cores()
    granted = cores
    if among > 1:
        granted = max(1, cores // among)
        use_cores(granted)
    while config.trainer.mode == "async":
        endpoints = await store.endpoints(config.name)
        busy = any(e.role == other and _is_here(e) and is_busy(e, time.time()) for e in endpoints)
        wanted = max(1, (cores // 2 if busy else cores) // among)
        if wanted != granted:
            use_cores(wanted)
            granted = wanted
        await asyncio.sleep(INTERVAL)
    await asyncio.Event().wait()
