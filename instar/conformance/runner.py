"""Runs the conformance cases on one backend: ``python -m instar.conformance.runner JOB OUTPUT_FOLDER``.

The backend runs in a separate process, so that its packages can be in a different environment, which needs
torch only if the backend does. A cloud backend's API key is passed in an environment variable.
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
import typer

from instar.backends.base import Backend
from instar.config import CloudEngineConfig, LocalEngineConfig, ModelConfig, RunConfig
from instar.conformance.cases import CaseContext, select_cases
from instar.engines.factory import create_engine
from instar.registry import resolve_section
from instar.types import Artifact, Json

CASE_TIMEOUT_SECONDS = 180.0


class ConformanceResult(msgspec.Struct):
    losses: list[str]
    """The losses that the backend supports."""
    cases: list[str]
    failures: dict[str, str]
    """Error messages by case name."""
    artifacts: dict[str, Artifact]


async def run_cases(
    config: RunConfig, folder: Path, report: Callable[[str], None] = lambda _: None
) -> tuple[ConformanceResult, dict[str, Any]]:
    """Run the cases and return the result and the recorded arrays. ``report`` gets the name of each case."""
    backend: Backend = resolve_section("backends", config.backend)(
        config.model, config.backend, seed=config.seed
    )
    context = CaseContext(backend, lambda: create_engine(config), folder, config.model.context_length)
    result = ConformanceResult(sorted(backend.capabilities.losses), [], {}, context.artifacts)
    try:
        await backend.start()
        await backend.save_state(folder / "begin")
        for name, case in select_cases(backend).items():
            report(name)
            try:
                async with asyncio.timeout(CASE_TIMEOUT_SECONDS):
                    await backend.load_state(folder / "begin")
                    await case(context)
            except Exception as error:  # noqa: BLE001 - any error fails the case
                result.failures[name] = f"{type(error).__name__}: {error}"
                traceback.print_exc()
            result.cases.append(name)
    finally:
        await backend.close()
    return result, context.arrays


def build_job(model: ModelConfig, backend: Json, seed: int) -> Json:
    """Build the content of the JOB file, which is a run config."""
    uses_local_engine = backend["type"] in ("local", "verl")
    engine = LocalEngineConfig(max_batch=4, threads=1) if uses_local_engine else CloudEngineConfig()
    return {
        "model": model.model_dump(mode="json"),
        "backend": backend,
        "engine": engine.model_dump(),
        "seed": seed,
    }


def main() -> None:
    job_file, output_folder = Path(sys.argv[1]), Path(sys.argv[2])
    config = RunConfig.model_validate(json.loads(job_file.read_text()))
    (output_folder / "work").mkdir(parents=True, exist_ok=True)
    result, arrays = asyncio.run(run_cases(config, output_folder / "work", typer.echo))
    np.savez(output_folder / "arrays.npz", **arrays)
    (output_folder / "result.json").write_bytes(msgspec.json.encode(result))


if __name__ == "__main__":
    main()
