"""Send a million malformed, hostile and valid requests to all routes and dialects of a gateway.

    python bench/fuzz.py [--json] [--full] [--seed N] [--replay SEED]

The gateway runs in its own process, with a scripted engine and a SQLite store. There are three request
generators: random changes to valid requests (*grammar*), connections that violate HTTP or stop halfway
(*raw*), and Schemathesis with the gateway's OpenAPI description (*schema*). Schemathesis is installed into
its own environment under .cache/bench on the first run.

Five metrics decide whether the run fails. `server_errors`: statuses of 500 and above except the documented
502, 503 and 504, errors in the log, and responses that are not valid HTTP or JSON. `hangs`: requests that
neither get a response nor have their connection closed. `mismatches`: responses that differ from the OpenAPI
description. `rss_growth`: memory growth after the first fifth of the requests. `bystander_ratio`: the latency
of a well-behaved client in its own process during fuzzing, divided by its latency while as many connections
send only valid requests (the larger of the ratios at the median and at the 95th percentile).

By default, the run ends after 15 minutes and reports which fraction of the requests it sent. `--full`
sends all of them and continues an interrupted run. Every failing request is written to a file with its seed,
and `--replay SEED` sends it again to a new gateway.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import uvloop
from fuzz_parts.bystander import start_bystander
from fuzz_parts.cases import Pool, Route, list_routes
from fuzz_parts.client import connect
from fuzz_parts.fuzzer import (
    SESSION_COUNT,
    FailureLog,
    Fuzzer,
    find_problem,
    open_session,
    refresh_pool,
    send,
)
from fuzz_parts.schema import Schemathesis
from gateway_parts.processes import MeasurementError, read_usage
from gateway_parts.servers import GatewayProcess, start_gateway
from rich.console import Console
from rich.table import Table

CACHE = Path(__file__).resolve().parent.parent / ".cache" / "bench"
FULL_RUN_REQUESTS = 1_000_000
SCHEMA_FRACTION = 0.005
"""The fraction of requests from Schemathesis. It takes about 50 ms per request, 100 times as long as the
other generators."""
STATE_FILE = CACHE / "fuzz-state.json"
"""The progress of an interrupted run, from which `--full` continues."""
ROUND_SIZE = 20_000
VALID_ROUND_SIZE = 1_500
"""The number of valid requests before each round. They measure the well-behaved client's normal latency and
do not count as fuzzing requests."""
MAX_RSS_GROWTH = 0.05
MAX_BYSTANDER_RATIO = 2.0
REPLIES = ['Well.\n<tool_call>{"name": "f", "arguments": {"x": "1"}}</tool_call>', "Done."]
GATEWAY_SETTINGS = {"read_timeout": 3.0, "request_timeout": 15.0, "max_sessions_in_memory": 256}

console = Console(stderr=True)


@dataclass
class Progress:
    """The results so far. They are saved after each round and each Schemathesis batch."""

    base: int
    """The number from which the seeds of all cases are derived (`--seed`)."""
    next_case: int = 0
    next_batch: int = 0
    requests: dict[str, int] = field(default_factory=lambda: {"grammar and raw": 0, "schema": 0})
    server_errors: int = 0
    hangs: int = 0
    unavailable: int = 0
    """Responses with a documented 502, 503 or 504."""
    mismatches: int = 0
    """Responses that differ from the OpenAPI description."""
    statuses: dict[str, int] = field(default_factory=dict[str, int])
    rss_mb: list[list[float]] = field(default_factory=list[list[float]])
    """The memory of each gateway process after each round."""
    latencies_ms: dict[str, list[float]] = field(default_factory=lambda: {"valid": [], "fuzz": []})
    """The well-behaved client's latencies in each phase."""

    def save(self) -> None:
        STATE_FILE.write_text(json.dumps(asdict(self)))

    @property
    def total_requests(self) -> int:
        return sum(self.requests.values())


def log(text: str) -> None:
    console.print(f"{time.strftime('%H:%M:%S')} {text}", highlight=False)


def percentile(values: list[float], fraction: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(fraction * len(ordered)))]


