"""Measure how much training on live traffic delays the replies to an agent in use.

    python bench/live_latency.py [--json] [--model NAME] [--rounds N] [--requests N] [--returns N]

Runs `instar train` with `data: live` and rated sessions, and measures the time to the first token of requests
that are sent one after the other. The window of the run is closed (A), open (B) and closed again (C); rounds
change the order. In each, an agent is first in use, with pauses between its requests of up to a second, in
which training continues. Then it is away for longer than `live.window.idle`, and returns, several times.

`p99_ratio` is the 99th percentile in B relative to that of A and C together, while the agent is in use;
`p99_control` is that of A relative to C. `return_ratio` and `return_control` compare the medians of the first
request after a return. `training_share` is the share of returns in B at which the trainer was in the middle
of a step; below 1, there were too few sessions to train on. The controls show how far the figures can be
trusted: other programs on the machine must be idle.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import yaml
from rich.console import Console

from instar.cli.roles import fetch_roles
from instar.conformance.tiny import make_tiny_model
from instar.errors import InstarError
from instar.live.learning_window import write_opened
from instar.live.windows import OpenedWindow

console = Console(stderr=True)
IDLE_SECONDS = 0.5
AWAY_SECONDS = 3 * IDLE_SECONDS
MAX_THINK_SECONDS = 1.0
SESSION_WORDS = 60
SESSIONS_PER_STEP = 16
START_TIMEOUT_SECONDS = 600.0
MODES = ("A", "B", "C")


@dataclass
class Measurements:
    """Seconds to the first token, in one mode."""

    active: list[float] = field(default_factory=list[float])
    returns: list[float] = field(default_factory=list[float])
    training: list[bool] = field(default_factory=list[bool])
    """For each return, True if the trainer was in the middle of a step."""


def log(text: str) -> None:
    console.print(f"{time.strftime('%H:%M:%S')} {text}", highlight=False)


def make_settings(folder: Path, model: str, updates: int) -> dict[str, Any]:
    later = (time.localtime().tm_hour + 8) % 24
    return {
        "name": "latency",
        "dir": str(folder / "run"),
        "model": {"name": model, "device": "cpu"},
        "agents": {"default": {"mode": "learn"}},
        "data": "live",
        "live": {"window": {"hours": [f"{later:02}:00-{(later + 1) % 24:02}:00"], "idle": IDLE_SECONDS}},
        "backend": {"type": "local", "lora": {"rank": 8}},
        "trainer": {
            "steps": 10_000,
            "groups_per_step": SESSIONS_PER_STEP,
            "updates_per_step": updates,
            "adam": {"lr": 1e-6},
            "tensorboard": False,
        },
    }


async def fetch_role(run_dir: Path, name: str) -> Any:
    return next((role for role in await fetch_roles(run_dir) if role.name == name), None)


@asynccontextmanager
async def start_run(folder: Path, settings: dict[str, Any], key: str) -> AsyncGenerator[Path]:
    """Start the run, yield its folder when its trainer waits for data, and stop it."""
    config, run_dir = folder / "run.yaml", Path(settings["dir"])
    config.write_text(yaml.safe_dump(settings))
    command = [sys.executable, "-m", "instar.cli.main", "train", str(config), "--json"]
    env = {**os.environ, "INSTAR_ADMIN_KEY": key}
    with (folder / "output.txt").open("wb") as output:
        process = await asyncio.create_subprocess_exec(*command, stdout=output, stderr=output, env=env)
    try:
        deadline = time.monotonic() + START_TIMEOUT_SECONDS
        while True:
            try:
                trainer = await fetch_role(run_dir, "trainer")
            except InstarError:  # the run's folder does not exist yet
                trainer = None
            if trainer is not None and trainer.doing.startswith("waiting"):
                break
            if process.returncode is not None or time.monotonic() > deadline:
                raise InstarError(f"the run did not start:\n{(folder / 'output.txt').read_text()[-2000:]}")
            await asyncio.sleep(0.2)
        yield run_dir
    finally:
        if process.returncode is None:
            process.kill()  # the processes of the run exit with it; nothing of the last step is needed
        await process.wait()


class Agent:
    """A client of the run's gateway."""

    def __init__(self, client: aiohttp.ClientSession, seed: int = 0) -> None:
        self._client = client
        self._random = random.Random(seed)

    def _make_body(self, words: int, **fields: Any) -> dict[str, Any]:
        text = " ".join(str(self._random.randrange(1000)) for _ in range(words))
        return {"model": "m", "messages": [{"role": "user", "content": text}], **fields}

    async def measure_first_token(self) -> float:
        body = self._make_body(8, max_tokens=4, stream=True)
        started = time.perf_counter()
        async with self._client.post("/v1/chat/completions", json=body) as response:
            response.raise_for_status()
            await response.content.readline()
            seconds = time.perf_counter() - started
            await response.read()
        return seconds

    async def add_session(self, reward: float) -> None:
        """Complete a session with a reward, for the trainer."""
        async with self._client.post("/sessions", json={}) as response:
            session = await response.json()
        body = self._make_body(SESSION_WORDS, max_tokens=16)
        prefix = f"/s/{session['session_id']}"
        async with self._client.post(f"{prefix}/v1/chat/completions", json=body) as response:
            response.raise_for_status()
        complete = {"reward": reward}
        async with self._client.post(
            f"/sessions/{session['session_id']}/complete", json=complete
        ) as response:
            response.raise_for_status()

    async def think(self) -> None:
        await asyncio.sleep(self._random.uniform(0.05, MAX_THINK_SECONDS))


