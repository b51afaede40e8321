"""`instar sessions tag` and `instar sessions untag`."""

from __future__ import annotations

import asyncio
import getpass
import json
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import typer

from instar.cli.filters import is_given, parse_tag, session_filter
from instar.cli.run_store import store_of
from instar.errors import ConfigError
from instar.store.base import SessionFilter, SessionRow, Store
from instar.types import Tag

AT_ONCE = 500


async def pages(store: Store, run_id: str, where: SessionFilter) -> AsyncGenerator[list[SessionRow]]:
    """The sessions that are meant, oldest first. They may be tagged as they come."""
    after = 0
    while rows := await store.sessions(run_id, where=where, after=after, limit=AT_ONCE):
        yield rows
        after = rows[-1].seq


async def require(store: Store, run_id: str, session_ids: Sequence[str]) -> None:
    for session_id in session_ids:
        session = await store.session(session_id)
        if session is None or session.run_id != run_id:
            raise ConfigError(f"there is no session {session_id} in this run")


def run_tag(
    run_dir: Path,
    given: str,
    session_ids: list[str],
    chosen: dict[str, Any],
    *,
    reason: str,
    author: str,
    as_json: bool,
) -> None:
    if not session_ids and not is_given(chosen):
        raise ConfigError("which sessions? Give their ids, or a filter: --tag, --reward-max, --status, ...")
    name, value = parse_tag(given)
    tag = Tag("", name, value or "", reason, author or getpass.getuser())
    tagged = asyncio.run(_tag(run_dir, tag, session_filter(chosen, tuple(session_ids))))
    typer.echo(json.dumps({"tagged": tagged}) if as_json else f"{tagged} session(s) tagged {given}")


async def _tag(run_dir: Path, tag: Tag, where: SessionFilter) -> int:
    tagged = 0
    async with store_of(run_dir) as (config, store):
        await require(store, config.name, where.ids)
        async for rows in pages(store, config.name, where):
            await store.add_tags([replace(tag, session_id=row.session.session_id) for row in rows])
            tagged += len(rows)
    return tagged


def run_untag(
    run_dir: Path, name: str, session_ids: list[str], chosen: dict[str, Any], *, as_json: bool
) -> None:
    where = session_filter(chosen, tuple(session_ids))
    where = replace(where, tags=(*where.tags, (name, None)))
    untagged = asyncio.run(_untag(run_dir, name, where))
    typer.echo(json.dumps({"untagged": untagged}) if as_json else f"{untagged} session(s) untagged {name}")


async def _untag(run_dir: Path, name: str, where: SessionFilter) -> int:
    untagged = 0
    async with store_of(run_dir) as (config, store):
        await require(store, config.name, where.ids)
        async for rows in pages(store, config.name, where):
            untagged += await store.remove_tags([row.session.session_id for row in rows], name)
    return untagged
