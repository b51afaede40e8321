"""`instar roles` and `instar status`: list the processes of a run, and control each of them."""

from __future__ import annotations

import asyncio
import json
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import typer
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from instar.cli.options import AsJson, RunDir
from instar.cluster.control import Action, ControlRequest, RoleStatus, send_control_request
from instar.cluster.layout import RunFolder
from instar.errors import InstarError
from instar.store.factory import open_store


class RoleAction(StrEnum):
    restart = "restart"
    drain = "drain"
    stop = "stop"
    start = "start"


def roles(
    run_dir: RunDir,
    action: Annotated[RoleAction | None, typer.Argument(help="What to do with one of them.")] = None,
    name: Annotated[str | None, typer.Argument(help="Its name, e.g. `engine-0` or `trainer`.")] = None,
    timeout: Annotated[
        float, typer.Option(min=1, help="Seconds that a role has to drain before it is stopped.")
    ] = 600.0,
    as_json: AsJson = False,
) -> None:
    """List the processes if no action is given. The other processes keep running while one of them is
    controlled."""
    if action is not None and name is None:
        raise InstarError(f"Name the role to {action}; `instar roles {run_dir}` lists them.")
    _list_or_control(run_dir, action.value if action else "list", name or "", timeout, as_json=as_json)


def status(run_dir: RunDir, as_json: AsJson = False) -> None:
    _list_or_control(run_dir, "list", as_json=as_json)


def _list_or_control(
    run_dir: Path, action: Action | Literal["list"], name: str = "", timeout: float = 0.0, *, as_json: bool
) -> None:
    folder = RunFolder(run_dir)
    folder.read_config()  # raises ConfigError if this is not the folder of a run
    rows = asyncio.run(_ask(folder, ControlRequest(action, name, timeout)))
    if as_json:
        print(json.dumps([msgspec.to_builtins(row) for row in rows]), flush=True)
    else:
        _print_roles(rows, Console())


async def _ask(folder: RunFolder, request: ControlRequest) -> list[RoleStatus]:
    try:
        return await send_control_request(folder.control_socket, request)
    except (FileNotFoundError, ConnectionError):
        if request.do != "list":
            raise InstarError(f"The run in {folder.path} is not running.") from None
        return await _read_last_state(folder)


async def _read_last_state(folder: RunFolder) -> list[RoleStatus]:
    """Return the last reported state of each role, for a run that is not running."""
    config = folder.read_config()
    store = open_store(config, read_only=True)
    try:
        return [
            RoleStatus(entry.role, entry.name, "down", doing=entry.doing, address=entry.url, log=entry.log)
            for entry in await store.endpoints(config.name)
        ]
    finally:
        await store.close()


def _print_roles(rows: list[RoleStatus], console: Console) -> None:
    # People copy addresses and paths, so these are never truncated.
    table = Table(
        Column("name", no_wrap=True),
        Column("pid", no_wrap=True, justify="right"),
        Column("state", no_wrap=True),
        Column("address", no_wrap=True, overflow="ignore"),
        Column("doing"),
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
