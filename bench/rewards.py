"""Measure scoring in the background against the capacity of the judge's endpoint.

    python bench/rewards.py [--sessions 10000] [--slots 16] [--service 0.1] [--faults 0.2] [--kills 0]
        [--json]

An SQLite store is filled with sessions of one short call each. A judge's endpoint in its own process answers
``--slots`` requests at once, each in ``--service`` seconds; a share of them fails: no response, status 429,
an invalid reply or a broken connection. The runner scores every session in another process, which is killed
``--kills`` times. ``ratio_limit`` is the share of the endpoint's capacity that was used between the first
request and the last response; ``mib_early`` and ``mib_late`` are the runner's memory after its process has
scored a fifth of all sessions, and at its end.
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
INSERT_BATCH = 500
console = Console(stderr=True)


async def fill_store(path: Path, sessions: int) -> None:
    """Add completed live sessions, all of them different."""
    store = SqliteStore(path)
    await store.put_run(Run(RUN, RUN, {}))

    async def add_session(number: int) -> None:
        name = f"session-{number:06d}"
        await store.add_calls([make_call(name)], new_session=Session(name, RUN, "agent", RUN, Channel.LIVE))
        await store.end_session(name, SessionStatus.COMPLETED)

    for start in range(0, sessions, INSERT_BATCH):
        await asyncio.gather(
            *(add_session(number) for number in range(start, min(start + INSERT_BATCH, sessions)))
        )
    await store.close()


def make_call(session: str) -> Call:
    sampled = np.arange(16, dtype=np.int32)
    return Call(
        call_id=f"call-{session}",
        session_id=session,
        run_id=RUN,
        agent_id="agent",
        policy_id=RUN,
        request_id=f"request-{session}",
        prompt_ids=np.arange(64, dtype=np.int32),
        sampled_ids=sampled,
        logprobs=np.full(len(sampled), -0.5, np.float32),
        versions=np.zeros(len(sampled), np.int32),
        messages=({"role": "user", "content": f"What is your number, {session}?"},),
        reply={"role": "assistant", "content": f"It is {session}."},
        finish_reason="stop",
    )


@contextlib.contextmanager
def start_endpoint(arguments: argparse.Namespace) -> Generator[str]:
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


def run_scorer(store: Path, url: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Run the scorer until all sessions are scored, killing it after equal shares of the sessions."""
    command = [sys.executable, str(PARTS / "scorer.py"), str(store), url, str(arguments.sessions)]
    command += ["--concurrency", str(arguments.concurrency or 2 * arguments.slots)]
    kill_counts = [
        arguments.sessions * part // (arguments.kills + 1) for part in range(1, arguments.kills + 1)
    ]
    first_progress: dict[str, Any] | None = None
    early_mib: float | None = None
    progress: dict[str, Any] = {}
    for kill_at in [*kill_counts, None]:
        first_progress = early_mib = None
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            for text in process.stdout:
                progress = json.loads(text)
                first_progress = first_progress or progress
                if (
                    early_mib is None
                    and progress["scored"] - first_progress["scored"] >= arguments.sessions / 5
                ):
                    early_mib = progress["mib"]
                if kill_at is not None and progress["scored"] >= kill_at:
                    console.print(f"killed at {progress['scored']} scored")
                    process.kill()
                    break
        if kill_at is None and process.returncode != 0:
            raise SystemExit(f"the scorer process ended with code {process.returncode}")
    return {"mib_early": early_mib, "mib_late": progress["mib"]}


async def count_outcomes(store_path: Path) -> dict[str, int]:
    store = SqliteStore(store_path)
    states = await store.score_counts(RUN)
    await store.close()
    return {
        state: sum(counts.get(state, 0) for counts in states.values()) for state in ("scored", "fallback")
    }


def measure(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    store = folder / "store.db"
    asyncio.run(fill_store(store, arguments.sessions))
    console.print(f"{arguments.sessions} sessions to score")
    started_at = time.monotonic()
    with start_endpoint(arguments) as url:
        memory = run_scorer(store, url, arguments)
        with urllib.request.urlopen(f"{url}/stats", timeout=10) as response:
            endpoint_stats = json.loads(response.read())
    limit = arguments.slots / arguments.service
    rate = endpoint_stats["served"] / endpoint_stats["seconds"]
    return {
        "sessions": arguments.sessions,
        **asyncio.run(count_outcomes(store)),
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
    parser.add_argument("--sessions", type=int, default=10_000)
    parser.add_argument("--slots", type=int, default=16)
    parser.add_argument("--service", type=float, default=0.1)
    parser.add_argument("--faults", type=float, default=0.2)
    parser.add_argument("--concurrency", type=int, help="concurrent judge requests; default: twice the slots")
    parser.add_argument("--kills", type=int, default=0)
    parser.add_argument(
        "--dir", type=Path, help="folder in which the store is kept; default: a temporary folder"
    )
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        figures = measure(arguments, arguments.dir or Path(scratch))
    console.print(figures)
    if arguments.json:
        print(json.dumps(figures))


if __name__ == "__main__":
    main()
