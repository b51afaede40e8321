"""How long new weights take into a running vLLM server, and what a live stream sees of it.

    python bench/weights.py [--shape 0.6B --shape 4B] [--python VLLM_PYTHON] [--updates 20] [--eager] [--json]

For each shape a model with random weights is written, a trainer's backend with a LoRA adapter of rank 16 on
all linear layers is made on the same device, and two servers are started: one that serves adapters, and one
whose own weights are replaced. Every update follows a step of training. ``lora_seconds``: from the trained
adapter to the server serving it, by files. ``full_seconds``: the same for all weights, the adapter merged in,
without files (`sync.route: ipc`). The streams are read by a process of their own. ``pause_ms`` is the longest
time between two tokens of a stream around an update, its median and maximum over the updates; ``gap_ms`` is
the time between two tokens when nothing is updated. In the end the server's logprobs are compared with the
trainer's: ``off`` is the mean difference, ``moved`` how far training has moved them.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from weights_parts.shapes import SHAPES, make_model

from instar.backends.local.backend import LocalBackend
from instar.config import AdamConfig, LocalBackendConfig, LossConfig, RunConfig
from instar.engines.remote import RemoteEngine
from instar.models import device_and_dtype
from instar.sync.base import Sync
from instar.sync.factory import create_sync
from instar.types import Artifact, Floats, Policy, Sample

PARTS = Path(__file__).parent / "weights_parts"
QUIET_SECONDS = 4.0
"""How long the streams are watched without an update."""
AROUND = 0.3
"""Seconds after an update that still belong to it."""
START_SECONDS = 420.0
console = Console(stderr=True)


class Failed(Exception):
    """There is nothing to measure."""


@dataclass
class Update:
    began: float
    ended: float

    @property
    def seconds(self) -> float:
        return self.ended - self.began


@dataclass
class Updates:
    """Of one kind, into one server."""

    first: float = 0.0
    made: list[Update] = field(default_factory=list[Update])
    replies: list[list[float]] = field(default_factory=list[list[float]])
    off: float = 0.0

    def _gaps(self) -> list[tuple[float, float]]:
        return [pair for times in self.replies for pair in pairwise(times)]

    def pauses(self) -> list[float]:
        gaps = self._gaps()
        return [
            max((b - a for a, b in gaps if b > update.began and a < update.ended + AROUND), default=0.0)
            for update in self.made
        ]

    def figures(self) -> dict[str, float]:
        quiet = [b - a for a, b in self._gaps() if b < self.made[0].began]
        pauses = self.pauses()
        return {
            "seconds": statistics.median(update.seconds for update in self.made),
            "seconds_max": max(update.seconds for update in self.made),
            "first_seconds": self.first,
            "pause_ms_p50": 1e3 * statistics.median(pauses),
            "pause_ms_max": 1e3 * max(pauses),
            "gap_ms_p50": 1e3 * statistics.median(quiet),
            "gap_ms_max": 1e3 * max(quiet),
            "off": self.off,
        }


@dataclass(frozen=True)
class Host:
    url: str
    engine: RemoteEngine


class Trainer:
    """A backend that takes a step on one sample before each update."""

    def __init__(self, config: RunConfig, vocab: int) -> None:
        assert isinstance(config.backend, LocalBackendConfig)
        self.backend = LocalBackend(config.model, config.backend)
        self.versions = 0
        ids = np.random.default_rng(0).integers(0, vocab, 96).astype(np.int32)
        mask = np.ones(len(ids), np.float32)
        mask[0] = 0
        self.sample = Sample(
            "s", "s", ids, mask, np.full(len(ids), np.nan, np.float32), mask / len(ids), np.zeros_like(ids)
        )
        self.before: Floats | None = None

    async def step(self) -> None:
        if self.before is None:
            self.before = await self.logprobs()
        await self.backend.forward_backward([self.sample], LossConfig(name="cross_entropy"))
        await self.backend.optim_step(AdamConfig(lr=1e-3))
        self.versions += 1

    async def logprobs(self) -> Floats:
        (found,) = await self.backend.forward([self.sample])
        return found[1:]

    async def moved(self) -> float:
        assert self.before is not None
        return float(np.abs(await self.logprobs() - self.before).mean())


async def measure(shape: str, options: argparse.Namespace, folder: Path) -> dict[str, float]:
    device, _ = device_and_dtype(RunConfig().model)
    console.print(f"[bold]{shape}[/bold]: writing a model of this shape")
    model = await asyncio.to_thread(make_model, folder / "model", SHAPES[shape], device)
    configs = {kind: _config(model, device, kind, options) for kind in ("adapter", "merged")}
    console.print(f"{shape}: starting two vLLM servers")
    async with contextlib.AsyncExitStack() as stack:
        hosts = await asyncio.gather(
            *(stack.enter_async_context(_host(config, folder, kind)) for kind, config in configs.items())
        )
        trainer = await asyncio.to_thread(Trainer, configs["merged"], SHAPES[shape].vocab)
        stack.push_async_callback(trainer.backend.close)
        found: dict[str, float] = {}
        for name, kind, host in zip(("lora", "full"), configs, hosts, strict=True):
            console.print(f"{shape}: {options.updates} updates of {name}")
            sync = await create_sync(configs[kind], trainer.backend, [host.engine])
            console.print(f"{shape}: {sync.description}")
            updates = await _update(trainer, sync, host, options, folder, SHAPES[shape].vocab)
            console.print(f"{shape}: pauses, ms: {' '.join(f'{1e3 * p:.0f}' for p in updates.pauses())}")
            found |= {f"{name}_{key}": value for key, value in updates.figures().items()}
        found["moved"] = await trainer.moved()
    return found


def _config(model: Path, device: str, kind: str, options: argparse.Namespace) -> RunConfig:
    dtype = "bf16" if device == "cuda" else device_and_dtype(RunConfig().model)[1]
    engine: dict[str, Any] = {"type": "vllm", "policy": kind, "python": options.python, "lora_rank": 16}
    engine |= {"start_timeout": START_SECONDS, "max_batch": 16}
    if options.eager:
        engine["eager"] = True
    if device == "cuda":
        # Two servers and the trainer are on the GPU; a cache of a fixed size needs no look at what is free.
        engine |= {"gpu_memory": 0.25, "args": ["--kv-cache-memory-bytes", str(4 * 2**30)]}
    else:
        engine["kv_gib"] = 0.25
    return RunConfig.model_validate(
        {
            "model": {"name": str(model), "dtype": dtype, "device": device, "max_context": 1024},
            "engine": engine,
            "backend": {"type": "local", "lora": {"rank": 16}},
            "sync": {"route": "files" if kind == "adapter" else "ipc"},
        }
    )


@contextlib.asynccontextmanager
async def _host(config: RunConfig, folder: Path, kind: str) -> AsyncGenerator[Host]:
    job = folder / f"{kind}.json"
    job.write_text(config.model_dump_json())
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(PARTS / "host.py"), str(job), stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stdin is not None
    engine: RemoteEngine | None = None
    try:
        async with asyncio.timeout(START_SECONDS):
            url = (await process.stdout.readline()).decode().strip()
        if not url:
            raise Failed(f"the {kind} server did not come up:\n{_logs(folder, kind)}")
        engine = await RemoteEngine.connect(url)
        yield Host(url, engine)
    finally:
        if engine is not None:
            await engine.close()
        process.stdin.close()
        await asyncio.wait_for(process.wait(), 60)


def _logs(folder: Path, kind: str) -> str:
    texts = [path.read_text(errors="replace")[-4000:] for path in sorted(folder.glob(f"{kind}*.log"))]
    return "\n".join(texts)


async def _update(
    trainer: Trainer, sync: Sync, host: Host, options: argparse.Namespace, folder: Path, vocab: int
) -> Updates:
    updates, engine = Updates(), host.engine
    await trainer.step()
    updates.first = (await _one(trainer, sync, engine, folder)).seconds
    listening = await asyncio.create_subprocess_exec(
        sys.executable,
        str(PARTS / "listen.py"),
        host.url,
        *map(str, (options.streams, options.tokens, vocab)),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        limit=2**28,
    )
    assert listening.stdin is not None
    await _until_running(engine, options.streams)
    await asyncio.sleep(QUIET_SECONDS)
    for _ in range(options.updates):
        await trainer.step()
        updates.made.append(await _one(trainer, sync, engine, folder))
        await asyncio.sleep(max(AROUND, options.every))
    told, _ = await listening.communicate(b"")
    if listening.returncode:
        raise Failed("the streams broke off; see above")
    updates.replies = json.loads(told)
    served = await engine.logprobs(trainer.sample.token_ids)
    updates.off = float(np.abs(served[1:] - await trainer.logprobs()).mean())
    await sync.close()
    return updates


async def _one(trainer: Trainer, sync: Sync, engine: RemoteEngine, folder: Path) -> Update:
    version, began = trainer.versions, time.monotonic()
    if sync.live:
        artifact = Artifact("live")
    else:
        artifact = await trainer.backend.publish(folder / "policies" / f"v{version}")
    (failure,) = await sync.push(Policy("bench", version, artifact), [engine])
    update = Update(began, time.monotonic())
    if failure is not None:
        raise Failed(f"version {version} did not get there: {failure}")
    assert (await engine.status()).version == version
    return update


async def _until_running(engine: RemoteEngine, streams: int) -> None:
    async with asyncio.timeout(60):
        while (await engine.status()).running < streams:  # noqa: ASYNC110 - in another process
            await asyncio.sleep(0.1)


def scratch(shapes: Sequence[str]) -> Path | None:
    """Memory, where there is room: disks would be measured otherwise."""
    shared = Path("/dev/shm")
    room = 2**30 * (24 if "4B" in shapes else 6)
    return shared if shared.is_dir() and shutil.disk_usage(shared).free > room else None


def show(found: dict[str, dict[str, float]]) -> None:
    table = Table(title="New weights into a running vLLM server")
    for title in ("shape", "weights", "seconds", "max", "pause p50 / max, ms", "gap p50 / max, ms", "off"):
        table.add_column(title, justify="left" if title in ("shape", "weights") else "right")
    for shape, figures in found.items():
        for name in ("lora", "full"):
            one = {key.removeprefix(f"{name}_"): value for key, value in figures.items()}
            table.add_row(
                shape,
                name,
                f"{one['seconds']:.3f}",
                f"{one['seconds_max']:.3f}",
                f"{one['pause_ms_p50']:.0f} / {one['pause_ms_max']:.0f}",
                f"{one['gap_ms_p50']:.1f} / {one['gap_ms_max']:.0f}",
                f"{one['off']:.3f}",
            )
    console.print(table)


async def main(options: argparse.Namespace) -> int:
    found: dict[str, dict[str, float]] = {}
    for shape in options.shape:
        with tempfile.TemporaryDirectory(prefix="instar-weights-", dir=scratch(options.shape)) as folder:
            found[shape] = await measure(shape, options, Path(folder))
    show(found)
    wrong = [
        f"{shape}: {name}"
        for shape, figures in found.items()
        for name in ("lora", "full")
        if figures[f"{name}_off"] > max(0.1, figures["moved"] / 4)
    ]
    if options.json:
        print(json.dumps(found))
    if wrong:
        console.print(f"[red]the server does not serve what was trained: {', '.join(wrong)}")
    return int(bool(wrong))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", action="append", choices=list(SHAPES), help="default: 0.6B and 4B")
    parser.add_argument("--python", help="interpreter that has vLLM; default: the running one")
    parser.add_argument("--updates", type=int, default=20)
    parser.add_argument("--every", type=float, default=0.7, help="seconds between two updates")
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=256, help="of one reply")
    parser.add_argument("--eager", action="store_true", help="servers start sooner and sample slower")
    parser.add_argument("--json", action="store_true", help="end with the figures as one line")
    given = parser.parse_args()
    given.shape = given.shape or ["0.6B", "4B"]
    given.python = given.python and str(Path(given.python).absolute())
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        sys.exit(asyncio.run(main(given)))
    except Failed as error:
        sys.exit(str(error))
