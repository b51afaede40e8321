"""`instar rescore`: score stored sessions with another rule or judge."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from instar.cli.config_file import load_config, validate
from instar.cli.filters import session_filter, with_session_filters
from instar.cli.options import AsJson, RunDir, SessionIds
from instar.cli.run_store import open_run_store
from instar.cli.tags import iterate_pages, require_sessions
from instar.config import RunConfig, ScoringConfig
from instar.errors import ConfigError, ConflictError
from instar.rewards.base import NO_TASK, GroupScorer, Scorer, ScoringContext, Transcript
from instar.rewards.factory import create_scorers
from instar.rewards.scoring import score_sessions
from instar.rollout.tasks import TaskSet, load_tasks
from instar.store.base import SessionFilter, Store
from instar.types import Json, ScoreState, Session, SessionStatus, Task


@dataclass(slots=True)
class RescoreCounts:
    """The number of sessions by result."""

    scored: int = 0
    fallback: int = 0
    skipped: int = 0
    """The number of sessions that this version of the scorer had already scored."""
    reasons: dict[str, int] = field(default_factory=dict[str, int])


@with_session_filters
def rescore(
    run_dir: RunDir,
    filters: dict[str, Any],
    session_ids: SessionIds = None,
    reward: Annotated[
        list[str] | None, typer.Option(metavar="YAML", help="A `reward` section, e.g. '{type: math}'.")
    ] = None,
    config_file: Annotated[
        Path | None, typer.Option("--config", help="Take `reward` and `scoring` from another YAML file.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """No agent runs again. The new scores are stored next to the earlier ones."""
    where = session_filter(filters, tuple(session_ids or ()))
    if where.status not in (None, SessionStatus.COMPLETED):
        raise ConfigError(f"--status: given {where.status.value!r}; only completed sessions are scored")
    where = replace(where, status=SessionStatus.COMPLETED)
    done = asyncio.run(_rescore(run_dir, where, reward or (), config_file))
    if as_json:
        typer.echo(json.dumps({key: _counts_json(counts) for key, counts in done.items()}))
        return
    for key, counts in done.items():
        typer.echo(
            f"{key}: {counts.scored} scored, {counts.fallback} failed, {counts.skipped} already scored"
        )
        for reason, count in counts.reasons.items():
            typer.echo(f"  {count} failed: {reason}")


def _counts_json(counts: RescoreCounts) -> dict[str, Any]:
    return {name: getattr(counts, name) for name in ("scored", "fallback", "skipped", "reasons")}


async def _rescore(
    run_dir: Path, where: SessionFilter, rewards: Sequence[str], file: Path | None
) -> dict[str, RescoreCounts]:
    async with AsyncExitStack() as stack:
        config, store = await stack.enter_async_context(open_run_store(run_dir))
        await require_sessions(store, config.name, where.ids)
        rescore_config = _with_other_scorers(config, rewards, file)
        scorers = create_scorers(rescore_config, _load_tasks_if_needed(rescore_config))
        for scorer in scorers:
            stack.push_async_callback(scorer.close)
            await scorer.start(ScoringContext(config.name, store))
        return {
            scorer.key: await rescore_sessions(store, config.name, scorer, where, rescore_config.scoring)
            for scorer in scorers
        }


def _with_other_scorers(config: RunConfig, rewards: Sequence[str], file: Path | None) -> RunConfig:
    """Return the run's config with the scorers from ``rewards`` or from a different file."""
    if bool(rewards) == (file is not None):
        raise ConfigError("Give the scorer with --reward '{type: ...}', or another YAML file with --config.")
    if file is not None:
        other = load_config(file)
        return config.model_copy(update={"reward": other.reward, "scoring": other.scoring})
    try:
        sections = [yaml.safe_load(each) for each in rewards]
    except yaml.YAMLError as error:
        raise ConfigError(f"--reward: not valid YAML: {error}") from error
    settings: Json = config.model_dump(mode="json", exclude_unset=True) | {"reward": sections}
    scoring: Json = settings.get("scoring") or {}
    scoring.pop("combine", None)  # it may refer to scorers that are not used here
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)  # a rule's function may be there
    return validate(settings, "--reward")


