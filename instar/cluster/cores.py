"""Divides the CPU cores of one machine between the engines and the trainer.

If threads of two processes run on the same cores, both processes become much slower, because the threads wait
for each other in every operation. So each side uses half of the cores while the other side may be busy: the
engines while a trainer is running, the trainer while an engine samples. In sync mode the two sides take turns
and the number of threads does not change, because it can affect the last bits of a sum.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable

from instar.cluster.supervisor import HOST_ENV
from instar.cluster.tasks import wait_forever
from instar.config import RunConfig
from instar.models import usable_cores
from instar.store.base import Store

POLL_SECONDS = 0.25
HEARTBEAT_EXPIRY_SECONDS = 5.0
"""A state that a role announced longer ago than this is ignored, because the role may have exited."""
IDLE_STATES = {"engine": "idle", "trainer": "finished"}
"""For each role, the state that it announces while it does not use its cores."""


async def share_cores(
    config: RunConfig, store: Store, other: str, use_cores: Callable[[int], None], *, process_count: int = 1
) -> None:
    """Until cancelled, call ``use_cores`` when the number of cores for each of this role's ``process_count``
    processes changes. In async mode, it depends on whether the role ``other`` is busy on this machine."""
    host = os.environ.get(HOST_ENV)
    cores = usable_cores()
    granted_cores = cores
    if process_count > 1:
        granted_cores = max(1, cores // process_count)
        use_cores(granted_cores)
    while config.trainer.mode == "async":
        endpoints = await store.endpoints(config.name)
        others = [e for e in endpoints if e.role == other and (not host or e.log.startswith(f"{host}:"))]
        is_busy = any(
            e.doing != IDLE_STATES[other] and time.time() - e.heartbeat < HEARTBEAT_EXPIRY_SECONDS
            for e in others
        )
        share = max(1, (cores // 2 if is_busy else cores) // process_count)
        if share != granted_cores:
            use_cores(share)
            granted_cores = share
        await asyncio.sleep(POLL_SECONDS)
    await wait_forever()
