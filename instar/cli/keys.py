"""`instar keys create`, `instar keys ls` and `instar keys revoke`."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from instar.cli.options import AsJson, RunDir, new_app
from instar.cli.run_store import open_run_store
from instar.errors import ConfigError, ConflictError, InstarError
from instar.gateway.auth import create_key
from instar.http.auth import hash_key
from instar.store.base import KeyRow
from instar.types import Json

SHOWN_DIGITS = 12

app = new_app()


@app.command()
def create(
    run_dir: RunDir,
    agent: Annotated[str | None, typer.Option(help="The agent. Default: the run's agent.")] = None,
    admin: Annotated[bool, typer.Option("--admin", help="Create an admin key.")] = False,
    name: Annotated[str, typer.Option(help="A name to revoke the key by.")] = "",
    as_json: AsJson = False,
) -> None:
    """Create a key and print it once; only its hash is stored."""
    if admin and agent is not None:
        raise ConfigError("--admin and --agent exclude each other: an admin key belongs to no agent.")
    if agent is not None and not agent.strip():
        raise ConfigError("--agent must not be empty.")
    asyncio.run(_create(run_dir, agent, admin, name, as_json))


async def _create(run_dir: Path, agent: str | None, admin: bool, name: str, as_json: bool) -> None:
    async with open_run_store(run_dir) as (config, store):
        agent_id = None if admin else agent or config.agent_id
        try:
            key = await create_key(store, "admin" if admin else "agent", agent_id, name)
        except ConflictError:
            raise InstarError(f"A key named {name!r} exists; revoke it or choose another name.") from None
        row = await store.key(hash_key(key))
    assert row is not None
    if as_json:
        typer.echo(json.dumps({"key": key, **_key_details(row)}))
        return
    typer.echo(key)
    owner = "An admin key" if admin else f"A key of agent {agent_id}"
    typer.echo(f"{owner}. It is not shown again; revoke it with `instar keys revoke`.", err=True)


@app.command("ls")
def list_keys(run_dir: RunDir, as_json: AsJson = False) -> None:
    """List keys with their agent and their dates of creation and revocation."""
    asyncio.run(_ls(run_dir, as_json))


async def _ls(run_dir: Path, as_json: bool) -> None:
    async with open_run_store(run_dir, read_only=True) as (_, store):
        rows = await store.keys()
    if as_json:
        typer.echo(json.dumps([_key_details(row) for row in rows]))
        return
    columns = [Column(name, no_wrap=True) for name in ("hash", "kind", "created", "revoked")]
    table = Table(*columns, Column("agent"), Column("name"), box=None, padding=(0, 1, 0, 0))
    for row in rows:
        revoked = "" if row.revoked_at is None else _format_time(row.revoked_at)
        digits = row.key_hash[:SHOWN_DIGITS]
        table.add_row(
            digits, row.kind, _format_time(row.created_at), revoked, Text(row.agent_id or ""), Text(row.name)
        )
    Console().print(table)


@app.command()
def revoke(
    run_dir: RunDir,
    key: Annotated[str, typer.Argument(help="The key, its name, or the beginning of its hash.")],
    as_json: AsJson = False,
) -> None:
    """Revoke a key. A running gateway rejects it within 5 seconds."""
    asyncio.run(_revoke(run_dir, key, as_json))


async def _revoke(run_dir: Path, key: str, as_json: bool) -> None:
    async with open_run_store(run_dir) as (_, store):
        count = await store.revoke_key(key) or await store.revoke_key(hash_key(key))
    if count == 0:
        raise InstarError(
            "No key was revoked: no active key has this value, this name, or a hash that begins with it "
            "(at least eight digits; see `instar keys ls`)."
        )
    if as_json:
        typer.echo(json.dumps({"revoked": count}))
    else:
        typer.echo(f"{count} key(s) revoked. A running gateway rejects them within 5 seconds.")


def _format_time(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))


def _key_details(row: KeyRow) -> Json:
    return {
        "key_hash": row.key_hash,
        "kind": row.kind,
        "agent_id": row.agent_id,
        "name": row.name,
        "created_at": row.created_at,
        "revoked_at": row.revoked_at,
    }
