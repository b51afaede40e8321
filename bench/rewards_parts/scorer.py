"""Run the scoring runner on a store until every session has a score.

    python bench/rewards_parts/scorer.py STORE URL SESSIONS --concurrency 32

Regularly prints a JSON line with the number of sessions scored so far and the memory of this process in MiB.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
from pathlib import Path

import uvloop

from instar.config import ScoringConfig
from instar.config.judge import JudgeRewardConfig
from instar.rewards.base import ScoringContext
from instar.rewards.judge.judges import create_judge
from instar.rewards.runner import ScoringRunner
from instar.store.sqlite import SqliteStore

RUN = "bench"
REPORT_INTERVAL_SECONDS = 0.25


def read_memory_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096 / (1 << 20)


async def run(arguments: argparse.Namespace) -> None:
    store = SqliteStore(arguments.store)
    concurrency = arguments.concurrency
    judge = create_judge(
        JudgeRewardConfig(
            type="judge", endpoint=f"{arguments.url}/v1", model="m", timeout=1.0, concurrency=concurrency
        )
    )
    await judge.start(ScoringContext(RUN, store))
    config = ScoringConfig(concurrency=concurrency, deadline=10.0, retries=arguments.retries)
    runner = ScoringRunner(store, RUN, [judge], config, agent_id="agent", live_scorers=[judge])
    runner_task = asyncio.create_task(runner.run())
    while not runner_task.done():
        scored = sum(n for states in (await store.score_counts(RUN)).values() for n in states.values())
        print(json.dumps({"scored": scored, "mib": read_memory_mib()}), flush=True)
        if scored >= arguments.sessions:
            runner.drain()
            break
        await asyncio.sleep(REPORT_INTERVAL_SECONDS)
    await runner_task
    await judge.close()
    await store.close()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("store", type=Path)
    parser.add_argument("url")
    parser.add_argument("sessions", type=int)
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--retries", type=int, default=3)
    logging.getLogger("instar").setLevel(logging.ERROR)
    uvloop.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
