"""Divide the CPU cores of one machine between the engines and the trainer.

If threads of two processes run on the same cores, both processes become much slower, because their threads
wait for each other in every operation. So each side uses half of the cores while the other side may be busy:
the engines while a trainer is running, the trainer while an engine samples. In sync mode, the two sides take
turns, and the number of threads stays the same, because it can affect the last bits of a sum.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable

from instar.cluster.supervisor import HOST_ENV
from instar.cluster.tasks import wait_forever
from instar.config import RunConfig
from instar.live.learning_window import yields_to_requests
from instar.models import usable_cores
from instar.store.base import Store

POLL_INTERVAL_SECONDS = 0.25
HEARTBEAT_EXPIRY_SECONDS = 5.0
"""Announcements older than this are ignored, because the role may have exited."""
IDLE_ACTIVITIES = {"engine": "idle", "trainer": "finished"}
"""The activity that each role announces while it does not use its cores."""


async def share_cores(
    config: RunConfig,
    store: Store,
    other_role: str,
    use_cores: Callable[[int], None],
    *,
    process_count: int = 1,
) -> None:
    """Call ``use_cores`` whenever the number of cores for each of this role's processes changes, until
    cancelled. In async mode, the number depends on whether ``other_role`` is busy on this machine."""
    host = os.environ.get(HOST_ENV)
    total_cores = usable_cores()
    current_cores = total_cores
    if process_count > 1:
        current_cores = max(1, total_cores // process_count)
        use_cores(current_cores)
    # A trainer that pauses for live requests and has a lower priority takes no cores from the engines.
    yields = other_role == "trainer" and yields_to_requests(config)
    while config.trainer.mode == "async" and not yields:
        endpoints = [e for e in await store.endpoints(config.name) if e.role == other_role]
        if host:  # on a Ray cluster, the path of a log starts with the role's host
            endpoints = [e for e in endpoints if e.log.startswith(f"{host}:")]
        is_busy = any(
            e.doing != IDLE_ACTIVITIES[other_role] and time.time() - e.heartbeat < HEARTBEAT_EXPIRY_SECONDS
            for e in endpoints
        )
        cores = max(1, (total_cores // 2 if is_busy else total_cores) // process_count)
        if cores != current_cores:
            use_cores(cores)
            current_cores = cores
        await asyncio.sleep(POLL_INTERVAL_SECONDS)
    await wait_forever()
