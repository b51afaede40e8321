"""`instar rescore`: score stored sessions with a different rule or judge."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from instar.cli.config_file import load_config, validate
from instar.cli.filters import build_session_filter, with_session_filters
from instar.cli.options import AsJson, RunDir, SessionIds, async_command
from instar.cli.output import print_json, progress_bar
from instar.cli.run_store import open_run_store
from instar.cli.tags import iterate_pages, require_sessions
from instar.config import RunConfig, ScoringConfig
from instar.errors import ConfigError, ConflictError, SessionNotFound
from instar.rewards.base import GroupScorer, Scorer, ScoringContext, Transcript, get_task
from instar.rewards.factory import create_scorers
from instar.rewards.scoring import score_sessions
from instar.rollout.tasks import load_tasks
from instar.store.base import SessionFilter, Store
from instar.types import Group, Json, ScoreState, Session, SessionStatus, Task


@dataclass(slots=True)
class RescoreCounts:
    scored: int = 0
    fallback: int = 0
    """Number of sessions that the scorer could not score."""
    skipped: int = 0
    """Number of sessions that already had a score from this version of the scorer."""
    reasons: dict[str, int] = field(default_factory=dict[str, int])
    """Number of sessions in ``fallback``, by failure reason."""


@with_session_filters
@async_command
async def rescore(
    run_dir: RunDir,
    filters: dict[str, Any],
    session_ids: SessionIds = None,
    reward: Annotated[
        list[str] | None, typer.Option(metavar="YAML", help="A `reward`, e.g. '{type: math}'; repeatable.")
    ] = None,
    config_file: Annotated[
        Path | None, typer.Option("--config", help="Use `reward` and `scoring` from another YAML file.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Agents are not run again. The new scores are stored alongside the earlier ones."""
    where = build_session_filter(filters, tuple(session_ids or ()))
    if where.status not in (None, SessionStatus.COMPLETED):
        raise ConfigError(f"--status: only completed sessions can be rescored, got {where.status.value!r}")
    where = replace(where, status=SessionStatus.COMPLETED)
    counts_by_scorer: dict[str, RescoreCounts] = {}
    async with AsyncExitStack() as stack:
        config, store = await stack.enter_async_context(open_run_store(run_dir))
        await require_sessions(store, config.name, where.ids)
        rescore_config = _replace_scorers(config, reward or (), config_file)
        sections, rollout = rescore_config.reward, rescore_config.rollout
        uses_task_scorer = any(section.type == "rule" and section.function is None for section in sections)
        tasks = load_tasks(rollout.tasks) if uses_task_scorer and rollout else None
        scorers = create_scorers(rescore_config, tasks)
        for scorer in scorers:
            stack.push_async_callback(scorer.close)
            await scorer.start(ScoringContext(config.name, store))
        for scorer in scorers:
            rescorer = SessionRescorer(store, config.name, scorer, rescore_config.scoring)
            counts_by_scorer[scorer.key] = await rescorer.run(where)
    if as_json:
        print_json({key: asdict(counts) for key, counts in counts_by_scorer.items()})
        return
    for key, counts in counts_by_scorer.items():
        typer.echo(
            f"{key}: {counts.scored} scored, {counts.fallback} failed, {counts.skipped} already scored"
        )
        for reason, count in counts.reasons.items():
            typer.echo(f"  {count} failed: {reason}")


def _replace_scorers(config: RunConfig, rewards: Sequence[str], file: Path | None) -> RunConfig:
    """Return the run's config with the scorers from ``rewards`` or ``file``. Exactly one must be set."""
    if bool(rewards) == (file is not None):
        shown = "neither" if file is None else "both"
        raise ConfigError(f"Set exactly one of --reward '{{type: ...}}' and --config FILE, got {shown}.")
    if file is not None:
        other = load_config(file)
        return config.model_copy(update={"reward": other.reward, "scoring": other.scoring})
    sections: list[Any] = []
    for text in rewards:
        try:
            sections.append(yaml.safe_load(text))
        except yaml.YAMLError as error:
            raise ConfigError(f"--reward {text}: not valid YAML: {error}") from error
    settings: Json = config.model_dump(mode="json", exclude_unset=True) | {"reward": sections}
    scoring: Json = settings.get("scoring") or {}
    scoring.pop("combine", None)  # it may refer to scorers that are not used here
    if (working_directory := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, working_directory)  # it may contain a rule's function
    return validate(settings, "--reward")


