"""`instar curate`: check a run's sessions, and report or tag the findings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Column
from rich.text import Text

from instar.cli.filters import build_session_filter, with_session_filters
from instar.cli.options import AsJson, RunDir, async_command
from instar.cli.output import plain_table, print_json
from instar.cli.run_store import open_run_store
from instar.config import RunConfig
from instar.curation.base import CurationFinding, SessionSummary, Thresholds
from instar.curation.checks import CHECKS, GROUP_CHECKS
from instar.data.combine import RewardCombiner
from instar.data.group_loader import FINISHED_STATUSES, select_final_sessions
from instar.errors import ConfigError
from instar.store.base import SessionFilter, Store
from instar.types import Call, GroupStatus, Message, Reward, Session, Tag

PAGE_SIZE = 256
UNFINISHED_STATUSES = (GroupStatus.OPEN, GroupStatus.SCORING)
MAX_SHOWN_PER_CHECK = 20


@with_session_filters
@async_command
async def curate(
    run_dir: RunDir,
    filters: dict[str, Any],
    apply: Annotated[bool, typer.Option("--apply", help="Tag the sessions that have findings.")] = False,
    checks: Annotated[
        list[str] | None, typer.Option("--check", metavar="NAME", help="Run only this check; repeatable.")
    ] = None,
    limit: Annotated[
        int, typer.Option(min=1, help="Maximum number of sessions to check, newest first.")
    ] = 10_000,
    as_json: AsJson = False,
) -> None:
    if unknown := set(checks or ()) - set(CHECKS):
        shown = ", ".join(repr(name) for name in sorted(unknown))
        raise ConfigError(f"Unknown check {shown}. Available: {', '.join(CHECKS)}")
    names = checks or list(CHECKS)
    findings: list[CurationFinding] = []
    async with open_run_store(run_dir, read_only=not apply) as (config, store):
        selected = await load_recent_sessions(store, config, build_session_filter(filters), limit)
        has_group_check = any(name in GROUP_CHECKS for name in names)
        grouped = await load_group_sessions(store, config, selected) if has_group_check else []
        selected_ids = {summary.session.session_id for summary in selected}
        for name in names:
            for finding in CHECKS[name](grouped if name in GROUP_CHECKS else selected, Thresholds()):
                session_ids = tuple(filter(selected_ids.__contains__, finding.session_ids))
                if session_ids:
                    findings.append(replace(finding, session_ids=session_ids))
        for finding in findings if apply else ():
            tag = Tag("", finding.tag, finding.value, finding.reason, author=f"check:{finding.check}")
            await store.add_tags([replace(tag, session_id=session_id) for session_id in finding.session_ids])
    if as_json:
        rows = [asdict(finding) for finding in findings]
        print_json({"sessions": len(selected), "applied": apply, "findings": rows})
    else:
        _print(Console(), names, len(selected), findings, apply)


async def load_recent_sessions(
    store: Store, config: RunConfig, where: SessionFilter, limit: int
) -> list[SessionSummary]:
    """Return summaries of the newest ``limit`` matching sessions that finished with calls, oldest first."""
    rows = await store.sessions(config.name, where=where, limit=limit)
    ended = [row.session for row in rows if row.session.status in FINISHED_STATUSES]
    return await _summarize_sessions(store, config, ended)


async def load_group_sessions(
    store: Store, config: RunConfig, selected: Sequence[SessionSummary]
) -> list[SessionSummary]:
    """Return summaries of all final sessions in the complete and scored groups of the selected sessions."""
    group_ids = dict.fromkeys(summary.session.group_id for summary in selected)
    groups = [await store.group(group_id) for group_id in group_ids if group_id is not None]
    complete = [group for group in groups if group and group.status not in UNFINISHED_STATUSES]
    final_sessions: list[Session] = []
    for start in range(0, len(complete), PAGE_SIZE):
        page = complete[start : start + PAGE_SIZE]
        for sessions in (await store.group_sessions(page, config.agent_id)).values():
            ended = [session for session in sessions if session.status in FINISHED_STATUSES]
            final_sessions += select_final_sessions(ended)
    return await _summarize_sessions(store, config, final_sessions)


async def _summarize_sessions(
    store: Store, config: RunConfig, sessions: Sequence[Session]
) -> list[SessionSummary]:
    combine = RewardCombiner(config)
    summaries: list[SessionSummary] = []
    for start in range(0, len(sessions), PAGE_SIZE):
        sessions_by_id = {session.session_id: session for session in sessions[start : start + PAGE_SIZE]}
        ids = list(sessions_by_id)
        rewards, scores = await store.rewards_by_session(ids), await store.scores(ids)
        calls_by_session = await store.calls_by_session(ids)
        for session_id, calls in calls_by_session.items():
            if calls:
                reward = combine(rewards[session_id], scores[session_id])
                session = sessions_by_id[session_id]
                summaries.append(_summarize(session, calls, reward, rewards[session_id]))
    return summaries


def _summarize(
    session: Session, calls: Sequence[Call], reward: float | None, rewards: Sequence[Reward]
) -> SessionSummary:
    prompts = (message["content"] for message in calls[0].messages if message["role"] == "user")
    return SessionSummary(
        session=session,
        prompt=next(prompts, ""),
        output="\n".join(_format_reply(call.reply) for call in calls),
        tokens=sum(len(call.sampled_ids) for call in calls),
        version=min((int(call.versions.min()) for call in calls if len(call.versions)), default=0),
        reward=reward,
        rewards=tuple(rewards),
    )


def _format_reply(reply: Message) -> str:
    tool_calls = [f"{call['name']} {call['arguments']}" for call in reply.get("tool_calls", [])]
    return " ".join([reply.get("reasoning", ""), reply["content"], *tool_calls]).strip()


def _print(
    console: Console, names: Sequence[str], total: int, findings: Sequence[CurationFinding], applied: bool
) -> None:
    table = plain_table("check", Column("sessions", justify="right"), "finding")
    for name in names:
        check_findings = [finding for finding in findings if finding.check == name]
        for finding in check_findings[:MAX_SHOWN_PER_CHECK]:
            table.add_row(name, str(len(finding.session_ids)), Text(finding.reason))
        if len(check_findings) > MAX_SHOWN_PER_CHECK:
            hidden_count = len(check_findings) - MAX_SHOWN_PER_CHECK
            table.add_row(name, "", f"and {hidden_count} more; use --json to print all")
        if not check_findings:
            table.add_row(name, "0", "none")
    console.print(table)
    count = len({session_id for finding in findings for session_id in finding.session_ids})
    outcome = "tagged" if applied else "with findings; use --apply to tag them"
    console.print(f"checked {total} sessions: {count} {outcome}", highlight=False)
