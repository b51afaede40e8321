"""Background tasks for deleted sessions: remove them from memory, and delete sessions after the retention
time."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from instar.config import RetentionConfig
from instar.errors import StoreError
from instar.store.base import Store

logger = logging.getLogger(__name__)

POLL_INTERVAL_SECONDS = 1.0
"""How often the store is asked for deleted sessions. Until then, the gateway may keep their text in memory,
but the store rejects it."""
RETENTION_INTERVAL_SECONDS = 600.0
RETENTION_PAUSE_SECONDS = 1.0
"""The pause between two passes while more sessions have expired."""
SESSIONS_PER_PASS = 256
SESSIONS_PER_WRITE = 16
"""Deleted in one transaction, so that other writes do not wait long."""
MIN_AGE_SECONDS = 3600.0
"""Sessions that ended more recently are kept, because they may still be scored, rated or read."""
SECONDS_PER_DAY = 86400.0


@dataclass(frozen=True, slots=True)
class RetentionPolicy:
    config: RetentionConfig
    keep_checkpoints: int
    """`trainer.keep_checkpoints`: the sessions of the steps that are not in all of these are kept."""

    @property
    def is_limited(self) -> bool:
        return self.config.days is not None or self.config.sessions is not None


async def run_forgetting_tasks(
    store: Store,
    run_id: str,
    drops: Sequence[Callable[[Sequence[str]], None]],
    policy: RetentionPolicy | None,
) -> None:
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(drop_forgotten_sessions(store, run_id, drops))
        if policy is not None and policy.is_limited:
            tasks.create_task(delete_expired_sessions(store, run_id, policy))


async def drop_forgotten_sessions(
    store: Store, run_id: str, drops: Sequence[Callable[[Sequence[str]], None]]
) -> None:
    """Call ``drops`` with the ids of sessions that were deleted from the store by any process."""
    position: int | None = None
    while True:
        try:
            position, session_ids = await store.forgotten_after(run_id, position)
            for drop in drops if session_ids else ():
                drop(session_ids)
        except StoreError as error:
            logger.warning("Could not read the deleted sessions, will retry: %s", error)
        await asyncio.sleep(POLL_INTERVAL_SECONDS)


async def delete_expired_sessions(store: Store, run_id: str, policy: RetentionPolicy) -> None:
    while True:
        count = 0
        try:
            count = await delete_expired_once(store, run_id, policy)
        except StoreError as error:
            logger.warning("Could not delete expired sessions, will retry: %s", error)
        await asyncio.sleep(RETENTION_PAUSE_SECONDS if count else RETENTION_INTERVAL_SECONDS)


async def delete_expired_once(
    store: Store, run_id: str, policy: RetentionPolicy, *, limit: int = SESSIONS_PER_PASS
) -> int:
    """Delete up to ``limit`` expired sessions and return how many were deleted."""
    days = policy.config.days
    session_ids = await store.expired_sessions(
        run_id,
        max_age=None if days is None else days * SECONDS_PER_DAY,
        max_sessions=policy.config.sessions,
        min_age=MIN_AGE_SECONDS,
        keep_checkpoints=policy.keep_checkpoints,
        limit=limit,
    )
    count = 0
    for start in range(0, len(session_ids), SESSIONS_PER_WRITE):
        page = session_ids[start : start + SESSIONS_PER_WRITE]
        count += len(await store.forget_sessions(run_id, page, "retention"))
    if count:
        logger.info("deleted %d session(s) after the time in store.retention", count)
        await store.erase_deleted(rewrite=False)
    return count
