"""The interface of a cluster: it starts the roles of a run, watches them and restarts them.

Each role is a process. A role that dies is started again after a growing pause. A role that keeps dying, or
whose exit code says that a restart would not help, fails the run.
"""

from __future__ import annotations

import asyncio
import signal
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any, TypedDict, Unpack

from instar.cluster.tasks import cancel_tasks
from instar.errors import InstarError

EXIT_FATAL = 70
"""Exit code of a role whose failure a restart would not fix."""
EXIT_STOPPED = 75
"""Exit code of a role that was stopped by a signal before its work was done."""
DRAIN_SIGNAL = signal.SIGUSR1
"""Signal that tells a role to accept no new work and to exit after its current work."""
LONG_RUNNING_ROLES = frozenset({"engine", "teacher", "gateway", "rewards"})
"""Roles that do not exit by themselves."""
RESTART_BACKOFF = (0.2, 0.5, 1.0, 2.0, 4.0, 8.0)
RESTART_RESET_SECONDS = 120.0
"""Seconds of running after which a role that dies is restarted with the shortest pause again."""

ListenAddress = tuple[str, int]
"""Host and port to listen on; port 0 picks a free port."""


class RoleOptions(TypedDict, total=False):
    name: str | None
    """Name of the process, unique within the role. It can be reused after the process has exited."""
    python: str | None
    """Python interpreter of the role. Default: the running interpreter."""
    env: Mapping[str, str]
    exclude_env: Collection[str]
    """Environment variables that the role does not inherit."""
    listen: ListenAddress | None
    """Address of a listening socket that the role gets. The socket outlives the process, so a client that
    connects during a restart waits instead of being refused."""


@dataclass(eq=False)
class RoleHandle:
    """The state of one role process in its cluster."""

    role: str
    name: str
    url: str = ""
    """The URL at which other roles reach this role. It changes when the role moves to another machine, and is
    empty if the role does not listen."""
    log: str = ""
    """Path of the role's log file, preceded by the host's name if the file is on a different machine."""
    restarts: int = 0
    is_stopping: bool = False
    """True once the role was told to exit; it is then not restarted."""
    is_retired: bool = False
    """True once the role's work is no longer needed; it then cannot be started again."""
    exit_code: asyncio.Future[int] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    """The last exit code, set when the role has exited and will not be restarted."""


class Cluster(ABC):
    def __init__(self, *, log: Callable[[str], None]) -> None:
        self.log = log
        """Called with messages for the user."""
        self.failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """A future without a result. Its exception is the first error that made the run fail."""
        self._watchers: dict[str, asyncio.Task[None]] = {}

    @property
    @abstractmethod
    def roles(self) -> Mapping[str, RoleHandle]:
        """The roles by name, in the order in which they were first started."""

    @abstractmethod
    async def start(self, role: str, *arguments: str, **options: Unpack[RoleOptions]) -> RoleHandle:
        """Start a role, restart it whenever it dies, and return its handle."""

    def describe_listen_host(self, host: str) -> str:
        """Return the host on which a role configured with ``host`` actually listens, for messages."""
        return host

    async def wait(self, name: str) -> int:
        """Return the exit code when the role has exited for good. Raises the first error if the run fails."""
        exit_code = self.roles[name].exit_code
        await asyncio.wait({exit_code, self.failure}, return_when=asyncio.FIRST_COMPLETED)
        self.raise_failure()
        return exit_code.result()

    def raise_failure(self) -> None:
        if self.failure.done():
            self.failure.result()

    def fail(self, error: Exception) -> None:
        """Mark the run as failed; only the first error counts."""
        if not self.failure.done():
            self.failure.set_exception(error)

    def _start_watcher(self, role: RoleHandle, watch: Coroutine[Any, Any, None]) -> None:
        """Watch a role in the background. If the watcher itself fails, the run fails, because nothing would
        notice that the role has exited."""

        def check(watcher: asyncio.Task[None]) -> None:
            if watcher.cancelled() or (error := watcher.exception()) is None:
                return
            self.fail(InstarError(f"{type(error).__name__}: {error}"))
            if self.roles.get(role.name) is role:
                self.kill(role.name)
            if not role.exit_code.done():
                role.exit_code.set_result(EXIT_FATAL)

        self._watchers[role.name] = asyncio.create_task(watch)
        self._watchers[role.name].add_done_callback(check)

    @abstractmethod
    def signal(self, name: str, number: int = signal.SIGTERM) -> None:
        """Send a role a signal to exit. The role is not restarted, even if it has just died."""

    @abstractmethod
    def kill(self, name: str) -> None:
        """Kill the role and every process that it started, and do not restart it."""

    @abstractmethod
    async def restart(self, name: str, timeout: float = 10.0) -> None:
        """Stop a role and start it again with the same arguments at the same address.

        The role is killed if it has not exited after ``timeout`` seconds. A role that has already exited is
        started, too. The restart does not count as a failure, and ``exit_code`` stays open. Returns when the
        new process has been started.
        """

    async def stop(self, name: str, timeout: float = 10.0) -> None:
        """Tell the role to exit. After ``timeout`` seconds, kill it and every process that it started."""
        role = self.roles.get(name)
        if role is None or role.exit_code.done():
            return
        self.signal(name)
        try:
            await asyncio.wait_for(asyncio.shield(role.exit_code), timeout)
        except TimeoutError:
            self.kill(name)
            await role.exit_code

    @abstractmethod
    async def tail(self, name: str, lines: int = 12) -> str:
        """Return the last lines of the role's log, as far as they can be read."""

    async def close(self) -> None:
        """Stop all roles in reverse order of their start, because later roles depend on earlier ones."""
        for name in reversed(list(self.roles)):
            await self.stop(name)
        await cancel_tasks(self._watchers.values())
        if self.failure.done():
            self.failure.exception()  # retrieved, so that asyncio does not warn about it
        else:
            self.failure.cancel()


def describe_exit(code: int) -> str:
    if code == EXIT_STOPPED:
        return "a signal from outside the run"
    if code < 0:
        return f"signal {signal.Signals(-code).name}"
    return f"exit code {code}"
