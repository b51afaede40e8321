"""Plays the scenes on one backend and writes what it showed: ``python -m instar.conformance.runner JOB OUT``.

A process of its own, so that a backend whose packages conflict with others is played in its own environment.
Needs no torch unless the backend does. The service's key comes by the environment.
"""

from __future__ import annotations

import asyncio
import json
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from instar.backends.base import Backend
from instar.config import CloudEngineConfig, LocalEngineConfig, ModelConfig, RunConfig
from instar.conformance.cases import CaseContext, select_cases
from instar.engines.base import Engine
from instar.engines.factory import create_engine
from instar.registry import resolve_section
from instar.types import Artifact, Json

CASE_DEADLINE = 180.0


class ConformanceResult(msgspec.Struct):
    """What a play left behind, beside its arrays."""

    losses: list[str]
    cases: list[str]
    failures: dict[str, str]
    """Scenes that broke off, and how."""
    artifacts: dict[str, Artifact]


async def run_cases(
    config: RunConfig, folder: Path, say: Callable[[str], None] = lambda _: None
) -> tuple[ConformanceResult, dict[str, Any]]:
    backend: Backend = resolve_section("backends", config.backend)(
        config.model, config.backend, seed=config.seed
    )
    stage = CaseContext(backend, lambda: _engine(config), folder, config.model.max_context)
    shown = ConformanceResult(sorted(backend.capabilities.losses), [], {}, stage.artifacts)
    try:
        await backend.start()
        await backend.save_state(folder / "begin")
        for name, scene in select_cases(backend).items():
            say(name)
            try:
                async with asyncio.timeout(CASE_DEADLINE):
                    await stage.restore_initial_state()
                    await scene(stage)
            except Exception as error:  # noqa: BLE001 - whatever a scene meets is its result
                shown.failures[name] = f"{type(error).__name__}: {error}"
                traceback.print_exc()
            shown.cases.append(name)
    finally:
        await backend.close()
    return shown, stage.arrays


async def _engine(config: RunConfig) -> Engine:
    """One that loads what the backend publishes: its service's sampler, or a local one."""
    return create_engine(config)


def build_job(model: ModelConfig, backend: Json, seed: int) -> Json:
    """What `main` is given, as JSON."""
    local = backend["type"] in ("local", "verl")
    engine: Json = (LocalEngineConfig(max_batch=4, threads=1) if local else CloudEngineConfig()).model_dump()
    return {"model": model.model_dump(mode="json"), "backend": backend, "engine": engine, "seed": seed}


def main() -> None:
    given, out = Path(sys.argv[1]), Path(sys.argv[2])
    config = RunConfig.model_validate(json.loads(given.read_text()))
    (out / "work").mkdir(parents=True, exist_ok=True)
    shown, arrays = asyncio.run(run_cases(config, out / "work", lambda name: print(name, flush=True)))
    np.savez(out / "arrays.npz", **arrays)
    (out / "shown.json").write_bytes(msgspec.json.encode(shown))


if __name__ == "__main__":
    main()
