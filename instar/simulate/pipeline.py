"""Simulates the admission, sessions, groups and training steps of a run.

The rules are the same as in `rollout/admission` (how many groups may start), `rollout/runner` and
`rollout/slots` (how many sessions run, what happens to a session that fails), `data/batcher` (which groups a
step takes, which are stale) and `trainer/loop` (a step is trained, published and served before the next one
begins).
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
"""Mean time in seconds until rollout and trainer notice each other's progress: both poll every 0.05 s."""
MAX_FAILED_GROUPS = 8
"""The limit of `rollout/runner` for consecutive groups without a successful session."""
MAX_VIRTUAL_SECONDS = 1000 * 3600.0
"""Number of virtual seconds after which a simulation is stopped."""


@dataclass(slots=True, eq=False)
class SimulatedGroup:
    index: int
    open_slots: int
    oldest_used: list[int] = field(default_factory=list[int])
    """For each sample, the version of its oldest token, or of its newest token if stale tokens are masked."""
    oldest_versions: list[int] = field(default_factory=list[int])
    """For each sample, the version of its oldest token."""
    tokens: list[int] = field(default_factory=list[int])
    failed: int = 0


@dataclass(slots=True, eq=False)
class SessionAttempt:
    group: SimulatedGroup
    session: SimulatedSession
    turn: int = 0
    version: int = -1
    """The version of the first token."""
    newest: int = -1
    replies: int = 0
    """Number of complete replies."""
    fails_at: int | None = None
    """The turn in which the session fails, or None if it does not fail."""
    refills: int = 0
    retries: int = 0
    engine: SimulatedEngine | None = None
    request: SimulatedRequest | None = None
    ended: bool = False


