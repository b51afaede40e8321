"""Compare the gateway with its peers. Each is a single process in front of the same stub.

    python bench/gateway.py [--quick] [--json] [--only rates|turns|memory] [--peers litellm,rllm,metaclaw]

Requires nginx with its Lua module, and wrk: apt-get install nginx libnginx-mod-http-lua wrk. The peers are
installed into their own environments under .cache/bench on the first run, which takes a few minutes.

Rates: nginx responds immediately with a fixed reply; wrk sends unique requests of 1 KB and of 400 KB (turn
100 of a session, which extends a recorded call). *proxy* is the gateway in front of nginx. *exact* is the
gateway with a scripted engine: it renders the messages to tokens and replies with 32 tokens. The floor is a
minimal proxy that commits one row per call. For each kind of request the servers take turns, so that other
load on the machine affects all of them.

Turns: the gateway's CPU time for turns 10 and 100 of a session, each minus the floor's CPU time for the same
bodies. Memory: the gateway's memory with many open sessions and many recorded calls.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import tempfile
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gateway_parts.load import (
    LARGE,
    SMALL,
    Cell,
    RequestKind,
    Target,
    check_reply,
    compute_median_cell,
    find_wrk,
    measure_cell,
    start_long_sessions,
)
from gateway_parts.peers import PEERS, install_peer, start_peer
from gateway_parts.processes import MeasurementError, read_usage
from gateway_parts.servers import make_exact_engine, make_proxy_engine, start_floor, start_gateway
from gateway_parts.sessions import measure_memory, measure_turns
from gateway_parts.stub import start_stub
from rich.console import Console
from rich.table import Table

CACHE = Path(__file__).resolve().parent.parent / ".cache" / "bench"
HEADLINE_KINDS = (RequestKind(SMALL, 32, False), RequestKind(LARGE, 32, False))
"""The kinds of requests whose rates are used in ratios."""
PARTS = ("rates", "turns", "memory")

console = Console(stderr=True)
Cells = dict[str, dict[RequestKind, Cell]]


@dataclass(frozen=True)
class GatewayPlan:
    cell_seconds: float
    rounds: int
    """The number of measurements of each cell that is used in a ratio. Other cells are measured once."""
    concurrency: tuple[int, ...]
    turn_sessions: int
    """The number of sessions in the part "turns"."""
    memory_sessions: int
    memory_calls: int


FULL_PLAN = GatewayPlan(2.0, 4, (1, 32, 256), 200, 10_000, 100_000)
QUICK_PLAN = GatewayPlan(1.0, 1, (1, 32), 4, 50, 200)


def log(text: str) -> None:
    console.print(f"{time.strftime('%H:%M:%S')} {text}", highlight=False)


# --- rates --------------------------------------------------------------------------------------


@contextlib.contextmanager
def start_servers(
    folder: Path, stub_url: str, peers: Sequence[str], failed: dict[str, str]
) -> Generator[list[Target]]:
    """Start all servers that are not in ``failed``. If one does not start, add it there with the reason."""
    with contextlib.ExitStack() as stack:

        def start_proxy() -> Target:
            gateway = stack.enter_context(start_gateway(folder / "proxy", make_proxy_engine(stub_url)))
            return gateway.open_target("proxy")

        def start_exact() -> Target:
            return stack.enter_context(start_gateway(folder / "exact", make_exact_engine())).open_target(
                "exact"
            )

        start_functions: dict[str, Callable[[], Target]] = {
            "floor": lambda: stack.enter_context(start_floor(folder / "floor", stub_url)),
            "proxy": start_proxy,
            "exact": start_exact,
        }
        for peer in PEERS:
            if peer.name in peers:
                start_functions[peer.name] = lambda peer=peer: stack.enter_context(
                    start_peer(peer, CACHE / peer.name, folder / peer.name, stub_url)
                )
        targets: list[Target] = []
        for name, start in start_functions.items():
            if name in failed:
                continue
            log(f"starting {name}")
            try:
                targets.append(start())
            except MeasurementError as error:
                failed[name] = str(error)
        yield targets


def install_peers(peers: Sequence[str]) -> dict[str, str]:
    """Install the peers. Return those that could not be installed, with the reason."""
    failed: dict[str, str] = {}
    for peer in PEERS:
        if peer.name in peers:
            try:
                install_peer(peer, CACHE / peer.name, log)
            except MeasurementError as error:
                failed[peer.name] = str(error)
    return failed


def measure_rates(
    folder: Path, targets: Sequence[Target], plan: GatewayPlan, failed: dict[str, str]
) -> Cells:
    cells: Cells = {target.name: {} for target in targets}
    for size in (SMALL, LARGE):
        for stream in (False, True):
            ready = [target for target in targets if prepare_target(target, size, stream, failed)]
            for concurrency in plan.concurrency:
                kind = RequestKind(size, concurrency, stream)
                log(kind.name)
                rounds = plan.rounds if kind in HEADLINE_KINDS else 1
                measured: dict[str, list[Cell]] = {target.name: [] for target in ready}
                for number in range(rounds):
                    for target in ready:
                        seconds = choose_seconds(plan.cell_seconds, kind, cells[target.name])
                        seed = f"{kind.name}-{number}-"
                        measured[target.name].append(measure_cell(target, kind, seconds, folder, seed))
                        wait_until_idle(target.pid)
                for name, measured_cells in measured.items():
                    cells[name][kind] = compute_median_cell(measured_cells)
    return cells


def prepare_target(target: Target, size: int, stream: bool, failed: dict[str, str]) -> bool:
    """Check that the server sends the expected reply. If not, add the reason to ``failed`` and return False.

    Before the first large requests, this also starts the long sessions that they extend.
    """
    try:
        if size == LARGE and not stream and target.extends_calls:
            start_long_sessions(target)
        check_reply(target, size, stream)
    except MeasurementError as error:
        failed[f"{target.name} {size // 1000} KB{', streamed' if stream else ''}"] = str(error)
        return False
    return True


def choose_seconds(seconds: float, kind: RequestKind, cells: dict[RequestKind, Cell]) -> float:
    """Return the duration of a measurement.

    If the rate in the previous cell is low, the duration is extended up to 20 s, so that the server can reply
    twice per connection.
    """
    rates = [c.rate for k, c in cells.items() if k.size == kind.size and k.stream == kind.stream and c.rate]
    return min(20.0, max(seconds, 2 * kind.concurrency / rates[-1])) if rates else seconds


def wait_until_idle(pid: int, timeout_seconds: float = 20.0) -> None:
    """Wait until the server has finished the requests that wrk aborted, so they do not slow other servers.

    After the timeout, return even if the server is still busy.
    """
    deadline = time.monotonic() + timeout_seconds
    previous = read_usage(pid).cpu_seconds
    while time.monotonic() < deadline:
        time.sleep(0.2)
        current = read_usage(pid).cpu_seconds
        if current - previous <= 0.03:
            return
        previous = current


def compute_ratios(cells: Cells) -> dict[str, float | None]:
    small, large = HEADLINE_KINDS

    def compute_ratio(ours: str, other: str, kind: RequestKind) -> float | None:
        pair = [cells.get(name, {}).get(kind) for name in (ours, other)]
        if not all(cell and cell.rate and not cell.error for cell in pair):
            return None
        return pair[0].rate / pair[1].rate  # pyright: ignore[reportOptionalMemberAccess]

    return {
        "ratio_litellm": compute_ratio("proxy", "litellm", small),
        "ratio_litellm_exact": compute_ratio("exact", "litellm", small),
        "ratio_rllm": compute_ratio("proxy", "rllm", small),
        "ratio_metaclaw": compute_ratio("proxy", "metaclaw", small),
        "share_of_floor": compute_ratio("proxy", "floor", small),
        "ratio_litellm_400k": compute_ratio("proxy", "litellm", large),
    }


# --- all parts ----------------------------------------------------------------------------------


def run_bench(plan: GatewayPlan, parts: Sequence[str], peers: Sequence[str]) -> dict[str, Any]:
    find_wrk()
    CACHE.mkdir(parents=True, exist_ok=True)
    failed = install_peers(peers) if "rates" in parts else {}
    metrics: dict[str, Any] = {}
    # Not in /tmp, which may be in memory, where commits are free.
    with tempfile.TemporaryDirectory(dir=CACHE, prefix="run-") as name:
        folder = Path(name)
        with start_stub(folder / "stub") as stub_url:
            if "rates" in parts:
                with start_servers(folder, stub_url, peers, failed) as targets:
                    cells = measure_rates(folder, targets, plan, failed)
                show_rates(targets, cells)
                metrics |= compute_ratios(cells)
                metrics["cells"] = {
                    name: {kind.name: asdict(cell) for kind, cell in by_kind.items()}
                    for name, by_kind in cells.items()
                }
            for part in ("turns", "memory"):
                if part in parts:
                    metrics |= measure_session_part(part, folder / part, stub_url, plan, failed)
    metrics["failed"] = failed
    return metrics


def measure_session_part(
    part: str, folder: Path, stub_url: str, plan: GatewayPlan, failed: dict[str, str]
) -> dict[str, Any]:
    """Measure one of the parts that run conversations, with its own gateway.

    If the measurement fails, add the reason to ``failed`` and return no metrics.
    """
    try:
        with start_gateway(folder / "gateway", make_exact_engine()) as gateway:
            if part == "memory":
                return measure_memory(gateway, plan.memory_sessions, plan.memory_calls, log)
            with start_floor(folder / "floor", stub_url) as floor:
                return measure_turns(gateway, floor, plan.turn_sessions, log)
    except MeasurementError as error:
        failed[part] = str(error)
        return {}


# --- output -------------------------------------------------------------------------------------


def show_rates(targets: Sequence[Target], cells: Cells) -> None:
    kinds = sorted({kind for by_kind in cells.values() for kind in by_kind}, key=lambda k: k.name)
    for size in (SMALL, LARGE):
        for stream in (False, True):
            title = f"{size // 1000} KB{', streamed' if stream else ''}"
            table = Table(
                "server", "in flight", "req/s", "p50 ms", "p99 ms", "CPU ms/req", "RSS MB", title=title
            )
            table_kinds = sorted(
                (k for k in kinds if k.size == size and k.stream == stream), key=lambda k: k.concurrency
            )
            for kind in table_kinds:
                for target in targets:
                    if cell := cells[target.name].get(kind):
                        table.add_row(target.label, str(kind.concurrency), *format_row(cell))
                table.add_section()
            console.print(table)


def format_row(cell: Cell) -> list[str]:
    rate = f"[red]invalid: {cell.error}[/red]" if cell.error else f"{cell.rate:,.0f}"
    times = [f"{cell.p50_ms:.2f}", f"{cell.p99_ms:.2f}", f"{cell.cpu_ms:.2f}"]
    return [rate, *times, f"{cell.rss_mb:.0f}"]


def show_metrics(metrics: dict[str, Any]) -> None:
    table = Table("metric", "value", "goal")
    goals = {
        "ratio_litellm": "≥ 25",
        "ratio_litellm_exact": "≥ 8",
        "ratio_rllm": "≥ 6",
        "share_of_floor": "≥ 0.5",
        "ratio_litellm_400k": "≥ 10",
        "turn_100_over_10": "≤ 2",
        "rss_mb": "< 400",
        "loop_lag_p99_ms": "< 50",
    }
    for name, value in metrics.items():
        if not isinstance(value, dict):
            table.add_row(name, "not measured" if value is None else f"{value:,.2f}", goals.get(name, ""))
    console.print(table)
    for name, reason in metrics["failed"].items():
        console.print(f"[red]{name}[/red]: {reason}", highlight=False)


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare the gateway with its peers.")
    parser.add_argument(
        "--quick", action="store_true", help="short run, without peers unless --peers is given"
    )
    parser.add_argument("--json", action="store_true", help="print the metrics as a JSON object at the end")
    parser.add_argument("--only", choices=PARTS, help="measure only this part")
    parser.add_argument(
        "--peers", help="comma-separated peers (" + ", ".join(peer.name for peer in PEERS) + "), or none"
    )
    parser.add_argument("--seconds", type=int, help="duration of one rate measurement, in seconds")
    arguments = parser.parse_args()
    peer_names = [peer.name for peer in PEERS]
    peer_option = arguments.peers
    if peer_option is None:
        peer_option = "none" if arguments.quick else ",".join(peer_names)
    peers = [name for name in peer_option.split(",") if name not in ("", "none")]
    if unknown := set(peers) - set(peer_names):
        parser.error(f"Unknown peers: {', '.join(sorted(unknown))}. Available: {', '.join(peer_names)}")
    plan = QUICK_PLAN if arguments.quick else FULL_PLAN
    if arguments.seconds:
        plan = GatewayPlan(**{**asdict(plan), "cell_seconds": arguments.seconds})
    try:
        metrics = run_bench(plan, [arguments.only] if arguments.only else PARTS, peers)
    except MeasurementError as error:
        parser.exit(1, f"{error}\n")
    show_metrics(metrics)
    if arguments.json:
        print(json.dumps(metrics))


if __name__ == "__main__":
    main()
