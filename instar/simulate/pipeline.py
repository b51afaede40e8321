"""Simulates the admission, sessions, groups and training steps of a run.

It follows the rules in `rollout/admission` (how many groups may start), `rollout/runner` and `rollout/slots`
(concurrent sessions, retries and refills), `data/batcher` (the groups of a step, and stale groups) and
`trainer/loop` (a step is trained, published and served before the next one begins).
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from instar.simulate.base import ClusterSpec, SimulationResult, Workload
from instar.simulate.engines import SimulatedEngine, SimulatedPool, SimulatedRequest, VirtualClock
from instar.simulate.sessions import SimulatedSession, make_draw

POLL_DELAY_SECONDS = 0.03
"""The assumed mean time until rollout and trainer notice each other's progress. Both poll every 0.05 s."""
MAX_FAILED_GROUPS = 8
"""The run ends after this many consecutive groups without a successful session, as in `rollout/runner`."""
MAX_VIRTUAL_SECONDS = 1000 * 3600.0


class SimulatedSample(NamedTuple):
    oldest_version: int
    compared_version: int
    """The version that decides staleness: the newest if stale tokens are masked, otherwise the oldest."""
    tokens: int


@dataclass(slots=True, eq=False)
class SimulatedGroup:
    index: int
    open_slots: int
    samples: list[SimulatedSample] = field(default_factory=list[SimulatedSample])
    failed_slots: int = 0


@dataclass(slots=True, eq=False)
class SessionAttempt:
    group: SimulatedGroup
    session: SimulatedSession
    failing_turn: int | None = None
    """Index of the turn after which the session fails, or None if it completes."""
    refills: int = 0
    retries: int = 0
    turn_index: int = 0
    first_version: int = -1
    newest_version: int = -1
    replies: int = 0
    """Number of complete replies."""
    engine: SimulatedEngine | None = None
    request: SimulatedRequest | None = None
    has_ended: bool = False


