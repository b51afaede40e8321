"""Measure the time to list sessions, to filter them and to build a batch."""

from __future__ import annotations

import statistics
import time
from collections.abc import Awaitable, Callable

from instar.config import RunConfig
from instar.data.batcher import Batcher
from instar.store.base import SessionFilter
from instar.store.sqlite import SqliteStore
from instar.types import Channel, RewardSource, SessionStatus
from store_parts.calls import RUN
from store_parts.million import GROUP_SIZE, GROUPS_PER_STEP, TURNS, StoreShape

PAGE_SIZE = 50
REPEATS = 15

FILTERS: dict[str, SessionFilter] = {
    "all": SessionFilter(),
    "channel and status (nearly all)": SessionFilter(channel=Channel.TRAIN, status=SessionStatus.COMPLETED),
    "status=failed (50)": SessionFilter(status=SessionStatus.FAILED),
    "tag (half)": SessionFilter(tags=(("quality", "good"),)),
    "without the tag (half)": SessionFilter(without=("quality",)),
    "tag (oldest 100)": SessionFilter(tags=(("rare", None),)),
    "reward ≥ 1 (a third)": SessionFilter(reward_min=1.0),
    "low reward (oldest 1000)": SessionFilter(reward_max=-0.5),
    "source=judge (oldest 1000)": SessionFilter(source=RewardSource.JUDGE),
    "scorer (all)": SessionFilter(scorer="math"),
    "task (one in 500)": SessionFilter(task="t7"),
    "agent (no matches)": SessionFilter(agent="missing"),
    "until (oldest)": SessionFilter(until=500.0),
}


async def measure_page_times(store: SqliteStore, shape: StoreShape) -> dict[str, float]:
    """Return the median time in ms to read a page of `sessions ls` with rewards and tags, by filter."""
    milliseconds: dict[str, float] = {}
    for name, session_filter in FILTERS.items():
        milliseconds[name] = await _measure_median_ms(
            lambda session_filter=session_filter: _read_page(store, session_filter, None)
        )
    middle = shape.sessions // 2
    milliseconds["all (from the middle)"] = await _measure_median_ms(
        lambda: _read_page(store, SessionFilter(), middle)
    )
    return milliseconds


async def _read_page(store: SqliteStore, session_filter: SessionFilter, before: int | None) -> None:
    rows = await store.sessions(RUN, where=session_filter, before=before, limit=PAGE_SIZE)
    ids = [row.session.session_id for row in rows]
    await store.rewards_by_session(ids)
    await store.tags(ids)


async def _measure_median_ms(read: Callable[[], Awaitable[None]]) -> float:
    times: list[float] = []
    for _ in range(REPEATS):
        started_at = time.perf_counter()
        await read()
        times.append(1000 * (time.perf_counter() - started_at))
    return statistics.median(times)


def make_batch_config() -> RunConfig:
    """Return the config of a run that trains on the store. Its functions are never called."""
    rollout = {
        "tasks": {"type": "python", "function": "instar.demo.tasks:train_tasks"},
        "agent": {"type": "function", "function": "instar.demo.agent:solve"},
        "group_size": GROUP_SIZE,
    }
    trainer = {"groups_per_step": GROUPS_PER_STEP}
    reward = {"type": "rule", "function": "instar.demo.tasks:train_tasks"}
    settings = {"name": RUN, "agent_id": "agent", "trainer": trainer, "rollout": rollout, "reward": reward}
    return RunConfig.model_validate(settings)


async def measure_batch_time(store: SqliteStore) -> float:
    """Return the median time in seconds for a new batcher to build its first batch."""
    times: list[float] = []
    for _ in range(3):
        batcher = Batcher(store, RUN, make_batch_config())
        started_at = time.perf_counter()
        batch = await batcher.next_batch(10_000, 0, 0, timeout=60.0)
        times.append(time.perf_counter() - started_at)
        assert batch is not None
        samples = len(batch.samples)
        assert samples == GROUPS_PER_STEP * GROUP_SIZE, f"the batch has {samples} samples"
        assert all(len(sample.spans) == TURNS for sample in batch.samples)
    return statistics.median(times)
