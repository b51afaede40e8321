"""`instar curate`: run the checks on a run's sessions, and report or tag the findings."""

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

PAGE_SIZE = 256
IN_PROGRESS = (GroupStatus.OPEN, GroupStatus.SCORING)
MAX_SHOWN = 20
"""The maximum number of findings per check in the text output."""


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
    checked, findings = asyncio.run(_curate(run_dir, session_filter(filters), names, limit, apply))
    if as_json:
        rows = [asdict(finding) for finding in findings]
        typer.echo(json.dumps({"sessions": checked, "applied": apply, "findings": rows}))
    else:
        _print(Console(), names, checked, findings, apply)


async def _curate(
    run_dir: Path, where: SessionFilter, names: Sequence[str], limit: int, apply: bool
) -> tuple[int, list[CurationFinding]]:
    async with open_run_store(run_dir, read_only=not apply) as (config, store):
        seen = await load_recent_sessions(store, config, where, limit)
        grouped = await load_complete_groups(store, config, seen) if set(names) & set(GROUP_CHECKS) else []
        findings: list[CurationFinding] = []
        for name in names:
            all_findings = CHECKS[name](grouped if name in GROUP_CHECKS else seen, CurationLimits())
            findings += _only_selected(all_findings, seen)
        if apply:
            for finding in findings:
                await store.add_tags(make_tags(finding))
    return len(seen), findings


def make_tags(finding: CurationFinding) -> list[Tag]:
    author = f"check:{finding.check}"
    return [Tag(each, finding.tag, finding.value, finding.reason, author) for each in finding.session_ids]


async def load_recent_sessions(
    store: Store, config: RunConfig, where: SessionFilter, limit: int
) -> list[SessionSummary]:
    """Return the newest ``limit`` sessions, oldest first, without sessions that have not ended."""
    combine = RewardCombiner(config)
    seen: list[SessionSummary] = []
    before: int | None = None
    while limit > 0:
        size = min(limit, PAGE_SIZE)
        rows = await store.sessions(config.name, where=where, before=before, limit=size)
        ended = [row.session for row in rows if row.session.status in ENDED_STATUSES]
        seen = [*await _load_sessions(store, ended, combine), *seen]
        if len(rows) < size:
            break
        before, limit = rows[0].seq, limit - size
    return seen


async def load_complete_groups(
    store: Store, config: RunConfig, chosen: Sequence[SessionSummary]
) -> list[SessionSummary]:
    """Return the sessions of the complete groups that the chosen sessions belong to, with only the last
    attempt at each slot."""
    combine = RewardCombiner(config)
    group_ids = dict.fromkeys(each.session.group_id for each in chosen if each.session.group_id is not None)
    groups = [await store.group(group_id) for group_id in group_ids]
    ids = [group.group_id for group in groups if group is not None and group.status not in IN_PROGRESS]
    seen: list[SessionSummary] = []
    for start in range(0, len(ids), PAGE_SIZE):
        grouped_sessions = (await store.sessions_by_group(ids[start : start + PAGE_SIZE])).values()
        ended = [
            [session for session in sessions if session.status in ENDED_STATUSES]
            for sessions in grouped_sessions
        ]
        final = [session for sessions in ended for session in select_final_sessions(sessions)]
        seen += await _load_sessions(store, final, combine)
    return seen


def _only_selected(
    findings: Sequence[CurationFinding], seen: Sequence[SessionSummary]
) -> list[CurationFinding]:
    """Return the findings restricted to the selected sessions."""
    chosen = {each.session.session_id for each in seen}
    kept = [tuple(each for each in finding.session_ids if each in chosen) for finding in findings]
    return [replace(f, session_ids=ids) for f, ids in zip(findings, kept, strict=True) if ids]


async def _load_sessions(
    store: Store, ended: Sequence[Session], combine: RewardCombiner
) -> list[SessionSummary]:
    sessions = {session.session_id: session for session in ended}
    ids = list(sessions)
    rewards, scores = await store.rewards_by_session(ids), await store.scores(ids)
    calls = await store.calls_by_session(ids)
    return [
        SessionSummary(
            session=sessions[each],
            prompt=_first_user_message(calls[each]),
            output="\n".join(_reply_text(call.reply) for call in calls[each]),
            tokens=sum(len(call.sampled_ids) for call in calls[each]),
            version=min((int(call.versions.min()) for call in calls[each] if len(call.versions)), default=0),
            reward=combine(rewards[each], scores[each]),
            rewards=tuple(rewards[each]),
        )
        for each in ids
        if calls[each]
    ]


def _first_user_message(calls: Sequence[Call]) -> str:
    return next((m["content"] for m in calls[0].messages if m["role"] == "user"), "")


def _reply_text(reply: Message) -> str:
    called = [f"{call['name']} {call['arguments']}" for call in reply.get("tool_calls", [])]
    return " ".join([reply.get("reasoning", ""), reply["content"], *called]).strip()


def _print(
    console: Console, names: Sequence[str], checked: int, findings: Sequence[CurationFinding], applied: bool
) -> None:
    table = Table("check", Column("sessions", justify="right"), "finding", box=None, padding=(0, 1, 0, 0))
    for name in names:
        those = [finding for finding in findings if finding.check == name]
        for finding in those[:MAX_SHOWN]:
            table.add_row(name, str(len(finding.session_ids)), Text(finding.reason))
        if len(those) > MAX_SHOWN:
            table.add_row(name, "", f"and {len(those) - MAX_SHOWN} more: --json has them all")
        if not those:
            table.add_row(name, "0", "none")
    console.print(table)
    sessions = len({each for finding in findings for each in finding.session_ids})
    done = "tagged" if applied else "found; --apply tags them"
    console.print(f"checked {checked} sessions: {sessions} {done}", highlight=False)
