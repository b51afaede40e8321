"""Measure the overhead of the served training protocols over the local backend.

    python bench/backends.py [--quick] [--mint PYTHON] [--device cuda] [--json]

Every backend runs in its own process, which runs ``forward_backward`` on a fixed batch on request. One
process runs the local backend. Each of the others runs the backend for one SDK, connected to a protocol
server on this machine that uses the same local backend. The processes take turns, so that other load on the
machine affects all of them. ``overhead`` is the largest slowdown among the protocols, as a fraction of the
local backend's time on the default model (4k tokens, 16k on a GPU). ``overhead_ms`` is the largest slowdown
in milliseconds on a one-layer model with the same batch.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from instar.clouds.base import SERVICES
from instar.config import ModelConfig
from instar.conformance.server import PROTOCOLS, run_server
from instar.conformance.tiny import make_tiny_model
from instar.models import resolve_model

CLIENT = Path(__file__).parent / "backends_parts" / "client.py"
RANK = 16
console = Console(stderr=True)


class BackendClient:
    """A process that runs one backend."""

    def __init__(self, name: str, process: subprocess.Popen[str]) -> None:
        self.name = name
        self.process = process
        self._read_line()  # "ready"

    def measure(self) -> float:
        """Run one ``forward_backward`` in the process and return its duration in seconds."""
        assert self.process.stdin is not None
        self.process.stdin.write("go\n")
        self.process.stdin.flush()
        return float(self._read_line())

    def _read_line(self) -> str:
        assert self.process.stdout is not None
        if not (line := self.process.stdout.readline()):
            raise SystemExit(f"{self.name}: the client process exited unexpectedly; see its output above")
        return line


@contextmanager
def start_client(
    name: str,
    model: ModelConfig,
    section: dict[str, Any],
    batch_args: dict[str, int],
    folder: Path,
    python: str,
    env: dict[str, str],
) -> Generator[BackendClient]:
    job = folder / f"{name}.json"
    config = {"model": model.model_dump(mode="json"), "backend": section}
    job.write_text(json.dumps({"config": config, "batch_args": batch_args}))
    process = subprocess.Popen(
        [python, str(CLIENT), str(job)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | env,
    )
    try:
        yield BackendClient(name, process)
    finally:
        process.kill()
        process.wait()


def measure(
    model: ModelConfig, batch_args: dict[str, int], rounds: int, pythons: dict[str, str], folder: Path
) -> dict[str, list[float]]:
    """Return the durations of ``forward_backward`` in seconds, one per round, by backend."""
    with ExitStack() as stack:
        section = {"type": "local", "lora": {"rank": RANK, "alpha": 32.0}}
        clients = [
            stack.enter_context(start_client("local", model, section, batch_args, folder, sys.executable, {}))
        ]
        for name, python in pythons.items():
            server = stack.enter_context(run_server(PROTOCOLS[name], model, folder / name))
            section = {"type": name, "rank": RANK, "base_url": server.url}
            env = {SERVICES[name].key_env: server.key}
            clients.append(
                stack.enter_context(start_client(name, model, section, batch_args, folder, python, env))
            )
        seconds_by_backend: dict[str, list[float]] = {client.name: [] for client in clients}
        for client in clients:
            client.measure()  # warm-up: compile, allocate, connect
        for number in range(rounds):
            for client in clients:
                seconds_by_backend[client.name].append(client.measure())
            console.print(
                f"  round {number + 1}: "
                + ", ".join(f"{k} {v[-1]:.3f} s" for k, v in seconds_by_backend.items())
            )
    return seconds_by_backend


def compute_overheads(seconds_by_backend: dict[str, list[float]]) -> dict[str, float]:
    """Return the median difference in seconds between each protocol and the local backend in the same
    round."""
    local = seconds_by_backend["local"]
    return {
        name: statistics.median(
            remote - in_process for remote, in_process in zip(seconds, local, strict=True)
        )
        for name, seconds in seconds_by_backend.items()
        if name != "local"
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="use small batches and few rounds, to check that the benchmark works",
    )
    parser.add_argument("--mint", metavar="PYTHON", help="interpreter with MinT (default: skip MinT)")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument(
        "--rounds",
        type=int,
        default=0,
        help="number of rounds with the default model (default: depends on the device)",
    )
    parser.add_argument("--json", action="store_true", help="print the metrics as one JSON line at the end")
    options = parser.parse_args(arguments)
    pythons = {"tinker": sys.executable, "weaver": sys.executable}
    if options.mint:
        pythons["mint"] = options.mint
    tokens = 512 if options.quick else 16384 if options.device == "cuda" else 4096
    batch_args = {"sequences": tokens // 512, "length": 512, "vocab": 300}
    with tempfile.TemporaryDirectory(prefix="instar-bench-") as scratch:
        folder = Path(scratch)
        full_config = ModelConfig(
            name=str(resolve_model(ModelConfig().name)), device=options.device, max_context=1024
        )
        if options.quick:
            full_config = ModelConfig(
                name=str(make_tiny_model(folder / "big")), dtype="fp32", device=options.device
            )
        console.print(f"{tokens} tokens, {'tiny' if options.quick else 'default'} model")
        (folder / "a").mkdir()
        # On a GPU, rounds vary more than the overhead, so more rounds are needed.
        rounds = options.rounds or (2 if options.quick else 15 if options.device == "cuda" else 7)
        full_model_seconds = measure(full_config, batch_args, rounds, pythons, folder / "a")
        small = make_tiny_model(folder / "small", layers=1, context=1024)
        one_layer_config = ModelConfig(name=str(small), dtype="fp32", device=options.device, max_context=1024)
        console.print(f"{tokens} tokens, one-layer model")
        (folder / "b").mkdir()
        one_layer_rounds = 3 if options.quick else 20
        one_layer_seconds = measure(one_layer_config, batch_args, one_layer_rounds, pythons, folder / "b")
    report(full_model_seconds, one_layer_seconds, tokens, as_json=options.json)


def report(
    full_model_seconds: dict[str, list[float]],
    one_layer_seconds: dict[str, list[float]],
    tokens: int,
    *,
    as_json: bool,
) -> None:
    local_seconds = statistics.median(full_model_seconds["local"])
    fractions = {name: extra / local_seconds for name, extra in compute_overheads(full_model_seconds).items()}
    milliseconds = {name: extra * 1000 for name, extra in compute_overheads(one_layer_seconds).items()}
    table = Table("backend", "full model (s)", "overhead", "one layer (ms)", "overhead (ms)")
    for name in full_model_seconds:
        row = [name, f"{statistics.median(full_model_seconds[name]):.3f}"]
        row += [f"{fractions[name]:+.1%}" if name in fractions else ""]
        row += [f"{statistics.median(one_layer_seconds[name]) * 1000:.1f}"]
        row += [f"{milliseconds[name]:+.1f}" if name in milliseconds else ""]
        table.add_row(*row)
    Console().print(table)
    if as_json:
        print(
            json.dumps(
                {
                    "overhead": max(fractions.values()),
                    "overhead_ms": max(milliseconds.values()),
                    "overheads": fractions,
                    "overheads_ms": milliseconds,
                    "tokens": tokens,
                    "local_seconds": local_seconds,
                }
            )
        )


if __name__ == "__main__":
    main()
