"""`instar backends`: where gradients can be computed, from this environment."""

from __future__ import annotations

import json
import os
import typing
from collections.abc import Mapping
from dataclasses import asdict, dataclass

import typer
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from instar.backends.base import ADAM_FIELDS, BackendCapabilities
from instar.backends.detect import detect_backend, find_services_in_environment
from instar.backends.factory import known_capabilities
from instar.backends.packages import REQUIREMENTS, InstalledPackage, inspect_packages
from instar.config import AutoBackendConfig, LossName, RunConfig
from instar.errors import ConfigError
from instar.registry import list_names


@dataclass(frozen=True)
class Row:
    name: str
    installed: bool
    version: str | None
    problem: str | None
    """Why it cannot run here, and what to type."""
    detected: bool
    """Whether `backend: auto` would take it."""
    why: str | None
    losses: list[str]
    features: list[str]
    optimizer: list[str]
    """Fields of `trainer.adam` that it honours."""
    artifacts: list[str]


def run_backends(*, as_json: bool) -> None:
    rows, conflict = list_backends(os.environ)
    if as_json:
        typer.echo(json.dumps({"backends": [asdict(row) for row in rows], "conflict": conflict}))
        return
    console = Console()
    console.print(_table(rows))
    for row in rows:
        if row.problem and (row.why or row.version):  # someone wants it
            console.print(f"{row.name}: {row.problem}", highlight=False, markup=False, soft_wrap=True)
    if conflict:
        console.print(f"auto is refused: {conflict}", highlight=False, markup=False, soft_wrap=True)


def list_backends(env: Mapping[str, str]) -> tuple[list[Row], str | None]:
    """Every backend, and why `backend: auto` would be refused, where it would."""
    clues = {name: reasons[0] for name, reasons in find_services_in_environment(env).items()}
    chosen, conflict = None, None
    try:
        detection = detect_backend(AutoBackendConfig(), env)
        chosen, clues[detection.name] = detection.name, detection.why
    except ConfigError as error:
        conflict = str(error)
    there = inspect_packages()
    known = [*there, *(other for other in list_names("backends") if other not in there)]
    return [_row(name, there.get(name), name == chosen, clues.get(name)) for name in known], conflict


def _row(name: str, found: InstalledPackage | None, chosen: bool, why: str | None) -> Row:
    can = _capabilities(name)
    return Row(
        name=name,
        installed=found is None or found.problem is None,
        version=found.version if found else None,
        problem=found.problem if found else None,
        detected=chosen,
        why=why,
        losses=sorted(can.losses) if can else [],
        features=_features(can) if can else [],
        optimizer=sorted(can.optimizer) if can else [],
        artifacts=sorted(can.artifacts) if can else [],
    )


def _capabilities(name: str) -> BackendCapabilities | None:
    """Of a backend with its default settings; of one from elsewhere, nothing is known before it is made."""
    if name not in REQUIREMENTS:
        return None
    return known_capabilities(RunConfig.model_validate({"backend": name}).backend)


def _features(can: BackendCapabilities) -> list[str]:
    said = {
        "full fine-tuning": can.full_finetuning,
        "reference KL": can.reference,
        "gradient norm": can.grad_norm,
    }
    return [feature for feature, there in said.items() if there]


def _table(rows: list[Row]) -> Table:
    table = Table("backend", "installed", "auto", Column("losses", overflow="fold"), "features")
    for row in rows:
        state = Text(row.version or "yes", "green") if row.installed else Text(row.version or "no", "red")
        auto = Text(f"chosen: {row.why}" if row.detected else row.why or "", "bold" if row.detected else "")
        every = set(row.losses) == set(typing.get_args(LossName))
        lacks = [f"no {name}" for name in sorted(ADAM_FIELDS - set(row.optimizer)) if row.optimizer]
        losses = "all" if every else ", ".join(row.losses)
        table.add_row(row.name, state, auto, losses, ", ".join([*row.features, *lacks]))
    return table
