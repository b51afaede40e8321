"""`instar sessions ls` and `instar sessions show`."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from instar.cli.filters import session_filter
from instar.cli.run_store import store_of
from instar.config import RunConfig
from instar.data.combine import RewardCombiner
from instar.errors import InstarError
from instar.store.base import SessionFilter, SessionRow, Store
from instar.types import Call, Channel, Claim, Group, GroupStatus, Json, Reward, Session, SessionStatus, Tag


def run_ls(run_dir: Path, *, chosen: dict[str, Any], limit: int, before: int | None, as_json: bool) -> None:
    asyncio.run(_ls(run_dir, session_filter(chosen), limit, before, as_json))


@dataclass(frozen=True, slots=True)
class Line:
    """A session with what its rewards come to, and its tags."""

    row: SessionRow
    reward: float | None
    tags: list[Tag]


async def _ls(run_dir: Path, where: SessionFilter, limit: int, before: int | None, as_json: bool) -> None:
    async with store_of(run_dir, read_only=True) as (config, store):
        rows = await store.sessions(config.name, where=where, before=before, limit=limit)
        lines = await _lines(store, config, rows)
    if as_json:
        typer.echo(json.dumps([_line(line) for line in lines]))
        return
    _print_lines(lines)
    if len(rows) == limit:
        typer.echo(f"older ones: --before {rows[0].seq}", err=True)


async def _lines(store: Store, config: RunConfig, rows: Sequence[SessionRow]) -> list[Line]:
    ids = [row.session.session_id for row in rows]
    rewards, scores, tags = await store.rewards_of(ids), await store.scores(ids), await store.tags(ids)
    combine = RewardCombiner(config)
    return [
        Line(row, combine(rewards[each], scores[each]), tags[each])
        for each, row in zip(ids, rows, strict=True)
    ]


def _print_lines(lines: Sequence[Line]) -> None:
    # A word or an id that is cut short is of no use, so all but the last columns keep their width.
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
            Text(" ".join(tag_text(tag) for tag in line.tags)),
            Text(session.reason or ""),
        )
    # In a file or a pipe nothing needs to fit a screen.
    Console(width=None if sys.stdout.isatty() else 200).print(table)


def tag_text(tag: Tag) -> str:
    return f"{tag.name}={tag.value}" if tag.value else tag.name


def _line(line: Line) -> Json:
    return {
        **_session(line.row.session),
        "calls": line.row.calls,
        "sampled_tokens": line.row.sampled_tokens,
        "reward": line.reward,
        "tags": [_tag(tag) for tag in line.tags],
        "number": line.row.seq,
    }


def _tag(tag: Tag) -> Json:
    facts = asdict(tag)
    del facts["session_id"]
    return facts


def _session(session: Session) -> Json:
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


def run_show(run_dir: Path, session_id: str, *, as_json: bool) -> None:
    asyncio.run(_show(run_dir, session_id, as_json))


async def _find(store: Store, run_id: str, beginning: str) -> Session:
    found = await store.session(beginning)
    if found is not None:
        return found
    rows = await store.sessions(run_id)
    matches = [row.session for row in rows if row.session.session_id.startswith(beginning)]
    if len(matches) != 1:
        raise InstarError(f"{len(matches)} sessions of this run begin with {beginning!r}")
    return matches[0]


@dataclass(frozen=True, slots=True)
class Story:
    """All that is known of one session."""

    session: Session
    calls: list[Call]
    rewards: list[Reward]
    claims: list[Claim]
    group: Group | None
    in_group: list[SessionRow]
    """The sessions of its group, itself among them."""


async def _read(store: Store, run_id: str, beginning: str) -> Story:
    session = await _find(store, run_id, beginning)
    group, in_group = None, []
    if session.group_id is not None:
        groups = await store.groups(run_id, session.channel)
        group = next((group for group in groups if group.group_id == session.group_id), None)
        in_group = await store.sessions(group_id=session.group_id)
    return Story(
        session=session,
        calls=await store.calls(session.session_id),
        rewards=await store.rewards(session.session_id),
        claims=await store.claims(run_id, session_id=session.session_id),
        group=group,
        in_group=in_group,
    )


async def _show(run_dir: Path, session_id: str, as_json: bool) -> None:
    async with store_of(run_dir, read_only=True) as (config, store):
        run_id = config.name
        story = await _read(store, run_id, session_id)
    if as_json:
        typer.echo(json.dumps(_facts(story)))
    else:
        _print(Console(), story)


def _facts(story: Story) -> Json:
    return {
        **_session(story.session),
        "calls": [_call(call) for call in story.calls],
        "rewards": [_reward(reward) for reward in story.rewards],
        "claims": [_claim(claim) for claim in story.claims],
        "group": _group(story),
    }


def _call(call: Call) -> Json:
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


def _reward(reward: Reward) -> Json:
    return {
        "value": reward.value,
        "source": reward.source,
        "scorer": reward.scorer,
        "call_id": reward.call_id,
    }


def _group(story: Story) -> Json | None:
    if story.group is None:
        return None
    return {
        "group_id": story.group.group_id,
        "status": story.group.status,
        "reason": story.group.reason,
        "size": story.group.size,
        "rewards": {row.session.session_id: row.reward for row in story.in_group},
    }


def _claim(claim: Claim) -> Json:
    return {
        "sample_key": claim.sample_key,
        "outcome": claim.outcome,
        "step": claim.step,
        "reason": claim.reason,
        "reward": claim.reward,
        "advantage": claim.advantage,
        "staleness": claim.staleness,
    }


# --- for people ---------------------------------------------------------------------------------


def _print(console: Console, story: Story) -> None:
    session = story.session
    console.print(f"[bold]{session.session_id}[/]  {session.channel}  {session.status}", highlight=False)
    if session.reason:
        console.print(f"reason: {session.reason}", highlight=False, markup=False)
    for number, call in enumerate(story.calls, 1):
        console.rule(_heading(number, call), align="left")
        for message in call.messages[call.base_messages :]:
            _message(console, message)
        _message(console, call.reply, style="green")
        if not call.trainable:
            console.print(f"not trainable: {call.reason}", highlight=False, markup=False)
    console.rule("reward → advantage → claim", align="left")
    for line in _outcome(story):
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def _heading(number: int, call: Call) -> str:
    versions = sorted({int(version) for version in call.versions})
    shown = "–".join(str(version) for version in dict.fromkeys([*versions[:1], *versions[-1:]])) or "none"
    return (
        f"call {number} · {call.link} · {len(call.prompt_ids)} prompt + {len(call.sampled_ids)} sampled "
        f"tokens · version {shown} · {call.finish_reason}"
    )


def _outcome(story: Story) -> list[str]:
    lines = [
        f"reward {reward.value:g} from {reward.source} {reward.scorer}"
        + (f" on call {reward.call_id}" if reward.call_id else "")
        for reward in story.rewards
    ]
    lines = lines or ["no reward"]
    if story.group is not None:
        lines.append(f"group {story.group.group_id}: rewards {_rewards_of(story.in_group)}")
    for claim in story.claims:
        advantage = "none" if claim.advantage is None else f"{claim.advantage:+.3f}"
        became = (
            f"trained in step {claim.step}, {claim.staleness or 0} version(s) stale"
            if claim.outcome == "trained"
            else f"dropped: {claim.reason}"
        )
        lines.append(f"sample {claim.sample_key}: advantage {advantage} → {became}")
    return lines if story.claims else [*lines, _unclaimed(story)]


def _rewards_of(rows: Sequence[SessionRow]) -> str:
    ended = [row for row in rows if row.session.status is not SessionStatus.ABANDONED]
    return " ".join("–" if row.reward is None else f"{row.reward:g}" for row in ended) or "none yet"


def _unclaimed(story: Story) -> str:
    """Why no step has consumed it."""
    session, group = story.session, story.group
    if session.channel is not Channel.TRAIN:
        return f"not claimed: sessions of the {session.channel} channel are not trained on"
    if session.status is SessionStatus.ABANDONED:
        return "not claimed: abandoned sessions are not trained on; its slot is tried again"
    if group is None:
        return "not claimed: it belongs to no group"
    if group.status is GroupStatus.OPEN:
        return f"not claimed: its group is not complete ({group.size} sessions are wanted)"
    if group.status is GroupStatus.DROPPED:
        return f"not claimed: its group was dropped ({group.reason})"
    return "not claimed yet: its group waits for a step"


def _message(console: Console, message: Any, style: str = "") -> None:
    text = Text(f"{message['role']:>9}  ", style="cyan")
    text.append(_printable(message["content"]), style=style)
    for call in message.get("tool_calls", []):
        text.append(_printable(f" → {call['name']}({call['arguments']})"), style=style or "yellow")
    console.print(text)


def _printable(text: str) -> str:
    """The store keeps half a surrogate pair as it came; no terminal takes it."""
    return text.encode("utf-8", "replace").decode()
