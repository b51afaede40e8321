"""How long it takes to list, to filter and to make a batch."""

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
from store_parts.million import GROUP_SIZE, STEP_GROUPS, TURNS, Shape

PAGE = 50
REPEATS = 15

PAGES: dict[str, SessionFilter] = {
    "all": SessionFilter(),
    "channel and status": SessionFilter(channel=Channel.TRAIN, status=SessionStatus.COMPLETED),
    "failed (50)": SessionFilter(status=SessionStatus.FAILED),
    "tag on half of them": SessionFilter(tags=(("quality", "good"),)),
    "without that tag": SessionFilter(without=("quality",)),
    "tag on the oldest 100": SessionFilter(tags=(("rare", None),)),
    "reward of 1": SessionFilter(reward_min=1.0),
    "reward of the oldest 1000": SessionFilter(reward_max=-0.5),
    "judged, the oldest 1000": SessionFilter(source=RewardSource.JUDGE),
    "scorer of all": SessionFilter(scorer="math"),
    "task": SessionFilter(task="t7"),
    "agent that has none": SessionFilter(agent="nobody"),
    "the oldest, by time": SessionFilter(until=500.0),
}


async def pages(store: SqliteStore, shape: Shape) -> dict[str, float]:
    """Milliseconds of a page with its rewards and tags, as `sessions ls` reads it: the median."""
    found: dict[str, float] = {}
    for name, where in PAGES.items():
        found[name] = await _milliseconds(lambda where=where: _page(store, where, None))
    middle = shape.sessions // 2
    found["all, from the middle"] = await _milliseconds(lambda: _page(store, SessionFilter(), middle))
    return found


async def _page(store: SqliteStore, where: SessionFilter, before: int | None) -> None:
    rows = await store.sessions(RUN, where=where, before=before, limit=PAGE)
    ids = [row.session.session_id for row in rows]
    await store.rewards_by_session(ids)
    await store.tags(ids)


async def _milliseconds(read: Callable[[], Awaitable[None]]) -> float:
    times: list[float] = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        await read()
        times.append(1000 * (time.perf_counter() - began))
    return statistics.median(times)


def batch_config() -> RunConfig:
    rollout = {
        "tasks": {"type": "python", "function": "instar.demo.tasks:train_tasks"},
        "agent": {"type": "function", "function": "instar.demo.agent:solve"},
        "group_size": GROUP_SIZE,
    }
    trainer = {"groups_per_step": STEP_GROUPS}
    reward = {"type": "rule", "function": "instar.demo.tasks:train_tasks"}
    return RunConfig.model_validate({"name": RUN, "trainer": trainer, "rollout": rollout, "reward": reward})


async def batch(store: SqliteStore) -> float:
    """Seconds until a trainer that has just started has a batch of 512 samples: the median of several."""
    times: list[float] = []
    for _ in range(3):
        batcher = Batcher(store, RUN, batch_config())
        began = time.perf_counter()
        made = await batcher.next_batch(10_000, 0, 0, timeout=60.0)
        times.append(time.perf_counter() - began)
        assert made is not None
        samples = len(made.samples)
        assert samples == STEP_GROUPS * GROUP_SIZE, f"{samples} samples"
        assert all(len(sample.spans) == TURNS for sample in made.samples)
    return statistics.median(times)
