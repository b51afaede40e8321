"""`instar keys create`, `instar keys ls` and `instar keys revoke`."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Column
from rich.text import Text

from instar.cli.options import AsJson, RunDir, async_command, new_app
from instar.cli.output import format_time, plain_table, print_json, print_result
from instar.cli.run_store import open_run_store
from instar.errors import ConfigError, ConflictError, InstarError
from instar.gateway.auth import create_key
from instar.http.auth import hash_key
from instar.store.base import KeyKind

SHOWN_HASH_DIGITS = 12

app = new_app()


@app.command()
@async_command
async def create(
    run_dir: RunDir,
    agent: Annotated[
        str | None,
        typer.Option(help="Id of the agent. Default: the run's agent, or all agents with --feedback."),
    ] = None,
    admin: Annotated[bool, typer.Option("--admin", help="Create an admin key.")] = False,
    feedback: Annotated[
        bool, typer.Option("--feedback", help="Create a key that can only rate and correct replies.")
    ] = False,
    name: Annotated[str, typer.Option(help="Name of the key, which can be used to revoke it.")] = "",
    as_json: AsJson = False,
) -> None:
    """Create a key and print it. It cannot be shown again, because only its hash is stored."""
    if admin and agent is not None:
        raise ConfigError("--admin and --agent are mutually exclusive: an admin key belongs to no agent.")
    if admin and feedback:
        raise ConfigError("--admin and --feedback are mutually exclusive; create two keys.")
    if agent is not None and not agent.strip():
        raise ConfigError("--agent must not be empty.")
    async with open_run_store(run_dir) as (config, store):
        kind: KeyKind = "admin" if admin else "feedback" if feedback else "agent"
        agent_id = config.agent_id if kind == "agent" and agent is None else agent
        try:
            key = await create_key(store, kind, agent_id, name)
        except ConflictError:
            raise InstarError(f"A key named {name!r} already exists; revoke it or use a new name.") from None
        row = await store.key(hash_key(key))
    assert row is not None
    if as_json:
        print_json({"key": key, **asdict(row)})
        return
    typer.echo(key)
    owner = "all agents" if agent_id is None else f"agent {agent_id}"
    label = "an admin key" if admin else f"a {'feedback ' if feedback else ''}key for {owner}"
    typer.echo(f"Created {label}. It will not be shown again; revoke it with `instar keys revoke`.", err=True)


@app.command("ls")
@async_command
async def list_keys(run_dir: RunDir, as_json: AsJson = False) -> None:
    """List keys with their agents and their creation and revocation dates."""
    async with open_run_store(run_dir, read_only=True) as (_, store):
        rows = await store.keys()
    if as_json:
        print_json([asdict(row) for row in rows])
        return
    columns = [Column(name, no_wrap=True) for name in ("hash", "kind", "created", "revoked")]
    table = plain_table(*columns, "agent", "name")
    for row in rows:
        revoked = "" if row.revoked_at is None else format_time(row.revoked_at)
        prefix = row.key_hash[:SHOWN_HASH_DIGITS]
        table.add_row(
            prefix, row.kind, format_time(row.created_at), revoked, Text(row.agent_id or ""), Text(row.name)
        )
    Console().print(table)


@app.command()
@async_command
async def revoke(
    run_dir: RunDir,
    key: Annotated[
        str, typer.Argument(help="The key, its name, or at least the first 8 characters of its hash.")
    ],
    as_json: AsJson = False,
) -> None:
    """Revoke a key. A running gateway rejects it within 5 seconds."""
    async with open_run_store(run_dir) as (_, store):
        count = await store.revoke_key(key) or await store.revoke_key(hash_key(key))
    if count == 0:
        raise InstarError(
            "No active key matches. Pass the key, its name, or at least the first 8 characters of its hash "
            "(see `instar keys ls`)."
        )
    text = f"{count} key(s) revoked. A running gateway rejects them within 5 seconds."
    print_result(as_json, {"revoked": count}, text)
