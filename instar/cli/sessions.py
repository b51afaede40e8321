"""`instar sessions`: the subcommands `ls` and `show`. Other modules define the other subcommands."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Column
from rich.text import Text

from instar.cli import tags
from instar.cli.close_sessions import close_sessions
from instar.cli.datasets import export_sessions, import_sessions
from instar.cli.filters import build_session_filter, with_session_filters
from instar.cli.options import AsJson, RunDir, async_command, new_app
from instar.cli.output import format_number, format_short_time, plain_table, print_json, select_fields
from instar.cli.run_store import open_run_store
from instar.config import RunConfig
from instar.data.combine import RewardCombiner
from instar.data.live import EXCLUSIONS, LiveLoader
from instar.errors import InstarError
from instar.store.base import SessionRow, Store
from instar.types import Call, Channel, Claim, Group, GroupStatus, Json, Reward, Session, SessionStatus, Tag

app = new_app()
app.command("tag")(tags.tag_sessions)
app.command("untag")(tags.untag_sessions)
app.command("close")(close_sessions)
app.command("export")(export_sessions)
app.command("import")(import_sessions)

WIDE_TABLE_COLUMNS = 150
MAX_SHOWN_CHARACTERS = 300
MAX_JSON_CHARACTERS = 2000
"""The number of characters of a session's first message in the output of `instar sessions ls --json`."""


@dataclass(frozen=True, slots=True)
class ListedSession:
    row: SessionRow
    reward: float | None
    tags: list[Tag]
    first_message: str
    """The first message of the user."""


