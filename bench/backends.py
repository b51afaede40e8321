"""What the served protocols cost over the backend in this process, in one run.

    python bench/backends.py [--quick] [--mint PYTHON] [--device cuda] [--json]

Every backend is a process of its own that holds one batch and runs ``forward_backward`` on it when told to:
the local one, and each SDK's adapter against a protocol server on this machine, over the same local backend.
They take turns, so that all of them meet the same machine. ``overhead`` is on the default model (4k tokens,
16k on a GPU), ``overhead_ms`` on a model of one layer with the same batch.
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


class Client:
    """One backend in a process of its own."""

    def __init__(self, name: str, process: subprocess.Popen[str]) -> None:
        self.name = name
        self.process = process
        self.seconds: list[float] = []
        self._read()  # ready

    def measure(self) -> float:
        assert self.process.stdin is not None
        self.process.stdin.write("go\n")
        self.process.stdin.flush()
        return float(self._read())

    def _read(self) -> str:
        assert self.process.stdout is not None
        if not (line := self.process.stdout.readline()):
            raise SystemExit(f"{self.name}: the client ended; see above")
        return line


@contextmanager
def client(
    name: str,
    model: ModelConfig,
    section: dict[str, Any],
    load: dict[str, int],
    folder: Path,
    python: str,
    env: dict[str, str],
) -> Generator[Client]:
    job = folder / f"{name}.json"
    config = {"model": model.model_dump(mode="json"), "backend": section}
    job.write_text(json.dumps({"config": config, "load": load}))
    process = subprocess.Popen(
        [python, str(CLIENT), str(job)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | env,
    )
    try:
        yield Client(name, process)
    finally:
        process.kill()
        process.wait()


def measure(
    model: ModelConfig, load: dict[str, int], rounds: int, pythons: dict[str, str], folder: Path
) -> dict[str, list[float]]:
    """Seconds of each round, per backend."""
    with ExitStack() as stack:
        section = {"type": "local", "lora": {"rank": RANK, "alpha": 32.0}}
        clients = [stack.enter_context(client("local", model, section, load, folder, sys.executable, {}))]
        for name, python in pythons.items():
            server = stack.enter_context(run_server(PROTOCOLS[name], model, folder / name))
            section = {"type": name, "rank": RANK, "base_url": server.url}
            env = {SERVICES[name].key_env: server.key}
            clients.append(stack.enter_context(client(name, model, section, load, folder, python, env)))
        found: dict[str, list[float]] = {each.name: [] for each in clients}
        for each in clients:
            each.measure()  # compiles, allocates, connects
        for number in range(rounds):
            for each in clients:
                found[each.name].append(each.measure())
            console.print(
                f"  round {number + 1}: " + ", ".join(f"{k} {v[-1]:.3f} s" for k, v in found.items())
            )
    return found


def differences(found: dict[str, list[float]]) -> dict[str, float]:
    """Per protocol, the median over the rounds of what it took longer than the local backend beside it."""
    local = found["local"]
    return {
        name: statistics.median(there - here for there, here in zip(seconds, local, strict=True))
        for name, seconds in found.items()
        if name != "local"
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick", action="store_true", help="small batches and few rounds: only shows that it runs"
    )
    parser.add_argument("--mint", metavar="PYTHON", help="interpreter with MinT; without it MinT is left out")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--rounds", type=int, default=0, help="of the default model")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    options = parser.parse_args(arguments)
    pythons = {"tinker": sys.executable, "weaver": sys.executable}
    if options.mint:
        pythons["mint"] = options.mint
    tokens = 512 if options.quick else 16384 if options.device == "cuda" else 4096
    load = {"sequences": tokens // 512, "length": 512, "vocab": 300}
    with tempfile.TemporaryDirectory(prefix="instar-bench-") as scratch:
        folder = Path(scratch)
        big = ModelConfig(
            name=str(resolve_model(ModelConfig().name)), device=options.device, max_context=1024
        )
        if options.quick:
            big = ModelConfig(name=str(make_tiny_model(folder / "big")), dtype="fp32", device=options.device)
        console.print(f"{tokens} tokens, the default model")
        (folder / "a").mkdir()
        # A GPU is quick, and so what is looked for is small beside how much its rounds differ.
        rounds = options.rounds or (2 if options.quick else 15 if options.device == "cuda" else 7)
        whole = measure(big, load, rounds, pythons, folder / "a")
        small = make_tiny_model(folder / "small", layers=1, context=1024)
        one_layer = ModelConfig(name=str(small), dtype="fp32", device=options.device, max_context=1024)
        console.print(f"{tokens} tokens, one layer")
        (folder / "b").mkdir()
        thin = measure(one_layer, load, 3 if options.quick else 20, pythons, folder / "b")
    report(whole, thin, tokens, as_json=options.json)


def report(
    whole: dict[str, list[float]], thin: dict[str, list[float]], tokens: int, *, as_json: bool
) -> None:
    base = statistics.median(whole["local"])
    shares = {name: extra / base for name, extra in differences(whole).items()}
    milliseconds = {name: extra * 1000 for name, extra in differences(thin).items()}
    table = Table("backend", f"{tokens} tokens, s", "overhead", "one layer, ms", "overhead, ms")
    for name in whole:
        row = [name, f"{statistics.median(whole[name]):.3f}"]
        row += [f"{shares[name]:+.1%}" if name in shares else ""]
        row += [f"{statistics.median(thin[name]) * 1000:.1f}"]
        row += [f"{milliseconds[name]:+.1f}" if name in milliseconds else ""]
        table.add_row(*row)
    Console().print(table)
    if as_json:
        print(
            json.dumps(
                {
                    "overhead": max(shares.values()),
                    "overhead_ms": max(milliseconds.values()),
                    "overheads": shares,
                    "overheads_ms": milliseconds,
                    "tokens": tokens,
                    "local_seconds": base,
                }
            )
        )


if __name__ == "__main__":
    main()
