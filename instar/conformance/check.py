"""Implements `instar backends check NAME`."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from instar.clouds.base import SERVICES
from instar.config import DType, ModelConfig, RunConfig
from instar.conformance.cases import FIVE_STEPS
from instar.conformance.compare import BackendRecord, CheckResult, compare
from instar.conformance.runner import ConformanceResult, build_job, run_cases
from instar.conformance.server import PROTOCOLS, ServerProcess, run_server
from instar.errors import BackendError, ConfigError
from instar.types import Json

MAX_CONTEXT = 256
SEED = 3
RANK = 8
TOLERANCE: dict[DType, float] = {"fp32": 1e-5, "bf16": 2e-2}
TOLERANCE_FACTORS = {"verl": 10.0}
"""Multiplies the tolerance for backends whose kernels sum in a different order than those of the local
backend. Adam amplifies the differences between small gradients."""
EXIT_TIMEOUT_SECONDS = 900.0
"""How long the runner may take to exit after closing its output. Each case has its own timeout."""
ReportProgress = Callable[[str], None]


def run_check(
    name: str, *, as_json: bool, url: str | None = None, python: str | None = None, dtype: DType = "fp32"
) -> None:
    """Run the checks and print the results. Exit with code 1 if a check fails. If ``url`` is set, a cloud
    backend is checked against that server instead of a local protocol server."""
    if dtype not in TOLERANCE:
        raise ConfigError(f"--dtype must be one of {', '.join(TOLERANCE)}, got {dtype!r}")
    console = Console(stderr=as_json)
    with console.status(f"{name}: preparing") as status:
        checks = check_backend(
            name, url=url, python=python, dtype=dtype, report=lambda text: status.update(f"{name}: {text}")
        )
    failed_count = sum(not check.passed for check in checks)
    passed_count = len(checks) - failed_count
    if as_json:
        for check in checks:
            typer.echo(json.dumps(asdict(check)))
        typer.echo(json.dumps({"backend": name, "passed": passed_count, "failed": failed_count}))
    else:
        table = Table("check", "result", "detail")
        for check in checks:
            table.add_row(check.name, "[green]passed" if check.passed else "[red]failed", check.detail)
        console.print(table)
        console.print(f"{name}: {passed_count} passed, {failed_count} failed")
    if failed_count:
        raise typer.Exit(1)


def check_backend(
    name: str,
    *,
    url: str | None = None,
    python: str | None = None,
    dtype: DType = "fp32",
    report: ReportProgress = lambda _: None,
) -> list[CheckResult]:
    """Run the cases on the local backend and on the backend ``name``, and compare the results."""
    from instar.conformance.tiny import make_tiny_model

    with tempfile.TemporaryDirectory(prefix="instar-check-") as scratch:
        folder = Path(scratch)
        make_tiny_model(folder / "model", context=MAX_CONTEXT)
        model = ModelConfig(name=str(folder / "model"), dtype=dtype, device="cpu", max_context=MAX_CONTEXT)
        report("running the local backend")
        local_section: Json = {"type": "local", "lora": {"rank": RANK}, "threads": 1}
        (folder / "expected").mkdir()
        config = RunConfig.model_validate(build_job(model, local_section, SEED))
        result, arrays = asyncio.run(run_cases(config, folder / "expected"))
        weights = _load_weights(Path(result.artifacts[FIVE_STEPS].path))
        expected = BackendRecord(result, arrays, weights)
        with _prepare_backend(name, model, folder, url, python) as (section, server):
            actual = _run_in_new_process(model, section, folder / "actual", python, server, report)
        return compare(expected, actual, MAX_CONTEXT, TOLERANCE[dtype] * TOLERANCE_FACTORS.get(name, 1.0))


@contextmanager
def _prepare_backend(
    name: str, model: ModelConfig, folder: Path, url: str | None, python: str | None
) -> Generator[tuple[Json, ServerProcess | None]]:
    """Yield the backend's config section and, if one was started, the server process."""
    if name in ("local", "verl"):
        yield {"type": name, "lora": {"rank": RANK}} | ({"threads": 1} if name == "local" else {}), None
        return
    if name not in SERVICES:
        raise ConfigError(f"unknown backend {name!r}; available: local, verl, {', '.join(SERVICES)}")
    section: Json = {"type": name, "rank": RANK, "python": python, "deadline": 120.0}
    if url is not None:
        yield section | {"base_url": url}, None
        return
    with run_server(PROTOCOLS[name], model, folder / "server", threads=1) as server:
        yield section | {"base_url": server.url}, server


def _run_in_new_process(
    model: ModelConfig,
    section: Json,
    folder: Path,
    python: str | None,
    server: ServerProcess | None,
    report: ReportProgress,
) -> BackendRecord:
    """Run the cases in a new process with the backend's interpreter."""
    folder.mkdir()
    (folder / "job.json").write_text(json.dumps(build_job(model, section, SEED)))
    env = dict(os.environ)
    if server is not None:
        env[SERVICES[section["type"]].key_env] = server.key
    command = [python or sys.executable, "-m", "instar.conformance.runner"]
    with (folder / "run.log").open("wb") as log:
        child = subprocess.Popen(
            [*command, str(folder / "job.json"), str(folder)], env=env, stdout=subprocess.PIPE, stderr=log
        )
    try:
        assert child.stdout is not None
        for line in child.stdout:
            report(f"running case {line.decode().strip()}")
        exit_code = child.wait(EXIT_TIMEOUT_SECONDS)
    finally:
        child.kill()
        child.wait()
    if exit_code != 0:
        log_tail = (folder / "run.log").read_text()[-2000:]
        raise BackendError(f"the runner failed with exit code {exit_code}:\n{log_tail}")
    result = msgspec.json.decode((folder / "result.json").read_bytes(), type=ConformanceResult)
    artifact, weights = result.artifacts.get(FIVE_STEPS), None
    if artifact is not None and artifact.kind != "remote":
        weights = _load_weights(Path(artifact.path))
    elif artifact is not None and server is not None:
        weights = _load_weights(server.adapter_folder(artifact.path))
    with np.load(folder / "arrays.npz") as arrays:
        return BackendRecord(result, dict(arrays), weights)


def _load_weights(folder: Path) -> dict[str, Any]:
    from safetensors.numpy import load_file

    return load_file(folder / "adapter_model.safetensors")
