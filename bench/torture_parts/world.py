"""The processes of a simulated run, the gates at which they wait, and the faults that hit them."""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextvars import copy_context
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from torture_parts.event_loop import ProcessState, SimulationLoop, current_process

T = TypeVar("T")

RESTART_DELAY_SECONDS = 0.05
MAX_DELAY_SECONDS = 1.0
"""The longest time that the scheduler lets pass while a process could continue."""
MAX_VIRTUAL_SECONDS = 3600.0
MAX_DECISIONS = 6_000
"""A run that needs more decisions is stuck; an undisturbed run needs about 400."""


class Role(Protocol):
    """The work of a process. `run` returns when the work is finished."""

    async def run(self) -> None: ...


class Process(ProcessState):
    def __init__(self, name: str) -> None:
        self.name = name
        self.lease = 0
        self.is_replaced = False
        """True if another process has taken over the role while this one is still running."""
        self.role: Role | None = None
        self.is_serving = False
        self.pending_replies: dict[asyncio.Future[Any], None] = {}
        """The replies that other processes are waiting for. (A dict, because a set has no fixed order.)"""


@dataclass(slots=True)
class Gate:
    """A point at which a process waits for the scheduler, and may be killed."""

    process: Process
    label: str
    passed: asyncio.Future[None]


@dataclass(frozen=True, slots=True)
class Fault:
    """Kills or replaces processes just before the scheduler makes decision number ``decision``."""

    decision: int
    process: str | None
    """The name of the process, or None for the process that would continue next."""
    kills_all: bool = False
    replaces: bool = False
    """The process keeps running, but another one takes over its lease, as if it were believed dead."""


class Scheduler:
    """Chooses the gate to open next. Without a seed, gates open in the order in which they are reached."""

    def __init__(self, seed: int | None = None, faults: Sequence[Fault] = ()) -> None:
        self.faults = sorted(faults, key=lambda fault: fault.decision)
        self._rng = random.Random(seed) if seed is not None else None
        self._is_fair = self._rng is None or self._rng.random() < 0.5
        self._priorities: dict[str, float] = {}

    def choose(self, gates: Sequence[Gate], *, can_wait: bool) -> Gate | None:
        """Return the gate to open. May return None if ``can_wait``, to let time pass first."""
        rng = self._rng
        if rng is None:
            return gates[0]
        if can_wait and rng.random() < 0.02:
            return None
        if self._is_fair:
            return rng.choice(gates)
        # A process with a low priority falls far behind the others.
        if rng.random() < 0.01:
            self._priorities.clear()
        for gate in gates:
            self._priorities.setdefault(gate.process.name, rng.random())
        first = max(gates, key=lambda gate: self._priorities[gate.process.name])
        return first if rng.random() < 0.9 else rng.choice(gates)


