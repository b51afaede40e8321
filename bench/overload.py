"""Measure how the gateway behaves at three times its capacity.

    python bench/overload.py [--json] [--full] [--only NAME] [--seconds S]

Capacity is the highest rate of replies with a fixed number of calls in flight. Then calls arrive at three
times that rate for a while, whether or not earlier ones were answered, and afterwards at half of it. In
*engine* the engine is the bottleneck: it needs 10 ms for each of a reply's 32 tokens. In *gateway* the
engine replies at once, so the gateway's own process is the bottleneck. Both are measured with complete and
with streamed replies. The load, the gateway and the engine share the machine.

``reject_ms`` is the 99th percentile of the time to a 429 response, ``peak_share`` the rate of replies
during the overload divided by the capacity, and ``recovery_s`` the time from the end of the overload to the
beginning of the first second without a rejected or slow call (p95 above twice that before the overload).
Each is the worst over the scenarios. ``lost`` counts replies that arrived completely and are not in the
store, ``no_retry_after`` the 429 responses without Retry-After, ``failed`` all responses but 200 and 429.

By default each overload lasts a quarter of the full measurement. `--full` runs all of it, keeps the figures
of finished scenarios in .cache/bench/overload.json and continues with the next one if it is started again.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvloop
from gateway_parts.processes import MeasurementError
from gateway_parts.servers import GatewayProcess, exact_engine, start_gateway
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
OVERLOAD = 3.0
"""The rate of calls during the overload, as a multiple of the capacity."""
CALM = 0.5
"""The rate of calls before and after the overload, as a share of the capacity."""
WINDOW_SECONDS = 0.25
GOALS = {"reject_ms": "< 50", "peak_share": "≥ 0.9", "recovery_s": "≤ 5", "lost": "0", "no_retry_after": "0"}

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
    Scenario("gateway", 0.0, 64),
    Scenario("gateway, streamed", 0.0, 64, stream=True),
)


def log(text: str) -> None:
    console.print(f"{time.strftime('%H:%M:%S')} {text}", highlight=False)


def measure_scenario(scenario: Scenario, seconds: float, folder: Path) -> dict[str, Any]:
    engine = {**exact_engine(), "delay": scenario.token_seconds}
    with start_gateway(folder, engine, max_in_flight=scenario.max_in_flight) as gateway:
        figures, outcomes = uvloop.run(apply_load(scenario, seconds, gateway))
        acknowledged = {outcome.reply_id for outcome in outcomes if outcome.reply_id}
        lost = acknowledged - gateway.list_replies()
    statuses = Counter(outcome.status for outcome in outcomes)
    rejected = [outcome for outcome in outcomes if outcome.status == 429]
    return figures | {
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
) -> tuple[dict[str, float], list[Outcome]]:
    client = LoadClient(gateway.url)
    load = LoadGenerator(ChatRequests(gateway.target("overload"), client, stream=scenario.stream).send_next)
    rates: list[float] = []
    for concurrency in (scenario.max_in_flight // 4, scenario.max_in_flight // 2, scenario.max_in_flight):
        began, ended = await load.run_concurrently(concurrency, max(2.0, seconds / 6))
        rates.append(count_replies(load.outcomes, began, ended) / (ended - began))
    capacity = max(rates)
    calm = await load.run_at_rate(CALM * capacity, max(3.0, seconds / 4))
    await load.finish()
    load.lags.clear()
    overload = await load.run_at_rate(OVERLOAD * capacity, seconds)
    lags = [*load.lags]
    after = await load.run_at_rate(CALM * capacity, max(6.0, seconds / 4))
    await load.finish()
    client.close()

    def begun_within(phase: tuple[float, float]) -> list[Outcome]:
        return [outcome for outcome in load.outcomes if phase[0] <= outcome.began < phase[1]]

    warm_up = min(1.0, seconds / 4)
    replies = count_replies(load.outcomes, overload[0] + warm_up, overload[1])
    rejected = [outcome.milliseconds for outcome in begun_within(overload) if outcome.status == 429]
    if not rejected:
        raise MeasurementError(f"no call was rejected at {OVERLOAD:g} times the capacity")
    calm_ms = percentile([outcome.milliseconds for outcome in begun_within(calm)], 0.95)
    figures = {
        "capacity": capacity,
        "offered": len(begun_within(overload)) / (overload[1] - overload[0]),
        "reject_ms": percentile(rejected, 0.99),
        "reject_median_ms": percentile(rejected, 0.5),
        "peak_share": replies / (overload[1] - overload[0] - warm_up) / capacity,
        "recovery_s": find_recovery(begun_within(after), after, 2 * calm_ms),
        "client_lag_ms": 1000 * percentile(lags, 0.99),
    }
    return figures, load.outcomes


def find_recovery(outcomes: list[Outcome], phase: tuple[float, float], slow_ms: float) -> float:
    """Return the seconds to the beginning of the first second in which no call was rejected or slow, or the
    duration of the phase if there was none."""
    count = int((phase[1] - phase[0]) / WINDOW_SECONDS)
    windows: list[list[Outcome]] = [[] for _ in range(count)]
    for outcome in outcomes:
        if (number := int((outcome.began - phase[0]) / WINDOW_SECONDS)) < count:
            windows[number].append(outcome)

    def is_good(window: list[Outcome]) -> bool:
        times = [outcome.milliseconds for outcome in window]
        return all(outcome.status == 200 for outcome in window) and percentile(times, 0.95) <= slow_ms

    good = [is_good(window) for window in windows]
    length = round(1 / WINDOW_SECONDS)
    starts = (n for n in range(count - length + 1) if all(good[n : n + length]))
    return next((n * WINDOW_SECONDS for n in starts), phase[1] - phase[0])


def summarize(scenarios: dict[str, dict[str, Any]]) -> dict[str, Any]:
    values = scenarios.values()
    return {
        "reject_ms": max(figures["reject_ms"] for figures in values),
        "peak_share": min(figures["peak_share"] for figures in values),
        "recovery_s": max(figures["recovery_s"] for figures in values),
        **{name: sum(figures[name] for figures in values) for name in ("lost", "no_retry_after", "failed")},
        "share": sum(figures["seconds"] for figures in values) / (FULL_SECONDS * len(SCENARIOS)),
        "scenarios": scenarios,
    }


def show(figures: dict[str, Any]) -> None:
    table = Table("scenario", "capacity/s", "offered/s", "reject ms", "peak share", "recovery s", "lost")
    for name, scenario in figures["scenarios"].items():
        rates = [f"{scenario['capacity']:.0f}", f"{scenario['offered']:.0f}", f"{scenario['reject_ms']:.1f}"]
        shares = [f"{scenario['peak_share']:.2f}", f"{scenario['recovery_s']:.2f}", str(scenario["lost"])]
        table.add_row(name, *rates, *shares)
    console.print(table)
    table = Table("figure", "value", "to reach")
    for name, goal in GOALS.items():
        table.add_row(name, f"{figures[name]:.4g}", goal)
    console.print(table)
    console.print(f"This run covered {figures['share']:.0%} of the full measurement.", highlight=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="print the figures as one JSON object at the end")
    parser.add_argument("--full", action="store_true", help="run all of it, or continue where it was stopped")
    parser.add_argument("--only", choices=[scenario.name for scenario in SCENARIOS])
    parser.add_argument("--seconds", type=float, help="duration of each overload")
    options = parser.parse_args()
    seconds = options.seconds or (FULL_SECONDS if options.full else DEFAULT_SECONDS)
    state = StateFile(CACHE / "overload.json", keep=options.full)
    CACHE.mkdir(parents=True, exist_ok=True)
    # On the disk: in a temporary folder in memory, commits would cost nothing.
    with tempfile.TemporaryDirectory(dir=CACHE, prefix="overload-") as folder:
        for number, scenario in enumerate(SCENARIOS):
            if scenario.name in state.parts or options.only not in (None, scenario.name):
                continue
            log(f"{scenario.name}: {seconds:g} s of overload")
            try:
                state.save(scenario.name, measure_scenario(scenario, seconds, Path(folder) / str(number)))
            except MeasurementError as error:
                parser.exit(1, f"{error}\n")
    figures = summarize(state.parts)
    state.remove()
    show(figures)
    if options.json:
        print(json.dumps(figures))


if __name__ == "__main__":
    main()
