"""`instar sessions ls` and `instar sessions show`."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import typer
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from instar.cli.run_store import store_of
from instar.errors import ConfigError, InstarError
from instar.store.base import SessionRow, Store
from instar.types import Call, Channel, Claim, Group, GroupStatus, Json, Reward, Session, SessionStatus


def run_ls(run_dir: Path, *, channel: str | None, status: str | None, limit: int, as_json: bool) -> None:
    asyncio.run(_ls(run_dir, _word(Channel, channel), _word(SessionStatus, status), limit, as_json))


Word = TypeVar("Word", Channel, SessionStatus)


def _word(kind: type[Word], given: str | None) -> Word | None:
    if given is None:
        return None
    try:
        return kind(given)
    except ValueError:
        raise ConfigError(f"{given!r} is not one of: {', '.join(kind)}") from None


async def _ls(
    run_dir: Path, channel: Channel | None, status: SessionStatus | None, limit: int, as_json: bool
) -> None:
    async with store_of(run_dir, read_only=True) as (config, store):
        run_id = config.name
        rows = await store.sessions(run_id, channel=channel, status=status, limit=limit)
    if as_json:
        typer.echo(json.dumps([_row(row) for row in rows]))
        return
    # A word or an id that is cut short is of no use, so all but the last columns keep their width.
    words = [Column("session", no_wrap=True, min_width=25), Column("channel"), Column("status", min_width=9)]
    numbers = [Column(name, justify="right", min_width=len(name)) for name in ("calls", "tokens", "reward")]
    table = Table(*words, Column("task"), *numbers, Column("reason"), box=None, padding=(0, 1, 0, 0))
    for row in rows:
        session = row.session
        table.add_row(
            session.session_id,
            session.channel,
            session.status,
            Text(session.task_id or ""),
            str(row.calls),
            str(row.sampled_tokens),
            "" if row.reward is None else f"{row.reward:g}",
            Text(session.reason or ""),
        )
    Console().print(table)


def _row(row: SessionRow) -> Json:
    return {
        **_session(row.session),
        "calls": row.calls,
        "sampled_tokens": row.sampled_tokens,
        "reward": row.reward,
    }


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
    text.append(message["content"], style=style)
    for call in message.get("tool_calls", []):
        text.append(f" → {call['name']}({call['arguments']})", style=style or "yellow")
    console.print(text)
