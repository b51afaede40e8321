"""`instar keys create`, `instar keys ls` and `instar keys revoke`."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path

import typer
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from instar.cli.run_store import store_of
from instar.errors import ConfigError, Conflict, InstarError
from instar.gateway.auth import create_key, hash_key
from instar.store.base import KeyRow
from instar.types import Json

SHOWN_DIGITS = 12


def run_create(run_dir: Path, *, agent: str | None, admin: bool, name: str, as_json: bool) -> None:
    if admin and agent is not None:
        raise ConfigError("an admin key is of no agent: give --admin or --agent")
    if agent is not None and not agent.strip():
        raise ConfigError("--agent is empty")
    asyncio.run(_create(run_dir, agent, admin, name, as_json))


async def _create(run_dir: Path, agent: str | None, admin: bool, name: str, as_json: bool) -> None:
    async with store_of(run_dir) as (config, store):
        agent_id = None if admin else agent or config.agent_id
        try:
            key = await create_key(store, "admin" if admin else "agent", agent_id, name)
        except Conflict:
            raise InstarError(f"a key named {name!r} is in use: revoke it, or give another name") from None
        row = await store.key(hash_key(key))
    assert row is not None, "it was just written"
    if as_json:
        typer.echo(json.dumps({"key": key, **_facts(row)}))
        return
    typer.echo(key)
    whose = "An admin key" if admin else f"A key of agent {agent_id}"
    typer.echo(f"{whose}. It is not shown again; `instar keys revoke` ends it.", err=True)


def run_ls(run_dir: Path, *, as_json: bool) -> None:
    asyncio.run(_ls(run_dir, as_json))


async def _ls(run_dir: Path, as_json: bool) -> None:
    async with store_of(run_dir, read_only=True) as (_, store):
        rows = await store.keys()
    if as_json:
        typer.echo(json.dumps([_facts(row) for row in rows]))
        return
    columns = [Column(name, no_wrap=True) for name in ("hash", "kind", "created", "revoked")]
    table = Table(*columns, Column("agent"), Column("name"), box=None, padding=(0, 1, 0, 0))
    for row in rows:
        revoked = "" if row.revoked_at is None else _when(row.revoked_at)
        digits = row.key_hash[:SHOWN_DIGITS]
        table.add_row(
            digits, row.kind, _when(row.created_at), revoked, Text(row.agent_id or ""), Text(row.name)
        )
    Console().print(table)


def run_revoke(run_dir: Path, given: str, *, as_json: bool) -> None:
    asyncio.run(_revoke(run_dir, given, as_json))


async def _revoke(run_dir: Path, given: str, as_json: bool) -> None:
    async with store_of(run_dir) as (_, store):
        count = await store.revoke_key(given) or await store.revoke_key(hash_key(given))
    if count == 0:
        raise InstarError(
            "no key is revoked: none in use is this one, has this name or a hash that begins so "
            "(eight digits or more; see `instar keys ls`)"
        )
    if as_json:
        typer.echo(json.dumps({"revoked": count}))
    else:
        typer.echo(f"{count} key(s) revoked. A gateway that runs refuses them within 5 seconds.")


def _when(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))


def _facts(row: KeyRow) -> Json:
    return {
        "key_hash": row.key_hash,
        "kind": row.kind,
        "agent_id": row.agent_id,
        "name": row.name,
        "created_at": row.created_at,
        "revoked_at": row.revoked_at,
    }
