"""Run one backend in its own process, and train on the same batch on request.

    python bench/backends_parts/client.py JOB

JOB is a JSON file with the run's settings (`config`) and the arguments of `make_batch` (`batch_args`). The
process prints "ready" when the backend has started. Then each line on stdin requests one training step, and
the process prints the duration of its ``forward_backward`` in seconds. It exits at the end of stdin.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from instar.backends.base import Backend
from instar.config import AdamConfig, LossConfig, RunConfig
from instar.registry import resolve_section
from instar.types import Sample


def make_batch(sequences: int, length: int, vocab: int, prompt_length: int = 16) -> list[Sample]:
    """Return random sequences without shared prefixes, each with a short prompt that is not trained on."""
    rng = np.random.default_rng(0)
    samples: list[Sample] = []
    for number in range(sequences):
        mask = np.zeros(length, np.float32)
        mask[prompt_length:] = 1
        samples.append(
            Sample(
                f"s{number}",
                f"s{number}",
                rng.integers(3, vocab, length).astype(np.int32),
                mask,
                np.where(mask > 0, rng.normal(-9, 1, length), np.nan).astype(np.float32),
                np.where(mask > 0, rng.normal(0, 1e-3, length), 0).astype(np.float32),
                np.where(mask > 0, 0, -1).astype(np.int32),
            )
        )
    return samples


async def serve(config: RunConfig, batch_args: dict[str, Any]) -> None:
    backend: Backend = resolve_section("backends", config.backend)(config.model, config.backend, seed=0)
    await backend.start()
    batch = make_batch(**batch_args)
    print("ready", flush=True)
    while await asyncio.to_thread(sys.stdin.readline):
        started_at = time.perf_counter()
        await backend.forward_backward(batch, LossConfig())
        seconds = time.perf_counter() - started_at
        await backend.optim_step(AdamConfig(lr=1e-6))
        print(seconds, flush=True)
    await backend.close()


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    asyncio.run(serve(RunConfig.model_validate(job["config"]), job["batch_args"]))


if __name__ == "__main__":
    main()
