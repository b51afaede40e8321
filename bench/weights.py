"""Measure how long it takes to load new weights into a running vLLM server, and how long live streams pause.

    python bench/weights.py [--shape 0.6B --shape 4B] [--python VLLM_PYTHON] [--updates 20] [--eager] [--json]

For each shape, the benchmark creates a model with random weights and, on the same device, a training backend
with a rank 16 LoRA adapter on all linear layers. It starts two servers: one serves adapters, and in the
other one all weights are replaced. Every update follows a training step. ``lora_seconds`` is the time from
the end of the step until the server serves the new adapter, which it reads from files. ``full_seconds`` is
the same for all weights, with the adapter merged in and without files (`sync.route: ipc`). A separate
process reads the streams. ``pause_ms`` is the longest time between two tokens of a stream around an update
(median and maximum over the updates), and ``gap_ms`` the time between two tokens without an update. At the
end, the server's logprobs are compared with the trainer's: ``off`` is their mean difference, and ``moved``
how far training has moved them. The exit status is 1 if ``off`` is too large for either server.
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
from instar.sync.base import SyncRoute
from instar.sync.factory import create_sync_route
from instar.types import Artifact, Floats, Policy, Sample

PARTS = Path(__file__).parent / "weights_parts"
QUIET_SECONDS = 4.0
"""The time for which the streams are observed before the first measured update."""
UPDATE_MARGIN_SECONDS = 0.3
"""A pause that begins within this time after an update is attributed to it."""
START_TIMEOUT_SECONDS = 420.0
console = Console(stderr=True)


class MeasurementError(Exception):
    """A server or the streams failed."""


@dataclass
class Update:
    started_at: float
    ended_at: float

    @property
    def seconds(self) -> float:
        return self.ended_at - self.started_at


@dataclass
class UpdateSeries:
    """The updates that were pushed to one server."""

    first_seconds: float = 0.0
    """The duration of the first update, which is not in ``updates``."""
    updates: list[Update] = field(default_factory=list[Update])
    token_times: list[list[float]] = field(default_factory=list[list[float]])
    """The arrival times of the tokens, by reply."""
    mean_logprob_error: float = 0.0

    def _list_gaps(self) -> list[tuple[float, float]]:
        return [pair for times in self.token_times for pair in pairwise(times)]

    def measure_pauses(self) -> list[float]:
        """Return the longest gap between two tokens around each update, in seconds."""
        gaps = self._list_gaps()
        return [
            max(
                (
                    b - a
                    for a, b in gaps
                    if b > update.started_at and a < update.ended_at + UPDATE_MARGIN_SECONDS
                ),
                default=0.0,
            )
            for update in self.updates
        ]

    def compute_metrics(self) -> dict[str, float]:
        quiet_gaps = [b - a for a, b in self._list_gaps() if b < self.updates[0].started_at]
        pauses = self.measure_pauses()
        return {
            "seconds": statistics.median(update.seconds for update in self.updates),
            "seconds_max": max(update.seconds for update in self.updates),
            "first_seconds": self.first_seconds,
            "pause_ms_p50": 1e3 * statistics.median(pauses),
            "pause_ms_max": 1e3 * max(pauses),
            "gap_ms_p50": 1e3 * statistics.median(quiet_gaps),
            "gap_ms_max": 1e3 * max(quiet_gaps),
            "off": self.mean_logprob_error,
        }


@dataclass(frozen=True)
class EngineHost:
    url: str
    engine: RemoteEngine


class Trainer:
    """Trains on one sample. Each step produces a new version."""

    def __init__(self, config: RunConfig, vocab: int) -> None:
        assert isinstance(config.backend, LocalBackendConfig)
        self.backend = LocalBackend(config.model, config.backend)
        self.version = 0
        ids = np.random.default_rng(0).integers(0, vocab, 96).astype(np.int32)
        mask = np.ones(len(ids), np.float32)
        mask[0] = 0
        self.sample = Sample(
            "s", "s", ids, mask, np.full(len(ids), np.nan, np.float32), mask / len(ids), np.zeros_like(ids)
        )
        self.initial_logprobs: Floats | None = None

    async def step(self) -> None:
        if self.initial_logprobs is None:
            self.initial_logprobs = await self.compute_logprobs()
        await self.backend.forward_backward([self.sample], LossConfig(name="cross_entropy"))
        await self.backend.optim_step(AdamConfig(lr=1e-3))
        self.version += 1

    async def compute_logprobs(self) -> Floats:
        (logprobs,) = await self.backend.forward([self.sample])
        return logprobs[1:]

    async def compute_logprob_change(self) -> float:
        assert self.initial_logprobs is not None
        return float(np.abs(await self.compute_logprobs() - self.initial_logprobs).mean())


async def measure(shape: str, options: argparse.Namespace, folder: Path) -> dict[str, float]:
    device, _ = device_and_dtype(RunConfig().model)
    console.print(f"[bold]{shape}[/bold]: creating a model of this shape")
    model = await asyncio.to_thread(make_model, folder / "model", SHAPES[shape], device)
    configs = {policy: _make_config(model, device, policy, options) for policy in ("adapter", "merged")}
    console.print(f"{shape}: starting two vLLM servers")
    async with contextlib.AsyncExitStack() as stack:
        hosts = await asyncio.gather(
            *(
                stack.enter_async_context(_start_host(config, folder, policy))
                for policy, config in configs.items()
            )
        )
        trainer = await asyncio.to_thread(Trainer, configs["merged"], SHAPES[shape].vocab)
        stack.push_async_callback(trainer.backend.close)
        metrics: dict[str, float] = {}
        for name, policy, host in zip(("lora", "full"), configs, hosts, strict=True):
            console.print(f"{shape}: {options.updates} {name} updates")
            sync = await create_sync_route(configs[policy], trainer.backend, [host.engine])
            console.print(f"{shape}: {sync.description}")
            series = await _measure_updates(trainer, sync, host, options, folder, SHAPES[shape].vocab)
            pauses = " ".join(f"{1e3 * pause:.0f}" for pause in series.measure_pauses())
            console.print(f"{shape}: pauses in ms: {pauses}")
            metrics |= {f"{name}_{key}": value for key, value in series.compute_metrics().items()}
        metrics["moved"] = await trainer.compute_logprob_change()
    return metrics


def _make_config(model: Path, device: str, policy: str, options: argparse.Namespace) -> RunConfig:
    dtype = "bf16" if device == "cuda" else device_and_dtype(RunConfig().model)[1]
    engine: dict[str, Any] = {"type": "vllm", "policy": policy, "python": options.python, "lora_rank": 16}
    engine |= {"start_timeout": START_TIMEOUT_SECONDS, "max_batch": 16}
    if options.eager:
        engine["eager"] = True
    if device == "cuda":
        # Two servers and the trainer share the GPU, so the cache size must not depend on the free memory.
        engine |= {"gpu_memory": 0.25, "args": ["--kv-cache-memory-bytes", str(4 * 2**30)]}
    else:
        engine["kv_gib"] = 0.25
    return RunConfig.model_validate(
        {
            "model": {"name": str(model), "dtype": dtype, "device": device, "max_context": 1024},
            "engine": engine,
            "backend": {"type": "local", "lora": {"rank": 16}},
            "sync": {"route": "files" if policy == "adapter" else "ipc"},
        }
    )


@contextlib.asynccontextmanager
async def _start_host(config: RunConfig, folder: Path, policy: str) -> AsyncGenerator[EngineHost]:
    """Serve an engine in its own process. Raises MeasurementError if it does not start."""
    config_path = folder / f"{policy}.json"
    config_path.write_text(config.model_dump_json())
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(PARTS / "host.py"),
        str(config_path),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stdin is not None
    engine: RemoteEngine | None = None
    try:
        async with asyncio.timeout(START_TIMEOUT_SECONDS):
            url = (await process.stdout.readline()).decode().strip()
        if not url:
            raise MeasurementError(f"the {policy} server did not start:\n{_read_logs(folder, policy)}")
        engine = await RemoteEngine.connect(url)
        yield EngineHost(url, engine)
    finally:
        if engine is not None:
            await engine.close()
        process.stdin.close()
        await asyncio.wait_for(process.wait(), 60)


def _read_logs(folder: Path, policy: str) -> str:
    texts = [path.read_text(errors="replace")[-4000:] for path in sorted(folder.glob(f"{policy}*.log"))]
    return "\n".join(texts)


async def _measure_updates(
    trainer: Trainer, sync: SyncRoute, host: EngineHost, options: argparse.Namespace, folder: Path, vocab: int
) -> UpdateSeries:
    series, engine = UpdateSeries(), host.engine
    await trainer.step()
    series.first_seconds = (await _push_update(trainer, sync, engine, folder)).seconds
    listener = await asyncio.create_subprocess_exec(
        sys.executable,
        str(PARTS / "listen.py"),
        host.url,
        *map(str, (options.streams, options.tokens, vocab)),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        limit=2**28,
    )
    assert listener.stdin is not None
    await _wait_for_streams(engine, options.streams)
    await asyncio.sleep(QUIET_SECONDS)
    for _ in range(options.updates):
        await trainer.step()
        series.updates.append(await _push_update(trainer, sync, engine, folder))
        await asyncio.sleep(max(UPDATE_MARGIN_SECONDS, options.every))
    output, _ = await listener.communicate(b"")
    if listener.returncode:
        raise MeasurementError("the streams failed; see the output above")
    series.token_times = json.loads(output)
    served_logprobs = await engine.logprobs(trainer.sample.token_ids)
    series.mean_logprob_error = float(np.abs(served_logprobs[1:] - await trainer.compute_logprobs()).mean())
    await sync.close()
    return series


async def _push_update(trainer: Trainer, sync: SyncRoute, engine: RemoteEngine, folder: Path) -> Update:
    version, started_at = trainer.version, time.monotonic()
    if sync.is_live:
        artifact = Artifact("live")
    else:
        artifact = await trainer.backend.publish(folder / "policies" / f"v{version}")
    (failure,) = await sync.push(Policy("bench", version, artifact), [engine])
    update = Update(started_at, time.monotonic())
    if failure is not None:
        raise MeasurementError(f"the server did not load version {version}: {failure}")
    assert (await engine.status()).version == version
    return update


async def _wait_for_streams(engine: RemoteEngine, streams: int) -> None:
    async with asyncio.timeout(60):
        while (await engine.status()).running < streams:  # noqa: ASYNC110 - another process changes this
            await asyncio.sleep(0.1)


def choose_scratch_folder(shapes: Sequence[str]) -> Path | None:
    """Return a folder in memory, so that the disk is not measured, or None if there is not enough space."""
    shared_memory = Path("/dev/shm")
    needed_bytes = 2**30 * (24 if "4B" in shapes else 6)
    if shared_memory.is_dir() and shutil.disk_usage(shared_memory).free > needed_bytes:
        return shared_memory
    return None


def show(metrics_by_shape: dict[str, dict[str, float]]) -> None:
    table = Table(title="Weight updates of a running vLLM server")
    for title in (
        "shape",
        "update",
        "seconds",
        "max seconds",
        "pause p50 / max, ms",
        "gap p50 / max, ms",
        "logprob error",
    ):
        table.add_column(title, justify="left" if title in ("shape", "update") else "right")
    for shape, metrics in metrics_by_shape.items():
        for name in ("lora", "full"):
            row = {key.removeprefix(f"{name}_"): value for key, value in metrics.items()}
            table.add_row(
                shape,
                name,
                f"{row['seconds']:.3f}",
                f"{row['seconds_max']:.3f}",
                f"{row['pause_ms_p50']:.0f} / {row['pause_ms_max']:.0f}",
                f"{row['gap_ms_p50']:.1f} / {row['gap_ms_max']:.0f}",
                f"{row['off']:.3f}",
            )
    console.print(table)


async def main(options: argparse.Namespace) -> int:
    metrics_by_shape: dict[str, dict[str, float]] = {}
    for shape in options.shape:
        with tempfile.TemporaryDirectory(
            prefix="instar-weights-", dir=choose_scratch_folder(options.shape)
        ) as folder:
            metrics_by_shape[shape] = await measure(shape, options, Path(folder))
    show(metrics_by_shape)
    mismatches = [
        f"{shape} {name} by {metrics[f'{name}_off']:.3f}"
        for shape, metrics in metrics_by_shape.items()
        for name in ("lora", "full")
        if metrics[f"{name}_off"] > max(0.1, metrics["moved"] / 4)
    ]
    if options.json:
        print(json.dumps(metrics_by_shape))
    if mismatches:
        console.print(f"[red]the server's logprobs differ from the trainer's: {', '.join(mismatches)}")
    return int(bool(mismatches))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--shape",
        action="append",
        choices=list(SHAPES),
        help="model shape; may be repeated (default: 0.6B and 4B)",
    )
    parser.add_argument("--python", help="interpreter with vLLM (default: the current one)")
    parser.add_argument("--updates", type=int, default=20, help="number of updates per server")
    parser.add_argument("--every", type=float, default=0.7, help="seconds between two updates")
    parser.add_argument("--streams", type=int, default=4, help="number of concurrent streams")
    parser.add_argument("--tokens", type=int, default=256, help="tokens per reply")
    parser.add_argument(
        "--eager", action="store_true", help="start the servers faster, but sample more slowly"
    )
    parser.add_argument("--json", action="store_true", help="print the metrics as one JSON line at the end")
    arguments = parser.parse_args()
    arguments.shape = arguments.shape or ["0.6B", "4B"]
    arguments.python = arguments.python and str(Path(arguments.python).absolute())
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        sys.exit(asyncio.run(main(arguments)))
    except MeasurementError as error:
        sys.exit(str(error))