class PipelineSimulation:
    def __init__(
        self, workload: Workload, cluster: ClusterSpec, seed: int, on_step: Callable[[int], None]
    ) -> None:
        self.workload = workload
        self.cluster = cluster
        self.on_step = on_step
        self.rng = random.Random(seed)
        self.clock = VirtualClock()
        self.pool = SimulatedPool(self.clock, cluster.engines, cluster.max_batch, workload.speed)
        self.draw_latency = make_draw(workload.latency, self.rng)
        self.draw_publish_seconds = make_draw(workload.publish_seconds, self.rng)
        self.result = SimulationResult()
        self.claimed_steps = self.served_steps = 0
        """The number of steps that have begun, and the number of steps whose policy is served."""
        self.started_groups = self.open_groups = 0
        self.ready_groups: list[SimulatedGroup] = []
        self.consecutive_failed_groups = 0
        self.is_training = False
        self.trainer_busy_seconds = 0.0
        self.open_slots = 0
        self.running_sessions = self.calling_sessions = 0
        self.queue: deque[SessionAttempt] = deque()
        self._mean_tokens = sum(session.tokens for session in workload.sessions) / len(workload.sessions)
        self._next_session = 0
        self._session_seconds = self._counted_at = 0.0
        self._will_admit = self._will_batch = False

    def run(self) -> SimulationResult:
        for engine in self.pool.engines:
            self._schedule_crash(engine)
        self._admit()
        self._schedule_batch()
        while self.served_steps < self.cluster.steps and self.clock.now < MAX_VIRTUAL_SECONDS:
            # Without this check, scheduled crashes would keep a stuck simulation running.
            is_stuck = not (self.is_training or self.open_groups or self._will_admit or self._will_batch)
            if is_stuck or self.consecutive_failed_groups >= MAX_FAILED_GROUPS or not self.clock.step():
                break
        return self._finish()

    def _finish(self) -> SimulationResult:
        result, cluster, engines = self.result, self.cluster, self.pool.engines
        for engine in engines:
            self.pool.update(engine)
        self._change_running_sessions(0)
        seconds = result.seconds = max(self.clock.now, 1e-9)
        result.steps = self.served_steps
        result.finished = self.served_steps >= cluster.steps
        result.given_up = self.consecutive_failed_groups >= MAX_FAILED_GROUPS
        result.generated_tokens = round(sum(engine.tokens for engine in engines))
        busy_seconds = sum(engine.busy_seconds for engine in engines)
        result.engines_idle = 1 - busy_seconds / (seconds * cluster.engines)
        max_speed = self.workload.speed(cluster.max_batch) * cluster.engines
        result.engines_used = result.generated_tokens / (seconds * max_speed)
        result.trainer_idle = 1 - self.trainer_busy_seconds / seconds
        result.in_flight = self._session_seconds / seconds
        return result

    def _schedule_admission(self) -> None:
        if not self._will_admit:
            self._will_admit = True
            self.clock.after(POLL_DELAY_SECONDS, self._admit)

    def _admit(self) -> None:
        self._will_admit = False
        while self.open_slots < self.cluster.concurrency and self._can_start_group():
            group = SimulatedGroup(self.started_groups, self.cluster.group_size)
            self.started_groups += 1
            self.open_groups += 1
            self.open_slots += group.open_slots
            for _ in range(group.open_slots):
                self._enqueue(self._new_attempt(group))

    def _can_start_group(self) -> bool:
        cluster = self.cluster
        claimed_groups = cluster.count_rollout_groups(self.claimed_steps)
        kept_groups = self.open_groups + len(self.ready_groups) + claimed_groups
        replacements = max(0, self.started_groups - kept_groups)
        last_step = min(self.served_steps + cluster.max_staleness + 1, cluster.steps)
        return self.started_groups < cluster.count_rollout_groups(last_step) + replacements

    def _new_attempt(self, group: SimulatedGroup, refills: int = 0, retries: int = 0) -> SessionAttempt:
        sessions = self.workload.sessions
        session = sessions[self._next_session % len(sessions)]
        self._next_session += 1
        fails = self.workload.failures and self.rng.random() < self.workload.failures
        failing_turn = self.rng.randrange(len(session.turns)) if fails else None
        return SessionAttempt(group, session, failing_turn, refills, retries)

    def _enqueue(self, attempt: SessionAttempt) -> None:
        if self.running_sessions < self.cluster.concurrency:
            self._start(attempt)
        else:
            self.queue.append(attempt)

    def _start(self, attempt: SessionAttempt) -> None:
        self._change_running_sessions(1)
        self._schedule(self.cluster.timeout, attempt, self._on_timeout)
        self._schedule(attempt.session.start_seconds, attempt, self._call)

    def _schedule(
        self, seconds: float, attempt: SessionAttempt, action: Callable[[SessionAttempt], None]
    ) -> None:
        """Call ``action`` after ``seconds``, unless the attempt has ended by then."""
        self.clock.after(seconds, lambda: None if attempt.has_ended else action(attempt))

    def _call(self, attempt: SessionAttempt) -> None:
        request = attempt.request = SimulatedRequest(
            attempt.session.turns[attempt.turn_index].tokens_after_first,
            on_begin=lambda: self._on_begin(attempt),
            on_done=lambda: self._on_reply(attempt, request),
            on_crash=lambda: self._on_engine_crash(attempt),
        )
        self.calling_sessions += 1
        factor = self.workload.compute_latency_factor(self.calling_sessions / self.cluster.engines)
        seconds = self.draw_latency() * factor
        self._schedule(seconds, attempt, lambda attempt: self.pool.send(request, attempt.engine))

    def _on_begin(self, attempt: SessionAttempt) -> None:
        attempt.newest_version = self.served_steps
        if attempt.first_version < 0:
            attempt.first_version = self.served_steps

    def _on_reply(self, attempt: SessionAttempt, request: SimulatedRequest) -> None:
        attempt.replies += 1
        attempt.engine = request.engine
        if self.cluster.versions_per_token:
            attempt.newest_version = self.served_steps
        self._end_call(attempt)
        self._schedule(attempt.session.turns[attempt.turn_index].tool_seconds, attempt, self._next_turn)

    def _next_turn(self, attempt: SessionAttempt) -> None:
        if attempt.turn_index == attempt.failing_turn:
            self._fail(attempt)
            return
        attempt.turn_index += 1
        if attempt.turn_index < len(attempt.session.turns):
            self._call(attempt)
        else:
            self._end(attempt)
            self._fill_slot(attempt, is_trainable=True)

    def _end(self, attempt: SessionAttempt) -> None:
        attempt.has_ended = True
        self._end_call(attempt)
        self._change_running_sessions(-1)
        if self.queue:
            self._start(self.queue.popleft())

    def _end_call(self, attempt: SessionAttempt) -> None:
        if attempt.request is not None:
            attempt.request = None
            self.calling_sessions -= 1

    def _on_timeout(self, attempt: SessionAttempt) -> None:
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
        attempt.group.failed_slots += 1
        self._fill_slot(attempt, is_trainable=cluster.trains_on_failed and attempt.replies > 0)

    def _on_engine_crash(self, attempt: SessionAttempt) -> None:
        """Retry the session. Fail it if no retries are left."""
        if attempt.has_ended:
            return
        if attempt.retries >= self.cluster.retries:
            self._fail(attempt)
            return
        self._end(attempt)
        self.result.dropped["abandoned"] += 1
        retries = attempt.retries + 1
        retry = SessionAttempt(attempt.group, attempt.session, attempt.failing_turn, attempt.refills, retries)
        # The mean delay in `rollout/slots`: 0.5 s, doubled for each retry, times a mean jitter of 0.75.
        self.clock.after(0.375 * 2**attempt.retries, lambda: self._enqueue(retry))

    def _fill_slot(self, attempt: SessionAttempt, *, is_trainable: bool) -> None:
        group = attempt.group
        self.open_slots -= 1
        group.open_slots -= 1
        if is_trainable:
            compared = attempt.newest_version if self.cluster.masks_stale else attempt.first_version
            tokens = attempt.session.count_tokens(attempt.replies)
            group.samples.append(SimulatedSample(attempt.first_version, compared, tokens))
        else:
            self.result.dropped["failed"] += 1
        if group.open_slots == 0:
            self._close_group(group)
        self._schedule_admission()

    def _close_group(self, group: SimulatedGroup) -> None:
        self.open_groups -= 1
        drops_failed = self.cluster.group_policy == "drop"
        if group.failed_slots < self.cluster.group_size:
            self.consecutive_failed_groups = 0
        elif drops_failed or not self.cluster.trains_on_failed:
            self.consecutive_failed_groups += 1
        if group.failed_slots and drops_failed:
            self.result.dropped["session_failed"] += len(group.samples)
        else:
            self.ready_groups.append(group)
            self._schedule_batch()

    def _schedule_batch(self) -> None:
        if not self.is_training and not self._will_batch:
            self._will_batch = True
            self.clock.after(POLL_DELAY_SECONDS, self._form_batch)

    def _form_batch(self) -> None:
        self._will_batch = False
        oldest_allowed = self.served_steps - self.cluster.max_staleness
        fresh: list[SimulatedGroup] = []
        for group in self.ready_groups:
            if group.samples and all(sample.compared_version < oldest_allowed for sample in group.samples):
                self.result.dropped["stale"] += len(group.samples)
            else:
                fresh.append(group)
        if len(fresh) < len(self.ready_groups):
            self._schedule_admission()
        fresh.sort(key=lambda group: group.index)
        self.ready_groups = fresh
        count_groups = self.cluster.count_rollout_groups
        needed = count_groups(self.claimed_steps + 1) - count_groups(self.claimed_steps)
        if len(fresh) >= needed and self.claimed_steps < self.cluster.steps:
            self.ready_groups = fresh[needed:]
            self._train(fresh[:needed], oldest_allowed)

    def _train(self, groups: list[SimulatedGroup], oldest_allowed: int) -> None:
        self.claimed_steps += 1
        self.is_training = True
        # Groups from exported data have no failed or stale sessions.
        data_groups = self.cluster.groups_per_step - len(groups)
        data_samples = self.cluster.group_size * sum(self._draw_has_signal() for _ in range(data_groups))
        self.result.samples += data_samples
        self.result.data_samples += data_samples
        tokens = data_samples * self._mean_tokens
        for group in groups:
            if not self._draw_has_signal():
                self.result.dropped["zero_signal"] += len(group.samples)
                continue
            for sample in group.samples:
                if sample.compared_version < oldest_allowed:
                    self.result.dropped["stale"] += 1
                    continue
                tokens += sample.tokens
                self.result.samples += 1
                self.result.staleness[self.served_steps - max(sample.oldest_version, oldest_allowed)] += 1
        seconds = self.workload.train_base + self.workload.train_per_token * tokens
        publish_seconds, pause = self.draw_publish_seconds(), self.workload.pause
        self.trainer_busy_seconds += seconds + publish_seconds
        if pause:
            self.clock.after(seconds + max(0.0, publish_seconds - pause), lambda: self.pool.pause(pause))
        self.clock.after(seconds + publish_seconds, self._on_served)

    def _draw_has_signal(self) -> bool:
        """Return True if a group has a learning signal, chosen at random."""
        return not self.workload.zero_signal or self.rng.random() >= self.workload.zero_signal

    def _on_served(self) -> None:
        self.served_steps += 1
        self.on_step(self.served_steps)
        self.is_training = False
        self._schedule_admission()
        self._schedule_batch()

    def _schedule_crash(self, engine: SimulatedEngine) -> None:
        if self.workload.crashes_per_hour:
            seconds = self.rng.expovariate(self.workload.crashes_per_hour / 3600)
            self.clock.after(seconds, lambda: self._crash(engine))

    def _crash(self, engine: SimulatedEngine) -> None:
        self.result.crashes += 1
        self.pool.crash(engine, self.workload.restart_seconds)
        self._schedule_crash(engine)

    def _change_running_sessions(self, change: int) -> None:
        self._session_seconds += self.running_sessions * (self.clock.now - self._counted_at)
        self._counted_at = self.clock.now
        self.running_sessions += change


def simulate(
    workload: Workload,
    cluster: ClusterSpec,
    *,
    seed: int = 0,
    on_step: Callable[[int], None] = lambda _: None,
) -> SimulationResult:
    """Simulate a run until it ends or cannot finish. ``on_step`` gets the number of finished steps."""
    return PipelineSimulation(workload, cluster, seed, on_step).run()
