"""`instar sessions`: the subcommands `ls` and `show`. `tag`, `untag`, `export` and `import` are in other
modules."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from instar.cli import tags
from instar.cli.datasets import export_sessions, import_sessions
from instar.cli.filters import session_filter, with_session_filters
from instar.cli.options import AsJson, RunDir, new_app
from instar.cli.run_store import open_run_store
from instar.config import RunConfig
from instar.data.combine import RewardCombiner
from instar.errors import InstarError
from instar.store.base import SessionFilter, SessionRow, Store
from instar.types import Call, Channel, Claim, Group, GroupStatus, Json, Reward, Session, SessionStatus, Tag

app = new_app()
app.command("tag")(tags.tag_sessions)
app.command("untag")(tags.untag_sessions)
app.command("export")(export_sessions)
app.command("import")(import_sessions)


@app.command("ls")
@with_session_filters
def list_sessions(
    run_dir: RunDir,
    filters: dict[str, Any],
    limit: Annotated[int, typer.Option(min=1, help="Number of sessions, the newest first.")] = 50,
    before: Annotated[
        int | None, typer.Option(metavar="NUMBER", help="Only those before this number: the next page.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List sessions with their task, calls, tokens, reward and tags."""
    asyncio.run(_list(run_dir, session_filter(filters), limit, before, as_json))


@dataclass(frozen=True, slots=True)
class ListedSession:
    """A session with its combined reward and its tags."""

    row: SessionRow
    reward: float | None
    tags: list[Tag]


async def _list(run_dir: Path, where: SessionFilter, limit: int, before: int | None, as_json: bool) -> None:
    async with open_run_store(run_dir, read_only=True) as (config, store):
        rows = await store.sessions(config.name, where=where, before=before, limit=limit)
        lines = await _load_listed(store, config, rows)
    if as_json:
        typer.echo(json.dumps([_listed_json(line) for line in lines]))
        return
    _print_table(lines)
    if len(rows) == limit:
        typer.echo(f"Older sessions: --before {rows[0].seq}", err=True)


async def _load_listed(store: Store, config: RunConfig, rows: Sequence[SessionRow]) -> list[ListedSession]:
    ids = [row.session.session_id for row in rows]
    rewards, scores, tags = (
        await store.rewards_by_session(ids),
        await store.scores(ids),
        await store.tags(ids),
    )
    combine = RewardCombiner(config)
    return [
        ListedSession(row, combine(rewards[each], scores[each]), tags[each])
        for each, row in zip(ids, rows, strict=True)
    ]


def _print_table(lines: Sequence[ListedSession]) -> None:
    # Truncated ids and words are useless, so only the last columns may shrink.
    words = [Column("session", no_wrap=True, min_width=25), Column("channel"), Column("status", min_width=9)]
    numbers = [Column(name, justify="right", min_width=len(name)) for name in ("calls", "tokens", "reward")]
    table = Table(
        *words, Column("task"), *numbers, Column("tags"), Column("reason"), box=None, padding=(0, 1, 0, 0)
    )
    for line in lines:
        row, session = line.row, line.row.session
        table.add_row(
            session.session_id,
            session.channel,
            session.status,
            Text(session.task_id or ""),
            str(row.calls),
            str(row.sampled_tokens),
            "" if line.reward is None else f"{line.reward:g}",
            Text(" ".join(format_tag(tag) for tag in line.tags)),
            Text(session.reason or ""),
        )
    # In a file or a pipe the table does not have to fit a screen.
    Console(width=None if sys.stdout.isatty() else 200).print(table)


def format_tag(tag: Tag) -> str:
    return f"{tag.name}={tag.value}" if tag.value else tag.name


def _listed_json(line: ListedSession) -> Json:
    return {
        **_session_json(line.row.session),
        "calls": line.row.calls,
        "sampled_tokens": line.row.sampled_tokens,
        "reward": line.reward,
        "tags": [_tag_json(tag) for tag in line.tags],
        "number": line.row.seq,
    }