class SessionRescorer:
    """Scores the sessions of a run with one scorer. An interrupted command can be repeated, because sessions
    that the scorer has already scored are skipped."""

    def __init__(self, store: Store, run_id: str, scorer: Scorer, config: ScoringConfig) -> None:
        self._store = store
        self._run_id = run_id
        self._scorer = scorer
        self._config = config
        self._slots = asyncio.Semaphore(config.concurrency)
        self._counts = RescoreCounts()

    async def run(self, where: SessionFilter) -> RescoreCounts:
        done = total = 0
        with progress_bar(self._scorer.key) as update_bar:

            async def score(task: Task, session_ids: list[str]) -> None:
                nonlocal done
                await self._score(task, session_ids)
                done += len(session_ids)
                if update_bar:
                    update_bar(done, total)

            async for sessions in self._iterate_unscored(where):
                total += len(sessions)
                async with asyncio.TaskGroup() as task_group:
                    for task, session_ids in await self._group_for_scoring(sessions):
                        task_group.create_task(score(task, session_ids))
        return self._counts

    async def _iterate_unscored(self, where: SessionFilter) -> AsyncGenerator[list[Session]]:
        """Yield unscored sessions in pages, or all at once if the scorer compares the sessions of a group."""
        unscored: list[Session] = []
        async for rows in iterate_pages(self._store, self._run_id, where):
            scores_by_session = await self._store.scores([row.session.session_id for row in rows])
            scored_ids = {
                session_id
                for session_id, scores in scores_by_session.items()
                if any(score.scorer == self._scorer.key for score in scores)
            }
            self._counts.skipped += len(scored_ids)
            unscored += [row.session for row in rows if row.session.session_id not in scored_ids]
            if not isinstance(self._scorer, GroupScorer):
                yield unscored
                unscored = []
        yield unscored

    async def _group_for_scoring(self, sessions: Sequence[Session]) -> list[tuple[Task, list[str]]]:
        """Return lists of session ids to score together, each with its task. A list contains one session or,
        if the scorer compares sessions, all ``sessions`` of a group."""
        tasks_and_ids: dict[tuple[str, str], tuple[Task, list[str]]] = {}
        groups: dict[str, Group | None] = {}
        for session in sessions:
            group_id = session.group_id or ""
            if group_id not in groups:
                groups[group_id] = await self._store.group(group_id)
            group = groups[group_id]
            is_in_group = group is not None and group.accepts(session)
            is_compared = is_in_group and isinstance(self._scorer, GroupScorer)
            key = (group_id, "" if is_compared else session.session_id)
            _, session_ids = tasks_and_ids.setdefault(key, (get_task(session, group), []))
            session_ids.append(session.session_id)
        return list(tasks_and_ids.values())

    async def _score(self, task: Task, session_ids: list[str]) -> None:
        async def load() -> list[Transcript]:
            calls = await self._store.calls_by_session(session_ids)
            return [Transcript(session_id, calls[session_id], None) for session_id in session_ids]

        result = await score_sessions(
            self._scorer, task, session_ids, load, self._config, memory_slot=self._slots
        )
        has_failed = any(score.state is ScoreState.FALLBACK for score in result.scores)
        # A failure without a fallback reward is not recorded, so the session can be scored later.
        if not has_failed or result.rewards:
            try:
                is_new = await self._store.record_scores(result.scores, result.rewards)
            except (ConflictError, SessionNotFound):  # another process scored or deleted the session
                is_new = False
            if not is_new:
                self._counts.skipped += len(session_ids)
                return
        for score in result.scores:
            if score.state is ScoreState.SCORED:
                self._counts.scored += 1
            else:
                self._counts.fallback += 1
                reason = score.reason or ""
                self._counts.reasons[reason] = self._counts.reasons.get(reason, 0) + 1
