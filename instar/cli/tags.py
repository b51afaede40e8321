"""`instar sessions tag` and `instar sessions untag`."""

from __future__ import annotations

import getpass
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from typing import Annotated, Any

import typer

from instar.cli.filters import build_session_filter, has_filters, parse_tag, with_session_filters
from instar.cli.options import AsJson, RunDir, SessionIds, async_command
from instar.cli.output import print_result
from instar.cli.run_store import open_run_store
from instar.errors import ConfigError
from instar.store.base import SessionFilter, SessionRow, Store
from instar.types import Tag

PAGE_SIZE = 500


async def iterate_pages(store: Store, run_id: str, where: SessionFilter) -> AsyncGenerator[list[SessionRow]]:
    """Yield the matching sessions in pages, oldest first. The caller may tag sessions between pages."""
    after = 0
    while rows := await store.sessions(run_id, where=where, after=after, limit=PAGE_SIZE):
        yield rows
        after = rows[-1].seq


async def require_sessions(store: Store, run_id: str, session_ids: Sequence[str]) -> None:
    for session_id in session_ids:
        session = await store.session(session_id)
        if session is None or session.run_id != run_id:
            raise ConfigError(f"There is no session {session_id} in this run; see `instar sessions ls`.")


@with_session_filters
@async_command
async def tag_sessions(
    run_dir: RunDir,
    tag_name: Annotated[
        str,
        typer.Argument(
            metavar="NAME[=VALUE]", help="The tag to add. `untrainable` excludes a session from training."
        ),
    ],
    filters: dict[str, Any],
    session_ids: SessionIds = None,
    reason: Annotated[str, typer.Option(help="The reason, stored with the tag.")] = "",
    author: Annotated[str, typer.Option(help="Name of the author. Default: the login name.")] = "",
    as_json: AsJson = False,
) -> None:
    """Tag sessions, selected by id or by filters."""
    if not session_ids and not has_filters(filters):
        raise ConfigError(
            "No sessions are selected; select them by id or by a filter such as --tag or --reward-max."
        )
    name, value = parse_tag(tag_name)
    tag = Tag("", name, value or "", reason, author or getpass.getuser())
    where = build_session_filter(filters, tuple(session_ids or ()))
    count = 0
    async with open_run_store(run_dir) as (config, store):
        await require_sessions(store, config.name, where.ids)
        async for rows in iterate_pages(store, config.name, where):
            await store.add_tags([replace(tag, session_id=row.session.session_id) for row in rows])
            count += len(rows)
    print_result(as_json, {"tagged": count}, f"{count} session(s) tagged {tag_name}")


@with_session_filters
@async_command
async def untag_sessions(
    run_dir: RunDir,
    tag_name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the tag to remove.")],
    filters: dict[str, Any],
    session_ids: SessionIds = None,
    as_json: AsJson = False,
) -> None:
    """Remove a tag from the selected sessions. By default, all sessions with the tag are selected."""
    where = build_session_filter(filters, tuple(session_ids or ()))
    where = replace(where, tags=(*where.tags, (tag_name, None)))
    count = 0
    async with open_run_store(run_dir) as (config, store):
        await require_sessions(store, config.name, where.ids)
        async for rows in iterate_pages(store, config.name, where):
            count += await store.remove_tags([row.session.session_id for row in rows], tag_name)
    print_result(as_json, {"untagged": count}, f"removed the tag {tag_name} from {count} session(s)")
