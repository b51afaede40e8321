"""Scores completed sessions in the background.

Every scorer has its own queue, so that a scorer that is slow or hangs delays only its own sessions. A score
and its rewards are written in one transaction, once per session and scorer. If the process dies, the next one
scores the sessions that were in progress.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

from instar.config import ScoringConfig
from instar.errors import ConflictError
from instar.rewards.base import JUDGE_AGENT, NO_TASK, GroupScorer, Scorer, ScoringResult, Transcript
from instar.rewards.scoring import score_sessions
from instar.store.base import Store, UnscoredSession
from instar.types import Channel, Group, GroupStatus, ScoreState, Session, SessionStatus, Task

POLL_SECONDS = 0.2
FULL_SCAN_SECONDS = 30.0
"""The interval in seconds at which all sessions are read again from the beginning."""
PENDING_PER_SLOT = 8
"""Pending sessions per concurrent attempt. Most of them wait for a slot or for a retry."""
ROLLOUT_CHANNELS = (Channel.TRAIN, Channel.VAL)
IDLE_STATUS = "idle"
"""The start of the status text when nothing is left to score."""


@dataclass
class ScoringCounts:
    scored: int = 0
    fallback: int = 0
    in_progress: int = 0
    last_reason: str = ""

    def add(self, result: ScoringResult) -> None:
        for score in result.scores:
            if score.state is ScoreState.FALLBACK:
                self.fallback += 1
                self.last_reason = score.reason or ""
            else:
                self.scored += 1


class ScoringRunner:
    """Scores sessions of rollouts with the background scorers, and sessions of the live channel with
    ``live_scorers``."""

    def __init__(
        self,
        store: Store,
        run_id: str,
        scorers: Sequence[Scorer],
        config: ScoringConfig,
        *,
        live_scorers: Sequence[Scorer] = (),
    ) -> None:
        self.store = store
        self.run_id = run_id
        self.config = config
        self.counts = ScoringCounts()
        session_scorers = [scorer for scorer in scorers if not isinstance(scorer, GroupScorer)]
        background = [scorer for scorer in session_scorers if scorer.background]
        group_scorers = [scorer for scorer in scorers if isinstance(scorer, GroupScorer)]
        self._group_queue = _GroupQueue(self, background, group_scorers)
        self._scorer_queues = [
            _ScorerQueue(self, scorer, channels)
            for scorer in session_scorers
            if (channels := _channels(scorer, scorer in live_scorers))
        ]
        self._draining = False

    @property
    def doing(self) -> str:
        """The role's status text."""
        counts, pending = self.counts, self._group_queue.pending_count
        gave_up = f", {counts.fallback} given up ({counts.last_reason[:80]})" if counts.fallback else ""
        groups = f", {pending} groups waiting" if pending else ""
        now = f"{counts.in_progress} under way" if counts.in_progress or pending else IDLE_STATUS
        return f"{now}, {counts.scored} scored{gave_up}{groups}"

    async def run(self) -> None:
        """Score sessions until `drain` is called and the sessions in progress are scored. On cancellation,
        stop immediately; a later run scores the remaining sessions. Raises StoreError."""
        for states in (await self.store.score_counts(self.run_id)).values():
            self.counts.scored += states.get(ScoreState.SCORED, 0)
            self.counts.fallback += states.get(ScoreState.FALLBACK, 0)
        try:
            async with asyncio.TaskGroup() as tasks:
                for queue in self._scorer_queues:
                    tasks.create_task(queue.run(tasks))
                tasks.create_task(self._group_queue.run(tasks))
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None

    def drain(self) -> None:
        """Start no more sessions; `run` returns when the sessions in progress are scored."""
        self._draining = True

    @property
    def draining(self) -> bool:
        return self._draining

    async def score(
        self,
        scorer: Scorer,
        task: Task,
        session_ids: list[str],
        memory_limit: asyncio.Semaphore,
        attempt_limit: asyncio.Semaphore,
    ) -> None:
        """Score the sessions and record the scores and rewards."""

        async def load() -> list[Transcript]:
            return [Transcript(each, await self.store.calls(each), None) for each in session_ids]

        result = await score_sessions(
            scorer,
            task,
            session_ids,
            load,
            self.config,
            memory_slot=memory_limit,
            attempt_slot=attempt_limit,
        )
        try:
            is_new = await self.store.record_scores(result.scores, result.rewards)
        except ConflictError:  # another process recorded the same score at the same moment
            is_new = False
        if is_new:
            self.counts.add(result)
        for session_id in session_ids:
            self._group_queue.mark_scored(session_id, scorer.name)


