"""`instar backends`: list and check the training backends. The subcommand `serve` is in `backends_serve`."""

from __future__ import annotations

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
from instar.backends.factory import get_known_capabilities
from instar.backends.packages import REQUIREMENTS, PackageStatus, inspect_packages
from instar.backends.resolve import detect_backend, find_services_in_environment
from instar.cli.backends_serve import serve
from instar.cli.options import AsJson, new_app
from instar.cli.output import print_json
from instar.config import AutoBackendConfig, LossName, RunConfig
from instar.errors import ConfigError
from instar.registry import list_names


@dataclass(frozen=True)
class BackendRow:
    name: str
    installed: bool
    version: str | None
    problem: str | None
    """Why the backend cannot run here and how to fix it, or None if it can run."""
    detected: bool
    """True if `backend: auto` would choose the backend."""
    why: str | None
    """The reason to choose the backend, such as a variable in the environment, or None."""
    losses: list[str]
    features: list[str]
    optimizer: list[str]
    """The fields of `trainer.adam` that the backend supports."""
    artifacts: list[str]


app = new_app(no_args_is_help=False)
app.command()(serve)


@app.callback(invoke_without_command=True)
def backends(context: typer.Context, as_json: AsJson = False) -> None:
    """Without a subcommand, show for each backend whether it is installed, whether `backend: auto` chooses
    it, and what it supports."""
    if context.invoked_subcommand is not None:
        return
    rows, conflict = list_backends(os.environ)
    if as_json:
        print_json({"backends": [asdict(row) for row in rows], "conflict": conflict})
        return
    console = Console()
    console.print(_make_table(rows))
    # Hide the problems of backends that are neither configured nor partly installed.
    lines = [f"{row.name}: {row.problem}" for row in rows if row.problem and (row.why or row.version)]
    lines += [f"`backend: auto` cannot choose: {conflict}"] if conflict else []
    for line in lines:
        console.print(line, highlight=False, markup=False, soft_wrap=True)


@app.command()
def check(
    name: Annotated[str, typer.Argument(help="Backend: local, tinker, mint, weaver or verl.")],
    url: Annotated[
        str | None, typer.Option(help="URL of the service to check. By default, a local server is started.")
    ] = None,
    python: Annotated[
        str | None, typer.Option(help="Python interpreter that has the backend's package.")
    ] = None,
    dtype: Annotated[
        Literal["fp32", "bf16"],
        typer.Option(help="Data type. The tolerance is 1e-5 for fp32 and 2e-2 for bf16 (10x for verl)."),
    ] = "fp32",
    as_json: AsJson = False,
) -> None:
    """Run the conformance suite, which compares the backend's results with those of the local backend."""
    from instar.conformance.check import run_check

    run_check(name, url=url, python=python, dtype=dtype, as_json=as_json)


def list_backends(env: Mapping[str, str]) -> tuple[list[BackendRow], str | None]:
    """Return all backends, and the error message if `backend: auto` would fail, else None."""
    reasons = {name: reasons[0] for name, reasons in find_services_in_environment(env).items()}
    chosen, conflict = None, None
    try:
        detection = detect_backend(AutoBackendConfig(), env)
        chosen, reasons[detection.name] = detection.name, detection.reason
    except ConfigError as error:
        conflict = str(error)
    packages = inspect_packages()
    names = [*packages, *(name for name in list_names("backends") if name not in packages)]
    rows = [_make_row(name, packages.get(name), name == chosen, reasons.get(name)) for name in names]
    return rows, conflict


def _make_row(name: str, package: PackageStatus | None, is_chosen: bool, reason: str | None) -> BackendRow:
    # The capabilities of plugins are unknown.
    config = RunConfig.model_validate({"backend": name}).backend if name in REQUIREMENTS else None
    capabilities = get_known_capabilities(config) if config else None
    return BackendRow(
        name=name,
        installed=package is None or package.problem is None,
        version=package.version if package else None,
        problem=package.problem if package else None,
        detected=is_chosen,
        why=reason,
        losses=sorted(capabilities.losses) if capabilities else [],
        features=_list_features(capabilities) if capabilities else [],
        optimizer=sorted(capabilities.optimizer_settings) if capabilities else [],
        artifacts=sorted(capabilities.artifacts) if capabilities else [],
    )


def _list_features(capabilities: BackendCapabilities) -> list[str]:
    features = {
        "full fine-tuning": capabilities.supports_full_finetuning,
        "reference KL": capabilities.has_reference,
        "gradient norm": capabilities.reports_grad_norm,
    }
    return [feature for feature, is_supported in features.items() if is_supported]


def _make_table(rows: list[BackendRow]) -> Table:
    table = Table("backend", "installed", "auto", Column("losses", overflow="fold"), "features")
    for row in rows:
        state = Text(row.version or "yes", "green") if row.installed else Text(row.version or "no", "red")
        auto = Text(f"chosen: {row.why}" if row.detected else row.why or "", "bold" if row.detected else "")
        has_all_losses = set(row.losses) == set(typing.get_args(LossName))
        losses = "all" if has_all_losses else ", ".join(row.losses)
        unsupported = [f"no {name}" for name in sorted(ADAM_FIELDS - set(row.optimizer)) if row.optimizer]
        table.add_row(row.name, state, auto, losses, ", ".join([*row.features, *unsupported]))
    return table
