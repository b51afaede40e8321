"""A run on the virtual clock: admission, sessions, groups, training steps, by the rules of the real one.

The rules are those of `rollout/admission` (how many groups may start), `rollout/runner` and `rollout/slots`
(how many sessions run, what becomes of one that fails), `data/batcher` (which groups a step takes, what is
too old) and `trainer/loop` (a step is trained, published and served before its successor begins).
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from instar.simulate.base import ClusterSpec, SimulationResult, Workload
from instar.simulate.engines import SimulatedEngine, SimulatedPool, SimulatedRequest, VirtualClock
from instar.simulate.sessions import SimulatedSession, make_draw

POLL_DELAY = 0.03
"""Seconds, on average, until rollout and trainer notice what the other one did: each looks every 0.05 s."""
MAX_FAILED_GROUPS = 8
"""As `rollout/runner`: groups in a row that may fail as a whole."""
MAX_VIRTUAL_SECONDS = 1000 * 3600.0
"""Virtual seconds after which a simulation is given up."""


@dataclass(slots=True, eq=False)
class SimulatedGroup:
    index: int
    left: int
    """Slots without a final session."""
    lowest: list[int] = field(default_factory=list[int])
    """Per sample, the version of its oldest token, or of its newest one where only old tokens are masked."""
    stamps: list[int] = field(default_factory=list[int])
    """Per sample, the version of its oldest token."""
    tokens: list[int] = field(default_factory=list[int])
    failed: int = 0


@dataclass(slots=True, eq=False)
class SessionAttempt:
    """A session under way."""

    group: SimulatedGroup
    session: SimulatedSession
    turn: int = 0
    version: int = -1
    """Of its first token."""
    newest: int = -1
    replies: int = 0
    """Those that it got whole."""
    fails_at: int | None = None
    """The turn in which it fails."""
    refills: int = 0
    retries: int = 0
    server: SimulatedEngine | None = None
    request: SimulatedRequest | None = None
    over: bool = False


class PipelineSimulation:
    def __init__(self, work: Workload, plant: ClusterSpec, seed: int = 0) -> None:
        self.workload = work
        self.plant = plant
        self.rng = random.Random(seed)
        self.clock = VirtualClock()
        self.pool = SimulatedPool(self.clock, plant.engines, plant.max_batch, work.speed)
        self.latency = make_draw(work.latency, self.rng)
        self.publish = make_draw(work.publish, self.rng)
        self.result = SimulationResult()
        self.version = 0
        """What the engines serve."""
        self.done = 0
        """Steps whose version is served."""
        self.claimed = 0
        """Steps begun."""
        self.started = self.open = 0
        """Groups: all, and those with slots left."""
        self.ready: list[SimulatedGroup] = []
        self.training = False
        self.hopeless = 0
        """Groups in a row of which every session failed."""
        self.unfinished = 0
        self.playing = self.calling = 0
        """Sessions, and those of them that wait for a reply or get one."""
        self.queue: deque[Callable[[], None]] = deque()
        """Slots that wait for their turn."""
        self.trained_seconds = 0.0
        self._data_tokens = sum(session.tokens for session in work.sessions) / len(work.sessions)
        """Of a session of exported data."""
        self._played = 0
        self._flight = 0.0
        self._flight_at = 0.0
        self._admitting = self._batching = False

    def run(self, on_step: Callable[[int], None] | None = None) -> SimulationResult:
        """Until the steps are trained. ``tell`` is called with their number now and then."""
        for server in self.pool.engines:
            self._next_crash(server)
        self._admit()
        self._look_for_batch()
        told = 0
        while self.done < self.plant.steps and self.clock.now < MAX_VIRTUAL_SECONDS:
            if self._stuck() or self.hopeless >= MAX_FAILED_GROUPS or not self.clock.step():
                break
            if on_step is not None and self.done > told:
                told = self.done
                on_step(told)
        return self._finish()

    def _stuck(self) -> bool:
        """Whether nothing is under way: crashes of idle engines would keep the clock going for ever."""
        return not (self.training or self.open or self._admitting or self._batching)

    def _finish(self) -> SimulationResult:
        result, plant = self.result, self.plant
        self.pool.update_all()
        self._count_flight(0)
        seconds = max(self.clock.now, 1e-9)
        result.seconds = seconds
        result.steps = self.done
        result.finished = self.done >= plant.steps
        result.given_up = self.hopeless >= MAX_FAILED_GROUPS
        result.generated = round(sum(server.tokens for server in self.pool.engines))
        result.engines_idle = 1 - sum(s.busy_seconds for s in self.pool.engines) / (seconds * plant.engines)
        best = self.workload.speed(plant.max_batch) * plant.engines
        result.engines_used = result.generated / (seconds * best)
        result.trainer_idle = 1 - self.trained_seconds / seconds
        result.in_flight = self._flight / seconds
        return result

    # --- admission ---------------------------------------------------------------------------------

    def _notice(self) -> None:
        """Rollout looks again."""
        if not self._admitting:
            self._admitting = True
            self.clock.after(POLL_DELAY, self._noticed)

    def _noticed(self) -> None:
        self._admitting = False
        self._admit()

    def _room(self) -> int:
        cluster = self.plant
        in_steps = cluster.count_live_groups(self.claimed)
        made_up = max(0, self.started - self.open - len(self.ready) - in_steps)
        wanted = (
            cluster.count_live_groups(min(self.done + cluster.max_staleness + 1, cluster.steps)) + made_up
        )
        return max(0, wanted - self.started)

    def _admit(self) -> None:
        while self.unfinished < self.plant.concurrency and self._room():
            group = SimulatedGroup(self.started, self.plant.group_size)
            self.started += 1
            self.open += 1
            self.unfinished += group.left
            for _ in range(group.left):
                self._enqueue(self._fresh(group))

    # --- sessions ----------------------------------------------------------------------------------

    def _fresh(self, group: SimulatedGroup, refills: int = 0, retries: int = 0) -> SessionAttempt:
        sessions = self.workload.sessions
        session = sessions[self._played % len(sessions)]
        self._played += 1
        attempt = SessionAttempt(group, session, refills=refills, retries=retries)
        if self.workload.failures and self.rng.random() < self.workload.failures:
            attempt.fails_at = self.rng.randrange(len(session.turns))
        return attempt

    def _enqueue(self, attempt: SessionAttempt) -> None:
        """Run it as soon as fewer than `concurrency` do."""
        if self.playing < self.plant.concurrency:
            self._play(attempt)
        else:
            self.queue.append(lambda: self._play(attempt))

    def _play(self, attempt: SessionAttempt) -> None:
        self._count_flight(1)
        self.clock.after(self.plant.timeout, lambda: self._out_of_time(attempt))
        self.clock.after(attempt.session.start, lambda: self._call(attempt))

    def _call(self, attempt: SessionAttempt) -> None:
        if attempt.over:
            return
        request = attempt.request = SimulatedRequest(
            attempt.session.turns[attempt.turn].tokens_after_first,
            on_begin=lambda: self._began(attempt),
            on_done=lambda: self._replied(attempt, request),
            on_crash=lambda: self._lost(attempt),
        )
        self.calling += 1
        crowded = self.workload.latency_factor(self.calling / self.plant.engines)
        self.clock.after(self.latency() * crowded, lambda: self._send(attempt, request))

    def _send(self, attempt: SessionAttempt, request: SimulatedRequest) -> None:
        if not attempt.over:
            self.pool.send(request, attempt.server)

    def _began(self, attempt: SessionAttempt) -> None:
        attempt.newest = self.version
        if attempt.version < 0:
            attempt.version = self.version

    def _replied(self, attempt: SessionAttempt, request: SimulatedRequest) -> None:
        attempt.replies += 1
        attempt.server = request.engine
        if self.plant.versions_per_token:
            attempt.newest = self.version
        self._hang_up(attempt)
        tool = attempt.session.turns[attempt.turn].tool_seconds
        self.clock.after(tool, lambda: self._next_turn(attempt))

    def _next_turn(self, attempt: SessionAttempt) -> None:
        if attempt.over:
            return
        if attempt.turn == attempt.fails_at:
            self._failed(attempt)
            return
        attempt.turn += 1
        if attempt.turn < len(attempt.session.turns):
            self._call(attempt)
        else:
            self._end(attempt)
            self._settle(attempt, sample=True)

    def _end(self, attempt: SessionAttempt) -> None:
        """It makes room for another one."""
        attempt.over = True
        self._hang_up(attempt)
        self._count_flight(-1)
        if self.queue:
            self.queue.popleft()()

    def _hang_up(self, attempt: SessionAttempt) -> None:
        if attempt.request is not None:
            attempt.request = None
            self.calling -= 1

    def _out_of_time(self, attempt: SessionAttempt) -> None:
        if attempt.over:
            return
        if attempt.request is not None:
            self.pool.cancel(attempt.request)
        self._failed(attempt)

    def _failed(self, attempt: SessionAttempt) -> None:
        self._end(attempt)
        plant = self.plant
        if plant.group_policy == "refill" and attempt.refills < plant.refills:
            self.result.dropped["superseded"] += 1
            self._enqueue(self._fresh(attempt.group, attempt.refills + 1, attempt.retries))
            return
        attempt.group.failed += 1
        self._settle(attempt, sample=plant.failed_counts and attempt.replies > 0)

    def _lost(self, attempt: SessionAttempt) -> None:
        """A transient fault: the same session again, some times."""
        if attempt.over:
            return
        if attempt.retries >= self.plant.retries:
            self._failed(attempt)
            return
        self._end(attempt)
        self.result.dropped["abandoned"] += 1
        again = SessionAttempt(
            attempt.group, attempt.session, refills=attempt.refills, retries=attempt.retries + 1
        )
        again.fails_at = attempt.fails_at
        self.clock.after(0.375 * 2**attempt.retries, lambda: self._enqueue(again))

    def _settle(self, attempt: SessionAttempt, *, sample: bool) -> None:
        """A slot has its final session."""
        group = attempt.group
        self.unfinished -= 1
        group.left -= 1
        if sample:
            group.stamps.append(attempt.version)
            group.lowest.append(attempt.newest if self.plant.masks_stale else attempt.version)
            group.tokens.append(attempt.session.count_tokens(attempt.replies))
        else:
            self.result.dropped["failed"] += 1
        if group.left == 0:
            self._close(group)
        self._notice()

    def _close(self, group: SimulatedGroup) -> None:
        self.open -= 1
        self._note_failed(group)
        if group.failed and self.plant.group_policy == "drop":
            self.result.dropped["session_failed"] += len(group.stamps)
        else:
            self.ready.append(group)
            self._look_for_batch()

    def _note_failed(self, group: SimulatedGroup) -> None:
        """A run that cannot come to anything is stopped."""
        if group.failed < self.plant.group_size:
            self.hopeless = 0
        elif self.plant.group_policy == "drop" or not self.plant.failed_counts:
            self.hopeless += 1

    # --- training ----------------------------------------------------------------------------------

    def _look_for_batch(self) -> None:
        if not self.training and not self._batching:
            self._batching = True
            self.clock.after(POLL_DELAY, self._batch)

    def _batch(self) -> None:
        self._batching = False
        oldest = self.version - self.plant.max_staleness
        fresh: list[SimulatedGroup] = []
        for group in self.ready:
            if group.lowest and max(group.lowest) < oldest:
                self.result.dropped["stale"] += len(group.lowest)
            else:
                fresh.append(group)
        if len(fresh) < len(self.ready):
            self._notice()
        fresh.sort(key=lambda group: group.index)
        self.ready = fresh
        wanted = self.plant.count_live_groups(self.claimed + 1) - self.plant.count_live_groups(self.claimed)
        if len(fresh) >= wanted and self.claimed < self.plant.steps:
            self.ready = fresh[wanted:]
            self._train(fresh[:wanted], oldest)

    def _train(self, groups: list[SimulatedGroup], oldest: int) -> None:
        self.claimed += 1
        self.training = True
        tokens = self._train_data(self.plant.groups_per_step - len(groups))
        for group in groups:
            if not self._teaches():
                self.result.dropped["zero_signal"] += len(group.stamps)
                continue
            for lowest, stamp, size in zip(group.lowest, group.stamps, group.tokens, strict=True):
                if lowest < oldest:
                    self.result.dropped["stale"] += 1
                    continue
                tokens += size
                self.result.samples += 1
                self.result.staleness[self.version - max(stamp, oldest)] += 1
        seconds = self.workload.train_base + self.workload.train_per_token * tokens
        publish = self.publish()
        self.trained_seconds += seconds + publish
        if self.workload.pause:
            self.clock.after(
                seconds + max(0.0, publish - self.workload.pause),
                lambda: self.pool.pause(self.workload.pause),
            )
        self.clock.after(seconds + publish, self._served)

    def _train_data(self, groups: int) -> float:
        """So many groups of exported data; returns their tokens. They are like the live ones, but none of
        their sessions has failed, and none is too old."""
        samples = self.plant.group_size * sum(self._teaches() for _ in range(groups))
        self.result.samples += samples
        self.result.data_samples += samples
        return samples * self._data_tokens

    def _teaches(self) -> bool:
        """Whether a group has signal."""
        return not self.workload.zero_signal or self.rng.random() >= self.workload.zero_signal

    def _served(self) -> None:
        self.version += 1
        self.done += 1
        self.training = False
        self._notice()
        self._look_for_batch()

    # --- the rest ----------------------------------------------------------------------------------

    def _next_crash(self, server: SimulatedEngine) -> None:
        if self.workload.crashes_per_hour:
            self.clock.after(
                self.rng.expovariate(self.workload.crashes_per_hour / 3600), lambda: self._crash(server)
            )

    def _crash(self, server: SimulatedEngine) -> None:
        self.result.crashes += 1
        self.pool.crash(server, self.workload.restart)
        self._next_crash(server)

    def _count_flight(self, change: int) -> None:
        self._flight += self.playing * (self.clock.now - self._flight_at)
        self._flight_at = self.clock.now
        self.playing += change


def simulate(
    workload: Workload, cluster: ClusterSpec, *, seed: int = 0, on_step: Callable[[int], None] | None = None
) -> SimulationResult:
    return PipelineSimulation(workload, cluster, seed).run(on_step)
