"""`instar backends`: list the training backends and check them. `backends_serve` has the subcommand
`serve`."""

from __future__ import annotations

import json
import os
import typing
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Annotated, Literal

import typer
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from instar.backends.base import ADAM_FIELDS, BackendCapabilities
from instar.backends.detect import detect_backend, find_services_in_environment
from instar.backends.factory import known_capabilities
from instar.backends.packages import REQUIREMENTS, InstalledPackage, inspect_packages
from instar.cli.backends_serve import serve
from instar.cli.options import AsJson, new_app
from instar.config import AutoBackendConfig, LossName, RunConfig
from instar.errors import ConfigError
from instar.registry import list_names


@dataclass(frozen=True)
class BackendRow:
    name: str
    installed: bool
    version: str | None
    problem: str | None
    """Why the backend cannot run here, with the command that fixes it; None if it can."""
    detected: bool
    """True if `backend: auto` would choose the backend."""
    why: str | None
    losses: list[str]
    features: list[str]
    optimizer: list[str]
    """The fields of `trainer.adam` that the backend supports."""
    artifacts: list[str]


app = new_app(no_args_is_help=False)
app.command()(serve)


@app.callback(invoke_without_command=True)
def backends(context: typer.Context, as_json: AsJson = False) -> None:
    """Show which backends are installed, which one `backend: auto` would choose and why, and what each
    backend supports, unless a subcommand is given."""
    if context.invoked_subcommand is None:
        _print_backends(as_json=as_json)


@app.command()
def check(
    name: Annotated[str, typer.Argument(help="local, tinker, mint, weaver or verl.")],
    url: Annotated[
        str | None, typer.Option(help="A server to check against. Default: one that is started here.")
    ] = None,
    python: Annotated[str | None, typer.Option(help="Interpreter that has the backend's package.")] = None,
    dtype: Annotated[Literal["fp32", "bf16"], typer.Option(help="Compared to 1e-5, or to 2e-2.")] = "fp32",
    as_json: AsJson = False,
) -> None:
    """Run the conformance suite: a backend must compute the same numbers as the local one, step by step."""
    from instar.conformance.check import run_check

    run_check(name, url=url, python=python, dtype=dtype, as_json=as_json)


def _print_backends(*, as_json: bool) -> None:
    rows, conflict = list_backends(os.environ)
    if as_json:
        typer.echo(json.dumps({"backends": [asdict(row) for row in rows], "conflict": conflict}))
        return
    console = Console()
    console.print(_table(rows))
    for row in rows:
        if row.problem and (row.why or row.version):  # it is configured or partly installed
            console.print(f"{row.name}: {row.problem}", highlight=False, markup=False, soft_wrap=True)
    if conflict:
        console.print(
            f"`backend: auto` cannot choose: {conflict}", highlight=False, markup=False, soft_wrap=True
        )


def list_backends(env: Mapping[str, str]) -> tuple[list[BackendRow], str | None]:
    """Return every backend, and the reason why `backend: auto` cannot choose one, or None if it can."""
    clues = {name: reasons[0] for name, reasons in find_services_in_environment(env).items()}
    chosen, conflict = None, None
    try:
        detection = detect_backend(AutoBackendConfig(), env)
        chosen, clues[detection.name] = detection.name, detection.reason
    except ConfigError as error:
        conflict = str(error)
    installed = inspect_packages()
    known = [*installed, *(other for other in list_names("backends") if other not in installed)]
    return [_row(name, installed.get(name), name == chosen, clues.get(name)) for name in known], conflict


def _row(name: str, package: InstalledPackage | None, chosen: bool, why: str | None) -> BackendRow:
    capabilities = _capabilities(name)
    return BackendRow(
        name=name,
        installed=package is None or package.problem is None,
        version=package.version if package else None,
        problem=package.problem if package else None,
        detected=chosen,
        why=why,
        losses=sorted(capabilities.losses) if capabilities else [],
        features=_features(capabilities) if capabilities else [],
        optimizer=sorted(capabilities.optimizer) if capabilities else [],
        artifacts=sorted(capabilities.artifacts) if capabilities else [],
    )


def _capabilities(name: str) -> BackendCapabilities | None:
    """Return a backend's capabilities with default settings, or None for a backend that a plugin provides."""
    if name not in REQUIREMENTS:
        return None
    return known_capabilities(RunConfig.model_validate({"backend": name}).backend)


def _features(capabilities: BackendCapabilities) -> list[str]:
    features = {
        "full fine-tuning": capabilities.full_finetuning,
        "reference KL": capabilities.reference,
        "gradient norm": capabilities.grad_norm,
    }
    return [feature for feature, is_supported in features.items() if is_supported]


def _table(rows: list[BackendRow]) -> Table:
    table = Table("backend", "installed", "auto", Column("losses", overflow="fold"), "features")
    for row in rows:
        state = Text(row.version or "yes", "green") if row.installed else Text(row.version or "no", "red")
        auto = Text(f"chosen: {row.why}" if row.detected else row.why or "", "bold" if row.detected else "")
        every = set(row.losses) == set(typing.get_args(LossName))
        lacks = [f"no {name}" for name in sorted(ADAM_FIELDS - set(row.optimizer)) if row.optimizer]
        losses = "all" if every else ", ".join(row.losses)
        table.add_row(row.name, state, auto, losses, ", ".join([*row.features, *lacks]))
    return table
