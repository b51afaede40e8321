"""`instar doctor`: check what this machine has and what is missing."""

from __future__ import annotations

import asyncio
import importlib.metadata
import json
import os
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Literal

import typer
from rich.console import Console
from rich.table import Table

from instar.cli.options import AsJson
from instar.models import DEFAULT_MODEL, cache_dir, is_cached

State = Literal["ok", "note", "missing"]
MARK = {"ok": "[green]ok[/]", "note": "[yellow]note[/]", "missing": "[red]missing[/]"}


@dataclass(frozen=True)
class DoctorFinding:
    what: str
    state: State
    detail: str


def doctor(as_json: AsJson = False) -> None:
    findings = [check() for check in CHECKS]
    if as_json:
        typer.echo(json.dumps([asdict(finding) for finding in findings]))
    else:
        table = Table("what", "", "detail")
        for finding in findings:
            table.add_row(finding.what, MARK[finding.state], finding.detail)
        Console().print(table)
    if any(finding.state == "missing" for finding in findings):
        raise typer.Exit(1)


def _python() -> DoctorFinding:
    version = platform.python_version()
    return DoctorFinding(
        "python", "ok" if sys.version_info >= (3, 11) else "missing", f"{version} (3.11+ needed)"
    )


def _package(name: str, extra: str | None = None) -> Callable[[], DoctorFinding]:
    def check() -> DoctorFinding:
        try:
            return DoctorFinding(name, "ok", importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            hint = f"pip install 'instar[{extra}]'" if extra else f"pip install {name}"
            return DoctorFinding(name, "missing", hint)

    return check


def _machine() -> DoctorFinding:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    state: State = "ok" if memory >= 8 else "note"
    return DoctorFinding(
        "machine", state, f"{os.cpu_count()} cores, {memory:.0f} GiB (the demo takes about 6 GiB)"
    )


def _compute() -> DoctorFinding:
    try:
        import torch
    except ModuleNotFoundError:
        return DoctorFinding("compute", "missing", "torch is not installed: pip install 'instar[local]'")
    from instar.config import ModelConfig
    from instar.models import device_and_dtype

    device, dtype = device_and_dtype(ModelConfig())
    name = torch.cuda.get_device_name() if device == "cuda" else platform.processor() or "CPU"
    slow = device == "cpu" and dtype == "fp32"
    return DoctorFinding(
        "compute",
        "note" if slow else "ok",
        f"{device}, {dtype} ({name})" + (", no fast bf16" if slow else ""),
    )


def _disk() -> DoctorFinding:
    free = shutil.disk_usage(".").free / 2**30
    durations: list[float] = []
    try:
        with tempfile.NamedTemporaryFile(dir=".") as file:
            for _ in range(20):
                file.write(b"x" * 4096)
                file.flush()
                began = time.perf_counter()
                os.fsync(file.fileno())
                durations.append(time.perf_counter() - began)
    except OSError as error:
        return DoctorFinding(
            "disk", "note", f"cannot write to this folder, the default place for runs/: {error.strerror}"
        )
    state: State = "ok" if free >= 2 else "note"
    return DoctorFinding(
        "disk", state, f"{free:.0f} GiB free here, fsync {sorted(durations)[10] * 1000:.1f} ms"
    )


def _backends() -> DoctorFinding:
    from instar.backends.packages import inspect_packages

    ready = [
        f"{name} ({package.version})"
        for name, package in inspect_packages().items()
        if package.problem is None
    ]
    state: State = "ok" if ready else "note"
    return DoctorFinding("backends", state, f"{', '.join(ready) or 'none'}; see `instar backends`")


def _sandbox() -> DoctorFinding:
    from instar.errors import ConfigError
    from instar.rewards.sandbox.factory import create_sandbox

    try:
        sandbox = asyncio.run(create_sandbox())
    except ConfigError as error:
        return DoctorFinding(
            "sandbox", "note", f"none, so rewards by command or unit tests are not available: {error}"
        )
    return DoctorFinding("sandbox", "ok", f"{sandbox.name}, for rewards by command or unit tests")


def _model() -> DoctorFinding:
    if is_cached(DEFAULT_MODEL):
        return DoctorFinding("default model", "ok", f"in {cache_dir() / 'models' / DEFAULT_MODEL}")
    return DoctorFinding("default model", "note", "not downloaded yet; the first run downloads it (93 MB)")


CHECKS: tuple[Callable[[], DoctorFinding], ...] = (
    _python,
    _machine,
    _compute,
    _disk,
    _package("renderers"),
    _package("transformers"),
    _package("torch", "local"),
    _package("peft", "local"),
    _package("reasoning-gym", "local"),
    _package("openai", "local"),
    _package("matplotlib", "local"),
    _backends,
    _sandbox,
    _model,
)
