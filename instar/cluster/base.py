"""What starts a run's roles and watches over them, wherever they run.

A role is a process of its own. One that dies is started again with a growing pause; one that keeps dying,
or says that another start would not help, is the failure of the run.
"""

from __future__ import annotations

import asyncio
import signal
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import TypedDict, Unpack

EXIT_FATAL = 70
"""Exit code of a role whose failure another start would not cure."""
EXIT_STOPPED = 75
"""Exit code of a role that a signal ended before it was done."""
DRAIN_SIGNAL = signal.SIGUSR1
"""Tells a role to begin nothing more, and to end with what is under way."""
LONG_RUNNING_ROLES = frozenset({"engine", "teacher", "gateway", "rewards"})
"""Roles that are never done by themselves."""
RESTART_BACKOFF = (0.2, 0.5, 1.0, 2.0, 4.0, 8.0)
RESTART_RESET_SECONDS = 120.0
"""Seconds of running after which earlier restarts are forgotten."""

ListenAddress = tuple[str, int]
"""Host and port to listen on; port 0 is any free one."""


class RoleOptions(TypedDict, total=False):
    """Of a role's start."""

    name: str | None
    """Tells processes of the same role apart; one that has ended gives its name free."""
    python: str | None
    """The interpreter. Default: the running one."""
    env: Mapping[str, str]
    exclude_env: Collection[str]
    """Variables that it does not inherit."""
    listen: ListenAddress | None
    """It is given a listening socket there that outlives it, so that a client which connects during a restart
    waits instead of being refused."""


@dataclass(eq=False)
class RoleHandle:
    """A role as its cluster knows it."""

    role: str
    name: str
    url: str = ""
    """Where the other roles reach it; it changes when the role moves to another machine. Empty: it does not
    listen."""
    log: str = ""
    """Where its log file is, with the host before it where that is another one."""
    restarts: int = 0
    is_stopping: bool = False
    """Whether it was asked to end, so that it is not started again."""
    is_retired: bool = False
    """Whether what it was for has ended, so that nobody starts it again."""
    exit_code: asyncio.Future[int] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    """Its last exit code, once it has ended for good."""


class Cluster(ABC):
    def __init__(self, *, log: Callable[[str], None]) -> None:
        self.log = log
        """Takes what a person should know."""
        self.failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Never has a result; its exception is the first cause, once the run cannot go on."""

    @property
    @abstractmethod
    def roles(self) -> Mapping[str, RoleHandle]:
        """By name, in the order they were started first."""

    @abstractmethod
    async def start(self, role: str, *arguments: str, **options: Unpack[RoleOptions]) -> RoleHandle:
        """Start a role, and again whenever it dies."""

    def describe_listen_host(self, host: str) -> str:
        """Where a role that is told to listen on ``host`` does, for people."""
        return host

    async def wait(self, name: str) -> int:
        """Until the role has ended for good. Raises the first cause when any role cannot go on."""
        ended = self.roles[name].exit_code
        await asyncio.wait({ended, self.failure}, return_when=asyncio.FIRST_COMPLETED)
        self.raise_failure()
        return ended.result()

    def raise_failure(self) -> None:
        if self.failure.done():
            self.failure.result()

    def fail(self, error: Exception) -> None:
        """The run cannot go on; the first cause counts."""
        if not self.failure.done():
            self.failure.set_exception(error)

    @abstractmethod
    def signal(self, name: str, number: int = signal.SIGTERM) -> None:
        """Ask a role to end in its own way; it is not started again, nor when it has just died."""

    @abstractmethod
    def kill(self, name: str) -> None:
        """End the role and all it started at once, for good."""

    @abstractmethod
    async def restart(self, name: str, timeout: float = 10.0) -> None:
        """Let a role end in its own way, then start it again as it was started, at the same address. After
        ``timeout`` seconds it is killed first. One that has ended is started too. Its ``exit`` stays open;
        it counts as no failure. Returns when the new process is started."""

    async def stop(self, name: str, timeout: float = 10.0) -> None:
        """Ask, wait, then kill the role and all it started."""
        found = self.roles.get(name)
        if found is None or found.exit_code.done():
            return
        self.signal(name)
        try:
            await asyncio.wait_for(asyncio.shield(found.exit_code), timeout)
        except TimeoutError:
            self.kill(name)
            await found.exit_code

    @abstractmethod
    async def tail(self, name: str, lines: int = 12) -> str:
        """The end of the role's log, as far as it can be read."""

    async def close(self) -> None:
        """Stop everything, the ones that others depend on last."""
        for name in reversed(list(self.roles)):
            await self.stop(name)
        if self.failure.done():
            self.failure.exception()  # retrieved, so that asyncio does not warn of it
        else:
            self.failure.cancel()


def describe_exit(code: int) -> str:
    if code == EXIT_STOPPED:
        return "a signal from outside the run"
    if code < 0:
        return f"signal {signal.Signals(-code).name}"
    return f"exit code {code}"
