"""Scores sessions once they have completed, in the background.

Every scorer has a lane of its own, so that one that is slow or hangs keeps only its own sessions waiting.
A score and its rewards are written in one transaction, once per session and scorer: what a process that died
was about to score, the next one scores.
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

POLL = 0.2
LOOK_AGAIN = 30.0
"""Seconds after which everything is looked at anew, whatever was seen before."""
PER_SLOT = 8
"""Sessions under way for each that is being scored: the others wait for their turn, or another attempt."""
IN_ROLLOUT = (Channel.TRAIN, Channel.VAL)


@dataclass
class ScoringCounts:
    scored: int = 0
    fallback: int = 0
    under_way: int = 0
    last_reason: str = ""

    def add(self, verdict: ScoringResult) -> None:
        for score in verdict.scores:
            if score.state is ScoreState.FALLBACK:
                self.fallback += 1
                self.last_reason = score.reason or ""
            else:
                self.scored += 1


class ScoringRunner:
    """Has sessions of rollouts scored by the scorers that no rollout waits for, those of the live channel by
    ``on_live``."""

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
        alone = [scorer for scorer in scorers if not isinstance(scorer, GroupScorer)]
        background = [scorer for scorer in alone if scorer.background]
        together = [scorer for scorer in scorers if isinstance(scorer, GroupScorer)]
        self._group_queue = _GroupQueue(self, background, together)
        self._scorer_queues = [
            _ScorerQueue(self, scorer, channels)
            for scorer in alone
            if (channels := _channels(scorer, scorer in live_scorers))
        ]
        self._draining = False

    @property
    def doing(self) -> str:
        counts = self.counts
        gave_up = f", {counts.fallback} given up ({counts.last_reason[:80]})" if counts.fallback else ""
        waiting = f", {self._group_queue.waiting} groups waiting" if self._group_queue.waiting else ""
        now = f"{counts.under_way} under way" if counts.under_way or waiting else IDLE_STATUS
        return f"{now}, {counts.scored} scored{gave_up}{waiting}"

    async def run(self) -> None:
        """Until `drain` was called and what was under way is scored. Cancelling stops at once: what was under
        way is scored by a later run. Raises StoreError."""
        for states in (await self.store.score_counts(self.run_id)).values():
            self.counts.scored += states.get(ScoreState.SCORED, 0)
            self.counts.fallback += states.get(ScoreState.FALLBACK, 0)
        try:
            async with asyncio.TaskGroup() as tasks:
                for lane in self._scorer_queues:
                    tasks.create_task(lane.run(tasks))
                tasks.create_task(self._group_queue.run(tasks))
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None

    def drain(self) -> None:
        """Begin nothing more."""
        self._draining = True

    @property
    def draining(self) -> bool:
        return self._draining

    async def load_transcript(self, session_id: str) -> Transcript:
        return Transcript(session_id, await self.store.calls(session_id), None)

    async def record(self, verdict: ScoringResult) -> None:
        try:
            new = await self.store.record_scores(verdict.scores, verdict.rewards)
        except ConflictError:  # another process was faster, in the very moment
            new = False
        if new:
            self.counts.add(verdict)

    def mark_scored(self, session_id: str, scorer: Scorer) -> None:
        self._group_queue.scored(session_id, scorer.name)


IDLE_STATUS = "idle"
"""So begins what it says of itself when nothing is left to score."""


def _channels(scorer: Scorer, live: bool) -> tuple[Channel, ...]:
    return (*(IN_ROLLOUT if scorer.background else ()), *((Channel.LIVE,) if live else ()))


class _ScorerQueue:
    """One scorer and the sessions that it is to see one by one."""

    def __init__(self, runner: ScoringRunner, scorer: Scorer, channels: tuple[Channel, ...]) -> None:
        self.runner = runner
        self.scorer = scorer
        self.channels = channels
        slots = runner.config.concurrency
        self._slots = asyncio.Semaphore(slots)
        self._at_hand = asyncio.Semaphore(2 * slots)
        self._limit = PER_SLOT * slots
        self._under_way: dict[str, int] = {}
        """Session → seq."""
        self._freed = asyncio.Event()
        self._at = 0
        """Behind this the next look begins."""
        self._settled: int | None = None
        """Up to this, every session had ended when the present walk through the sessions began."""
        self._walked = time.monotonic()

    async def run(self, tasks: asyncio.TaskGroup) -> None:
        while not self.runner.draining:
            if len(self._under_way) > self._limit // 2:
                self._freed.clear()
                await self._freed.wait()
            elif not await self._look(tasks):
                await asyncio.sleep(POLL)

    async def _look(self, tasks: asyncio.TaskGroup) -> bool:
        """Begin with as many as there is room for. False: all there are, are begun with."""
        store, run_id = self.runner.store, self.runner.run_id
        if self._settled is None:
            self._settled = await store.last_ended_seq(run_id, self.channels)
        limit = self._limit  # in which those under way come up again, at most
        found = await store.unscored_sessions(
            run_id, self.scorer.key, self.channels, after=self._at, limit=limit, pending_only=True
        )
        room = limit - len(self._under_way)
        fresh = [each for each in found if self._is_fresh(each.session)]
        for each in fresh[:room]:
            self._under_way[each.session.session_id] = each.seq
            tasks.create_task(self._score(each))
        if len(fresh) > room:
            self._at = fresh[room - 1].seq
            return True
        if len(found) == limit:
            self._at = found[-1].seq
            return True
        self._begin_again(self._settled)
        return False

    def _is_fresh(self, session: Session) -> bool:
        return session.session_id not in self._under_way and session.agent_id != JUDGE_AGENT

    def _begin_again(self, settled: int) -> None:
        """The next walk begins where something may still come up; now and then from the start."""
        self._at = min([settled, *(seq - 1 for seq in self._under_way.values())])
        self._settled = None
        if time.monotonic() - self._walked > LOOK_AGAIN:
            self._at, self._walked = 0, time.monotonic()

    async def _score(self, found: UnscoredSession) -> None:
        runner, session = self.runner, found.session
        runner.counts.under_way += 1

        async def load() -> list[Transcript]:
            return [await runner.load_transcript(session.session_id)]

        try:
            verdict = await score_sessions(
                self.scorer,
                await self._task_of(session),
                [session.session_id],
                load,
                runner.config,
                memory_slot=self._at_hand,
                attempt_slot=self._slots,
            )
            await runner.record(verdict)
            runner.mark_scored(session.session_id, self.scorer)
        finally:
            runner.counts.under_way -= 1
            del self._under_way[session.session_id]
            self._freed.set()

    async def _task_of(self, session: Session) -> Task:
        if session.group_id is not None and (group := await self.runner.store.group(session.group_id)):
            return group.task
        told = session.metadata.get("task")
        return Task(session.task_id or "", told) if isinstance(told, dict) else NO_TASK


@dataclass(frozen=True)
class _PendingGroup:
    """A group that waits for scores."""

    sessions: list[str]
    missing: set[tuple[str, str]]
    """(session, scorer)"""


class _GroupQueue:
    """Groups whose sessions have all ended: compares those sessions, and lets the trainer have the group once
    every one of them has its scores."""

    def __init__(
        self, runner: ScoringRunner, alone: Sequence[Scorer], together: Sequence[GroupScorer]
    ) -> None:
        self.runner = runner
        self.alone = alone
        self.together = together
        slots = runner.config.concurrency
        self._slots = {scorer.key: asyncio.Semaphore(slots) for scorer in together}
        self._at_hand = {scorer.key: asyncio.Semaphore(2 * slots) for scorer in together}
        self._waiting: dict[str, _PendingGroup] = {}
        """By group."""
        self._group_of: dict[str, str] = {}
        self._compared: set[tuple[str, str]] = set()
        """(group, scorer) that are being compared."""
        self._meanwhile: set[tuple[str, str]] | None = None
        """Scored while the store is being asked what a group waits for."""
        self._looked = time.monotonic()

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    async def run(self, tasks: asyncio.TaskGroup) -> None:
        if not self.alone and not self.together:
            return
        while not self.runner.draining or self.runner.counts.under_way:
            if time.monotonic() - self._looked > LOOK_AGAIN:
                self._waiting, self._group_of = {}, {}
                self._looked = time.monotonic()
            for channel in IN_ROLLOUT:
                groups = await self.runner.store.groups(self.runner.run_id, channel, GroupStatus.SCORING)
                for group in groups:
                    if group.group_id not in self._waiting:
                        await self._take_up(group, tasks)
            await self._close()
            await asyncio.sleep(POLL)
        await self._close()

    def scored(self, session_id: str, scorer: str) -> None:
        if self._meanwhile is not None:
            self._meanwhile.add((session_id, scorer))
        if group_id := self._group_of.get(session_id):
            self._waiting[group_id].missing.discard((session_id, scorer))

    async def _take_up(self, group: Group, tasks: asyncio.TaskGroup) -> None:
        self._meanwhile = set()
        done, scored = await self._read(group)
        wanted = {(each, scorer.name) for each in done for scorer in (*self.alone, *self.together)}
        missing = wanted - scored - self._meanwhile
        self._meanwhile = None
        self._waiting[group.group_id] = _PendingGroup(done, missing)
        self._group_of |= dict.fromkeys(done, group.group_id)
        for scorer in self.together:
            key = (group.group_id, scorer.key)
            left = [each for each in done if (each, scorer.name) in missing]
            if left and key not in self._compared and not self.runner.draining:
                self._compared.add(key)
                tasks.create_task(self._compare(group, scorer, left))

    async def _read(self, group: Group) -> tuple[list[str], set[tuple[str, str]]]:
        """Its completed sessions, and by which scorers they are scored, in whatever version."""
        store = self.runner.store
        rows = await store.sessions(group_id=group.group_id)
        done = [row.session.session_id for row in rows if row.session.status is SessionStatus.COMPLETED]
        given = [score for scores in (await store.scores(done)).values() for score in scores]
        return done, {(score.session_id, score.scorer.partition("@")[0]) for score in given}

    async def _compare(self, group: Group, scorer: GroupScorer, session_ids: list[str]) -> None:
        runner = self.runner
        runner.counts.under_way += 1

        async def load() -> list[Transcript]:
            return [await runner.load_transcript(each) for each in session_ids]

        try:
            verdict = await score_sessions(
                scorer,
                group.task,
                session_ids,
                load,
                runner.config,
                memory_slot=self._at_hand[scorer.key],
                attempt_slot=self._slots[scorer.key],
            )
            await runner.record(verdict)
            for each in session_ids:
                self.scored(each, scorer.name)
        finally:
            runner.counts.under_way -= 1
            self._compared.discard((group.group_id, scorer.key))

    async def _close(self) -> None:
        for group_id in [group_id for group_id, found in self._waiting.items() if not found.missing]:
            await self.runner.store.close_group(group_id, GroupStatus.READY)
            for session_id in self._waiting.pop(group_id).sessions:
                del self._group_of[session_id]
