"""The gateway against its peers, in one run, each as one process in front of the same stub.

    python bench/gateway.py [--quick] [--json] [--only rates|turns|memory] [--peers litellm,rllm,metaclaw]

Needs nginx with its Lua module, and wrk: apt-get install nginx libnginx-mod-http-lua wrk. The peers are
installed into environments of their own under .cache/bench the first time, which takes some minutes.

Rates: nginx answers at once with a fixed reply, wrk sends requests that are all different, of 1 KB and of
400 KB (turn 100 of a session, which extends what was recorded before). *proxy* is the gateway in front
of nginx; *exact* renders the messages to tokens and asks a scripted engine, which replies with 32 tokens. The
floor is a bare forwarder that commits one row per call. Within a cell the servers take turns, so that what
else the machine does hits all of them.

Turns: sessions of 100 turns; CPU time of the gateway's process for their 100th turn and for their 10th, each
less the floor's for the same bodies. Memory: many sessions open, many calls recorded.
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

from gateway_parts.load import LARGE, SMALL, Cell, Kind, Target, begin, check, measure, median, wrk
from gateway_parts.peers import PEERS, install, started
from gateway_parts.processes import DidNotStart, usage
from gateway_parts.servers import exact_engine, floor, gateway, proxy_engine
from gateway_parts.sessions import measure_memory, measure_turns
from gateway_parts.stub import stub
from rich.console import Console
from rich.table import Table

CACHE = Path(__file__).resolve().parent.parent / ".cache" / "bench"
HEADLINES = (Kind(SMALL, 32, False), Kind(LARGE, 32, False))
PARTS = ("rates", "turns", "memory")

console = Console(stderr=True)
Cells = dict[str, dict[Kind, Cell]]


@dataclass(frozen=True)
class Plan:
    seconds: float
    rounds: int
    """Of the cells that the ratios come from; the others are measured once."""
    concurrency: tuple[int, ...]
    turn_sessions: int
    sessions: int
    calls: int


FULL = Plan(2.0, 4, (1, 32, 256), 200, 10_000, 100_000)
QUICK = Plan(1.0, 1, (1, 32), 4, 50, 200)


def log(text: str) -> None:
    console.print(f"{time.strftime('%H:%M:%S')} {text}", highlight=False)


# --- rates --------------------------------------------------------------------------------------


@contextlib.contextmanager
def servers(
    folder: Path, stub_url: str, peers: Sequence[str], failed: dict[str, str]
) -> Generator[list[Target]]:
    """All that can be started; what cannot is in ``failed`` with the reason."""
    with contextlib.ExitStack() as stack:

        def proxy() -> Target:
            return stack.enter_context(gateway(folder / "proxy", proxy_engine(stub_url))).target("proxy")

        def exact() -> Target:
            return stack.enter_context(gateway(folder / "exact", exact_engine())).target("exact")

        starts: dict[str, Callable[[], Target]] = {
            "floor": lambda: stack.enter_context(floor(folder / "floor", stub_url)),
            "proxy": proxy,
            "exact": exact,
        }
        for peer in PEERS:
            if peer.name in peers:
                starts[peer.name] = lambda peer=peer: stack.enter_context(
                    started(peer, CACHE / peer.name, folder / peer.name, stub_url)
                )
        up: list[Target] = []
        for name, start in starts.items():
            if name in failed:
                continue
            log(f"starting {name}")
            try:
                up.append(start())
            except DidNotStart as error:
                failed[name] = str(error)
        yield up


def install_peers(peers: Sequence[str]) -> dict[str, str]:
    failed: dict[str, str] = {}
    for peer in PEERS:
        if peer.name in peers:
            try:
                install(peer, CACHE / peer.name, log)
            except DidNotStart as error:
                failed[peer.name] = str(error)
    return failed


def measure_rates(folder: Path, targets: Sequence[Target], plan: Plan, failed: dict[str, str]) -> Cells:
    cells: Cells = {target.name: {} for target in targets}
    for size in (SMALL, LARGE):
        for stream in (False, True):
            ready = [target for target in targets if answers(target, size, stream, failed)]
            for concurrency in plan.concurrency:
                kind = Kind(size, concurrency, stream)
                log(kind.name)
                rounds = plan.rounds if kind in HEADLINES else 1
                measured: dict[str, list[Cell]] = {target.name: [] for target in ready}
                for turn in range(rounds):
                    for target in ready:
                        seconds = long_enough(plan.seconds, kind, cells[target.name])
                        seed = f"{kind.name}-{turn}-"
                        measured[target.name].append(measure(target, kind, seconds, folder, seed))
                        settle(target.pid)
                for name, several in measured.items():
                    cells[name][kind] = median(several)
    return cells


def answers(target: Target, size: int, stream: bool, failed: dict[str, str]) -> bool:
    try:
        if size == LARGE and not stream and target.knows_sessions:
            begin(target)
        check(target, size, stream)
    except DidNotStart as error:
        failed[f"{target.name} {size // 1000} KB{', streamed' if stream else ''}"] = str(error)
        return False
    return True


def long_enough(seconds: float, kind: Kind, before: dict[Kind, Cell]) -> float:
    """A slow server gets time to answer every connection twice, to be measured at all."""
    slower = [c.rate for k, c in before.items() if k.size == kind.size and k.stream == kind.stream and c.rate]
    return min(20.0, max(seconds, 2 * kind.concurrency / slower[-1])) if slower else seconds


def settle(pid: int, limit: float = 20.0) -> None:
    """Until the server is done with requests that were cut off, which would slow down the next one."""
    deadline = time.monotonic() + limit
    before = usage(pid).cpu_s
    while time.monotonic() < deadline:
        time.sleep(0.2)
        now = usage(pid).cpu_s
        if now - before <= 0.03:
            return
        before = now


def ratios(cells: Cells) -> dict[str, float | None]:
    small, large = HEADLINES

    def over(ours: str, other: str, kind: Kind) -> float | None:
        pair = [cells.get(name, {}).get(kind) for name in (ours, other)]
        if not all(cell and cell.rate and not cell.error for cell in pair):
            return None
        return pair[0].rate / pair[1].rate  # pyright: ignore[reportOptionalMemberAccess]

    return {
        "ratio_litellm": over("proxy", "litellm", small),
        "ratio_litellm_exact": over("exact", "litellm", small),
        "ratio_rllm": over("proxy", "rllm", small),
        "ratio_metaclaw": over("proxy", "metaclaw", small),
        "share_of_floor": over("proxy", "floor", small),
        "ratio_litellm_400k": over("proxy", "litellm", large),
    }


# --- the whole ----------------------------------------------------------------------------------


def run(plan: Plan, parts: Sequence[str], peers: Sequence[str]) -> dict[str, Any]:
    wrk()
    CACHE.mkdir(parents=True, exist_ok=True)
    failed = install_peers(peers) if "rates" in parts else {}
    figures: dict[str, Any] = {}
    # Beside the environments: a temporary folder in memory would make every commit free.
    with tempfile.TemporaryDirectory(dir=CACHE, prefix="run-") as name:
        folder = Path(name)
        with stub(folder / "stub") as stub_url:
            if "rates" in parts:
                with servers(folder, stub_url, peers, failed) as targets:
                    cells = measure_rates(folder, targets, plan, failed)
                show_rates(targets, cells)
                figures |= ratios(cells)
                figures["cells"] = {
                    name: {kind.name: asdict(cell) for kind, cell in by_kind.items()}
                    for name, by_kind in cells.items()
                }
            for part in ("turns", "memory"):
                if part in parts:
                    figures |= in_sessions(part, folder / part, stub_url, plan, failed)
    figures["failed"] = failed
    return figures


def in_sessions(part: str, folder: Path, stub_url: str, plan: Plan, failed: dict[str, str]) -> dict[str, Any]:
    """One of the parts that hold conversations, with a gateway of its own."""
    try:
        with gateway(folder / "gateway", exact_engine()) as served:
            if part == "memory":
                return measure_memory(served, plan.sessions, plan.calls, log)
            with floor(folder / "floor", stub_url) as bare:
                return measure_turns(served, bare, plan.turn_sessions, log)
    except DidNotStart as error:
        failed[part] = str(error)
        return {}


# --- for people ---------------------------------------------------------------------------------


def show_rates(targets: Sequence[Target], cells: Cells) -> None:
    kinds = sorted({kind for by_kind in cells.values() for kind in by_kind}, key=lambda k: k.name)
    for size in (SMALL, LARGE):
        for stream in (False, True):
            title = f"{size // 1000} KB{', streamed' if stream else ''}"
            table = Table(
                "server", "in flight", "req/s", "p50 ms", "p99 ms", "CPU ms/req", "RSS MB", title=title
            )
            chosen = sorted(
                (k for k in kinds if k.size == size and k.stream == stream), key=lambda k: k.concurrency
            )
            for kind in chosen:
                for target in targets:
                    if cell := cells[target.name].get(kind):
                        table.add_row(target.label, str(kind.concurrency), *row(cell))
                table.add_section()
            console.print(table)


def row(cell: Cell) -> list[str]:
    rate = f"[red]invalid: {cell.error}[/red]" if cell.error else f"{cell.rate:,.0f}"
    times = [f"{cell.p50_ms:.2f}", f"{cell.p99_ms:.2f}", f"{cell.cpu_ms:.2f}"]
    return [rate, *times, f"{cell.rss_mb:.0f}"]


def show_figures(figures: dict[str, Any]) -> None:
    table = Table("figure", "value", "to reach")
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
    for name, value in figures.items():
        if not isinstance(value, dict):
            table.add_row(name, "not measured" if value is None else f"{value:,.2f}", goals.get(name, ""))
    console.print(table)
    for name, reason in figures["failed"].items():
        console.print(f"[red]{name}[/red]: {reason}", highlight=False)


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the gateway against its peers.")
    parser.add_argument("--quick", action="store_true", help="small and short, without peers unless named")
    parser.add_argument("--json", action="store_true", help="print the figures as one JSON object at the end")
    parser.add_argument("--only", choices=PARTS, help="one part alone")
    parser.add_argument("--peers", help="some of " + ",".join(peer.name for peer in PEERS) + ", or none")
    parser.add_argument("--seconds", type=int, help="of one measurement")
    arguments = parser.parse_args()
    known = [peer.name for peer in PEERS]
    asked = arguments.peers if arguments.peers is not None else "none" if arguments.quick else ",".join(known)
    peers = [name for name in asked.split(",") if name not in ("", "none")]
    if unknown := set(peers) - set(known):
        parser.error(f"--peers: {', '.join(sorted(unknown))} is none of {', '.join(known)}")
    plan = QUICK if arguments.quick else FULL
    if arguments.seconds:
        plan = Plan(**{**asdict(plan), "seconds": arguments.seconds})
    try:
        figures = run(plan, [arguments.only] if arguments.only else PARTS, peers)
    except DidNotStart as error:
        parser.exit(1, f"{error}\n")
    show_figures(figures)
    if arguments.json:
        print(json.dumps(figures))


if __name__ == "__main__":
    main()