def _tag_json(tag: Tag) -> Json:
    facts = asdict(tag)
    del facts["session_id"]
    return facts


def _session_json(session: Session) -> Json:
    return {
        "session_id": session.session_id,
        "channel": session.channel,
        "status": session.status,
        "group_id": session.group_id,
        "slot": session.slot,
        "attempt": session.attempt,
        "task_id": session.task_id,
        "reason": session.reason,
        "created_at": session.created_at,
        "ended_at": session.ended_at,
    }


@app.command()
def show(
    run_dir: RunDir,
    session_id: Annotated[str, typer.Argument(help="The session's id, or the beginning of it.")],
    as_json: AsJson = False,
) -> None:
    """Show one session: its messages, rewards, advantage and claims."""
    asyncio.run(_show(run_dir, session_id, as_json))


async def _find_session(store: Store, run_id: str, beginning: str) -> Session:
    session = await store.session(beginning)
    if session is not None:
        return session
    rows = await store.sessions(run_id)
    matches = [row.session for row in rows if row.session.session_id.startswith(beginning)]
    if len(matches) != 1:
        raise InstarError(
            f"{len(matches)} sessions of this run have an id that begins with {beginning!r}; expected one."
        )
    return matches[0]


@dataclass(frozen=True, slots=True)
class SessionDetails:
    """Everything that is stored about one session."""

    session: Session
    calls: list[Call]
    rewards: list[Reward]
    claims: list[Claim]
    group: Group | None
    group_sessions: list[SessionRow]
    """All sessions of the session's group, including the session itself."""


async def _load_details(store: Store, run_id: str, beginning: str) -> SessionDetails:
    session = await _find_session(store, run_id, beginning)
    group, group_sessions = None, []
    if session.group_id is not None:
        groups = await store.groups(run_id, session.channel)
        group = next((group for group in groups if group.group_id == session.group_id), None)
        group_sessions = await store.sessions(group_id=session.group_id)
    return SessionDetails(
        session=session,
        calls=await store.calls(session.session_id),
        rewards=await store.rewards(session.session_id),
        claims=await store.claims(run_id, session_id=session.session_id),
        group=group,
        group_sessions=group_sessions,
    )


async def _show(run_dir: Path, session_id: str, as_json: bool) -> None:
    async with open_run_store(run_dir, read_only=True) as (config, store):
        run_id = config.name
        details = await _load_details(store, run_id, session_id)
    if as_json:
        typer.echo(json.dumps(_details_json(details)))
    else:
        _print(Console(), details)


def _details_json(details: SessionDetails) -> Json:
    return {
        **_session_json(details.session),
        "calls": [_call_json(call) for call in details.calls],
        "rewards": [_reward_json(reward) for reward in details.rewards],
        "claims": [_claim_json(claim) for claim in details.claims],
        "group": _group_json(details),
    }


def _call_json(call: Call) -> Json:
    return {
        "call_id": call.call_id,
        "parent_id": call.parent_id,
        "link": call.link,
        "status": call.status,
        "prompt_tokens": len(call.prompt_ids),
        "sampled_ids": call.sampled_ids.tolist(),
        "logprobs": [None if value != value else value for value in call.logprobs.tolist()],
        "versions": call.versions.tolist(),
        "finish_reason": call.finish_reason,
        "trainable": call.trainable,
        "reason": call.reason,
        "messages": list(call.messages),
        "reply": call.reply,
    }


def _reward_json(reward: Reward) -> Json:
    return {
        "value": reward.value,
        "source": reward.source,
        "scorer": reward.scorer,
        "call_id": reward.call_id,
    }


def _group_json(details: SessionDetails) -> Json | None:
    if details.group is None:
        return None
    return {
        "group_id": details.group.group_id,
        "status": details.group.status,
        "reason": details.group.reason,
        "size": details.group.size,
        "rewards": {row.session.session_id: row.reward for row in details.group_sessions},
    }