def compute_growth(samples: list[float]) -> float:
    """Return the relative growth of the median from just after the first fifth to the last tenth.

    Return 0 for fewer than five samples.
    """
    if len(samples) < 5:
        return 0.0
    start = statistics.median(samples[len(samples) // 5 : len(samples) // 5 + max(1, len(samples) // 10)])
    return statistics.median(samples[-max(1, len(samples) // 10) :]) / start - 1


def compute_metrics(progress: Progress) -> dict[str, Any]:
    valid, fuzz = progress.latencies_ms["valid"], progress.latencies_ms["fuzz"]
    ratios = [
        percentile(fuzz, fraction) / percentile(valid, fraction) if valid and fuzz else 0.0
        for fraction in (0.5, 0.95)
    ]
    return {
        "requests": progress.total_requests,
        "share": round(min(1.0, progress.total_requests / FULL_RUN_REQUESTS), 4),
        "server_errors": progress.server_errors,
        "hangs": progress.hangs,
        "rss_growth": round(max((compute_growth(samples) for samples in progress.rss_mb), default=0.0), 4),
        "bystander_ratio": round(max(ratios), 3),
        "bystander_p50_ms": round(percentile(fuzz, 0.5), 2) if fuzz else None,
        "bystander_p95_ms": round(percentile(fuzz, 0.95), 2) if fuzz else None,
        "bystander_max_ms": round(max(fuzz), 1) if fuzz else None,
        "documented_5xx": progress.unavailable,
        "mismatches": progress.mismatches,
        "rss_mb": [round(samples[-1], 1) for samples in progress.rss_mb if samples],
        "generators": progress.requests,
        "statuses": dict(sorted(progress.statuses.items())),
    }


def is_failure(metrics: dict[str, Any]) -> bool:
    return bool(
        metrics["server_errors"]
        or metrics["hangs"]
        or metrics["mismatches"]
        or metrics["rss_growth"] > MAX_RSS_GROWTH
        or metrics["bystander_ratio"] > MAX_BYSTANDER_RATIO
    )


@dataclass
class Target:
    """A running gateway with the keys and sessions that cases use."""

    gateway: GatewayProcess
    address: tuple[str, int]
    routes: list[Route]
    pool: Pool


async def prepare_target(gateway: GatewayProcess) -> Target:
    host, port = gateway.url.removeprefix("http://").split(":")
    address = (host, int(port))
    pool = Pool(gateway.admin_key, gateway.agent_key, [])
    connection = await connect(*address)
    description = await send(connection, "GET", "/openapi.json", pool.admin_key)
    pool.sessions += [await open_session(connection, pool) for _ in range(SESSION_COUNT)]
    connection.transport.abort()
    return Target(gateway, address, list_routes(description), pool)


async def run_rounds(
    target: Target, progress: Progress, count: int, stop_at: float, folder: Path, failures: FailureLog
) -> None:
    """Send cases in rounds, up to case number ``count`` or until ``time.monotonic()`` reaches ``stop_at``.

    At the end, calls that are still in flight are counted as hangs.
    """
    fuzzer = Fuzzer(target.address, progress.base, target.routes, target.pool, failures)
    refresher = asyncio.create_task(refresh_pool(target.address, target.pool))
    samples: list[float] = []
    progress.rss_mb.append(samples)
    with start_bystander(folder, target.address, target.gateway.admin_key) as bystander:
        while progress.next_case < count and time.monotonic() < stop_at:
            round_size = min(ROUND_SIZE, count - progress.next_case)
            for phase, case_count in (
                ("valid", min(VALID_ROUND_SIZE, round_size // 2)),
                ("fuzz", round_size),
            ):
                start = time.time()
                await fuzzer.run(progress.next_case, case_count, is_valid=phase == "valid")
                progress.latencies_ms[phase] += await asyncio.to_thread(bystander.read, start, time.time())
            progress.next_case += round_size
            samples.append(read_usage(target.gateway.pid).rss_mb)
            add_counts(progress, fuzzer)
            progress.save()
            problems = f"{progress.server_errors} server errors, {progress.hangs} hangs"
            log(f"{progress.total_requests:,} requests, {problems}, {samples[-1]:.0f} MB")
            if refresher.done():
                refresher.result()  # raise its error
        await fuzzer.drain()
    refresher.cancel()
    await asyncio.wait([refresher])
    add_counts(progress, fuzzer)
    if stuck := await count_stuck_calls(target):
        progress.hangs += stuck
        failures.add("", f"{stuck} requests", "still in flight at the end")


def add_counts(progress: Progress, fuzzer: Fuzzer) -> None:
    """Add the fuzzer's counts to the progress and reset them."""
    counts = fuzzer.counts
    progress.requests["grammar and raw"] += counts.requests
    progress.server_errors += counts.server_errors
    progress.hangs += counts.hangs
    progress.unavailable += counts.unavailable
    progress.statuses = dict(Counter(progress.statuses) + counts.statuses)
    fuzzer.reset()


async def count_stuck_calls(target: Target, timeout_seconds: float = 30.0) -> int:
    """Wait until no calls are in flight, and return the number that still are when the timeout expires."""
    deadline = time.monotonic() + timeout_seconds
    while True:
        connection = await connect(*target.address)
        stats = await send(connection, "GET", "/stats", target.pool.admin_key)
        connection.transport.abort()
        if not stats["in_flight"] or time.monotonic() > deadline:
            return stats["in_flight"]
        await asyncio.sleep(0.5)


def run_schemathesis(
    target: Target, progress: Progress, count: int, stop_at: float, failures: FailureLog, environment: Path
) -> None:
    """Run batches until ``count`` requests are sent or ``time.monotonic()`` reaches ``stop_at``."""
    keys = (target.pool.admin_key, target.pool.agent_key)
    with Schemathesis(environment, target.gateway.url, keys, target.pool.sessions) as schemathesis:
        while progress.requests["schema"] < count and time.monotonic() < stop_at:
            batch = schemathesis.run_batch(progress.base, progress.next_batch)
            progress.next_batch += 1
            progress.requests["schema"] += batch["requests"]
            progress.statuses = dict(Counter(progress.statuses) + Counter(batch["statuses"]))
            for problem in batch["problems"]:
                if problem["is_mismatch"]:
                    progress.mismatches += 1
                elif problem["is_hang"]:
                    progress.hangs += 1
                else:
                    progress.server_errors += 1
                failures.add(batch["seed"], batch["operation"], problem["text"], problem["request"].encode())
            progress.save()


def record_log_errors(folder: Path, failures: FailureLog) -> int:
    """Add every traceback and ERROR line in the logs to ``failures`` and return their number."""
    count = 0
    for path in sorted(folder.rglob("*.log")):
        lines = path.read_text(errors="replace").splitlines()
        for number, line in enumerate(lines):
            if "Traceback (most recent call last)" in line or " ERROR " in line:
                count += 1
                failures.add(
                    "", path.name, "error in the log", "\n".join(lines[number : number + 40]).encode()
                )
    return count


def load_progress(base: int) -> Progress:
    """Return the progress of an interrupted run with this base, or a new progress if there is none."""
    if STATE_FILE.is_file():
        saved = json.loads(STATE_FILE.read_text())
        if saved["base"] == base:
            progress = Progress(**saved)
            log(f"continuing after {progress.total_requests:,} requests")
            return progress
    return Progress(base)


def run_bench(
    progress: Progress, total: int, timeout_seconds: float, failures: FailureLog, *, use_schema: bool
) -> None:
    schema_count = round(total * SCHEMA_FRACTION) if use_schema else 0
    environment = Schemathesis.install(CACHE, log) if schema_count else None
    started_at = time.monotonic()
    with tempfile.TemporaryDirectory(dir=CACHE, prefix="fuzz-") as name:
        folder = Path(name)
        engine = {"type": "scripted", "replies": REPLIES}
        with start_gateway(folder / "gateway", engine, max_context=4096, **GATEWAY_SETTINGS) as gateway:
            target = uvloop.run(prepare_target(gateway))
            if environment is not None:
                stop_at = started_at + 0.15 * timeout_seconds
                run_schemathesis(target, progress, schema_count, stop_at, failures, environment)
                log(f"{progress.requests['schema']:,} requests from Schemathesis")
            count = total - schema_count
            stop_at = started_at + timeout_seconds
            uvloop.run(run_rounds(target, progress, count, stop_at, folder, failures))
        progress.server_errors += record_log_errors(folder, failures)


async def replay(seed: str, failures: FailureLog) -> None:
    """Send the request with this seed to a new gateway, and print the responses and problems.

    A Schemathesis seed identifies a batch of requests. They are all sent again, and only their statuses and
    problems are printed.
    """
    with tempfile.TemporaryDirectory(dir=CACHE, prefix="fuzz-") as name:
        engine = {"type": "scripted", "replies": REPLIES}
        with start_gateway(Path(name) / "gateway", engine, max_context=4096, **GATEWAY_SETTINGS) as gateway:
            target = await prepare_target(gateway)
            *generator, base, number = seed.split(":")
            if generator:
                progress = Progress(int(base), next_batch=int(number))
                environment = Schemathesis.install(CACHE, log)
                run_schemathesis(target, progress, 1, float("inf"), failures, environment)
                console.print(progress.statuses)
            else:
                fuzzer = Fuzzer(target.address, int(base), target.routes, target.pool, failures)
                for reply in await fuzzer.replay(int(number)):
                    problem = find_problem(reply)
                    console.print(f"{reply.status} {problem or ''}", reply.body[:2000], highlight=False)
        record_log_errors(Path(name), failures)
    for line in failures.path.read_text().splitlines():
        row = json.loads(line)
        console.print(f"[red]{row['problem']}[/red] {row['case']}", row["request"][:4000], highlight=False)


def show(metrics: dict[str, Any], failures: FailureLog) -> None:
    table = Table("metric", "value", "limit")
    limits = {
        "server_errors": "0",
        "hangs": "0",
        "mismatches": "0",
        "rss_growth": f"{MAX_RSS_GROWTH:g}",
        "bystander_ratio": f"{MAX_BYSTANDER_RATIO:g}",
    }
    for name, value in metrics.items():
        table.add_row(name, str(value), limits.get(name, ""))
    console.print(table)
    for description, count in failures.counts.most_common(30):
        console.print(f"{count:6} {description}", highlight=False)
    console.print(
        f"{metrics['requests']:,} of {FULL_RUN_REQUESTS:,} requests ({metrics['share']:.1%} of a full run). "
        f"Failures are in {failures.path}.",
        highlight=False,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Fuzz the gateway.")
    parser.add_argument("--json", action="store_true", help="print the metrics as a JSON object at the end")
    parser.add_argument(
        "--full", action="store_true", help="send all requests, or continue an interrupted run"
    )
    parser.add_argument("--requests", type=int, default=FULL_RUN_REQUESTS, help="number of requests to send")
    parser.add_argument("--minutes", type=float, default=15.0, help="time limit; ignored with --full")
    parser.add_argument(
        "--seed", type=int, default=1, help="number from which the seeds of all requests are derived"
    )
    parser.add_argument("--no-schema", action="store_true", help="do not use Schemathesis")
    parser.add_argument("--replay", metavar="SEED", help="send the request with this seed again")
    parser.add_argument(
        "--failures", type=Path, default=CACHE / "fuzz-failures.jsonl", help="file for failing requests"
    )
    arguments = parser.parse_args()
    CACHE.mkdir(parents=True, exist_ok=True)
    if arguments.replay:
        with tempfile.NamedTemporaryFile(suffix=".jsonl") as file:
            uvloop.run(replay(arguments.replay, FailureLog(Path(file.name))))
        return
    progress = Progress(arguments.seed)
    if arguments.full:
        progress = load_progress(arguments.seed)
    if not progress.total_requests:
        arguments.failures.unlink(missing_ok=True)
    failures = FailureLog(arguments.failures)
    timeout_seconds = float("inf") if arguments.full else 60 * arguments.minutes
    try:
        run_bench(progress, arguments.requests, timeout_seconds, failures, use_schema=not arguments.no_schema)
    except MeasurementError as error:
        parser.exit(1, f"{error}\n")
    finally:
        failures.close()
    STATE_FILE.unlink(missing_ok=True)
    metrics = compute_metrics(progress)
    show(metrics, failures)
    if arguments.json:
        print(json.dumps(metrics))
    sys.exit(is_failure(metrics))


if __name__ == "__main__":
    main()
