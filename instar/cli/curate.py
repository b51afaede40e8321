"""`instar curate`: what the checks find in a run's sessions, reported or tagged."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from instar.cli.filters import session_filter, with_session_filters
from instar.cli.options import AsJson, RunDir
from instar.cli.run_store import open_run_store
from instar.config import RunConfig
from instar.curation.base import CurationFinding, CurationLimits, SessionSummary
from instar.curation.checks import CHECKS, GROUP_CHECKS
from instar.data.combine import RewardCombiner
from instar.data.group_loader import ENDED_STATUSES, select_final_sessions
from instar.errors import ConfigError
from instar.store.base import SessionFilter, Store
from instar.types import Call, GroupStatus, Message, Session, Tag

AT_ONCE = 256
UNDER_WAY = (GroupStatus.OPEN, GroupStatus.SCORING)
SHOWN = 20
"""Findings of a check that people are shown."""


@with_session_filters
def curate(
    run_dir: RunDir,
    filters: dict[str, Any],
    apply: Annotated[bool, typer.Option("--apply", help="Tag the sessions that were found.")] = False,
    checks: Annotated[
        list[str] | None, typer.Option("--check", metavar="NAME", help="Only this check; may be repeated.")
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="How many of the newest sessions to check.")] = 10_000,
    as_json: AsJson = False,
) -> None:
    if unknown := set(checks or ()) - set(CHECKS):
        raise ConfigError(f"--check: {', '.join(sorted(unknown))} is not one of: {', '.join(CHECKS)}")
    names = checks or list(CHECKS)
    looked_at, findings = asyncio.run(_curate(run_dir, session_filter(filters), names, limit, apply))
    if as_json:
        found = [asdict(finding) for finding in findings]
        typer.echo(json.dumps({"sessions": looked_at, "applied": apply, "findings": found}))
    else:
        _print(Console(), names, looked_at, findings, apply)


async def _curate(
    run_dir: Path, where: SessionFilter, names: Sequence[str], limit: int, apply: bool
) -> tuple[int, list[CurationFinding]]:
    async with open_run_store(run_dir, read_only=not apply) as (config, store):
        seen = await look_at(store, config, where, limit)
        whole = await look_at_groups(store, config, seen) if set(names) & set(GROUP_CHECKS) else []
        findings: list[CurationFinding] = []
        for name in names:
            found = CHECKS[name](whole if name in GROUP_CHECKS else seen, CurationLimits())
            findings += _of_chosen(found, seen)
        if apply:
            for finding in findings:
                await store.add_tags(tags_of(finding))
    return len(seen), findings


def tags_of(finding: CurationFinding) -> list[Tag]:
    author = f"check:{finding.check}"
    return [Tag(each, finding.tag, finding.value, finding.reason, author) for each in finding.session_ids]


async def look_at(store: Store, config: RunConfig, where: SessionFilter, limit: int) -> list[SessionSummary]:
    """The newest so many sessions, oldest first, those that have not ended left out."""
    combine = RewardCombiner(config)
    seen: list[SessionSummary] = []
    before: int | None = None
    while limit > 0:
        size = min(limit, AT_ONCE)
        rows = await store.sessions(config.name, where=where, before=before, limit=size)
        ended = [row.session for row in rows if row.session.status in ENDED_STATUSES]
        seen = [*await _seen(store, ended, combine), *seen]
        if len(rows) < size:
            break
        before, limit = rows[0].seq, limit - size
    return seen


async def look_at_groups(
    store: Store, config: RunConfig, chosen: Sequence[SessionSummary]
) -> list[SessionSummary]:
    """All of the groups that the chosen sessions are of, as a step takes them: the last attempt at each slot.
    Groups that are under way are left out."""
    combine = RewardCombiner(config)
    named = dict.fromkeys(each.session.group_id for each in chosen if each.session.group_id is not None)
    found = [await store.group(each) for each in named]
    ids = [group.group_id for group in found if group is not None and group.status not in UNDER_WAY]
    seen: list[SessionSummary] = []
    for start in range(0, len(ids), AT_ONCE):
        groups = (await store.sessions_by_group(ids[start : start + AT_ONCE])).values()
        ended = [[session for session in sessions if session.status in ENDED_STATUSES] for sessions in groups]
        final = [session for sessions in ended for session in select_final_sessions(sessions)]
        seen += await _seen(store, final, combine)
    return seen


def _of_chosen(findings: Sequence[CurationFinding], seen: Sequence[SessionSummary]) -> list[CurationFinding]:
    """Only the sessions that were chosen are spoken of, and tagged."""
    chosen = {each.session.session_id for each in seen}
    kept = [tuple(each for each in finding.session_ids if each in chosen) for finding in findings]
    return [replace(f, session_ids=ids) for f, ids in zip(findings, kept, strict=True) if ids]


async def _seen(store: Store, ended: Sequence[Session], combine: RewardCombiner) -> list[SessionSummary]:
    sessions = {session.session_id: session for session in ended}
    ids = list(sessions)
    rewards, scores = await store.rewards_by_session(ids), await store.scores(ids)
    calls = await store.calls_by_session(ids)
    return [
        SessionSummary(
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
    console: Console, names: Sequence[str], looked_at: int, findings: Sequence[CurationFinding], applied: bool
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
