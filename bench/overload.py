"""Measure how the gateway behaves at three times its capacity.

    python bench/overload.py [--json] [--full] [--only NAME] [--seconds S]

The capacity is the highest rate of replies that is reached with three different numbers of calls in flight.
Calls then arrive at half that rate, at three times that rate, whether or not earlier calls have completed,
and again at half of it. The overload is divided into phases of five seconds, and the three rates are measured
again after each of them, because other virtual machines on the same hardware can change the speed by half
within a minute. The highest of several noisy rates would be too high, so the peak is the highest of the three
means over all measurements.

In *engine*, the engine is the bottleneck: it takes 10 ms for each of a reply's 32 tokens. In *gateway*, the
engine replies immediately, so the gateway's own process is the bottleneck; it is limited to 32 calls in
flight, because more calls only cost more time per reply. Both are measured with complete and with streamed
replies. The gateway has a core to itself; the load generator and the engine share the other cores, so that
the generator, which sends three times as much during the overload, does not take the gateway's CPU time.

``reject_ms`` is the 99th percentile of the time to a 429 response, ``peak_share`` the rate of replies during
the overload divided by the peak, and ``recovery_s`` the time from the end of the overload to the first second
in which all calls succeed and the p95 latency is at most twice that before the overload. Each of these is
the worst value of all scenarios. Three more are sums: ``lost`` counts replies that arrived completely but are
not in the store, ``no_retry_after`` the 429 responses without Retry-After, and ``failed`` all responses other
than 200 and 429.

By default, each overload takes a quarter of the full time. `--full` runs the full time, keeps the metrics of
finished scenarios in .cache/bench/overload.json and continues an interrupted measurement.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import uvloop
from gateway_parts.processes import MeasurementError
from gateway_parts.servers import GatewayProcess, make_exact_engine, start_gateway
from reliability_parts.load import (
    ChatRequests,
    LoadClient,
    LoadGenerator,
    Outcome,
    count_replies,
    percentile,
)
from reliability_parts.state_file import CACHE, StateFile
from rich.console import Console
from rich.table import Table

FULL_SECONDS, DEFAULT_SECONDS = 120.0, 30.0
OVERLOAD_FACTOR = 3.0
"""The rate of calls during the overload, as a multiple of the capacity."""
PHASE_SECONDS, RATE_SECONDS = 5.0, 1.0
"""The duration of one phase of the overload, and of the measurement of one rate between two phases."""
NORMAL_FACTOR = 0.5
"""The rate of calls before and after the overload, as a multiple of the capacity."""
WINDOW_SECONDS = 0.25
GOALS = {"reject_ms": "< 50", "peak_share": "≥ 0.9", "recovery_s": "≤ 5", "lost": "0", "no_retry_after": "0"}

Phase = tuple[float, float]
"""The start and the end of a part of the measurement."""

console = Console(stderr=True)


@dataclass(frozen=True)
class Scenario:
    name: str
    token_seconds: float
    max_in_flight: int
    stream: bool = False


SCENARIOS = (
    Scenario("engine", 0.01, 64),
    Scenario("engine, streamed", 0.01, 64, stream=True),
    Scenario("gateway", 0.0, 32),
    Scenario("gateway, streamed", 0.0, 32, stream=True),
)


def log(text: str) -> None:
    console.print(f"{time.strftime('%H:%M:%S')} {text}", highlight=False)


def measure_scenario(scenario: Scenario, seconds: float, folder: Path) -> dict[str, Any]:
    engine = {**make_exact_engine(), "delay": scenario.token_seconds}
    gateway_core, *other_cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, other_cores or [gateway_core])  # the engine inherits this
    with start_gateway(folder, engine, max_in_flight=scenario.max_in_flight) as gateway:
        for thread in Path(f"/proc/{gateway.pid}/task").iterdir():
            os.sched_setaffinity(int(thread.name), [gateway_core])
        metrics, outcomes = uvloop.run(apply_load(scenario, seconds, gateway))
        acknowledged = {outcome.reply_id for outcome in outcomes if outcome.reply_id}
        lost = acknowledged - gateway.read_reply_ids()
    os.sched_setaffinity(0, [gateway_core, *other_cores])
    statuses = Counter(outcome.status for outcome in outcomes)
    rejected = [outcome for outcome in outcomes if outcome.status == 429]
    return metrics | {
        "calls": len(outcomes),
        "replies": len(acknowledged),
        "rejected": len(rejected),
        "failed": sum(count for status, count in statuses.items() if status not in (200, 429)),
        "no_retry_after": sum(not outcome.has_retry_after for outcome in rejected),
        "lost": len(lost),
        "seconds": seconds,
    }


async def apply_load(
    scenario: Scenario, seconds: float, gateway: GatewayProcess
) -> tuple[dict[str, Any], list[Outcome]]:
    """Run all phases. Return the metrics and the outcomes of all calls.

    Raises MeasurementError if no call was rejected during the overload.
    """
    client = LoadClient(gateway.url)
    target = gateway.open_target("overload")
    requests = ChatRequests(target, client, gateway.admin_key, stream=scenario.stream)
    load = LoadGenerator(requests.send_next)
    phase_count = max(1, round(seconds / PHASE_SECONDS))
    phase_seconds = seconds / phase_count

    async def measure_rates() -> tuple[float, ...]:
        """Return the rate of replies with each of three numbers of calls in flight."""
        rates: list[float] = []
        for concurrency in (scenario.max_in_flight // 4, scenario.max_in_flight // 2, scenario.max_in_flight):
            started_at, ended_at = await load.run_concurrently(concurrency, RATE_SECONDS)
            rates.append(count_replies(load.outcomes, started_at, ended_at) / (ended_at - started_at))
        return tuple(rates)

    measured_rates = [await measure_rates()]
    normal_rate = NORMAL_FACTOR * max(measured_rates[0])
    before = await load.run_at_rate(normal_rate, max(3.0, seconds / 4))
    await load.finish()
    load.timer_lags.clear()
    phases: list[Phase] = []
    for number in range(phase_count):
        if number:
            await load.finish()
            measured_rates.append(await measure_rates())
        phases.append(await load.run_at_rate(OVERLOAD_FACTOR * max(measured_rates[-1]), phase_seconds))
    timer_lags = [*load.timer_lags]
    after = await load.run_at_rate(normal_rate, max(6.0, seconds / 4))
    await load.finish()
    measured_rates.append(await measure_rates())
    client.close()

    def list_started_in(*phases: Phase) -> list[Outcome]:
        return [o for o in load.outcomes if any(start <= o.started_at < end for start, end in phases)]

    warm_up = min(1.0, phase_seconds / 4)
    rates = [
        count_replies(load.outcomes, start + warm_up, end) / (end - start - warm_up) for start, end in phases
    ]
    reject_ms = [outcome.milliseconds for outcome in list_started_in(*phases) if outcome.status == 429]
    if not reject_ms:
        raise MeasurementError(f"no call was rejected at {OVERLOAD_FACTOR:g} times the capacity")
    peak = max(map(fmean, zip(*measured_rates, strict=True)))
    normal_ms = percentile([outcome.milliseconds for outcome in list_started_in(before)], 0.95)
    metrics = {
        "capacity": peak,
        "measured_rates": measured_rates,
        "overload_rates": rates,
        "offered": len(list_started_in(*phases)) / sum(end - start for start, end in phases),
        "reject_ms": percentile(reject_ms, 0.99),
        "reject_median_ms": percentile(reject_ms, 0.5),
        "peak_share": fmean(rates) / peak,
        "recovery_s": measure_recovery(list_started_in(after), after, 2 * normal_ms),
        "client_lag_ms": 1000 * percentile(timer_lags, 0.99),
    }
    return metrics, load.outcomes


def measure_recovery(outcomes: list[Outcome], phase: Phase, max_p95_ms: float) -> float:
    """Return the time in seconds until the first good second, or the phase's duration if there is none.

    A second is good if all calls in it succeed and the p95 latency in each of its windows is at most
    ``max_p95_ms``.
    """
    count = int((phase[1] - phase[0]) / WINDOW_SECONDS)
    windows: list[list[Outcome]] = [[] for _ in range(count)]
    for outcome in outcomes:
        if (number := int((outcome.started_at - phase[0]) / WINDOW_SECONDS)) < count:
            windows[number].append(outcome)

    def is_good(window: list[Outcome]) -> bool:
        times = [outcome.milliseconds for outcome in window]
        return all(outcome.status == 200 for outcome in window) and percentile(times, 0.95) <= max_p95_ms

    good = [is_good(window) for window in windows]
    windows_per_second = round(1 / WINDOW_SECONDS)
    starts = (n for n in range(count - windows_per_second + 1) if all(good[n : n + windows_per_second]))
    return next((n * WINDOW_SECONDS for n in starts), phase[1] - phase[0])


def summarize(scenarios: dict[str, dict[str, Any]]) -> dict[str, Any]:
    values = scenarios.values()
    return {
        "reject_ms": max(metrics["reject_ms"] for metrics in values),
        "peak_share": min(metrics["peak_share"] for metrics in values),
        "recovery_s": max(metrics["recovery_s"] for metrics in values),
        **{name: sum(metrics[name] for metrics in values) for name in ("lost", "no_retry_after", "failed")},
        "share": sum(metrics["seconds"] for metrics in values) / (FULL_SECONDS * len(SCENARIOS)),
        "scenarios": scenarios,
    }


def show(metrics: dict[str, Any]) -> None:
    table = Table(
        "scenario", "capacity/s", "calls/s", "reject ms", "replies/capacity", "recovery s", "lost replies"
    )
    for name, scenario in metrics["scenarios"].items():
        rates = [f"{scenario['capacity']:.0f}", f"{scenario['offered']:.0f}", f"{scenario['reject_ms']:.1f}"]
        results = [f"{scenario['peak_share']:.2f}", f"{scenario['recovery_s']:.2f}", str(scenario["lost"])]
        table.add_row(name, *rates, *results)
    console.print(table)
    table = Table("metric", "value", "goal")
    for name, goal in GOALS.items():
        table.add_row(name, f"{metrics[name]:.4g}", goal)
    console.print(table)
    console.print(f"This run covered {metrics['share']:.0%} of the full measurement.", highlight=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="print the metrics as a JSON object at the end")
    parser.add_argument(
        "--full", action="store_true", help="run the full time, or continue an interrupted run"
    )
    parser.add_argument(
        "--only", choices=[scenario.name for scenario in SCENARIOS], help="run only this scenario"
    )
    parser.add_argument("--seconds", type=float, help="duration of each overload in seconds")
    options = parser.parse_args()
    seconds = options.seconds or (FULL_SECONDS if options.full else DEFAULT_SECONDS)
    state = StateFile(CACHE / "overload.json", keep=options.full)
    CACHE.mkdir(parents=True, exist_ok=True)
    # Not in /tmp, which may be in memory, where commits are free.
    with tempfile.TemporaryDirectory(dir=CACHE, prefix="overload-") as folder:
        for number, scenario in enumerate(SCENARIOS):
            if scenario.name in state.parts or options.only not in (None, scenario.name):
                continue
            log(f"{scenario.name}: {seconds:g} s of overload")
            try:
                state.save(scenario.name, measure_scenario(scenario, seconds, Path(folder) / str(number)))
            except MeasurementError as error:
                parser.exit(1, f"{error}\n")
    metrics = summarize(state.parts)
    state.remove()
    show(metrics)
    if options.json:
        print(json.dumps(metrics))


if __name__ == "__main__":
    main()
