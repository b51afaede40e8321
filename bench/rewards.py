"""Measure the throughput of background scoring relative to the capacity of the judge endpoint.

    python bench/rewards.py [--sessions 10000] [--slots 16] [--service 0.1] [--faults 0.2] [--kills 0]
        [--json]

A SQLite store is filled with sessions of one short call each. A judge endpoint in its own process handles up
to ``--slots`` concurrent requests, each in ``--service`` seconds. A fraction ``--faults`` of the requests
fails: no response, status 429, an invalid reply or a broken connection. Another process runs the scoring
runner until every session is scored, and is killed ``--kills`` times. ``ratio_limit`` is the fraction of the
endpoint's capacity that was used between the first request and the last response. ``mib_early`` and
``mib_late`` are the memory of the last scoring process after it has scored a fifth of all sessions and when
it ends.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Generator
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from instar.store.base import Run
from instar.store.sqlite import SqliteStore
from instar.types import Call, Channel, Session, SessionStatus

PARTS = Path(__file__).resolve().parent / "rewards_parts"
RUN = "bench"
INSERT_BATCH_SIZE = 500
console = Console(stderr=True)


async def fill_store(path: Path, sessions: int) -> None:
    """Create a store with completed live sessions, each with a different text."""
    store = SqliteStore(path)
    await store.put_run(Run(RUN, RUN, {}))

    async def add_session(number: int) -> None:
        session = Session(f"session-{number:06d}", RUN, "agent", RUN, Channel.LIVE)
        await store.add_calls([make_call(session.session_id)], new_session=session)
        await store.end_session(session.session_id, SessionStatus.COMPLETED)

    for start in range(0, sessions, INSERT_BATCH_SIZE):
        await asyncio.gather(
            *(add_session(number) for number in range(start, min(start + INSERT_BATCH_SIZE, sessions)))
        )
    await store.close()


def make_call(session_id: str) -> Call:
    sampled = np.arange(16, dtype=np.int32)
    return Call(
        call_id=f"call-{session_id}",
        session_id=session_id,
        run_id=RUN,
        agent_id="agent",
        policy_id=RUN,
        request_id=f"request-{session_id}",
        prompt_ids=np.arange(64, dtype=np.int32),
        sampled_ids=sampled,
        logprobs=np.full(len(sampled), -0.5, np.float32),
        versions=np.zeros(len(sampled), np.int32),
        messages=({"role": "user", "content": f"What is your number, {session_id}?"},),
        reply={"role": "assistant", "content": f"It is {session_id}."},
        finish_reason="stop",
    )


@contextlib.contextmanager
def start_endpoint(arguments: argparse.Namespace) -> Generator[str]:
    """Run the judge endpoint and yield its URL."""
    options = {"slots": arguments.slots, "service": arguments.service, "faults": arguments.faults}
    command = [sys.executable, str(PARTS / "endpoint.py")]
    for name, value in options.items():
        command += [f"--{name}", str(value)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        finally:
            process.kill()


def run_scorer(store_path: Path, url: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Run the scorer until all sessions are scored, and return its memory use in MiB.

    The scorer is killed and restarted ``arguments.kills`` times, each time after the same number of sessions.
    ``mib_late`` is measured at the end. ``mib_early`` is measured after the last process has scored a fifth
    of the sessions, and is None if it scores fewer.
    """
    command = [sys.executable, str(PARTS / "scorer.py"), str(store_path), url, str(arguments.sessions)]
    command += ["--concurrency", str(arguments.concurrency or 2 * arguments.slots)]
    kill_thresholds = [
        arguments.sessions * part // (arguments.kills + 1) for part in range(1, arguments.kills + 1)
    ]
    first_progress: dict[str, Any] | None = None
    early_mib: float | None = None
    progress: dict[str, Any] = {}
    for kill_at in [*kill_thresholds, None]:
        first_progress = early_mib = None
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            for line in process.stdout:
                progress = json.loads(line)
                first_progress = first_progress or progress
                if (
                    early_mib is None
                    and progress["scored"] - first_progress["scored"] >= arguments.sessions / 5
                ):
                    early_mib = progress["mib"]
                if kill_at is not None and progress["scored"] >= kill_at:
                    console.print(f"killed the scorer after {progress['scored']} sessions")
                    process.kill()
                    break
        if kill_at is None and process.returncode != 0:
            raise SystemExit(f"the scorer process exited with code {process.returncode}")
    return {"mib_early": early_mib, "mib_late": progress["mib"]}


async def count_outcomes(store_path: Path) -> dict[str, int]:
    """Return the numbers of sessions that were scored and that got the fallback reward."""
    store = SqliteStore(store_path)
    states = await store.score_counts(RUN)
    await store.close()
    return {
        state: sum(counts.get(state, 0) for counts in states.values()) for state in ("scored", "fallback")
    }


def measure(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    store_path = folder / "store.db"
    asyncio.run(fill_store(store_path, arguments.sessions))
    console.print(f"scoring {arguments.sessions} sessions")
    started_at = time.monotonic()
    with start_endpoint(arguments) as url:
        memory = run_scorer(store_path, url, arguments)
        with urllib.request.urlopen(f"{url}/stats", timeout=10) as response:
            endpoint_stats = json.loads(response.read())
    limit = arguments.slots / arguments.service
    rate = endpoint_stats["served"] / endpoint_stats["seconds"]
    return {
        "sessions": arguments.sessions,
        **asyncio.run(count_outcomes(store_path)),
        "answers_s": rate,
        "limit_s": limit,
        "ratio_limit": rate / limit,
        **memory,
        "seconds": time.monotonic() - started_at,
        "endpoint": endpoint_stats,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sessions", type=int, default=10_000, help="number of sessions to score")
    parser.add_argument(
        "--slots", type=int, default=16, help="number of requests that the endpoint handles at a time"
    )
    parser.add_argument(
        "--service", type=float, default=0.1, help="seconds that the endpoint takes per request"
    )
    parser.add_argument("--faults", type=float, default=0.2, help="fraction of requests that fail")
    parser.add_argument(
        "--concurrency", type=int, help="number of concurrent judge requests (default: twice the slots)"
    )
    parser.add_argument("--kills", type=int, default=0, help="number of times to kill the scorer")
    parser.add_argument(
        "--dir", type=Path, help="folder in which to keep the store (default: a temporary folder)"
    )
    parser.add_argument("--json", action="store_true", help="print the metrics as a JSON object at the end")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        metrics = measure(arguments, arguments.dir or Path(scratch))
    console.print(metrics)
    if arguments.json:
        print(json.dumps(metrics))


if __name__ == "__main__":
    main()
