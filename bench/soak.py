"""Measure whether a training run under load leaks memory or file descriptors over hours.

    python bench/soak.py [--json] [--full] [--minutes M] [--warm-up M]

`instar train` trains a tiny model on the replies of two scripted engines and loads every new version into
them. Its agents are rewarded by a rule, and some of them fail. In addition, live agents call the gateway at
70% of its measured capacity. They hold conversations, some of them streamed, and finish them with a reward
and feedback. A tenth of the calls disconnects during the reply, and a tenth is broken (malformed,
incomplete, too long, or with an unknown key or session). One of the engines is killed repeatedly.

``rss_growth`` is the relative growth of resident memory after the warm-up, for the process that grows most
(gateway, trainer, rollout, supervisor, or the engine that is not killed). It compares the medians of the
first and the last tenth of the samples. ``fd_growth`` is the growth of the number of open file descriptors.
It compares the minima of the first and the last third, because the number of connections varies. ``lost``
counts replies that arrived completely but are not in the store, ``server_errors`` the responses with status
500 or above other than 502, 503 and 504.

The full measurement takes 120 minutes, including 20 minutes of warm-up; the default is 17 minutes, including
5 minutes of warm-up. An interrupted `--full` measurement continues with a new run and a new warm-up. The
time after each warm-up counts, and the growth of the parts is added up. The samples are kept in
.cache/bench/soak.json.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import statistics
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import uvloop
from gateway_parts.processes import MeasurementError
from reliability_parts.live_agents import LiveAgents
from reliability_parts.load import LoadClient, LoadGenerator, count_replies
from reliability_parts.soaked_run import MAX_IN_FLIGHT, SoakedRun, start_run
from reliability_parts.state_file import CACHE, StateFile
from rich.console import Console
from rich.table import Table

from instar.conformance.tiny import make_tiny_model

LOAD_FACTOR = 0.7
"""The rate of replies, as a fraction of the capacity."""
FULL_WARM_UP, FULL_MEASURED = 20 * 60.0, 100 * 60.0
DEFAULT_WARM_UP, DEFAULT_MEASURED = 5 * 60.0, 12 * 60.0
SAMPLES = 300
"""The approximate number of samples per measurement."""
KILLED_ENGINE = "engine-1"
GOALS = {"rss_growth": "< 0.05", "fd_growth": "≤ 0", "lost": "0", "server_errors": "0"}
Sample = tuple[float, dict[str, dict[str, float]]]
"""The seconds since the start of the load, and the resources of each process."""

console = Console(stderr=True)


@dataclass(frozen=True)
class Plan:
    warm_up: float
    measured: float

    @property
    def total(self) -> float:
        return self.warm_up + self.measured

    @property
    def sample_seconds(self) -> float:
        return max(0.5, self.total / SAMPLES)

    @property
    def kill_seconds(self) -> float:
        """Time between kills. The supervisor gives up on a role that dies too often within 2 minutes."""
        return max(5.0, min(150.0, self.total / 3))


def log(text: str) -> None:
    console.print(f"{time.strftime('%H:%M:%S')} {text}", highlight=False)


class Soak:
    """A run under load. ``part`` contains its samples and counts so far."""

    def __init__(self, run: SoakedRun, plan: Plan, state: StateFile, name: str) -> None:
        self._run = run
        self._plan = plan
        self._state = state
        self._name = name
        self._client = LoadClient(run.gateway.url)
        self._agents = LiveAgents(run.gateway, self._client)
        self._load = LoadGenerator(self._agents.send_call)
        self._acknowledged: set[str] = set()
        self.part: dict[str, Any] = {"warm_up": plan.warm_up, "samples": [], "kills": 0}

    async def run(self) -> None:
        seconds = max(5.0, min(30.0, self._plan.warm_up / 10))
        began, ended = await self._load.run_concurrently(MAX_IN_FLIGHT, seconds)
        capacity = count_replies(self._load.outcomes, began, ended) / (ended - began)
        log(f"capacity: {capacity:.0f} replies/s")
        self.part["capacity"] = capacity
        # Broken calls and calls of clients that disconnect get no reply.
        calls_per_reply = len(self._load.outcomes) / max(1, count_replies(self._load.outcomes, began, ended))
        helpers = [asyncio.create_task(self._sample()), asyncio.create_task(self._kill_engine())]
        load = asyncio.create_task(
            self._load.run_at_rate(LOAD_FACTOR * capacity * calls_per_reply, self._plan.total)
        )
        try:
            done, _ = await asyncio.wait([*helpers, load], return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()  # helpers end only with an error
        finally:
            for task in (*helpers, load):
                task.cancel()
            await asyncio.gather(*helpers, load, return_exceptions=True)
            await self._load.finish()
            self._client.close()
        self._collect()
        self.part["lost"] = len(self._acknowledged - self._run.gateway.list_replies())
        self._save()

    async def _sample(self) -> None:
        began = time.monotonic()
        while True:
            await asyncio.sleep(self._plan.sample_seconds)
            measured = {name: asdict(resources) for name, resources in self._run.measure().items()}
            self.part["samples"].append((time.monotonic() - began, measured))
            self._collect()
            self._save()

    async def _kill_engine(self) -> None:
        while True:
            await asyncio.sleep(self._plan.kill_seconds)
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._run.list_processes()[KILLED_ENGINE], signal.SIGKILL)
                self.part["kills"] += 1

    def _collect(self) -> None:
        """Count the outcomes so far and discard them, to limit the memory of this process."""
        outcomes, self._load.outcomes = self._load.outcomes, []
        self._acknowledged.update(outcome.reply_id for outcome in outcomes if outcome.reply_id)
        self.part["replies"] = len(self._acknowledged)
        self.part["counts"] = dict(self._agents.counts)

    def _save(self) -> None:
        self.part["swaps"] = self._run.count_versions()
        self.part["rewards"] = self._run.count_rewards()
        self._state.save(self._name, self.part)


def measure_growth(samples: list[Sample], warm_up: float) -> dict[str, dict[str, float]]:
    """Return the memory and file descriptors of each process, and how much they grew after the warm-up."""
    samples = [sample for sample in samples if sample[0] >= warm_up]
    tenth, third = max(1, len(samples) // 10), max(1, len(samples) // 3)
    growth: dict[str, dict[str, float]] = {}
    for name in sorted({name for _, measured in samples for name in measured} - {KILLED_ENGINE}):
        values = [measured[name] for _, measured in samples if name in measured]
        rss_begin, rss_end = (
            statistics.median(v["rss_mb"] for v in part) for part in (values[:tenth], values[-tenth:])
        )
        fds_begin, fds_end = (min(v["fds"] for v in part) for part in (values[:third], values[-third:]))
        growth[name] = {
            "rss_mb": rss_end,
            "rss_growth": rss_end / rss_begin - 1,
            "fds": fds_end,
            "fd_growth": fds_end - fds_begin,
        }
    return growth


def summarize(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """Aggregate the metrics of all parts.

    Parts that ended during their warm-up do not contribute to the growth of memory and file descriptors.
    """
    growths = [measure_growth(part["samples"], part["warm_up"]) for part in parts]
    names = sorted({name for growth in growths for name in growth})
    processes = {
        name: {
            "rss_growth": sum(growth[name]["rss_growth"] for growth in growths if name in growth),
            "fd_growth": max(growth[name]["fd_growth"] for growth in growths if name in growth),
            "rss_mb": max(growth[name]["rss_mb"] for growth in growths if name in growth),
            "fds": max(growth[name]["fds"] for growth in growths if name in growth),
        }
        for name in names
    }
    if not processes:
        raise MeasurementError("the measurement ended during the warm-up")
    return {
        "rss_growth": max(process["rss_growth"] for process in processes.values()),
        "fd_growth": max(process["fd_growth"] for process in processes.values()),
        "lost": sum(part.get("lost", 0) for part in parts),
        "server_errors": sum(part["counts"].get("server_errors", 0) for part in parts),
        "share": sum(map(count_measured_seconds, parts)) / FULL_MEASURED,
        "processes": processes,
        **{name: sum(part[name] for part in parts) for name in ("replies", "swaps", "rewards", "kills")},
        "capacity": parts[-1]["capacity"],
        "counts": parts[-1]["counts"],
    }


def count_measured_seconds(part: dict[str, Any]) -> float:
    samples = part["samples"]
    return max(0.0, samples[-1][0] - part["warm_up"]) if samples else 0.0


def show(metrics: dict[str, Any]) -> None:
    table = Table("process", "RSS MB", "growth", "file descriptors", "growth")
    for name, process in metrics["processes"].items():
        memory = [f"{process['rss_mb']:.0f}", f"{process['rss_growth']:+.1%}"]
        table.add_row(name, *memory, f"{process['fds']:.0f}", f"{process['fd_growth']:+.0f}")
    console.print(table)
    table = Table("metric", "value", "goal")
    for name, goal in GOALS.items():
        table.add_row(name, f"{metrics[name]:.4g}", goal)
    console.print(table)
    counts = ", ".join(f"{metrics[name]:,} {name}" for name in ("replies", "swaps", "rewards", "kills"))
    covered = f"This run covered {metrics['share']:.0%} of the full measurement"
    console.print(f"{covered}: {counts}.", highlight=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="print the metrics as a JSON object at the end")
    parser.add_argument(
        "--full", action="store_true", help="run the full time, or continue an interrupted run"
    )
    parser.add_argument("--minutes", type=float, help="duration after the warm-up, in minutes")
    parser.add_argument("--warm-up", type=float, help="duration of the warm-up, in minutes")
    options = parser.parse_args()
    state = StateFile(CACHE / "soak.json", keep=options.full)
    parts = list(state.parts.values())
    defaults = (FULL_WARM_UP, FULL_MEASURED) if options.full else (DEFAULT_WARM_UP, DEFAULT_MEASURED)
    warm_up = defaults[0] if options.warm_up is None else 60 * options.warm_up
    measured = defaults[1] if options.minutes is None else 60 * options.minutes
    plan = Plan(warm_up, measured - sum(map(count_measured_seconds, parts)))
    CACHE.mkdir(parents=True, exist_ok=True)
    if plan.measured > 0:
        log(f"warm-up: {plan.warm_up / 60:.1f} minutes, measurement: {plan.measured / 60:.1f} minutes")
        with tempfile.TemporaryDirectory(dir=CACHE, prefix="soak-") as folder:
            try:
                model = make_tiny_model(Path(folder) / "model", hidden=32, context=4096)
                with start_run(Path(folder), model) as run:
                    soak = Soak(run, plan, state, f"part {len(parts) + 1}")
                    uvloop.run(soak.run())
                parts.append(soak.part)
            except MeasurementError as error:
                parser.exit(1, f"{error}\n")
    metrics = summarize(parts)
    state.remove()
    show(metrics)
    if options.json:
        print(json.dumps(metrics))


if __name__ == "__main__":
    main()
