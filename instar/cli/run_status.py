"""`instar status RUN_DIR`: the sessions, versions and processes of a run, and what it trains on when."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from instar.cli.learning_status import LearningReport, make_learning_report
from instar.cli.output import print_json
from instar.cli.roles import fetch_roles, print_roles
from instar.cli.run_store import open_run_store
from instar.cli.service.external import NOTHING, ExternalService, list_external_services
from instar.cli.version_warnings import list_version_warnings
from instar.trainer.monitor import read_warnings

MAX_WARNINGS = 4
"""The number of warnings that are shown, newest last."""

Rows = list[tuple[str, str]]


async def show_run_status(run_dir: Path, *, as_json: bool) -> None:
    async with open_run_store(run_dir, read_only=True) as (config, store):
        roles = await fetch_roles(run_dir)
        learning = await make_learning_report(config, store, roles)
        version_warnings = await list_version_warnings(store, config)
    external = list_external_services(config)
    warnings = [*read_warnings(run_dir)[-MAX_WARNINGS:], *version_warnings]
    if as_json:
        report = {"learning": learning, "external": external, "roles": roles, "warnings": warnings}
        print_json(msgspec.to_builtins(report, str_keys=True))
        return
    console = Console()
    print_rows([*list_learning_rows(learning), *list_external_rows(external)], console)
    if roles:
        console.print()
        print_roles(roles, console)
    for warning in warnings:
        console.print(Text(f"warning: {warning}", style="yellow"))


def list_learning_rows(report: LearningReport | None) -> Rows:
    if report is None:
        return []
    counts = {"sessions": report.sessions, "rewards": report.rewards}
    return [*((label, _join_counts(count)) for label, count in counts.items()), *report.list_rows()]


def list_external_rows(services: Sequence[ExternalService] | None) -> Rows:
    return [("external", text) for text in [item.describe() for item in services or ()] or [NOTHING]]


def print_rows(rows: Rows, console: Console) -> None:
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    table.add_column(no_wrap=True, style="bold")
    table.add_column(overflow="fold")
    for label, value in rows:
        table.add_row(label, Text(value))
    console.print(table)


def _join_counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in counts.items()) or "none"