def _load_tasks_if_needed(config: RunConfig) -> TaskSet | None:
    """Return the tasks if a rule uses their own scorer, or else None."""
    uses_task_scorer = any(section.type == "rule" and section.function is None for section in config.reward)
    return load_tasks(config.rollout.tasks) if uses_task_scorer and config.rollout else None


async def rescore_sessions(
    store: Store, run_id: str, scorer: Scorer, where: SessionFilter, config: ScoringConfig
) -> RescoreCounts:
    """Score the sessions that this scorer has not scored yet, and return the counts. An interrupted command
    can be repeated."""
    counts = RescoreCounts()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        bar = progress.add_task(scorer.key, total=None)
        seen = 0
        slots = asyncio.Semaphore(config.concurrency)

        async def score(task: Task, ids: list[str]) -> None:
            await _score(store, scorer, task, ids, config, slots, counts)
            progress.advance(bar, len(ids))

        async for sessions in _iterate_unscored(store, run_id, scorer, where, counts):
            seen += len(sessions)
            progress.update(bar, total=seen)
            async with asyncio.TaskGroup() as tasks:
                for task, ids in await _group_by_task(store, scorer, sessions):
                    tasks.create_task(score(task, ids))
    return counts


async def _iterate_unscored(
    store: Store, run_id: str, scorer: Scorer, where: SessionFilter, counts: RescoreCounts
) -> AsyncGenerator[list[Session]]:
    """Yield unscored sessions page by page, or all in one list for a scorer that compares the sessions of a
    group."""
    held: list[Session] = []
    async for rows in iterate_pages(store, run_id, where):
        scores = await store.scores([row.session.session_id for row in rows])
        done = {each for each, rows in scores.items() if any(row.scorer == scorer.key for row in rows)}
        counts.skipped += len(done)
        held += [row.session for row in rows if row.session.session_id not in done]
        if not isinstance(scorer, GroupScorer):
            yield held
            held = []
    yield held


async def _group_by_task(
    store: Store, scorer: Scorer, sessions: Sequence[Session]
) -> list[tuple[Task, list[str]]]:
    """Return the units that are scored together, each with its task: single sessions, or whole groups for a
    scorer that compares sessions."""
    units: list[tuple[Task, list[str]]] = []
    by_group: dict[str, list[str]] = {}
    tasks: dict[str, Task] = {}
    for session in sessions:
        group_id = session.group_id
        if group_id is not None and group_id not in tasks:
            group = await store.group(group_id)
            tasks[group_id] = group.task if group else NO_TASK
        task = tasks[group_id] if group_id is not None else _task_from_metadata(session)
        if group_id is not None and isinstance(scorer, GroupScorer):
            if group_id not in by_group:
                by_group[group_id] = []
                units.append((task, by_group[group_id]))
            by_group[group_id].append(session.session_id)
        else:
            units.append((task, [session.session_id]))
    return units


def _task_from_metadata(session: Session) -> Task:
    payload = session.metadata.get("task")
    return Task(session.task_id or "", payload) if isinstance(payload, dict) else NO_TASK


async def _score(
    store: Store,
    scorer: Scorer,
    task: Task,
    ids: list[str],
    config: ScoringConfig,
    slots: asyncio.Semaphore,
    counts: RescoreCounts,
) -> None:
    async def load() -> list[Transcript]:
        return [Transcript(each, await store.calls(each), None) for each in ids]

    verdict = await score_sessions(scorer, task, ids, load, config, memory_slot=slots)
    has_failed = any(score.state is ScoreState.FALLBACK for score in verdict.scores)
    if not has_failed or verdict.rewards:
        try:
            new = await store.record_scores(verdict.scores, verdict.rewards)
        except ConflictError:  # another process recorded a score at the same time
            new = False
        if not new:
            counts.skipped += len(ids)
            return
    # Without a fallback value, a session that could not be scored keeps its existing rewards.
    for each in verdict.scores:
        if each.state is ScoreState.SCORED:
            counts.scored += 1
        else:
            counts.fallback += 1
            reason = each.reason or ""
            counts.reasons[reason] = counts.reasons.get(reason, 0) + 1
