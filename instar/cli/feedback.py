"""`instar feedback`: what a person says of a session or an answer, written where the gateway writes it."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path

import msgspec
import typer
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from instar.cli.run_store import store_of
from instar.config import RunConfig, UpstreamEngineConfig
from instar.errors import ConfigError, InstarError
from instar.gateway.auth import Caller
from instar.gateway.base import ApiError
from instar.gateway.feedback import FeedbackBody, FeedbackService, FeedbackView
from instar.record.base import Renderer
from instar.record.redact import Redactor
from instar.store.base import Store


def run_give(run_dir: Path, asked: FeedbackBody, *, as_json: bool) -> None:
    asyncio.run(_give(run_dir, asked, as_json))


def run_ls(run_dir: Path, session_id: str | None, *, as_json: bool) -> None:
    asyncio.run(_ls(run_dir, session_id, as_json))


def correction_of(text: str | None, file: Path | None) -> str | None:
    """What is given, or the file's content without its last line break."""
    if file is None:
        return text
    if text is not None:
        raise ConfigError("give --correction or --correction-file")
    try:
        return file.read_text(encoding="utf-8").removesuffix("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--correction-file: {file} cannot be read: {error}") from error


async def _give(run_dir: Path, asked: FeedbackBody, as_json: bool) -> None:
    async with store_of(run_dir) as (config, store):
        renderer = _renderer(config) if asked.correction is not None else None
        try:
            checked = msgspec.convert(msgspec.to_builtins(asked), FeedbackBody)
            given, is_new = await _desk(config, store, renderer).add(Caller("admin"), checked)
        except (ApiError, msgspec.ValidationError) as error:
            raise InstarError(str(error)) from None
    if as_json:
        typer.echo(json.dumps(msgspec.to_builtins(given)))
        return
    about = f"call {given.call_id} of session" if given.call_id else "session"
    typer.echo(f"{'Recorded' if is_new else 'Recorded before'}: {about} {given.session_id}{_outcome(given)}")


def _outcome(given: FeedbackView) -> str:
    told = "" if given.reward is None else f", reward {given.reward:g}"
    if given.correction is None:
        return told
    if given.lesson:
        return f"{told}; the correction will be trained on"
    return f"{told}; the correction is kept, and not trained on: {given.reason}"


async def _ls(run_dir: Path, session_id: str | None, as_json: bool) -> None:
    async with store_of(run_dir, read_only=True) as (config, store):
        rows = await _desk(config, store, None).list_feedback(session_id)
    if as_json:
        typer.echo(json.dumps(msgspec.to_builtins(rows)))
        return
    words = [Column(name, no_wrap=True) for name in ("given", "session", "reward", "lesson")]
    table = Table(
        *words, Column("author"), Column("text"), Column("correction"), box=None, padding=(0, 1, 0, 0)
    )
    for row in rows:
        table.add_row(
            time.strftime("%Y-%m-%d %H:%M", time.localtime(row.created_at)),
            row.session_id,
            "" if row.reward is None else f"{row.reward:g}",
            "yes" if row.lesson else "",
            Text(row.author),
            Text(row.text),
            Text(row.correction or ""),
        )
    Console().print(table)


def _desk(config: RunConfig, store: Store, renderer: Renderer | None) -> FeedbackService:
    return FeedbackService(
        store,
        Redactor.from_config(config.gateway.redact),
        run_id=config.name,
        renderer=renderer,
        context=lambda: config.model.max_context,
        models=config.models,
    )


def _renderer(config: RunConfig) -> Renderer | None:
    """None where a provider has answered: there are no tokens of its calls."""
    if isinstance(config.engine, UpstreamEngineConfig):
        return None
    from instar.models import resolve_tokenizer

    return Renderer.load(resolve_tokenizer(config.model.name), config.model)
