"""Simulated engines on a virtual clock. Replies on the same engine slow each other down."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from instar.simulate.base import EngineSpeed

Event = Callable[[], None]

LOAD_FACTOR, LOAD_SLACK = 2, 8
"""The thresholds for moving a session to the least busy engine, as in `engines/pool`."""


class VirtualClock:
    """Runs events in time order. Simultaneous events run in the order in which they were added."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Event]] = []
        self._numbers = count()

    def after(self, seconds: float, event: Event) -> None:
        heapq.heappush(self._events, (self.now + seconds, next(self._numbers), event))

    def step(self) -> bool:
        """Run the next event. Return False if no events are left."""
        if not self._events:
            return False
        self.now, _, event = heapq.heappop(self._events)
        event()
        return True


@dataclass(slots=True, eq=False)
class SimulatedRequest:
    tokens: int
    """Number of tokens to generate after the first one."""
    on_begin: Event
    """Called when the first token is sampled."""
    on_done: Event
    on_crash: Event
    """Called when the engine crashes after the request has begun."""
    engine: SimulatedEngine | None = None
    """The engine that the request was sent to. None before that, and while no engine is up."""
    is_cancelled: bool = False


@dataclass(slots=True, eq=False)
class SimulatedEngine:
    """An engine whose running replies all advance at the same rate.

    ``progress`` is the number of tokens that a reply would have by now if it had been running from the start.
    A reply of n tokens that begins at progress p ends at p + n, however many replies share the engine.
    ``load`` is the number of running and waiting requests, and ``served`` that of all requests sent to it.
    """

    index: int
    running: list[tuple[float, int, SimulatedRequest]] = field(default_factory=list[Any])
    waiting: deque[SimulatedRequest] = field(default_factory=deque[SimulatedRequest])
    load: int = 0
    served: int = 0
    is_up: bool = True
    progress: float = 0.0
    updated_at: float = 0.0
    paused_until: float = 0.0
    busy_seconds: float = 0.0
    tokens: float = 0.0
    next_event: int = 0
    """The number of the event that ends the next reply. Events with lower numbers are outdated."""


class SimulatedPool:
    """All engines, with the gateway's routing: a session stays on its engine unless that engine is far busier
    than the least busy one. All other requests go to the least busy engine."""

    def __init__(self, clock: VirtualClock, engines: int, max_batch: int, speed: EngineSpeed) -> None:
        self.clock = clock
        self.max_batch = max_batch
        self.speed = speed
        self.engines = [SimulatedEngine(index) for index in range(engines)]
        self._by_load = [(0, 0, index) for index in range(engines)]
        self._numbers = count()
        self._waiting_for_engine: deque[SimulatedRequest] = deque()

    def send(self, request: SimulatedRequest, previous: SimulatedEngine | None) -> None:
        """Send a request, preferably to ``previous``. Queue it if no engine is up or the engine is full."""
        engine = request.engine = self._pick_engine(previous)
        if engine is None:
            self._waiting_for_engine.append(request)
            return
        engine.served += 1
        self._change_load(engine, 1)
        if len(engine.running) < self.max_batch:
            self._begin(engine, request)
        else:
            engine.waiting.append(request)

    def cancel(self, request: SimulatedRequest) -> None:
        request.is_cancelled = True
        engine = request.engine
        if engine is None:
            return
        remaining = [entry for entry in engine.running if entry[2] is not request]
        if len(remaining) < len(engine.running):
            self.update(engine)
            heapq.heapify(remaining)
            engine.running = remaining
            self._release_slot(engine)

    def pause(self, seconds: float) -> None:
        for engine in self.engines:
            if engine.is_up:
                self.update(engine)
                engine.paused_until = self.clock.now + seconds
                self._schedule_end(engine)

    def crash(self, engine: SimulatedEngine, restart_seconds: float) -> None:
        """Stop an engine for ``restart_seconds``. Running requests fail, and waiting requests are resent."""
        if not engine.is_up:
            return
        self.update(engine)
        engine.is_up = False
        running, waiting = engine.running, engine.waiting
        engine.running, engine.waiting = [], deque()
        engine.next_event += 1
        self._change_load(engine, -engine.load)
        self.clock.after(restart_seconds, lambda: self._restart(engine))
        for request in waiting:
            if not request.is_cancelled:
                self.send(request, None)
        for _, _, request in running:
            request.on_crash()

    def _restart(self, engine: SimulatedEngine) -> None:
        engine.is_up, engine.updated_at = True, self.clock.now
        self._change_load(engine, 0)
        while self._waiting_for_engine:
            request = self._waiting_for_engine.popleft()
            if not request.is_cancelled:
                self.send(request, None)

    def _begin(self, engine: SimulatedEngine, request: SimulatedRequest) -> None:
        self.update(engine)
        heapq.heappush(engine.running, (engine.progress + request.tokens, next(self._numbers), request))
        request.on_begin()
        self._schedule_end(engine)

    def update(self, engine: SimulatedEngine) -> None:
        """Bring the engine's progress, tokens and busy time up to the current time."""
        now = self.clock.now
        if active := len(engine.running):
            since = max(engine.updated_at, min(engine.paused_until, now))
            progress = (now - since) * self.speed.get_reply_rate(active)
            engine.progress += progress
            engine.tokens += progress * active
            engine.busy_seconds += now - engine.updated_at
        engine.updated_at = now

    def _schedule_end(self, engine: SimulatedEngine) -> None:
        engine.next_event += 1
        if engine.running:
            remaining_tokens = max(0.0, engine.running[0][0] - engine.progress)
            pause = max(0.0, engine.paused_until - self.clock.now)
            seconds = pause + remaining_tokens / self.speed.get_reply_rate(len(engine.running))
            event_number = engine.next_event
            self.clock.after(seconds, lambda: self._end_next(engine, event_number))

    def _end_next(self, engine: SimulatedEngine, event_number: int) -> None:
        if event_number != engine.next_event:
            return
        self.update(engine)
        _, _, request = heapq.heappop(engine.running)
        self._release_slot(engine)
        request.on_done()

    def _release_slot(self, engine: SimulatedEngine) -> None:
        self._change_load(engine, -1)
        while engine.waiting and len(engine.running) < self.max_batch:
            request = engine.waiting.popleft()
            if request.is_cancelled:
                self._change_load(engine, -1)
            else:
                self._begin(engine, request)
        self._schedule_end(engine)

    def _pick_engine(self, previous: SimulatedEngine | None) -> SimulatedEngine | None:
        least_busy = self._find_least_busy()
        if least_busy is None or previous is None or not previous.is_up:
            return least_busy
        return previous if previous.load <= LOAD_FACTOR * least_busy.load + LOAD_SLACK else least_busy

    def _find_least_busy(self) -> SimulatedEngine | None:
        """Return the least busy engine, or None if no engine is up."""
        while self._by_load:
            load, served, index = self._by_load[0]
            engine = self.engines[index]
            if engine.is_up and (engine.load, engine.served) == (load, served):
                return engine
            heapq.heappop(self._by_load)  # the entry is outdated
        return None

    def _change_load(self, engine: SimulatedEngine, change: int) -> None:
        engine.load += change
        if engine.is_up:
            heapq.heappush(self._by_load, (engine.load, engine.served, engine.index))
