"""Measure whether a training run under load leaks memory or file descriptors over hours.

    python bench/soak.py [--json] [--full] [--minutes M] [--warm-up M]

`instar train` trains a tiny model on the replies of two scripted engines and loads every new version into
them. Its agents are rewarded by a rule, and some of them fail. In addition, live agents call the gateway at
70% of its measured capacity. They hold conversations, some of them streamed, and finish them with a reward
and feedback. In a tenth of the calls the client disconnects, and a tenth is broken (malformed, incomplete,
without messages, too long, or with an unknown key or session). One of the engines is killed repeatedly.

``rss_growth`` is the relative growth of resident memory after the warm-up, for the process that grows most
(gateway, trainer, rollout, supervisor, or the engine that is not killed). It compares the medians of the
first and the last tenth of the samples. ``fd_growth`` is the growth of the number of open file descriptors.
It compares the minima of the first and the last third, because the number of connections varies. ``lost``
counts replies that arrived completely but are not in the store, ``server_errors`` the responses with status
500 or above other than 502, 503 and 504.

The full measurement takes 120 minutes, including 20 minutes of warm-up; the default is 17 minutes, including
5 minutes of warm-up. An interrupted `--full` measurement continues with a new run and a new warm-up. Only the
time after each warm-up counts, and the memory growth of all runs is added up. The samples are kept in
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
from reliability_parts.soak_run import MAX_IN_FLIGHT, SoakRun, start_run
from reliability_parts.state_file import CACHE, StateFile
from rich.console import Console
from rich.table import Table

from instar.conformance.tiny import make_tiny_model

LOAD_FACTOR = 0.7
"""The rate of replies, as a fraction of the capacity."""
FULL_WARM_UP_SECONDS, FULL_MEASURED_SECONDS = 20 * 60.0, 100 * 60.0
DEFAULT_WARM_UP_SECONDS, DEFAULT_MEASURED_SECONDS = 5 * 60.0, 12 * 60.0
SAMPLE_COUNT = 300
"""The approximate number of samples per measurement."""
KILLED_ENGINE = "engine-1"
GOALS = {"rss_growth": "< 0.05", "fd_growth": "≤ 0", "lost": "0", "server_errors": "0"}
Sample = tuple[float, dict[str, dict[str, float]]]
"""The seconds since the start of the load, and the resources of each process."""

console = Console(stderr=True)


@dataclass(frozen=True)
class Plan:
    warm_up_seconds: float
    measured_seconds: float

    @property
    def total_seconds(self) -> float:
        return self.warm_up_seconds + self.measured_seconds

    @property
    def sample_interval_seconds(self) -> float:
        return max(0.5, self.total_seconds / SAMPLE_COUNT)

    @property
    def kill_interval_seconds(self) -> float:
        """The time between kills. The supervisor gives up on a role that dies too often within 2 minutes."""
        return max(5.0, min(150.0, self.total_seconds / 3))


def log(text: str) -> None:
    console.print(f"{time.strftime('%H:%M:%S')} {text}", highlight=False)


class Soak:
    """Puts a run under load. ``part`` contains the samples and counts so far."""

    def __init__(self, run: SoakRun, plan: Plan, state: StateFile, name: str) -> None:
        self._run = run
        self._plan = plan
        self._state = state
        self._name = name
        self._client = LoadClient(run.gateway.url)
        self._agents = LiveAgents(run.gateway, self._client)
        self._load = LoadGenerator(self._agents.send_call)
        self._acknowledged: set[str] = set()
        self.part: dict[str, Any] = {"warm_up": plan.warm_up_seconds, "samples": [], "kills": 0}

    async def run(self) -> None:
        """Measure the gateway's capacity, apply the load and record samples until the plan's time is over."""
        seconds = max(5.0, min(30.0, self._plan.warm_up_seconds / 10))
        started_at, ended_at = await self._load.run_concurrently(MAX_IN_FLIGHT, seconds)
        replies = count_replies(self._load.outcomes, started_at, ended_at)
        capacity = replies / (ended_at - started_at)
        log(f"capacity: {capacity:.0f} replies/s")
        self.part["capacity"] = capacity
        # Broken calls and calls from clients that disconnect get no reply.
        calls_per_reply = len(self._load.outcomes) / max(1, replies)
        helpers = [asyncio.create_task(self._sample()), asyncio.create_task(self._kill_engine())]
        load = asyncio.create_task(
            self._load.run_at_rate(LOAD_FACTOR * capacity * calls_per_reply, self._plan.total_seconds)
        )
        try:
            done, _ = await asyncio.wait([*helpers, load], return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()  # helpers finish only with an error
        finally:
            for task in (*helpers, load):
                task.cancel()
            await asyncio.gather(*helpers, load, return_exceptions=True)
            await self._load.finish()
            self._client.close()
        self._collect()
        self.part["lost"] = len(self._acknowledged - self._run.gateway.read_reply_ids())
        self._save()

    async def _sample(self) -> None:
        started_at = time.monotonic()
        while True:
            await asyncio.sleep(self._plan.sample_interval_seconds)
            self._run.check_running()
            by_process = {name: asdict(used) for name, used in self._run.measure_resources().items()}
            self.part["samples"].append((time.monotonic() - started_at, by_process))
            self._collect()
            self._save()

    async def _kill_engine(self) -> None:
        while True:
            await asyncio.sleep(self._plan.kill_interval_seconds)
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._run.read_pids()[KILLED_ENGINE], signal.SIGKILL)
                self.part["kills"] += 1

    def _collect(self) -> None:
        """Count the outcomes so far and discard them, to limit the memory of this process."""
        outcomes, self._load.outcomes = self._load.outcomes, []
        self._acknowledged.update(outcome.reply_id for outcome in outcomes if outcome.reply_id)
        self.part["replies"] = len(self._acknowledged)
        self.part["counts"] = dict(self._agents.counts)

    def _save(self) -> None:
        self.part["swaps"] = self._run.count_published_versions()
        self.part["rewards"] = self._run.count_rewards()
        self._state.save(self._name, self.part)


def compute_growth(samples: list[Sample], warm_up_seconds: float) -> dict[str, dict[str, float]]:
    """Return the final memory and file descriptors of each process, and their growth since the warm-up.

    The engine that is killed is left out.
    """
    samples = [sample for sample in samples if sample[0] >= warm_up_seconds]
    tenth, third = max(1, len(samples) // 10), max(1, len(samples) // 3)
    growth: dict[str, dict[str, float]] = {}
    for name in sorted({name for _, by_process in samples for name in by_process} - {KILLED_ENGINE}):
        values = [by_process[name] for _, by_process in samples if name in by_process]
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
    Raises MeasurementError if all parts did.
    """
    growths = [compute_growth(part["samples"], part["warm_up"]) for part in parts]
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
        "share": sum(map(compute_measured_seconds, parts)) / FULL_MEASURED_SECONDS,
        "processes": processes,
        **{name: sum(part[name] for part in parts) for name in ("replies", "swaps", "rewards", "kills")},
        "capacity": parts[-1]["capacity"],
        "counts": parts[-1]["counts"],
    }


