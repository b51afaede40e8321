"""`instar roles`: the processes of a run, and what can be done to each of them alone."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from instar.cluster.control import Action, Request, RoleRow, ask
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
    rows = asyncio.run(_ask(folder, Request(action or "list", name or "", timeout)))
    if as_json:
        print(json.dumps([msgspec.to_builtins(row) for row in rows]), flush=True)
    else:
        Console().print(_table(rows))


async def _ask(folder: RunFolder, request: Request) -> list[RoleRow]:
    try:
        return await ask(folder.control, request)
    except (FileNotFoundError, ConnectionError):
        if request.do != "list":
            raise InstarError(f"the run in {folder.path} is not up") from None
        return await _last_known(folder)


async def _last_known(folder: RunFolder) -> list[RoleRow]:
    """What the roles of a run that is not up have said last."""
    config = folder.read_config()
    store = open_store(config, read_only=True)
    try:
        return [
            RoleRow(entry.role, entry.name, "down", doing=entry.doing, address=entry.url, log=entry.log)
            for entry in await store.endpoints(config.name)
        ]
    finally:
        await store.close()


def _table(rows: list[RoleRow]) -> Table:
    table = Table("role", "name", "pid", "state", "doing", "address", "log")
    for row in rows:
        table.add_row(row.role, row.name, str(row.pid or ""), row.state, row.doing, row.address, row.log)
    return table