async def measure_mode(
    run_dir: Path, agent: Agent, measurements: Measurements, requests: int, returns: int, is_open: bool
) -> None:
    now = time.time()
    write_opened(run_dir, OpenedWindow(now, now + 3600) if is_open else None)
    await asyncio.sleep(2 * IDLE_SECONDS + 1)
    for _ in range(requests):
        measurements.active.append(await agent.measure_first_token())
        await agent.think()
    for _ in range(returns):
        await asyncio.sleep(AWAY_SECONDS)
        trainer = await fetch_role(run_dir, "trainer")
        measurements.training.append("training on" in trainer.doing and "paused" not in trainer.doing)
        measurements.returns.append(await agent.measure_first_token())


def compute_percentile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def summarize(results: dict[str, Measurements]) -> dict[str, Any]:
    a, b, c = (results[mode] for mode in MODES)
    p99 = {mode: compute_percentile(results[mode].active, 0.99) for mode in MODES}
    medians = {mode: statistics.median(results[mode].returns) for mode in MODES}
    closed = [*a.active, *c.active]
    return {
        "p99_ratio": p99["B"] / compute_percentile(closed, 0.99),
        "p99_control": p99["A"] / p99["C"],
        "median_ratio": statistics.median(b.active) / statistics.median(closed),
        "return_ratio": medians["B"] / statistics.median([*a.returns, *c.returns]),
        "return_control": medians["A"] / medians["C"],
        "training_share": statistics.mean(b.training),
        "p99_ms": {mode: 1000 * p99[mode] for mode in MODES},
        "return_ms": {mode: 1000 * medians[mode] for mode in MODES},
        "requests": len(b.active),
        "returns": len(b.returns),
    }


async def run_bench(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    model = arguments.model or str(make_tiny_model(folder / "model", hidden=128, layers=4))
    key = f"sk-instar-{random.randbytes(16).hex()}"
    settings = make_settings(folder, model, arguments.updates)
    log("starting the run")
    async with start_run(folder, settings, key) as run_dir:
        gateway = await fetch_role(run_dir, "gateway")
        headers = {"Authorization": f"Bearer {key}"}
        async with aiohttp.ClientSession(gateway.address, headers=headers) as client:
            agent = Agent(client)
            log(f"recording {arguments.sessions} sessions to train on")
            for index in range(arguments.sessions):
                await agent.add_session(float(index % 2))
            results = {mode: Measurements() for mode in MODES}
            for number in range(arguments.rounds):
                for offset in range(len(MODES)):
                    mode = MODES[(number + offset) % len(MODES)]
                    log(f"round {number + 1} of {arguments.rounds}: {mode}")
                    counts = arguments.requests, arguments.returns
                    await measure_mode(run_dir, agent, results[mode], *counts, is_open=mode == "B")
    return summarize(results)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", action="store_true", help="end with the figures as JSON")
    parser.add_argument("--model", help="the model; default: a tiny model with random weights")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=40, help="requests in use, per window and round")
    parser.add_argument("--returns", type=int, default=5, help="returns, per window and round")
    parser.add_argument("--sessions", type=int, default=4 * SESSIONS_PER_STEP, help="sessions to train on")
    parser.add_argument("--updates", type=int, default=400, help="updates per step, so that steps are long")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="instar-latency-") as folder:
        figures = asyncio.run(run_bench(arguments, Path(folder)))
    for name, value in figures.items():
        log(f"{name}: {value}")
    if arguments.json:
        print(json.dumps(figures))


if __name__ == "__main__":
    main()
