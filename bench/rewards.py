"""Scoring in the background, against what the judge's endpoint could do at most.

    python bench/rewards.py [--sessions 10000] [--slots 16] [--service 0.1] [--faults 0.2] [--kills 0]
        [--json]

Sessions of one short call are put into an SQLite store. A judge's endpoint in a process of its own answers
``--slots`` questions at once, each in ``--service`` seconds, and a part of them badly: not at all, by 429, by
garbage, by a connection that breaks off. The runner scores every session in another process, which is killed
``--kills`` times on the way. ``ratio_limit`` is the share of the endpoint's capacity that was used between
the first question and the last answer; ``mib_early`` and ``mib_late`` are the runner's memory once its
process has scored a fifth of all sessions, and at its end.
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
AT_ONCE = 500
console = Console(stderr=True)


async def fill(path: Path, sessions: int) -> None:
    """Completed live sessions, no two of them alike."""
    store = SqliteStore(path)
    await store.put_run(Run(RUN, RUN, {}))

    async def add(number: int) -> None:
        name = f"session-{number:06d}"
        await store.add_calls([make_call(name)], opening=Session(name, RUN, "agent", RUN, Channel.LIVE))
        await store.end_session(name, SessionStatus.COMPLETED)

    for start in range(0, sessions, AT_ONCE):
        await asyncio.gather(*(add(number) for number in range(start, min(start + AT_ONCE, sessions))))
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
def endpoint(arguments: argparse.Namespace) -> Generator[str]:
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


def score(store: Path, url: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Until all is scored; the process is killed at equal parts of the way."""
    command = [sys.executable, str(PARTS / "scorer.py"), str(store), url, str(arguments.sessions)]
    command += ["--concurrency", str(arguments.concurrency or 2 * arguments.slots)]
    ends = [arguments.sessions * part // (arguments.kills + 1) for part in range(1, arguments.kills + 1)]
    first: dict[str, Any] | None = None
    early: float | None = None
    line: dict[str, Any] = {}
    for end in [*ends, None]:
        first = early = None
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            for text in process.stdout:
                line = json.loads(text)
                first = first or line
                if early is None and line["scored"] - first["scored"] >= arguments.sessions / 5:
                    early = line["mib"]
                if end is not None and line["scored"] >= end:
                    console.print(f"killed at {line['scored']} scored")
                    process.kill()
                    break
        if end is None and process.returncode != 0:
            raise SystemExit(f"the scorer ended with {process.returncode}")
    return {"mib_early": early, "mib_late": line["mib"]}


async def outcome(store_path: Path) -> dict[str, int]:
    store = SqliteStore(store_path)
    states = await store.score_counts(RUN)
    await store.close()
    return {
        state: sum(counts.get(state, 0) for counts in states.values()) for state in ("scored", "fallback")
    }


def measure(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    store = folder / "store.db"
    asyncio.run(fill(store, arguments.sessions))
    console.print(f"{arguments.sessions} sessions to be scored")
    began = time.monotonic()
    with endpoint(arguments) as url:
        memory = score(store, url, arguments)
        with urllib.request.urlopen(f"{url}/stats", timeout=10) as answer:
            did = json.loads(answer.read())
    limit = arguments.slots / arguments.service
    rate = did["served"] / did["seconds"]
    return {
        "sessions": arguments.sessions,
        **asyncio.run(outcome(store)),
        "answers_s": rate,
        "limit_s": limit,
        "ratio_limit": rate / limit,
        **memory,
        "seconds": time.monotonic() - began,
        "endpoint": did,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sessions", type=int, default=10_000)
    parser.add_argument("--slots", type=int, default=16)
    parser.add_argument("--service", type=float, default=0.1)
    parser.add_argument("--faults", type=float, default=0.2)
    parser.add_argument("--concurrency", type=int, help="questions at once; default: twice the slots")
    parser.add_argument("--kills", type=int, default=0)
    parser.add_argument("--dir", type=Path, help="where the store is left; default: nowhere")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        figures = measure(arguments, arguments.dir or Path(scratch))
    console.print(figures)
    if arguments.json:
        print(json.dumps(figures))


if __name__ == "__main__":
    main()