def _claim_json(claim: Claim) -> Json:
    return {
        "sample_key": claim.sample_key,
        "outcome": claim.outcome,
        "step": claim.step,
        "reason": claim.reason,
        "reward": claim.reward,
        "advantage": claim.advantage,
        "staleness": claim.staleness,
    }


# --- text output ---------------------------------------------------------------------------------


def _print(console: Console, details: SessionDetails) -> None:
    session = details.session
    console.print(f"[bold]{session.session_id}[/]  {session.channel}  {session.status}", highlight=False)
    if session.reason:
        console.print(f"reason: {session.reason}", highlight=False, markup=False)
    for number, call in enumerate(details.calls, 1):
        console.rule(_call_heading(number, call), align="left")
        for message in call.messages[call.base_messages :]:
            _print_message(console, message)
        _print_message(console, call.reply, style="green")
        if not call.trainable:
            console.print(f"not trainable: {call.reason}", highlight=False, markup=False)
    console.rule("reward → advantage → claim", align="left")
    for line in _describe_outcome(details):
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def _call_heading(number: int, call: Call) -> str:
    versions = sorted({int(version) for version in call.versions})
    shown = "–".join(str(version) for version in dict.fromkeys([*versions[:1], *versions[-1:]])) or "none"
    return (
        f"call {number} · {call.link} · {len(call.prompt_ids)} prompt + {len(call.sampled_ids)} sampled "
        f"tokens · version {shown} · {call.finish_reason}"
    )


def _describe_outcome(details: SessionDetails) -> list[str]:
    lines = [
        f"reward {reward.value:g} from {reward.source} {reward.scorer}"
        + (f" on call {reward.call_id}" if reward.call_id else "")
        for reward in details.rewards
    ]
    lines = lines or ["no reward"]
    if details.group is not None:
        lines.append(f"group {details.group.group_id}: rewards {_format_rewards(details.group_sessions)}")
    for claim in details.claims:
        advantage = "none" if claim.advantage is None else f"{claim.advantage:+.3f}"
        outcome = (
            f"trained in step {claim.step}, {claim.staleness or 0} version(s) stale"
            if claim.outcome == "trained"
            else f"dropped: {claim.reason}"
        )
        lines.append(f"sample {claim.sample_key}: advantage {advantage} → {outcome}")
    return lines if details.claims else [*lines, _explain_unclaimed(details)]


def _format_rewards(rows: Sequence[SessionRow]) -> str:
    ended = [row for row in rows if row.session.status is not SessionStatus.ABANDONED]
    return " ".join("–" if row.reward is None else f"{row.reward:g}" for row in ended) or "none yet"


def _explain_unclaimed(details: SessionDetails) -> str:
    """Return a text that explains why no training step has consumed the session."""
    session, group = details.session, details.group
    if session.channel is not Channel.TRAIN:
        return f"not claimed: {session.channel} sessions are not trained on"
    if session.status is SessionStatus.ABANDONED:
        return "not claimed: abandoned sessions are not trained on; its slot is retried"
    if group is None:
        return "not claimed: it belongs to no group"
    if group.status is GroupStatus.OPEN:
        return f"not claimed: its group is incomplete ({group.size} sessions are needed)"
    if group.status is GroupStatus.DROPPED:
        return f"not claimed: its group was dropped ({group.reason})"
    return "not claimed yet: its group waits for a step"


def _print_message(console: Console, message: Any, style: str = "") -> None:
    text = Text(f"{message['role']:>9}  ", style="cyan")
    text.append(_printable(message["content"]), style=style)
    for call in message.get("tool_calls", []):
        text.append(_printable(f" → {call['name']}({call['arguments']})"), style=style or "yellow")
    console.print(text)


def _printable(text: str) -> str:
    """Return the text with lone surrogates, which the store keeps and a terminal cannot print, replaced."""
    return text.encode("utf-8", "replace").decode()
