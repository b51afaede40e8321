"""`instar rescore`: stored sessions, scored by another rule or judge. No agent runs again, and what they were
scored with before stays beside it."""

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
class Tally:
    """Sessions, by what came of them."""

    scored: int = 0
    fallback: int = 0
    skipped: int = 0
    """Scored by the same version of the scorer before."""
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
    """No agent runs again. The new scores are stored beside the earlier ones."""
    where = session_filter(filters, tuple(session_ids or ()))
    if where.status not in (None, SessionStatus.COMPLETED):
        raise ConfigError(f"--status: given {where.status.value!r}; only completed sessions are scored")
    where = replace(where, status=SessionStatus.COMPLETED)
    done = asyncio.run(_rescore(run_dir, where, reward or (), config_file))
    if as_json:
        typer.echo(json.dumps({key: _facts(tally) for key, tally in done.items()}))
        return
    for key, tally in done.items():
        typer.echo(f"{key}: {tally.scored} scored, {tally.fallback} given up, {tally.skipped} were before")
        for reason, count in tally.reasons.items():
            typer.echo(f"  {count} given up: {reason}")


def _facts(tally: Tally) -> dict[str, Any]:
    return {name: getattr(tally, name) for name in ("scored", "fallback", "skipped", "reasons")}


async def _rescore(
    run_dir: Path, where: SessionFilter, rewards: Sequence[str], file: Path | None
) -> dict[str, Tally]:
    async with AsyncExitStack() as stack:
        config, store = await stack.enter_async_context(open_run_store(run_dir))
        await require_sessions(store, config.name, where.ids)
        wanted = _wanted(config, rewards, file)
        scorers = create_scorers(wanted, _taskset(wanted))
        for scorer in scorers:
            stack.push_async_callback(scorer.close)
            await scorer.start(ScoringContext(config.name, store))
        return {
            scorer.key: await rescore_sessions(store, config.name, scorer, where, wanted.scoring)
            for scorer in scorers
        }


def _wanted(config: RunConfig, rewards: Sequence[str], file: Path | None) -> RunConfig:
    """The run's config with other scorers."""
    if bool(rewards) == (file is not None):
        raise ConfigError("score with what? Give --reward '{type: ...}', or --config with another YAML file")
    if file is not None:
        other = load_config(file)
        return config.model_copy(update={"reward": other.reward, "scoring": other.scoring})
    try:
        sections = [yaml.safe_load(each) for each in rewards]
    except yaml.YAMLError as error:
        raise ConfigError(f"--reward: not YAML: {error}") from error
    given: Json = config.model_dump(mode="json", exclude_unset=True) | {"reward": sections}
    scoring: Json = given.get("scoring") or {}
    scoring.pop("combine", None)  # it may name scorers that are not among these
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)  # where a rule's function may live
    return validate(given, "--reward")


def _taskset(config: RunConfig) -> TaskSet | None:
    """Where a rule asks for the tasks' own scorer."""
    own = any(section.type == "rule" and section.function is None for section in config.reward)
    return load_tasks(config.rollout.tasks) if own and config.rollout else None


async def rescore_sessions(
    store: Store, run_id: str, scorer: Scorer, where: SessionFilter, config: ScoringConfig
) -> Tally:
    """Have a scorer see sessions that it has not scored yet: beginning again goes on where it was left."""
    tally = Tally()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        bar = progress.add_task(scorer.key, total=None)
        seen = 0
        slots = asyncio.Semaphore(config.concurrency)

        async def score(task: Task, ids: list[str]) -> None:
            await _score(store, scorer, task, ids, config, slots, tally)
            progress.advance(bar, len(ids))

        async for sessions in _unscored(store, run_id, scorer, where, tally):
            seen += len(sessions)
            progress.update(bar, total=seen)
            async with asyncio.TaskGroup() as tasks:
                for task, ids in await _units(store, scorer, sessions):
                    tasks.create_task(score(task, ids))
    return tally


async def _unscored(
    store: Store, run_id: str, scorer: Scorer, where: SessionFilter, tally: Tally
) -> AsyncGenerator[list[Session]]:
    """Page by page; all at once for a scorer that compares the sessions of a group."""
    held: list[Session] = []
    async for rows in iterate_pages(store, run_id, where):
        scores = await store.scores([row.session.session_id for row in rows])
        done = {each for each, given in scores.items() if any(s.scorer == scorer.key for s in given)}
        tally.skipped += len(done)
        held += [row.session for row in rows if row.session.session_id not in done]
        if not isinstance(scorer, GroupScorer):
            yield held
            held = []
    yield held


async def _units(store: Store, scorer: Scorer, sessions: Sequence[Session]) -> list[tuple[Task, list[str]]]:
    """What is scored at once: a session, or those of a group for a scorer that compares them."""
    units: list[tuple[Task, list[str]]] = []
    by_group: dict[str, list[str]] = {}
    tasks: dict[str, Task] = {}
    for session in sessions:
        group_id = session.group_id
        if group_id is not None and group_id not in tasks:
            group = await store.group(group_id)
            tasks[group_id] = group.task if group else NO_TASK
        task = tasks[group_id] if group_id is not None else _told(session)
        if group_id is not None and isinstance(scorer, GroupScorer):
            if group_id not in by_group:
                by_group[group_id] = []
                units.append((task, by_group[group_id]))
            by_group[group_id].append(session.session_id)
        else:
            units.append((task, [session.session_id]))
    return units


def _told(session: Session) -> Task:
    told = session.metadata.get("task")
    return Task(session.task_id or "", told) if isinstance(told, dict) else NO_TASK


async def _score(
    store: Store,
    scorer: Scorer,
    task: Task,
    ids: list[str],
    config: ScoringConfig,
    slots: asyncio.Semaphore,
    tally: Tally,
) -> None:
    async def load() -> list[Transcript]:
        return [Transcript(each, await store.calls(each), None) for each in ids]

    verdict = await score_sessions(scorer, task, ids, load, config, memory_slot=slots)
    gave_up = any(score.state is ScoreState.FALLBACK for score in verdict.scores)
    if not gave_up or verdict.rewards:
        try:
            new = await store.record_scores(verdict.scores, verdict.rewards)
        except ConflictError:  # another process was faster, in the very moment
            new = False
        if not new:
            tally.skipped += len(ids)
            return
    # A session that was given up on, without a value for that, stays what it was: it has its rewards already.
    for each in verdict.scores:
        if each.state is ScoreState.SCORED:
            tally.scored += 1
        else:
            tally.fallback += 1
            reason = each.reason or ""
            tally.reasons[reason] = tally.reasons.get(reason, 0) + 1