def compute_measured_seconds(part: dict[str, Any]) -> float:
    """Return the time from the end of the part's warm-up to its last sample."""
    samples = part["samples"]
    return max(0.0, samples[-1][0] - part["warm_up"]) if samples else 0.0


def show(metrics: dict[str, Any]) -> None:
    table = Table("process", "RSS MB", "RSS growth", "file descriptors", "descriptor growth")
    for name, process in metrics["processes"].items():
        memory = [f"{process['rss_mb']:.0f}", f"{process['rss_growth']:+.1%}"]
        table.add_row(name, *memory, f"{process['fds']:.0f}", f"{process['fd_growth']:+.0f}")
    console.print(table)
    table = Table("metric", "value", "goal")
    for name, goal in GOALS.items():
        table.add_row(name, f"{metrics[name]:.4g}", goal)
    console.print(table)
    labels = {"replies": "replies", "swaps": "weight updates", "rewards": "rewards", "kills": "engine kills"}
    counts = ", ".join(f"{metrics[name]:,} {label}" for name, label in labels.items())
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
    warm_up_seconds = FULL_WARM_UP_SECONDS if options.full else DEFAULT_WARM_UP_SECONDS
    if options.warm_up is not None:
        warm_up_seconds = 60 * options.warm_up
    measured_seconds = FULL_MEASURED_SECONDS if options.full else DEFAULT_MEASURED_SECONDS
    if options.minutes is not None:
        measured_seconds = 60 * options.minutes
    plan = Plan(warm_up_seconds, measured_seconds - sum(map(compute_measured_seconds, parts)))
    CACHE.mkdir(parents=True, exist_ok=True)
    if plan.measured_seconds > 0:
        log(f"{plan.warm_up_seconds / 60:.1f} minutes of warm-up, {plan.measured_seconds / 60:.1f} measured")
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