def _channels(scorer: Scorer, is_live: bool) -> tuple[Channel, ...]:
    return (*(ROLLOUT_CHANNELS if scorer.background else ()), *((Channel.LIVE,) if is_live else ()))


class _ScorerQueue:
    """The queue of one scorer, which scores sessions one by one."""

    def __init__(self, runner: ScoringRunner, scorer: Scorer, channels: tuple[Channel, ...]) -> None:
        self.runner = runner
        self.scorer = scorer
        self.channels = channels
        slots = runner.config.concurrency
        self._attempt_limit = asyncio.Semaphore(slots)
        self._memory_limit = asyncio.Semaphore(2 * slots)
        self._max_pending = PENDING_PER_SLOT * slots
        self._pending: dict[str, int] = {}
        """The ``seq`` of each session that is being scored or waits to be scored."""
        self._session_done = asyncio.Event()
        self._after = 0
        """The next query returns sessions with a higher ``seq``."""
        self._settled: int | None = None
        """All sessions up to this ``seq`` had ended when the current scan began."""
        self._last_full_scan = time.monotonic()

    async def run(self, tasks: asyncio.TaskGroup) -> None:
        while not self.runner.draining:
            if len(self._pending) > self._max_pending // 2:
                self._session_done.clear()
                await self._session_done.wait()
            elif not await self._take_up_sessions(tasks):
                await asyncio.sleep(POLL_SECONDS)

    async def _take_up_sessions(self, tasks: asyncio.TaskGroup) -> bool:
        """Start scoring as many sessions as allowed. Return False if no more sessions exist."""
        store, run_id = self.runner.store, self.runner.run_id
        if self._settled is None:
            self._settled = await store.last_ended_seq(run_id, self.channels)
        limit = self._max_pending  # the result may contain every pending session again
        unscored = await store.unscored_sessions(
            run_id, self.scorer.key, self.channels, after=self._after, limit=limit, pending_only=True
        )
        free = limit - len(self._pending)
        new = [each for each in unscored if self._is_new(each.session)]
        for each in new[:free]:
            self._pending[each.session.session_id] = each.seq
            tasks.create_task(self._score(each))
        if len(new) > free:
            self._after = new[free - 1].seq
            return True
        if len(unscored) == limit:
            self._after = unscored[-1].seq
            return True
        self._restart_scan(self._settled)
        return False

    def _is_new(self, session: Session) -> bool:
        return session.session_id not in self._pending and session.agent_id != JUDGE_AGENT

    def _restart_scan(self, settled: int) -> None:
        """Begin the next scan at the first session that may still become ready, or periodically at 0."""
        self._after = min([settled, *(seq - 1 for seq in self._pending.values())])
        self._settled = None
        if time.monotonic() - self._last_full_scan > FULL_SCAN_SECONDS:
            self._after, self._last_full_scan = 0, time.monotonic()

    async def _score(self, unscored: UnscoredSession) -> None:
        session_id = unscored.session.session_id
        self.runner.counts.in_progress += 1
        try:
            task = await self._load_task(unscored.session)
            await self.runner.score(self.scorer, task, [session_id], self._memory_limit, self._attempt_limit)
        finally:
            self.runner.counts.in_progress -= 1
            del self._pending[session_id]
            self._session_done.set()

    async def _load_task(self, session: Session) -> Task:
        if session.group_id is not None and (group := await self.runner.store.group(session.group_id)):
            return group.task
        data = session.metadata.get("task")
        return Task(session.task_id or "", data) if isinstance(data, dict) else NO_TASK


@dataclass(frozen=True)
class _PendingGroup:
    """A group that waits for scores."""

    session_ids: list[str]
    missing: set[tuple[str, str]]
    """Pairs of session id and scorer name."""


