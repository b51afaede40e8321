"""`instar roles`: the processes of a run, and what can be done to each of them alone."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from instar.cluster.control import Action, ControlRequest, RoleStatus, send_control_request
from instar.cluster.layout import RunFolder
from instar.errors import InstarError
from instar.store.factory import open_store


def run_roles(
    run_dir: Path, action: Action | None, name: str | None, timeout: float, *, as_json: bool
) -> None:
    if action is not None and name is None:
        raise InstarError(f"which role is to {action}? `instar roles {run_dir}` lists them")
    folder = RunFolder(run_dir)
    folder.read_config()  # says so where it is no run's folder
    rows = asyncio.run(_ask(folder, ControlRequest(action or "list", name or "", timeout)))
    if as_json:
        print(json.dumps([msgspec.to_builtins(row) for row in rows]), flush=True)
    else:
        _show(rows, Console())


async def _ask(folder: RunFolder, request: ControlRequest) -> list[RoleStatus]:
    try:
        return await send_control_request(folder.control_socket, request)
    except (FileNotFoundError, ConnectionError):
        if request.do != "list":
            raise InstarError(f"the run in {folder.path} is not up") from None
        return await _last_known(folder)


async def _last_known(folder: RunFolder) -> list[RoleStatus]:
    """What the roles of a run that is not up have said last."""
    config = folder.read_config()
    store = open_store(config, read_only=True)
    try:
        return [
            RoleStatus(entry.role, entry.name, "down", doing=entry.doing, address=entry.url, log=entry.log)
            for entry in await store.endpoints(config.name)
        ]
    finally:
        await store.close()


def _show(rows: list[RoleStatus], console: Console) -> None:
    """Addresses and paths are to be copied: they are never cut short."""
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
