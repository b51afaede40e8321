"""`instar feedback`: rate or correct a session or a reply, or list a run's feedback."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import typer
from rich.console import Console
from rich.table import Column
from rich.text import Text

from instar.cli.options import AsJson, RunDir, async_command
from instar.cli.output import format_number, format_time, plain_table, print_json
from instar.cli.run_store import open_run_store
from instar.config import RunConfig, UpstreamEngineConfig
from instar.errors import ConfigError, InstarError
from instar.gateway.auth import Caller
from instar.gateway.base import ApiError
from instar.gateway.feedback import FeedbackService
from instar.gateway.feedback_api import FeedbackBody, FeedbackView, explain_unused
from instar.record.base import Renderer
from instar.record.redact import Redactor
from instar.store.base import Store


@async_command
async def feedback(
    run_dir: RunDir,
    action: Annotated[Literal["ls"] | None, typer.Argument(help="`ls`: list feedback.")] = None,
    session: Annotated[str | None, typer.Option(help="Session to rate, or to list feedback for.")] = None,
    call: Annotated[str | None, typer.Option(help="Id of the call to rate, instead of a session.")] = None,
    response: Annotated[str | None, typer.Option(help="Response id of the reply to rate.")] = None,
    thumbs: Annotated[bool | None, typer.Option("--up/--down", help="Good (reward 1) or bad (0).")] = None,
    score: Annotated[float | None, typer.Option(help="The reward as a number.")] = None,
    text: Annotated[str, typer.Option(help="A comment.")] = "",
    correction: Annotated[str | None, typer.Option(help="The correct reply.")] = None,
    correction_file: Annotated[Path | None, typer.Option(help="A file with the correct reply.")] = None,
    over: Annotated[str | None, typer.Option(help="Call whose reply is worse than the rated one.")] = None,
    under: Annotated[str | None, typer.Option(help="Call whose reply is better than the rated one.")] = None,
    over_file: Annotated[Path | None, typer.Option(help="A file with a reply that is worse.")] = None,
    under_file: Annotated[Path | None, typer.Option(help="A file with a reply that is better.")] = None,
    author: Annotated[str, typer.Option(help="The author's name.")] = "",
    feedback_id: Annotated[
        str | None, typer.Option("--id", help="Unique id of the feedback; each id is recorded only once.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Record feedback, or list it with `ls`. If the run trains, it also trains on corrected replies and on
    preferences between two replies (`--over`, `--under`)."""
    if action is not None:
        await _list_feedback(run_dir, session, as_json)
        return
    request = FeedbackBody(
        session_id=session,
        call_id=call,
        response_id=response,
        feedback_id=feedback_id,
        thumbs=None if thumbs is None else ("up" if thumbs else "down"),
        score=score,
        text=text,
        correction=_read_correction(correction, correction_file),
        author=author,
        **_read_preference(over, under, over_file, under_file),
    )
    needs_renderer = request.correction is not None or request.other_text is not None
    async with open_run_store(run_dir) as (config, store):
        service = _create_service(config, store, needs_renderer=needs_renderer)
        try:
            checked = msgspec.convert(msgspec.to_builtins(request), FeedbackBody)
            recorded, is_new = await service.add(Caller("admin"), checked)
        except (ApiError, msgspec.ValidationError) as error:
            raise InstarError(str(error)) from None
    if as_json:
        print_json(msgspec.to_builtins(recorded))
        return
    subject = f"call {recorded.call_id} of session" if recorded.call_id else "session"
    verb = "Recorded" if is_new else "Already recorded"
    typer.echo(f"{verb}: {subject} {recorded.session_id}{_describe_outcome(recorded)}")


def _read_correction(text: str | None, file: Path | None) -> str | None:
    """Return ``text``, or the content of the file without a trailing newline, or None if both are None."""
    if file is None:
        return text
    if text is not None:
        raise ConfigError("--correction and --correction-file are mutually exclusive.")
    return _read_text(file, "--correction-file")


def _read_text(file: Path, option: str) -> str:
    try:
        return file.read_text(encoding="utf-8").removesuffix("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{option}: cannot read {file}: {error}") from error


def _read_preference(
    over: str | None, under: str | None, over_file: Path | None, under_file: Path | None
) -> dict[str, Any]:
    """Return the fields of the request for a preference, or none if no option is set."""
    if sum(value is not None for value in (over, under, over_file, under_file)) > 1:
        raise ConfigError("--over, --under, --over-file and --under-file are mutually exclusive.")
    preferred = "this" if over is not None or over_file is not None else "other"
    if (call_id := over or under) is not None:
        return {"preferred": preferred, "other_call_id": call_id}
    if (file := over_file or under_file) is not None:
        text = _read_text(file, "--over-file" if over_file is not None else "--under-file")
        return {"preferred": preferred, "other_text": text}
    return {}


def _describe_outcome(feedback: FeedbackView) -> str:
    reward = "" if feedback.reward is None else f", reward {feedback.reward:g}"
    if feedback.correction is None and feedback.preferred is None:
        return reward
    kind = "correction" if feedback.preferred is None else "preference"
    if feedback.trainable:
        return f"{reward}; the {kind} will be used when this run trains"
    return f"{reward}; the {kind} is stored, but this run does not train on it: {feedback.reason}"


async def _list_feedback(run_dir: Path, session_id: str | None, as_json: bool) -> None:
    async with open_run_store(run_dir, read_only=True) as (config, store):
        service = _create_service(config, store)
        page = await service.list_feedback(session_id)
        rows = page.feedback
        while page.next is not None:
            page = await service.list_feedback(session_id, page.next)
            rows += page.feedback
    if as_json:
        print_json(msgspec.to_builtins(rows))
        return
    columns = [Column(name, no_wrap=True) for name in ("time", "session", "source", "reward", "trainable")]
    table = plain_table(*columns, "author", "text", "correction or preference")
    for row in rows:
        table.add_row(
            format_time(row.created_at),
            row.session_id,
            row.source.value,
            format_number(row.reward),
            "yes" if row.trainable else "",
            *(Text(value) for value in (row.author, row.text, row.correction or _describe_preference(row))),
        )
    Console().print(table)


def _describe_preference(row: FeedbackView) -> str:
    if row.preferred is None:
        return ""
    other = row.other_call_id or row.other_text or ""
    return f"over {other}" if row.preferred == "this" else f"{other} instead"


def _create_service(config: RunConfig, store: Store, *, needs_renderer: bool = False) -> FeedbackService:
    renderer = None
    # Runs that forward calls to a provider have no tokenizer to encode a correction with.
    if needs_renderer and not isinstance(config.engine, UpstreamEngineConfig):
        from instar.models import resolve_tokenizer

        renderer = Renderer.load(resolve_tokenizer(config.model.name), config.model)
    return FeedbackService(
        store,
        Redactor.from_config(config.gateway.redact),
        run_id=config.name,
        renderer=renderer,
        get_max_context=lambda: config.model.context_length,
        models=config.models,
        reward_range=config.gateway.reward_range,
        unused_reasons=explain_unused(config),
        trained_agents=config.trained_agents,
    )
