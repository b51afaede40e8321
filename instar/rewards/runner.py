"""Scores completed sessions in the background. Each scorer has its own queue, so a slow or hanging scorer
delays only its own scores. A score and its rewards are written in one transaction, once per session and
scorer. If the process dies, the next process scores the sessions that were in progress."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from instar.config import ScoringConfig
from instar.errors import ConflictError, SessionNotFound
from instar.rewards.base import JUDGE_AGENT, GroupScorer, Scorer, ScoringResult, Transcript, get_task
from instar.rewards.open_sessions import OpenSessionQueue
from instar.rewards.scoring import score_sessions
from instar.store.base import Store
from instar.types import Channel, Group, GroupStatus, ScoreState, Session, SessionStatus, Task

POLL_INTERVAL_SECONDS = 0.2
FULL_SCAN_INTERVAL_SECONDS = 30.0
PENDING_PER_SLOT = 8
"""Maximum number of pending sessions per concurrent attempt. Most of them wait for a slot or a retry."""
ROLLOUT_CHANNELS = (Channel.TRAIN, Channel.VAL)
IDLE_STATUS = "idle"


@dataclass
class ScoringCounts:
    scored: int = 0
    fallback: int = 0
    in_progress: int = 0
    last_failure: str = ""

    def add(self, result: ScoringResult) -> None:
        for score in result.scores:
            if score.state is ScoreState.FALLBACK:
                self.fallback += 1
                self.last_failure = score.reason or ""
            else:
                self.scored += 1


class ScoringRunner:
    """Scores train and val sessions with ``rollout_scorers``, and live sessions with ``live_scorers``."""

    def __init__(
        self,
        store: Store,
        run_id: str,
        rollout_scorers: Sequence[Scorer],
        config: ScoringConfig,
        *,
        agent_id: str,
        live_scorers: Sequence[Scorer] = (),
    ) -> None:
        self.store = store
        self.run_id = run_id
        self.agent_id = agent_id
        self.config = config
        self.counts = ScoringCounts()
        scorers = [*rollout_scorers, *(scorer for scorer in live_scorers if scorer not in rollout_scorers)]
        self._slots = {
            scorer.key: (asyncio.Semaphore(2 * config.concurrency), asyncio.Semaphore(config.concurrency))
            for scorer in scorers
        }
        """The limits on sessions or groups in memory and on concurrent attempts, by scorer key."""
        session_scorers = [scorer for scorer in scorers if not isinstance(scorer, GroupScorer)]
        self._group_queue = _GroupQueue(
            self,
            [scorer for scorer in session_scorers if scorer in rollout_scorers],
            [scorer for scorer in rollout_scorers if isinstance(scorer, GroupScorer)],
        )
        self._scorer_queues: list[_ScorerQueue] = []
        for scorer in session_scorers:
            channels = ROLLOUT_CHANNELS if scorer in rollout_scorers else ()
            channels += (Channel.LIVE, Channel.RESAMPLED) if scorer in live_scorers else ()
            if channels:
                self._scorer_queues.append(_ScorerQueue(self, scorer, channels))
        open_scorers = [scorer for scorer in live_scorers if scorer.scores_open_sessions]
        self._open_queue = OpenSessionQueue(store, run_id, open_scorers, config)
        self.is_draining = False

    @property
    def status_text(self) -> str:
        counts, pending_groups = self.counts, len(self._group_queue.pending)
        failed = f", {counts.fallback} failed ({counts.last_failure[:80]})" if counts.fallback else ""
        groups = f", {pending_groups} groups waiting" if pending_groups else ""
        is_busy = counts.in_progress or pending_groups
        progress = f"{counts.in_progress} in progress" if is_busy else IDLE_STATUS
        return f"{progress}, {counts.scored} scored{failed}{groups}"

    async def run(self) -> None:
        """Score sessions until `drain` is called and the sessions in progress are scored. Raises StoreError
        if the store fails. After a cancellation, a later run scores the remaining sessions."""
        for states in (await self.store.score_counts(self.run_id)).values():
            self.counts.scored += states.get(ScoreState.SCORED, 0)
            self.counts.fallback += states.get(ScoreState.FALLBACK, 0)
        try:
            async with asyncio.TaskGroup() as tasks:
                for queue in self._scorer_queues:
                    tasks.create_task(queue.run(tasks))
                tasks.create_task(self._group_queue.run(tasks))
                tasks.create_task(self._open_queue.run(lambda: self.is_draining))
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None

    def drain(self) -> None:
        """Stop scoring new sessions, so that `run` returns once the sessions in progress are scored."""
        self.is_draining = True

    async def score(self, scorer: Scorer, task: Task, session_ids: list[str]) -> None:
        async def load() -> list[Transcript]:
            return [
                Transcript(session_id, await self.store.calls(session_id), None) for session_id in session_ids
            ]

        memory_slot, attempt_slot = self._slots[scorer.key]
        result = await score_sessions(
            scorer, task, session_ids, load, self.config, memory_slot=memory_slot, attempt_slot=attempt_slot
        )
        # Another process recorded the same score at the same time, or a person deleted the session.
        with suppress(ConflictError, SessionNotFound):
            if await self.store.record_scores(result.scores, result.rewards):
                self.counts.add(result)
        for session_id in session_ids:
            self._group_queue.mark_scored(session_id, scorer.name)


class _ScorerQueue:
    def __init__(self, runner: ScoringRunner, scorer: Scorer, channels: tuple[Channel, ...]) -> None:
        self.runner = runner
        self.scorer = scorer
        self.channels = channels
        self._max_pending = PENDING_PER_SLOT * runner.config.concurrency
        self._pending: dict[str, int] = {}
        """The ``seq`` of each session that is waiting or being scored, by session id."""
        self._session_done = asyncio.Event()
        self._after_seq = 0
        """The next query returns sessions with a higher ``seq``."""
        self._settled_seq: int | None = None
        """All sessions up to this ``seq`` had ended when the current scan began. None between scans."""
        self._last_full_scan = time.monotonic()

    async def run(self, tasks: asyncio.TaskGroup) -> None:
        while not self.runner.is_draining:
            if len(self._pending) > self._max_pending // 2:
                self._session_done.clear()
                await self._session_done.wait()
            elif not await self._start_sessions(tasks):
                await asyncio.sleep(POLL_INTERVAL_SECONDS)

    async def _start_sessions(self, tasks: asyncio.TaskGroup) -> bool:
        """Start scoring as many sessions as allowed. Return False if there are no more sessions to check."""
        store, run_id = self.runner.store, self.runner.run_id
        if self._settled_seq is None:
            self._settled_seq = await store.seq_before_oldest_open(run_id, self.channels)
        limit = self._max_pending  # the result may contain every pending session again
        unscored = await store.unscored_sessions(
            run_id, self.scorer.key, self.channels, after=self._after_seq, limit=limit, pending_only=True
        )
        free_count = limit - len(self._pending)
        new = [
            row
            for row in unscored
            if row.session.session_id not in self._pending and row.session.agent_id != JUDGE_AGENT
        ]
        for row in new[:free_count]:
            self._pending[row.session.session_id] = row.seq
            tasks.create_task(self._score(row.session))
        if len(new) > free_count:
            self._after_seq = new[free_count - 1].seq
            return True
        if len(unscored) == limit:
            self._after_seq = unscored[-1].seq
            return True
        # The next scan starts at the first session that may still become ready, or periodically at 0.
        self._after_seq = min([self._settled_seq, *(seq - 1 for seq in self._pending.values())])
        self._settled_seq = None
        if time.monotonic() - self._last_full_scan > FULL_SCAN_INTERVAL_SECONDS:
            self._after_seq, self._last_full_scan = 0, time.monotonic()
        return False

    async def _score(self, session: Session) -> None:
        self.runner.counts.in_progress += 1
        try:
            group = await self.runner.store.group(session.group_id) if session.group_id else None
            await self.runner.score(self.scorer, get_task(session, group), [session.session_id])
        finally:
            self.runner.counts.in_progress -= 1
            del self._pending[session.session_id]
            self._session_done.set()


@dataclass(frozen=True)
class _PendingGroup:
    session_ids: list[str]
    missing: set[tuple[str, str]]
    """The missing scores, as pairs of session id and scorer name."""


class _GroupQueue:
    """The queue of groups whose sessions have all ended. A group becomes ready when each of its completed
    sessions has a score from every background scorer."""

    def __init__(
        self, runner: ScoringRunner, session_scorers: Sequence[Scorer], group_scorers: Sequence[GroupScorer]
    ) -> None:
        self.runner = runner
        self.session_scorers = session_scorers
        self.group_scorers = group_scorers
        self.pending: dict[str, _PendingGroup] = {}
        self._group_id_by_session: dict[str, str] = {}
        self._comparisons: set[tuple[str, str]] = set()
        """The comparisons in progress, as pairs of group id and scorer key."""
        self._scored_during_read: set[tuple[str, str]] | None = None
        """The (session id, scorer name) pairs scored while a group's scores are read. None at other times."""
        self._last_full_scan = time.monotonic()

    async def run(self, tasks: asyncio.TaskGroup) -> None:
        if not self.session_scorers and not self.group_scorers:
            return
        while not self.runner.is_draining or self.runner.counts.in_progress:
            if time.monotonic() - self._last_full_scan > FULL_SCAN_INTERVAL_SECONDS:
                self.pending, self._group_id_by_session = {}, {}
                self._last_full_scan = time.monotonic()
            for channel in ROLLOUT_CHANNELS:
                groups = await self.runner.store.groups(self.runner.run_id, channel, GroupStatus.SCORING)
                for group in groups:
                    if group.group_id not in self.pending:
                        await self._add_group(group, tasks)
            await self._close_scored_groups()
            await asyncio.sleep(POLL_INTERVAL_SECONDS)
        await self._close_scored_groups()

    def mark_scored(self, session_id: str, scorer_name: str) -> None:
        if self._scored_during_read is not None:
            self._scored_during_read.add((session_id, scorer_name))
        if group_id := self._group_id_by_session.get(session_id):
            self.pending[group_id].missing.discard((session_id, scorer_name))

    async def _add_group(self, group: Group, tasks: asyncio.TaskGroup) -> None:
        self._scored_during_read = set()
        store = self.runner.store
        sessions = (await store.group_sessions([group], self.runner.agent_id))[group.group_id]
        completed = [s.session_id for s in sessions if s.status is SessionStatus.COMPLETED]
        scores = [score for scores in (await store.scores(completed)).values() for score in scores]
        # A score from any version of a scorer counts.
        scored = {(score.session_id, score.scorer.partition("@")[0]) for score in scores}
        scorers = (*self.session_scorers, *self.group_scorers)
        expected = {(session_id, scorer.name) for session_id in completed for scorer in scorers}
        missing = expected - scored - self._scored_during_read
        self._scored_during_read = None
        self.pending[group.group_id] = _PendingGroup(completed, missing)
        self._group_id_by_session |= dict.fromkeys(completed, group.group_id)
        for scorer in self.group_scorers:
            key = (group.group_id, scorer.key)
            unscored = [session_id for session_id in completed if (session_id, scorer.name) in missing]
            if unscored and key not in self._comparisons and not self.runner.is_draining:
                self._comparisons.add(key)
                tasks.create_task(self._compare(group, scorer, unscored))

    async def _compare(self, group: Group, scorer: GroupScorer, session_ids: list[str]) -> None:
        self.runner.counts.in_progress += 1
        try:
            await self.runner.score(scorer, group.task, session_ids)
        finally:
            self.runner.counts.in_progress -= 1
            self._comparisons.discard((group.group_id, scorer.key))

    async def _close_scored_groups(self) -> None:
        for group_id in [group_id for group_id, group in self.pending.items() if not group.missing]:
            await self.runner.store.close_group(group_id, GroupStatus.READY)
            for session_id in self.pending.pop(group_id).session_ids:
                del self._group_id_by_session[session_id]
