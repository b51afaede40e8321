"""Engines on the virtual clock: replies share an engine, and the more there are the slower is each."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from instar.simulate.base import EngineSpeed

Event = Callable[[], None]

BUSIER, SLACK = 2, 8
"""As `engines/pool`: when a session leaves its engine for the idlest one."""


class VirtualClock:
    """Events in the order of their times; those of one time in the order they were set."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Event]] = []
        self._set = 0

    def after(self, seconds: float, event: Event) -> None:
        self._set += 1
        heapq.heappush(self._events, (self.now + seconds, self._set, event))

    def step(self) -> bool:
        """The next event. False: there is none."""
        if not self._events:
            return False
        self.now, _, event = heapq.heappop(self._events)
        event()
        return True


@dataclass(slots=True, eq=False)
class SimulatedRequest:
    tokens: int
    on_begin: Event
    """Its first token is being sampled."""
    on_done: Event
    on_crash: Event
    """Its engine crashed after it had begun."""
    engine: SimulatedEngine | None = None
    """Where it is now, or was; None while no engine was up."""
    cancelled: bool = False


@dataclass(slots=True, eq=False)
class SimulatedEngine:
    """One engine. ``work`` counts the tokens that a reply present from the start would have by now, so
    a reply that begins at work w ends at w + its tokens, however many share the engine meanwhile."""

    index: int
    running: list[tuple[float, int, SimulatedRequest]] = field(default_factory=list[Any])
    waiting: deque[SimulatedRequest] = field(default_factory=deque[SimulatedRequest])
    active: int = 0
    load: int = 0
    served: int = 0
    is_up: bool = True
    work: float = 0.0
    updated_at: float = 0.0
    paused_until: float = 0.0
    busy_seconds: float = 0.0
    """Seconds with something to generate."""
    tokens: float = 0.0
    next_event: int = 0
    """Number of the event that ends its next reply; earlier ones are void."""


class SimulatedPool:
    """All engines as one, by the gateway's rules: a session stays with its engine unless that is far busier
    than others, any other request goes to the idlest."""

    def __init__(self, clock: VirtualClock, engines: int, max_batch: int, speed: EngineSpeed) -> None:
        self.clock = clock
        self.max_batch = max_batch
        self.speed = speed
        self.engines = [SimulatedEngine(place) for place in range(engines)]
        self._idlest = [(0, 0, place) for place in range(engines)]
        self._count = 0
        self._homeless: deque[SimulatedRequest] = deque()
        """Requests while no engine is up."""

    def send(self, request: SimulatedRequest, last: SimulatedEngine | None) -> None:
        """To one of the engines; where none is up, it waits for one."""
        server = request.engine = self._pick(last)
        if server is None:
            self._homeless.append(request)
            return
        server.served += 1
        self._note(server, 1)
        if server.active < self.max_batch:
            self._begin(server, request)
        else:
            server.waiting.append(request)

    def cancel(self, request: SimulatedRequest) -> None:
        """Its session is given up: what it would have generated is not."""
        request.cancelled = True
        server = request.engine
        if server is None:
            return
        kept = [entry for entry in server.running if entry[2] is not request]
        if len(kept) < len(server.running):
            self._settle(server)
            heapq.heapify(kept)
            server.running = kept
            self._ended(server)

    def pause(self, seconds: float) -> None:
        for server in self.engines:
            if server.is_up:
                self._settle(server)
                server.paused_until = self.clock.now + seconds
                self._plan(server)

    def crash(self, server: SimulatedEngine, restart: float) -> None:
        """What had begun is lost, what waited goes elsewhere."""
        if not server.is_up:
            return
        self._settle(server)
        server.is_up = False
        lost = [request for _, _, request in server.running]
        moved = list(server.waiting)
        server.running, server.active, server.next_event = [], 0, server.next_event + 1
        server.waiting.clear()
        self._note(server, -server.load)
        self.clock.after(restart, lambda: self._return(server))
        for request in moved:
            if not request.cancelled:
                self.send(request, None)
        for request in lost:
            request.on_crash()

    def update_all(self) -> None:
        """Count the time up to now."""
        for server in self.engines:
            self._settle(server)

    # --- one engine --------------------------------------------------------------------------------

    def _return(self, server: SimulatedEngine) -> None:
        server.is_up, server.updated_at = True, self.clock.now
        self._note(server, 0)
        while self._homeless:
            request = self._homeless.popleft()
            if not request.cancelled:
                self.send(request, None)

    def _begin(self, server: SimulatedEngine, request: SimulatedRequest) -> None:
        self._settle(server)
        self._count += 1
        heapq.heappush(server.running, (server.work + request.tokens, self._count, request))
        server.active += 1
        request.on_begin()
        self._plan(server)

    def _settle(self, server: SimulatedEngine) -> None:
        """Count the work done since the last change."""
        now = self.clock.now
        since = max(server.updated_at, min(server.paused_until, now))
        if server.active and now > since:
            work = (now - since) * self.speed.per_reply(server.active)
            server.work += work
            server.tokens += work * server.active
        if server.active:
            server.busy_seconds += now - server.updated_at
        server.updated_at = now

    def _plan(self, server: SimulatedEngine) -> None:
        server.next_event += 1
        if server.running:
            left = max(0.0, server.running[0][0] - server.work) / self.speed.per_reply(server.active)
            start = max(0.0, server.paused_until - self.clock.now)
            number = server.next_event
            self.clock.after(start + left, lambda: self._end_next(server, number))

    def _end_next(self, server: SimulatedEngine, number: int) -> None:
        if number != server.next_event:
            return
        self._settle(server)
        _, _, request = heapq.heappop(server.running)
        self._ended(server)
        request.on_done()

    def _ended(self, server: SimulatedEngine) -> None:
        server.active -= 1
        self._note(server, -1)
        while server.waiting and server.active < self.max_batch:
            request = server.waiting.popleft()
            if request.cancelled:
                self._note(server, -1)
            else:
                self._begin(server, request)
        self._plan(server)

    # --- which engine ------------------------------------------------------------------------------

    def _pick(self, last: SimulatedEngine | None) -> SimulatedEngine | None:
        idlest = self._least_busy()
        if idlest is None or last is None or not last.is_up:
            return idlest
        return last if last.load <= BUSIER * idlest.load + SLACK else idlest

    def _least_busy(self) -> SimulatedEngine | None:
        """Entries of engines that have changed since are void: each change adds one."""
        while self._idlest:
            load, served, place = self._idlest[0]
            server = self.engines[place]
            if server.is_up and (server.load, server.served) == (load, served):
                return server
            heapq.heappop(self._idlest)
        return None

    def _note(self, server: SimulatedEngine, change: int) -> None:
        server.load += change
        if server.is_up:
            heapq.heappush(self._idlest, (server.load, server.served, server.index))
