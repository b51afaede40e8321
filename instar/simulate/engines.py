"""Engines on the virtual clock: replies share an engine, and the more there are the slower is each."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from instar.simulate.base import Speed

Event = Callable[[], None]

BUSIER, SLACK = 2, 8
"""As `engines/pool`: when a session leaves its engine for the idlest one."""


class Clock:
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
class Request:
    tokens: int
    began: Event
    """Its first token is being sampled."""
    done: Event
    lost: Event
    """Its engine crashed after it had begun."""
    server: Server | None = None
    """Where it is now, or was; None while no engine was up."""
    cancelled: bool = False


@dataclass(slots=True, eq=False)
class Server:
    """One engine. ``work`` counts the tokens that a reply present from the start would have by now, so
    a reply that begins at work w ends at w + its tokens, however many share the engine meanwhile."""

    place: int
    running: list[tuple[float, int, Request]] = field(default_factory=list[Any])
    waiting: deque[Request] = field(default_factory=deque[Request])
    active: int = 0
    load: int = 0
    served: int = 0
    up: bool = True
    work: float = 0.0
    at: float = 0.0
    paused_until: float = 0.0
    busy: float = 0.0
    """Seconds with something to generate."""
    tokens: float = 0.0
    plan: int = 0
    """Number of the event that ends its next reply; earlier ones are void."""


class Pool:
    """All engines as one, by the gateway's rules: a session stays with its engine unless that is far busier
    than others, any other request goes to the idlest."""

    def __init__(self, clock: Clock, engines: int, max_batch: int, speed: Speed) -> None:
        self.clock = clock
        self.max_batch = max_batch
        self.speed = speed
        self.servers = [Server(place) for place in range(engines)]
        self._idlest = [(0, 0, place) for place in range(engines)]
        self._count = 0
        self._homeless: deque[Request] = deque()
        """Requests while no engine is up."""

    def send(self, request: Request, last: Server | None) -> None:
        """To one of the engines; where none is up, it waits for one."""
        server = request.server = self._pick(last)
        if server is None:
            self._homeless.append(request)
            return
        server.served += 1
        self._note(server, 1)
        if server.active < self.max_batch:
            self._begin(server, request)
        else:
            server.waiting.append(request)

    def cancel(self, request: Request) -> None:
        """Its session is given up: what it would have generated is not."""
        request.cancelled = True
        server = request.server
        if server is None:
            return
        kept = [entry for entry in server.running if entry[2] is not request]
        if len(kept) < len(server.running):
            self._settle(server)
            heapq.heapify(kept)
            server.running = kept
            self._ended(server)

    def pause(self, seconds: float) -> None:
        for server in self.servers:
            if server.up:
                self._settle(server)
                server.paused_until = self.clock.now + seconds
                self._plan(server)

    def crash(self, server: Server, restart: float) -> None:
        """What had begun is lost, what waited goes elsewhere."""
        if not server.up:
            return
        self._settle(server)
        server.up = False
        lost = [request for _, _, request in server.running]
        moved = list(server.waiting)
        server.running, server.active, server.plan = [], 0, server.plan + 1
        server.waiting.clear()
        self._note(server, -server.load)
        self.clock.after(restart, lambda: self._return(server))
        for request in moved:
            if not request.cancelled:
                self.send(request, None)
        for request in lost:
            request.lost()

    def settle_all(self) -> None:
        """Count the time up to now."""
        for server in self.servers:
            self._settle(server)

    # --- one engine --------------------------------------------------------------------------------

    def _return(self, server: Server) -> None:
        server.up, server.at = True, self.clock.now
        self._note(server, 0)
        while self._homeless:
            request = self._homeless.popleft()
            if not request.cancelled:
                self.send(request, None)

    def _begin(self, server: Server, request: Request) -> None:
        self._settle(server)
        self._count += 1
        heapq.heappush(server.running, (server.work + request.tokens, self._count, request))
        server.active += 1
        request.began()
        self._plan(server)

    def _settle(self, server: Server) -> None:
        """Count the work done since the last change."""
        now = self.clock.now
        since = max(server.at, min(server.paused_until, now))
        if server.active and now > since:
            work = (now - since) * self.speed.per_reply(server.active)
            server.work += work
            server.tokens += work * server.active
        if server.active:
            server.busy += now - server.at
        server.at = now

    def _plan(self, server: Server) -> None:
        server.plan += 1
        if server.running:
            left = max(0.0, server.running[0][0] - server.work) / self.speed.per_reply(server.active)
            start = max(0.0, server.paused_until - self.clock.now)
            number = server.plan
            self.clock.after(start + left, lambda: self._end_next(server, number))

    def _end_next(self, server: Server, number: int) -> None:
        if number != server.plan:
            return
        self._settle(server)
        _, _, request = heapq.heappop(server.running)
        self._ended(server)
        request.done()

    def _ended(self, server: Server) -> None:
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

    def _pick(self, last: Server | None) -> Server | None:
        idlest = self._least_busy()
        if idlest is None or last is None or not last.up:
            return idlest
        return last if last.load <= BUSIER * idlest.load + SLACK else idlest

    def _least_busy(self) -> Server | None:
        """Entries of engines that have changed since are void: each change adds one."""
        while self._idlest:
            load, served, place = self._idlest[0]
            server = self.servers[place]
            if server.up and (server.load, server.served) == (load, served):
                return server
            heapq.heappop(self._idlest)
        return None

    def _note(self, server: Server, change: int) -> None:
        server.load += change
        if server.up:
            heapq.heappush(self._idlest, (server.load, server.served, server.place))
