"""`instar doctor`: check this machine for missing packages and other problems."""

from __future__ import annotations

import asyncio
import importlib.metadata
import os
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Literal

import typer
from rich.console import Console
from rich.table import Table

from instar.cli.options import AsJson
from instar.cli.output import print_json
from instar.models import DEFAULT_MODEL, cache_dir, is_local

State = Literal["ok", "note", "missing"]
STATE_LABELS = {"ok": "[green]ok[/]", "note": "[yellow]note[/]", "missing": "[red]missing[/]"}


@dataclass(frozen=True)
class DoctorFinding:
    what: str
    state: State
    detail: str


def doctor(as_json: AsJson = False) -> None:
    findings = [check() for check in CHECKS]
    if as_json:
        print_json([asdict(finding) for finding in findings])
    else:
        table = Table("check", "state", "detail")
        for finding in findings:
            table.add_row(finding.what, STATE_LABELS[finding.state], finding.detail)
        Console().print(table)
    if any(finding.state == "missing" for finding in findings):
        raise typer.Exit(1)


def _check_python() -> DoctorFinding:
    state: State = "ok" if sys.version_info >= (3, 11) else "missing"
    return DoctorFinding("python", state, f"{platform.python_version()} (3.11+ needed)")


def _check_package(name: str, extra: str | None = None) -> DoctorFinding:
    try:
        return DoctorFinding(name, "ok", importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        hint = f"pip install 'instar[{extra}]'" if extra else f"pip install {name}"
        return DoctorFinding(name, "missing", hint)


def _check_machine() -> DoctorFinding:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    detail = f"{os.cpu_count()} cores, {memory:.0f} GiB (the demo uses about 6 GiB)"
    return DoctorFinding("machine", "ok" if memory >= 8 else "note", detail)


def _check_compute() -> DoctorFinding:
    try:
        import torch
    except ModuleNotFoundError:
        return DoctorFinding("compute", "missing", "torch is not installed: pip install 'instar[local]'")
    from instar.config import ModelConfig
    from instar.models import device_and_dtype

    device, dtype = device_and_dtype(ModelConfig())
    name = torch.cuda.get_device_name() if device == "cuda" else platform.processor() or "CPU"
    if device == "cpu" and dtype == "fp32":
        return DoctorFinding("compute", "note", f"{device}, {dtype} ({name}), no fast bf16")
    return DoctorFinding("compute", "ok", f"{device}, {dtype} ({name})")


def _check_disk() -> DoctorFinding:
    free_gib = shutil.disk_usage(".").free / 2**30
    durations: list[float] = []
    try:
        with tempfile.NamedTemporaryFile(dir=".") as file:
            for _ in range(20):
                file.write(b"x" * 4096)
                file.flush()
                started = time.perf_counter()
                os.fsync(file.fileno())
                durations.append(time.perf_counter() - started)
    except OSError as error:
        detail = f"cannot write to this folder, where runs/ is created by default: {error.strerror}"
        return DoctorFinding("disk", "note", detail)
    detail = f"{free_gib:.0f} GiB free in this folder, fsync {sorted(durations)[10] * 1000:.1f} ms"
    return DoctorFinding("disk", "ok" if free_gib >= 2 else "note", detail)


def _check_backends() -> DoctorFinding:
    from instar.backends.packages import inspect_packages

    packages = inspect_packages().items()
    usable = [f"{name} ({package.version})" for name, package in packages if package.problem is None]
    detail = f"{', '.join(usable) or 'none'}; see `instar backends`"
    return DoctorFinding("backends", "ok" if usable else "note", detail)


def _check_sandbox() -> DoctorFinding:
    from instar.errors import ConfigError
    from instar.rewards.sandbox.factory import create_sandbox

    try:
        sandbox = asyncio.run(create_sandbox())
    except ConfigError as error:
        detail = f"none, so `command` and `tests` rewards are not available: {error}"
        return DoctorFinding("sandbox", "note", detail)
    return DoctorFinding("sandbox", "ok", f"{sandbox.name}, for `command` and `tests` rewards")


def _check_model() -> DoctorFinding:
    if is_local(DEFAULT_MODEL):
        return DoctorFinding("default model", "ok", f"in {cache_dir() / 'models' / DEFAULT_MODEL}")
    return DoctorFinding("default model", "note", "not downloaded yet; the first run downloads it (93 MB)")


CHECKS: tuple[Callable[[], DoctorFinding], ...] = (
    _check_python,
    _check_machine,
    _check_compute,
    _check_disk,
    *(partial(_check_package, name) for name in ("renderers", "transformers")),
    *(
        partial(_check_package, name, "local")
        for name in ("torch", "peft", "llguidance", "reasoning-gym", "openai", "matplotlib")
    ),
    _check_backends,
    _check_sandbox,
    _check_model,
)
