"""`instar curate`: what the checks find in a run's sessions, reported or tagged."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from instar.cli.filters import session_filter
from instar.cli.run_store import store_of
from instar.config import RunConfig
from instar.curation.base import Finding, Limits, Seen
from instar.curation.checks import CHECKS
from instar.data.combine import Combine
from instar.errors import ConfigError
from instar.store.base import SessionFilter, SessionRow, Store
from instar.types import Call, Message, SessionStatus, Tag

AT_ONCE = 256
ENDED = (SessionStatus.COMPLETED, SessionStatus.FAILED)
SHOWN = 20
"""Findings of a check that people are shown."""


def run_curate(
    run_dir: Path, chosen: dict[str, Any], *, apply: bool, checks: list[str], limit: int, as_json: bool
) -> None:
    if unknown := set(checks) - set(CHECKS):
        raise ConfigError(f"--check: {', '.join(sorted(unknown))} is not one of: {', '.join(CHECKS)}")
    names = checks or list(CHECKS)
    looked_at, findings = asyncio.run(_curate(run_dir, session_filter(chosen), names, limit, apply))
    if as_json:
        found = [asdict(finding) for finding in findings]
        typer.echo(json.dumps({"sessions": looked_at, "applied": apply, "findings": found}))
    else:
        _print(Console(), names, looked_at, findings, apply)


async def _curate(
    run_dir: Path, where: SessionFilter, names: Sequence[str], limit: int, apply: bool
) -> tuple[int, list[Finding]]:
    async with store_of(run_dir, read_only=not apply) as (config, store):
        seen = await look_at(store, config, where, limit)
        findings = [finding for name in names for finding in CHECKS[name](seen, Limits())]
        if apply:
            for finding in findings:
                await store.add_tags(tags_of(finding))
    return len(seen), findings


def tags_of(finding: Finding) -> list[Tag]:
    author = f"check:{finding.check}"
    return [Tag(each, finding.tag, finding.value, finding.reason, author) for each in finding.session_ids]


async def look_at(store: Store, config: RunConfig, where: SessionFilter, limit: int) -> list[Seen]:
    """The newest so many sessions, oldest first, those that have not ended left out."""
    combine = Combine(config)
    seen: list[Seen] = []
    before: int | None = None
    while limit > 0:
        size = min(limit, AT_ONCE)
        rows = await store.sessions(config.name, where=where, before=before, limit=size)
        seen = [*await _seen(store, rows, combine), *seen]
        if len(rows) < size:
            break
        before, limit = rows[0].seq, limit - size
    return seen


async def _seen(store: Store, rows: Sequence[SessionRow], combine: Combine) -> list[Seen]:
    sessions = {row.session.session_id: row.session for row in rows if row.session.status in ENDED}
    ids = list(sessions)
    rewards, scores = await store.rewards_of(ids), await store.scores(ids)
    calls = await store.calls_of(ids)
    return [
        Seen(
            session=sessions[each],
            prompt=_prompt(calls[each]),
            output="\n".join(_text(call.reply) for call in calls[each]),
            tokens=sum(len(call.sampled_ids) for call in calls[each]),
            version=min((int(call.versions.min()) for call in calls[each] if len(call.versions)), default=0),
            reward=combine(rewards[each], scores[each]),
            rewards=tuple(rewards[each]),
        )
        for each in ids
        if calls[each]
    ]


def _prompt(calls: Sequence[Call]) -> str:
    return next((m["content"] for m in calls[0].messages if m["role"] == "user"), "")


def _text(reply: Message) -> str:
    called = [f"{call['name']} {call['arguments']}" for call in reply.get("tool_calls", [])]
    return " ".join([reply.get("reasoning", ""), reply["content"], *called]).strip()


def _print(
    console: Console, names: Sequence[str], looked_at: int, findings: Sequence[Finding], applied: bool
) -> None:
    table = Table("check", Column("sessions", justify="right"), "finding", box=None, padding=(0, 1, 0, 0))
    for name in names:
        those = [finding for finding in findings if finding.check == name]
        for finding in those[:SHOWN]:
            table.add_row(name, str(len(finding.session_ids)), Text(finding.reason))
        if len(those) > SHOWN:
            table.add_row(name, "", f"and {len(those) - SHOWN} more: --json has them all")
        if not those:
            table.add_row(name, "0", "nothing")
    console.print(table)
    sessions = len({each for finding in findings for each in finding.session_ids})
    done = "tagged" if applied else "found; --apply tags them"
    console.print(f"looked at {looked_at} sessions: {sessions} {done}", highlight=False)