class _GroupQueue:
    """The queue of groups whose sessions have all ended. It compares the sessions of each group, and marks a
    group as ready for training when every session has all its scores."""

    def __init__(
        self, runner: ScoringRunner, session_scorers: Sequence[Scorer], group_scorers: Sequence[GroupScorer]
    ) -> None:
        self.runner = runner
        self.session_scorers = session_scorers
        self.group_scorers = group_scorers
        slots = runner.config.concurrency
        self._attempt_limits = {scorer.key: asyncio.Semaphore(slots) for scorer in group_scorers}
        self._memory_limits = {scorer.key: asyncio.Semaphore(2 * slots) for scorer in group_scorers}
        self._pending: dict[str, _PendingGroup] = {}
        self._group_ids: dict[str, str] = {}
        """The pending group that each session belongs to."""
        self._comparing: set[tuple[str, str]] = set()
        """Pairs of group id and scorer key that are in progress."""
        self._scored_during_read: set[tuple[str, str]] | None = None
        """The sessions that were scored while a group's scores are being read from the store."""
        self._last_full_scan = time.monotonic()

    @property
    def pending_count(self) -> int:
        return len(self._pending)

    async def run(self, tasks: asyncio.TaskGroup) -> None:
        if not self.session_scorers and not self.group_scorers:
            return
        while not self.runner.draining or self.runner.counts.in_progress:
            if time.monotonic() - self._last_full_scan > FULL_SCAN_SECONDS:
                self._pending, self._group_ids = {}, {}
                self._last_full_scan = time.monotonic()
            for channel in ROLLOUT_CHANNELS:
                groups = await self.runner.store.groups(self.runner.run_id, channel, GroupStatus.SCORING)
                for group in groups:
                    if group.group_id not in self._pending:
                        await self._take_up(group, tasks)
            await self._close_scored_groups()
            await asyncio.sleep(POLL_SECONDS)
        await self._close_scored_groups()

    def mark_scored(self, session_id: str, scorer: str) -> None:
        if self._scored_during_read is not None:
            self._scored_during_read.add((session_id, scorer))
        if group_id := self._group_ids.get(session_id):
            self._pending[group_id].missing.discard((session_id, scorer))

    async def _take_up(self, group: Group, tasks: asyncio.TaskGroup) -> None:
        self._scored_during_read = set()
        completed, scored = await self._read_scores(group)
        scorers = (*self.session_scorers, *self.group_scorers)
        expected = {(each, scorer.name) for each in completed for scorer in scorers}
        missing = expected - scored - self._scored_during_read
        self._scored_during_read = None
        self._pending[group.group_id] = _PendingGroup(completed, missing)
        self._group_ids |= dict.fromkeys(completed, group.group_id)
        for scorer in self.group_scorers:
            key = (group.group_id, scorer.key)
            unscored = [each for each in completed if (each, scorer.name) in missing]
            if unscored and key not in self._comparing and not self.runner.draining:
                self._comparing.add(key)
                tasks.create_task(self._compare(group, scorer, unscored))

    async def _read_scores(self, group: Group) -> tuple[list[str], set[tuple[str, str]]]:
        """Return the completed sessions, and the scored pairs of session and scorer (of any version)."""
        store = self.runner.store
        rows = await store.sessions(group_id=group.group_id)
        completed = [row.session.session_id for row in rows if row.session.status is SessionStatus.COMPLETED]
        scores = [score for scores in (await store.scores(completed)).values() for score in scores]
        return completed, {(score.session_id, score.scorer.partition("@")[0]) for score in scores}

    async def _compare(self, group: Group, scorer: GroupScorer, session_ids: list[str]) -> None:
        self.runner.counts.in_progress += 1
        try:
            memory_limit, attempt_limit = self._memory_limits[scorer.key], self._attempt_limits[scorer.key]
            await self.runner.score(scorer, group.task, session_ids, memory_limit, attempt_limit)
        finally:
            self.runner.counts.in_progress -= 1
            self._comparing.discard((group.group_id, scorer.key))

    async def _close_scored_groups(self) -> None:
        for group_id in [group_id for group_id, group in self._pending.items() if not group.missing]:
            await self.runner.store.close_group(group_id, GroupStatus.READY)
            for session_id in self._pending.pop(group_id).session_ids:
                del self._group_ids[session_id]
