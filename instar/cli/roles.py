"""`instar roles`: list the processes of a run, and control individual processes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import msgspec
import typer
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from instar.cli.options import AsJson, RunDir, async_command
from instar.cli.output import print_json
from instar.cli.run_store import open_run_store
from instar.cli.version_warnings import list_version_warnings, print_warnings
from instar.cluster.control import Action, ControlRequest, RoleStatus, send_control_request
from instar.cluster.layout import RunFolder
from instar.errors import InstarError
from instar.trainer.monitor import read_warnings

MAX_WARNINGS = 4
"""The number of warnings that `instar status` shows, newest last."""


@async_command
async def roles(
    run_dir: RunDir,
    action: Annotated[Action | None, typer.Argument(help="The action to apply to one process.")] = None,
    name: Annotated[str | None, typer.Argument(help="Name of the process, such as `engine-0`.")] = None,
    timeout: Annotated[
        float, typer.Option(min=1, help="Seconds that a process has to drain before it is stopped.")
    ] = 600.0,
    as_json: AsJson = False,
) -> None:
    """List the processes, or apply an action to one of them. The other processes keep running."""
    if action is not None and name is None:
        raise InstarError(
            f"The name of the process to {action} is missing; `instar roles {run_dir}` lists the processes."
        )
    await _list_or_control(run_dir, action or "list", name or "", timeout, as_json=as_json)


async def show_run_status(run_dir: Path, *, as_json: bool) -> None:
    await _list_or_control(run_dir, "list", as_json=as_json)


async def _list_or_control(
    run_dir: Path, action: Action | Literal["list"], name: str = "", timeout: float = 0.0, *, as_json: bool
) -> None:
    folder = RunFolder(run_dir)
    folder.read_config()  # raises ConfigError if this is not a run folder
    rows = await fetch_roles(run_dir, ControlRequest(action, name, timeout))
    if as_json:
        print_json([msgspec.to_builtins(row) for row in rows])
    else:
        console = Console()
        print_roles(rows, console)
        print_warnings(read_warnings(folder.path)[-MAX_WARNINGS:], console)
        print_warnings(await _read_version_warnings(run_dir), console)


async def _read_version_warnings(run_dir: Path) -> list[str]:
    async with open_run_store(run_dir, read_only=True) as (config, store):
        return await list_version_warnings(store, config)


async def fetch_roles(run_dir: Path, request: ControlRequest | None = None) -> list[RoleStatus]:
    """Send the request, by default to list the roles, to a run and return the roles in its response. If the
    run is not running, return what its processes reported last, or raise InstarError for other requests."""
    request = request or ControlRequest("list")
    try:
        return await send_control_request(RunFolder(run_dir).control_socket, request)
    except (FileNotFoundError, ConnectionError):
        if request.do != "list":
            raise InstarError(f"The run in {run_dir} is not running; start it first.") from None
        return await _read_last_state(run_dir)


async def _read_last_state(run_dir: Path) -> list[RoleStatus]:
    """Return the last reported activity, address and log of each process of a stopped run."""
    async with open_run_store(run_dir, read_only=True) as (config, store):
        return [
            RoleStatus(entry.role, entry.name, "down", doing=entry.doing, address=entry.url, log=entry.log)
            for entry in await store.endpoints(config.name)
        ]


def print_roles(rows: list[RoleStatus], console: Console) -> None:
    # People copy addresses and paths, so the table never truncates them.
    table = Table(
        Column("name", no_wrap=True),
        Column("pid", no_wrap=True, justify="right"),
        Column("state", no_wrap=True),
        Column("address", no_wrap=True, overflow="ignore"),
        Column("activity"),
        box=None,
        padding=(0, 2, 0, 0),
    )
    for row in rows:
        table.add_row(row.name, str(row.pid or ""), row.state, row.address, Text(row.doing))
    console.print(table)
    if logs := [row for row in rows if row.log]:
        console.print("\nlogs")
    for row in logs:
        console.print(Text(f"  {row.log}"), soft_wrap=True)