class PipelineSimulation:
    def __init__(self, workload: Workload, cluster: ClusterSpec, seed: int = 0) -> None:
        self.workload = workload
        self.cluster = cluster
        self.rng = random.Random(seed)
        self.clock = VirtualClock()
        self.pool = SimulatedPool(self.clock, cluster.engines, cluster.max_batch, workload.speed)
        self.latency = make_draw(workload.latency, self.rng)
        self.publish = make_draw(workload.publish, self.rng)
        self.result = SimulationResult()
        self.version = 0
        """The version that the engines serve."""
        self.done = 0
        """Number of steps whose policy is served."""
        self.claimed = 0
        """Number of steps that have begun."""
        self.started_groups = self.open_groups = 0
        self.ready: list[SimulatedGroup] = []
        self.training = False
        self.failed_groups = 0
        """Number of consecutive groups in which every session failed."""
        self.unfinished = 0
        self.running_sessions = self.calling = 0
        """Number of running sessions, and number of these with a call in progress."""
        self.queue: deque[Callable[[], None]] = deque()
        """Sessions that wait to start."""
        self.trained_seconds = 0.0
        self._data_tokens = sum(session.tokens for session in workload.sessions) / len(workload.sessions)
        """Mean number of tokens in a session of exported data."""
        self._next_session = 0
        self._session_seconds = 0.0
        self._counted_at = 0.0
        self._admitting = self._batching = False

    def run(self, on_step: Callable[[int], None] | None = None) -> SimulationResult:
        """Simulate until all steps are trained and return the result. ``on_step`` gets the finished steps."""
        for engine in self.pool.engines:
            self._schedule_crash(engine)
        self._admit()
        self._schedule_batch()
        reported = 0
        while self.done < self.cluster.steps and self.clock.now < MAX_VIRTUAL_SECONDS:
            if self._is_stuck() or self.failed_groups >= MAX_FAILED_GROUPS or not self.clock.step():
                break
            if on_step is not None and self.done > reported:
                reported = self.done
                on_step(reported)
        return self._finish()

    def _is_stuck(self) -> bool:
        """Return True if nothing is in progress; crashes of idle engines would otherwise never stop."""
        return not (self.training or self.open_groups or self._admitting or self._batching)

    def _finish(self) -> SimulationResult:
        result, cluster = self.result, self.cluster
        self.pool.update_all()
        self._count_sessions(0)
        seconds = max(self.clock.now, 1e-9)
        result.seconds = seconds
        result.steps = self.done
        result.finished = self.done >= cluster.steps
        result.given_up = self.failed_groups >= MAX_FAILED_GROUPS
        result.generated = round(sum(engine.tokens for engine in self.pool.engines))
        result.engines_idle = 1 - sum(s.busy_seconds for s in self.pool.engines) / (seconds * cluster.engines)
        best = self.workload.speed(cluster.max_batch) * cluster.engines
        result.engines_used = result.generated / (seconds * best)
        result.trainer_idle = 1 - self.trained_seconds / seconds
        result.in_flight = self._session_seconds / seconds
        return result

    # --- admission ---------------------------------------------------------------------------------

    def _schedule_admission(self) -> None:
        if not self._admitting:
            self._admitting = True
            self.clock.after(POLL_DELAY, self._on_poll)

    def _on_poll(self) -> None:
        self._admitting = False
        self._admit()

    def _admissible_groups(self) -> int:
        cluster = self.cluster
        in_steps = cluster.count_live_groups(self.claimed)
        replacements = max(0, self.started_groups - self.open_groups - len(self.ready) - in_steps)
        last_step = min(self.done + cluster.max_staleness + 1, cluster.steps)
        return max(0, cluster.count_live_groups(last_step) + replacements - self.started_groups)

    def _admit(self) -> None:
        while self.unfinished < self.cluster.concurrency and self._admissible_groups():
            group = SimulatedGroup(self.started_groups, self.cluster.group_size)
            self.started_groups += 1
            self.open_groups += 1
            self.unfinished += group.open_slots
            for _ in range(group.open_slots):
                self._enqueue(self._new_attempt(group))

    # --- sessions ----------------------------------------------------------------------------------

    def _new_attempt(self, group: SimulatedGroup, refills: int = 0, retries: int = 0) -> SessionAttempt:
        sessions = self.workload.sessions
        session = sessions[self._next_session % len(sessions)]
        self._next_session += 1
        attempt = SessionAttempt(group, session, refills=refills, retries=retries)
        if self.workload.failures and self.rng.random() < self.workload.failures:
            attempt.fails_at = self.rng.randrange(len(session.turns))
        return attempt

    def _enqueue(self, attempt: SessionAttempt) -> None:
        """Start a session when fewer than `concurrency` sessions run."""
        if self.running_sessions < self.cluster.concurrency:
            self._start(attempt)
        else:
            self.queue.append(lambda: self._start(attempt))

    def _start(self, attempt: SessionAttempt) -> None:
        self._count_sessions(1)
        self.clock.after(self.cluster.timeout, lambda: self._on_timeout(attempt))
        self.clock.after(attempt.session.start, lambda: self._call(attempt))

    def _call(self, attempt: SessionAttempt) -> None:
        if attempt.ended:
            return
        request = attempt.request = SimulatedRequest(
            attempt.session.turns[attempt.turn].tokens_after_first,
            on_begin=lambda: self._on_begin(attempt),
            on_done=lambda: self._on_reply(attempt, request),
            on_crash=lambda: self._on_engine_crash(attempt),
        )
        self.calling += 1
        factor = self.workload.latency_factor(self.calling / self.cluster.engines)
        self.clock.after(self.latency() * factor, lambda: self._send(attempt, request))

    def _send(self, attempt: SessionAttempt, request: SimulatedRequest) -> None:
        if not attempt.ended:
            self.pool.send(request, attempt.engine)

    def _on_begin(self, attempt: SessionAttempt) -> None:
        attempt.newest = self.version
        if attempt.version < 0:
            attempt.version = self.version

    def _on_reply(self, attempt: SessionAttempt, request: SimulatedRequest) -> None:
        attempt.replies += 1
        attempt.engine = request.engine
        if self.cluster.versions_per_token:
            attempt.newest = self.version
        self._end_call(attempt)
        tool = attempt.session.turns[attempt.turn].tool_seconds
        self.clock.after(tool, lambda: self._next_turn(attempt))

    def _next_turn(self, attempt: SessionAttempt) -> None:
        if attempt.ended:
            return
        if attempt.turn == attempt.fails_at:
            self._fail(attempt)
            return
        attempt.turn += 1
        if attempt.turn < len(attempt.session.turns):
            self._call(attempt)
        else:
            self._end(attempt)
            self._fill_slot(attempt, sample=True)

    def _end(self, attempt: SessionAttempt) -> None:
        """End a session and start the next one in the queue."""
        attempt.ended = True
        self._end_call(attempt)
        self._count_sessions(-1)
        if self.queue:
            self.queue.popleft()()

    def _end_call(self, attempt: SessionAttempt) -> None:
        if attempt.request is not None:
            attempt.request = None
            self.calling -= 1

    def _on_timeout(self, attempt: SessionAttempt) -> None:
        if attempt.ended:
            return
        if attempt.request is not None:
            self.pool.cancel(attempt.request)
        self._fail(attempt)

    def _fail(self, attempt: SessionAttempt) -> None:
        self._end(attempt)
        cluster = self.cluster
        if cluster.group_policy == "refill" and attempt.refills < cluster.refills:
            self.result.dropped["superseded"] += 1
            self._enqueue(self._new_attempt(attempt.group, attempt.refills + 1, attempt.retries))
            return
        attempt.group.failed += 1
        self._fill_slot(attempt, sample=cluster.failed_counts and attempt.replies > 0)

    def _on_engine_crash(self, attempt: SessionAttempt) -> None:
        """Run the same session again, up to the limit of retries."""
        if attempt.ended:
            return
        if attempt.retries >= self.cluster.retries:
            self._fail(attempt)
            return
        self._end(attempt)
        self.result.dropped["abandoned"] += 1
        retry = SessionAttempt(
            attempt.group, attempt.session, refills=attempt.refills, retries=attempt.retries + 1
        )
        retry.fails_at = attempt.fails_at
        self.clock.after(0.375 * 2**attempt.retries, lambda: self._enqueue(retry))

    def _fill_slot(self, attempt: SessionAttempt, *, sample: bool) -> None:
        """Record the final session of a slot. ``sample`` is True if the session can be trained on."""
        group = attempt.group
        self.unfinished -= 1
        group.open_slots -= 1
        if sample:
            group.oldest_versions.append(attempt.version)
            group.oldest_used.append(attempt.newest if self.cluster.masks_stale else attempt.version)
            group.tokens.append(attempt.session.count_tokens(attempt.replies))
        else:
            self.result.dropped["failed"] += 1
        if group.open_slots == 0:
            self._close(group)
        self._schedule_admission()

    def _close(self, group: SimulatedGroup) -> None:
        self.open_groups -= 1
        self._count_failed_group(group)
        if group.failed and self.cluster.group_policy == "drop":
            self.result.dropped["session_failed"] += len(group.oldest_versions)
        else:
            self.ready.append(group)
            self._schedule_batch()

    def _count_failed_group(self, group: SimulatedGroup) -> None:
        if group.failed < self.cluster.group_size:
            self.failed_groups = 0
        elif self.cluster.group_policy == "drop" or not self.cluster.failed_counts:
            self.failed_groups += 1

    # --- training ----------------------------------------------------------------------------------

    def _schedule_batch(self) -> None:
        if not self.training and not self._batching:
            self._batching = True
            self.clock.after(POLL_DELAY, self._batch)

    def _batch(self) -> None:
        self._batching = False
        oldest = self.version - self.cluster.max_staleness
        fresh: list[SimulatedGroup] = []
        for group in self.ready:
            if group.oldest_used and max(group.oldest_used) < oldest:
                self.result.dropped["stale"] += len(group.oldest_used)
            else:
                fresh.append(group)
        if len(fresh) < len(self.ready):
            self._schedule_admission()
        fresh.sort(key=lambda group: group.index)
        self.ready = fresh
        live_groups = self.cluster.count_live_groups
        needed = live_groups(self.claimed + 1) - live_groups(self.claimed)
        if len(fresh) >= needed and self.claimed < self.cluster.steps:
            self.ready = fresh[needed:]
            self._train(fresh[:needed], oldest)

    def _train(self, groups: list[SimulatedGroup], oldest: int) -> None:
        self.claimed += 1
        self.training = True
        tokens = self._train_data(self.cluster.groups_per_step - len(groups))
        for group in groups:
            if not self._has_signal():
                self.result.dropped["zero_signal"] += len(group.oldest_versions)
                continue
            for used, version, size in zip(
                group.oldest_used, group.oldest_versions, group.tokens, strict=True
            ):
                if used < oldest:
                    self.result.dropped["stale"] += 1
                    continue
                tokens += size
                self.result.samples += 1
                self.result.staleness[self.version - max(version, oldest)] += 1
        seconds = self.workload.train_base + self.workload.train_per_token * tokens
        publish, pause = self.publish(), self.workload.pause
        self.trained_seconds += seconds + publish
        if pause:
            self.clock.after(seconds + max(0.0, publish - pause), lambda: self.pool.pause(pause))
        self.clock.after(seconds + publish, self._on_served)

    def _train_data(self, groups: int) -> float:
        """Train groups of exported data and return their number of tokens. They are like live groups, but no
        session has failed and none is stale."""
        samples = self.cluster.group_size * sum(self._has_signal() for _ in range(groups))
        self.result.samples += samples
        self.result.data_samples += samples
        return samples * self._data_tokens

    def _has_signal(self) -> bool:
        """Return True, at random, if a group has a training signal."""
        return not self.workload.zero_signal or self.rng.random() >= self.workload.zero_signal

    def _on_served(self) -> None:
        self.version += 1
        self.done += 1
        self.training = False
        self._schedule_admission()
        self._schedule_batch()

    # --- crashes and statistics ---------------------------------------------------------------------

    def _schedule_crash(self, engine: SimulatedEngine) -> None:
        if self.workload.crashes_per_hour:
            self.clock.after(
                self.rng.expovariate(self.workload.crashes_per_hour / 3600), lambda: self._crash(engine)
            )

    def _crash(self, engine: SimulatedEngine) -> None:
        self.result.crashes += 1
        self.pool.crash(engine, self.workload.restart)
        self._schedule_crash(engine)

    def _count_sessions(self, change: int) -> None:
        self._session_seconds += self.running_sessions * (self.clock.now - self._counted_at)
        self._counted_at = self.clock.now
        self.running_sessions += change


def simulate(
    workload: Workload, cluster: ClusterSpec, *, seed: int = 0, on_step: Callable[[int], None] | None = None
) -> SimulationResult:
    return PipelineSimulation(workload, cluster, seed).run(on_step)