@app.command("ls")
@with_session_filters
@async_command
async def list_sessions(
    run_dir: RunDir,
    filters: dict[str, Any],
    limit: Annotated[int, typer.Option(min=1, help="List at most this many of the newest sessions.")] = 50,
    before: Annotated[
        int | None,
        typer.Option(metavar="NUMBER", help="Continue a listing: use the number printed at its end."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List sessions with their time, agent, first message, turns (model calls), sampled tokens, reward and
    status, and in a wide terminal also their channel, task, tags and reason."""
    where = build_session_filter(filters)
    async with open_run_store(run_dir, read_only=True) as (config, store):
        rows = await store.sessions(config.name, where=where, before=before, limit=limit)
        ids = [row.session.session_id for row in rows]
        rewards, scores = await store.rewards_by_session(ids), await store.scores(ids)
        tags_by_session = await store.tags(ids)
        first_messages = await store.first_messages(ids, "user")
    combine = RewardCombiner(config)
    sessions = [
        ListedSession(
            row,
            combine(rewards[session_id], scores[session_id]),
            tags_by_session[session_id],
            first_messages.get(session_id, ""),
        )
        for session_id, row in zip(ids, rows, strict=True)
    ]
    if as_json:
        print_json([_listed_json(session) for session in sessions])
        return
    _print_table(sessions)
    if len(rows) == limit:
        typer.echo(f"To list older sessions, use --before {rows[0].seq}.", err=True)


def _print_table(sessions: Sequence[ListedSession]) -> None:
    # In a file or a pipe the table does not have to fit a screen.
    console = Console(width=None if sys.stdout.isatty() else 200)
    is_wide = console.width >= WIDE_TABLE_COLUMNS
    # Truncated ids and numbers are useless, so only the other columns shrink.
    columns = [Column("session", no_wrap=True, min_width=25), Column("started", no_wrap=True, min_width=11)]
    columns += [Column("agent", no_wrap=True, max_width=16), Column("status", no_wrap=True, min_width=9)]
    columns.append(Column("first message", no_wrap=True, min_width=13, ratio=1))
    columns += [Column(name, justify="right", min_width=len(name)) for name in ("turns", "tokens", "reward")]
    extra_names = ("channel", "task", "tags", "reason") if is_wide else ()
    table = plain_table(*columns, *extra_names, expand=True)
    for listed in sessions:
        row, session = listed.row, listed.row.session
        tag_texts = [f"{tag.name}={tag.value}" if tag.value else tag.name for tag in listed.tags]
        extra = (session.channel.value, session.task_id or "", " ".join(tag_texts), session.reason or "")
        table.add_row(
            session.session_id,
            format_short_time(session.created_at),
            Text(session.agent_id),
            session.status,
            Text(" ".join(_printable(listed.first_message[:MAX_SHOWN_CHARACTERS]).split())),
            str(row.call_count),
            str(row.sampled_tokens),
            format_number(listed.reward),
            *(Text(text) for text in extra[: len(extra_names)]),
        )
    console.print(table)


def _listed_json(listed: ListedSession) -> Json:
    tags_json = [asdict(tag) for tag in listed.tags]
    for fields in tags_json:
        del fields["session_id"]
    return {
        **_session_json(listed.row.session),
        "agent_id": listed.row.session.agent_id,
        "first_message": listed.first_message[:MAX_JSON_CHARACTERS],
        "calls": listed.row.call_count,
        "sampled_tokens": listed.row.sampled_tokens,
        "reward": listed.reward,
        "tags": tags_json,
        "number": listed.row.seq,
    }


def _session_json(session: Session) -> Json:
    names = ("session_id", "channel", "status", "group_id", "slot", "attempt", "task_id", "reason")
    return select_fields(session, *names, "created_at", "ended_at")


@dataclass(frozen=True, slots=True)
class SessionDetails:
    session: Session
    calls: list[Call]
    rewards: list[Reward]
    claims: list[Claim]
    group: Group | None
    group_sessions: list[SessionRow]
    """The sessions in the group's slots, including the session itself, or empty if there is no group."""
    live_exclusion: str | None = None
    """Why the live session is not trained on, or None if it waits for a step or is not a live session."""
    rejected_versions: Mapping[int, int] = field(default_factory=dict[int, int])
    """The rejected version of each step that made one."""


@app.command()
@async_command
async def show(
    run_dir: RunDir,
    session_id: Annotated[str, typer.Argument(help="Session id, or a unique prefix of it.")],
    as_json: AsJson = False,
) -> None:
    """Show one session: its messages, rewards, advantage and claims."""
    async with open_run_store(run_dir, read_only=True) as (config, store):
        session = await _find_session(store, config.name, session_id)
        details = await _load_details(store, config, session)
    if as_json:
        print_json(_details_json(details))
    else:
        _print(Console(), details)


async def _find_session(store: Store, run_id: str, id_prefix: str) -> Session:
    session = await store.session(id_prefix)
    if session is not None and session.run_id == run_id:
        return session
    rows = await store.sessions(run_id)
    matches = [row.session for row in rows if row.session.session_id.startswith(id_prefix)]
    if not matches:
        raise InstarError(f"No session id in this run starts with {id_prefix!r}; see `instar sessions ls`.")
    if len(matches) > 1:
        shown = ", ".join(match.session_id for match in matches[:3]) + (", ..." if matches[3:] else "")
        raise InstarError(
            f"{len(matches)} session ids start with {id_prefix!r} ({shown}); pass more characters."
        )
    return matches[0]


async def _load_details(store: Store, config: RunConfig, session: Session) -> SessionDetails:
    run_id = config.name
    group, group_sessions = None, []
    if session.group_id is not None:
        groups = await store.groups(run_id, session.channel)
        group = next((group for group in groups if group.group_id == session.group_id), None)
        rows = await store.sessions(group_id=session.group_id)
        group_sessions = [row for row in rows if group is not None and group.accepts(row.session)]
    return SessionDetails(
        session=session,
        calls=await store.calls(session.session_id),
        rewards=await store.rewards(session.session_id),
        claims=await store.claims(run_id, session_id=session.session_id),
        group=group,
        group_sessions=group_sessions,
        live_exclusion=await _find_live_exclusion(store, config, session),
        rejected_versions=await store.rejected_versions(config.get_policy_id(session.agent_id)),
    )


async def _find_live_exclusion(store: Store, config: RunConfig, session: Session) -> str | None:
    if session.channel is not Channel.LIVE:
        return None
    if not config.trains_on_live:
        return "this run does not train on live sessions (see `data`)"
    (described,) = await LiveLoader(store, config).describe([session])
    return None if described.exclusion is None else EXCLUSIONS[described.exclusion]


def _details_json(details: SessionDetails) -> Json:
    claim_fields = ("sample_key", "policy_id", "outcome", "step", "reason")
    claim_fields += ("reward", "advantage", "staleness")
    return {
        **_session_json(details.session),
        "calls": [_call_json(call) for call in details.calls],
        "rewards": [
            select_fields(reward, "value", "source", "scorer", "call_id") for reward in details.rewards
        ],
        "claims": [
            select_fields(claim, *claim_fields)
            | {"rejected_version": details.rejected_versions.get(claim.step or -1)}
            for claim in details.claims
        ],
        "group": _group_json(details),
    }


def _call_json(call: Call) -> Json:
    return {
        **select_fields(call, "call_id", "parent_id", "link", "status"),
        "prompt_tokens": len(call.prompt_ids),
        "sampled_ids": call.sampled_ids.tolist(),
        "logprobs": [None if value != value else value for value in call.logprobs.tolist()],
        "versions": call.versions.tolist(),
        **select_fields(call, "finish_reason", "trainable", "reason"),
        "messages": list(call.messages),
        "reply": call.reply,
    }


def _group_json(details: SessionDetails) -> Json | None:
    if details.group is None:
        return None
    rewards = {row.session.session_id: row.reward for row in details.group_sessions}
    return {**select_fields(details.group, "group_id", "status", "reason", "size"), "rewards": rewards}


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
    version_range = f"{versions[0]}–{versions[-1]}" if versions[1:] else "".join(map(str, versions)) or "none"
    return (
        f"call {number} · {call.link} · {len(call.prompt_ids)} prompt + {len(call.sampled_ids)} sampled "
        f"tokens · version {version_range} · {call.finish_reason}"
    )


def _describe_outcome(details: SessionDetails) -> list[str]:
    lines = [
        f"reward {reward.value:g} from {reward.source} {reward.scorer}"
        + (f" on call {reward.call_id}" if reward.call_id else "")
        for reward in details.rewards
    ]
    lines = lines or ["no reward"]
    if details.group is not None:
        kept = [row for row in details.group_sessions if row.session.status is not SessionStatus.ABANDONED]
        rewards = " ".join(format_number(row.reward) or "–" for row in kept) or "none yet"
        lines.append(f"group {details.group.group_id}: rewards {rewards}")
    for claim in details.claims:
        advantage = "none" if claim.advantage is None else f"{claim.advantage:+.3f}"
        outcome = (
            f"trained in step {claim.step}, {claim.staleness or 0} step(s) stale"
            if claim.outcome == "trained"
            else f"dropped: {claim.reason}"
        )
        rejected = details.rejected_versions.get(claim.step or -1)
        outcome += "" if rejected is None else f"; version {rejected} was rejected"
        lines.append(f"sample {claim.sample_key}: advantage {advantage} → {outcome}")
    return lines if details.claims else [*lines, _explain_unclaimed(details)]


def _explain_unclaimed(details: SessionDetails) -> str:
    session, group = details.session, details.group
    if session.channel is Channel.LIVE:
        if details.live_exclusion is None:
            return "not claimed yet: the session waits for a step"
        return f"not claimed: {details.live_exclusion}"
    if session.channel not in (Channel.TRAIN, Channel.RESAMPLED):
        return f"not claimed: {session.channel} sessions are not trained on"
    if session.status is SessionStatus.ABANDONED:
        return "not claimed: abandoned sessions are not trained on; another session fills the slot"
    if group is None:
        return "not claimed: the session does not belong to a group"
    if group.status is GroupStatus.OPEN:
        return f"not claimed: the session's group is incomplete ({group.size} sessions are needed)"
    if group.status is GroupStatus.DROPPED:
        return f"not claimed: the session's group was dropped ({group.reason})"
    if group.status is GroupStatus.SCORING:
        return "not claimed yet: the session's group is being scored"
    return "not claimed yet: the session's group is waiting for a step"


def _print_message(console: Console, message: Any, style: str = "") -> None:
    text = Text(f"{message['role']:>9}  ", style="cyan")
    text.append(_printable(message["content"]), style=style)
    for call in message.get("tool_calls", []):
        text.append(_printable(f" → {call['name']}({call['arguments']})"), style=style or "yellow")
    console.print(text)


def _printable(text: str) -> str:
    """Replace lone surrogates, which the store accepts but a terminal cannot print."""
    return text.encode("utf-8", "replace").decode()
