"""`instar sessions ls` and `instar sessions show`."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any, TypeVar

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from instar.cluster.layout import RunFolder
from instar.errors import ConfigError, InstarError
from instar.store.base import SessionRow, Store
from instar.store.sqlite import SqliteStore
from instar.types import Call, Channel, Claim, Json, Reward, Session, SessionStatus


def _open(run_dir: Path) -> tuple[str, Store]:
    config = RunFolder(run_dir).read_config()
    return config.name, SqliteStore(config.store_path, read_only=True)


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
    run_id, store = _open(run_dir)
    rows = await store.sessions(run_id, channel=channel, status=status, limit=limit)
    await store.close()
    if as_json:
        for row in rows:
            typer.echo(json.dumps(_row(row)))
        return
    table = Table("session", "channel", "status", "group", "calls", "tokens", "reward", "reason")
    for row in rows:
        session = row.session
        table.add_row(
            session.session_id,
            session.channel,
            session.status,
            f"{session.group_id or ''}#{session.slot}" if session.group_id else "",
            str(row.calls),
            str(row.sampled_tokens),
            "" if row.reward is None else f"{row.reward:g}",
            session.reason or "",
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


async def _show(run_dir: Path, session_id: str, as_json: bool) -> None:
    run_id, store = _open(run_dir)
    session = await _find(store, run_id, session_id)
    calls = await store.calls(session.session_id)
    rewards = await store.rewards(session.session_id)
    claims = await store.claims(run_id, session_id=session.session_id)
    await store.close()
    if as_json:
        typer.echo(json.dumps(_facts(session, calls, rewards, claims)))
    else:
        _print(Console(), session, calls, rewards, claims)


def _facts(session: Session, calls: list[Call], rewards: list[Reward], claims: list[Claim]) -> Json:
    return {
        **_session(session),
        "calls": [
            {
                "call_id": call.call_id,
                "parent_id": call.parent_id,
                "link": call.link,
                "prompt_tokens": len(call.prompt_ids),
                "sampled_ids": call.sampled_ids.tolist(),
                "logprobs": call.logprobs.tolist(),
                "versions": call.versions.tolist(),
                "finish_reason": call.finish_reason,
                "trainable": call.trainable,
                "messages": list(call.messages),
                "reply": call.reply,
            }
            for call in calls
        ],
        "rewards": [
            {
                "value": reward.value,
                "source": reward.source,
                "scorer": reward.scorer,
                "call_id": reward.call_id,
            }
            for reward in rewards
        ],
        "claims": [_claim(claim) for claim in claims],
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


def _print(
    console: Console, session: Session, calls: list[Call], rewards: list[Reward], claims: list[Claim]
) -> None:
    console.print(f"[bold]{session.session_id}[/]  {session.channel}  {session.status}", highlight=False)
    if session.reason:
        console.print(f"reason: {session.reason}", highlight=False)
    for number, call in enumerate(calls, 1):
        versions = sorted({int(version) for version in call.versions})
        shown = "–".join(str(version) for version in {versions[0], versions[-1]}) if versions else "none"
        console.rule(
            f"call {number} · {call.link} · {len(call.prompt_ids)} prompt + {len(call.sampled_ids)} sampled "
            f"tokens · version {shown} · {call.finish_reason}",
            align="left",
        )
        for message in call.messages[call.base_messages :]:
            _message(console, message)
        _message(console, call.reply, style="green")
    console.rule("reward → advantage → claim", align="left")
    for reward in rewards:
        console.print(f"reward {reward.value:g} from {reward.source} {reward.scorer}", highlight=False)
    if not rewards:
        console.print("no reward")
    for claim in claims:
        advantage = "none" if claim.advantage is None else f"{claim.advantage:+.3f}"
        became = (
            f"trained in step {claim.step}, {claim.staleness or 0} version(s) stale"
            if claim.outcome == "trained"
            else f"dropped: {claim.reason}"
        )
        console.print(f"sample {claim.sample_key}: advantage {advantage} → {became}", highlight=False)
    if not claims:
        console.print("not claimed by any step")


def _message(console: Console, message: Any, style: str = "") -> None:
    text = Text(f"{message['role']:>9}  ", style="cyan")
    text.append(message["content"], style=style)
    for call in message.get("tool_calls", []):
        text.append(f" → {call['name']}({call['arguments']})", style=style or "yellow")
    console.print(text)