@dataclass
class World:
    """The simulated processes of a run, and the loop in which they run."""

    scheduler: Scheduler
    create_role: Callable[[World, str], Role]
    role_names: Sequence[str]
    finishing_roles: Sequence[str]
    """The roles that finish when the run is complete. The others serve until then."""
    take_lease: Callable[[str], int] = lambda _: 0
    violations: list[str] = field(default_factory=list[str])
    decisions: int = 0
    crashes: list[str] = field(default_factory=list[str])
    processes: dict[str, Process] = field(default_factory=dict[str, Process])
    finished: set[str] = field(default_factory=set[str])

    def __post_init__(self) -> None:
        self.loop = SimulationLoop(self._on_idle)
        self._gates: list[Gate] = []
        self._done = self.loop.create_future()
        self._trace = hashlib.blake2b(digest_size=8)

    @property
    def trace(self) -> str:
        """A hash of all decisions."""
        return self._trace.hexdigest()

    def report(self, violation: str) -> None:
        if violation not in self.violations:
            self.violations.append(violation)

    # --- processes ---------------------------------------------------------------------------------

    async def run(self) -> None:
        """Run all processes until the run is complete."""
        for name in self.role_names:
            self.start(name)
        await self._done

    def start(self, name: str) -> None:
        process = Process(name)
        process.lease = self.take_lease(name)
        self.processes[name] = process
        self.finished.discard(name)
        self._spawn(process, self._run_role(process))

    def kill(self, names: Sequence[str], label: str) -> None:
        """Stop the processes immediately and restart each of them after RESTART_DELAY_SECONDS."""
        names = [name for name in names if self.processes[name].is_alive]
        self.crashes.append(f"{' and '.join(names)} before decision {self.decisions} ({label})")
        killed = [self.processes[name] for name in names]
        for process in killed:
            process.is_alive = process.is_serving = False
        self._gates = [gate for gate in self._gates if gate.process.is_alive]
        for process in killed:
            for reply in process.pending_replies:
                if not reply.done():
                    reply.set_exception(ConnectionResetError(f"the {process.name} was killed"))
        for name in names:
            self.loop.call_later(RESTART_DELAY_SECONDS, self.start, name)

    def _kill_one(self, name: str, label: str) -> None:
        self.kill([name], label)

    def replace(self, name: str, label: str) -> None:
        """Start a second process for the role, as if the current one had lost contact with its supervisor."""
        process = self.processes[name]
        if not process.is_replaced:
            self.crashes.append(f"{name} replaced before decision {self.decisions} ({label})")
            process.is_replaced, process.is_serving = True, False
            self.start(name)

    def _spawn(self, process: Process, coroutine: Coroutine[Any, Any, Any]) -> None:
        context = copy_context()
        context.run(current_process.set, process)
        self.loop.create_task(coroutine, context=context)

    async def _run_role(self, process: Process) -> None:
        try:
            process.role = self.create_role(self, process.name)
            await process.role.run()
        except Exception as error:  # noqa: BLE001 - any error is a violation
            if process.is_replaced:
                process.is_alive = False
                return
            self.report(f"the {process.name} failed: {type(error).__name__}: {error}")
            self._finish()
            return
        if process.is_replaced:
            return
        self.finished.add(process.name)
        if self.finished.issuperset(self.finishing_roles):
            self._finish()

    def _finish(self) -> None:
        if not self._done.done():
            self._done.set_result(None)

    # --- gates and requests ------------------------------------------------------------------------

    async def pass_gate(self, label: str) -> None:
        process = current_process.get()
        assert isinstance(process, Process), "only a process may wait at a gate"
        gate = Gate(process, label, self.loop.create_future())
        self._gates.append(gate)
        await gate.passed

    async def request(self, server: str, label: str, handle: Callable[[Any], Awaitable[T]]) -> T:
        """Call ``handle`` with the server's role, in the server's process.

        Raises the handler's errors, and ConnectionError if the server is not running or is killed before its
        reply arrives.
        """
        await self.pass_gate(f"send {label}")
        process = self.processes[server]
        if not process.is_serving:
            raise ConnectionRefusedError(f"the {server} is not running")
        reply: asyncio.Future[T] = self.loop.create_future()
        process.pending_replies[reply] = None
        self._spawn(process, self._handle_request(process, label, handle, reply))
        return await reply

    async def _handle_request(
        self,
        process: Process,
        label: str,
        handle: Callable[[Any], Awaitable[T]],
        reply: asyncio.Future[T],
    ) -> None:
        error: Exception | None = None
        result: Any = None
        try:
            result = await handle(process.role)
        except Exception as caught:  # noqa: BLE001 - any error in the handler is sent to the client
            error = caught
        await self.pass_gate(f"reply {label}")
        process.pending_replies.pop(reply, None)
        if reply.done():
            return
        if error is None:
            reply.set_result(result)
        else:
            reply.set_exception(error)

    # --- scheduling --------------------------------------------------------------------------------

    def _on_idle(self, timeout: float | None) -> bool:
        """Apply the faults that are due and open the next gate. Return False to let time pass."""
        if self._done.done():
            return False
        if self.decisions >= MAX_DECISIONS or self.loop.time() > MAX_VIRTUAL_SECONDS:
            self.report(
                f"the run did not finish within {self.decisions} decisions and {self.loop.time():.0f} s"
            )
            self._finish()
            return True
        self._gates = [gate for gate in self._gates if not gate.passed.done()]
        if not self._gates:
            return False
        can_wait = timeout is not None and timeout <= MAX_DELAY_SECONDS
        gate = self.scheduler.choose(self._gates, can_wait=can_wait)
        if gate is None:
            return False
        self.decisions += 1
        self._trace.update(f"{gate.process.name} {gate.label}\n".encode())
        while (faults := self.scheduler.faults) and faults[0].decision <= self.decisions:
            fault = faults.pop(0)
            name = fault.process or gate.process.name
            if fault.kills_all:
                self.kill(self.role_names, f"{gate.process.name}: {gate.label}")
            elif self.processes[name].is_alive and name not in self.finished:
                apply_fault = self.replace if fault.replaces else self._kill_one
                apply_fault(name, gate.label if gate.process.name == name else "")
        if gate.process.is_alive:
            self._gates.remove(gate)
            gate.passed.set_result(None)
        return True
