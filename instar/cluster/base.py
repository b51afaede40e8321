"""The interface of a cluster: the processes that run the roles of a run.

Each role is a process. A role that dies is restarted after a delay that grows with every restart. The run
fails if a role keeps dying, or if it exits with `EXIT_FATAL`.
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
"""Exit code of a role that failed in a way that a restart would not fix."""
EXIT_STOPPED = 75
"""Exit code of a role that exited after a signal to stop or drain."""
DRAIN_SIGNAL = signal.SIGUSR1
"""Signal that makes a role finish its current work, accept no new work, and exit."""
LONG_RUNNING_ROLES = frozenset({"engine", "teacher", "gateway", "rewards", "gate"})
"""Roles that run until they are stopped. They are restarted even if they exit with code 0."""
STOP_ORDER = (("rollout", "rewards", "gate", "trainer"), ("gateway",), ("engine", "teacher"))
"""The order in which groups of roles are stopped. Roles stop before the roles that they depend on."""
KILL_TIMEOUT_SECONDS = 5.0
"""How long `stop` waits for a killed process to exit. A process blocked in a driver may take longer."""
RESTART_BACKOFF = (0.2, 0.5, 1.0, 2.0, 4.0, 8.0)
"""Delays before successive restarts, in seconds. The run fails if the role dies again after the last one."""
RESTART_RESET_SECONDS = 120.0
"""If a role dies after running this long, its restart delays start over."""

ListenAddress = tuple[str, int]
"""Host and port to listen on; port 0 picks a free port."""


class RoleOptions(TypedDict, total=False):
    name: str | None
    """Name of the process, unique within the run. Default: the role."""
    python: str | None
    """Python interpreter for the role. Default: the current interpreter."""
    env: Mapping[str, str]
    exclude_env: Collection[str]
    """Environment variables that the role does not inherit."""
    listen: ListenAddress | None
    """Address of a listening socket for the role. The socket stays open when the process dies, so a client
    that connects during a restart waits instead of being refused."""


@dataclass(eq=False)
class RoleHandle:
    role: str
    name: str
    url: str = ""
    """The URL at which other roles reach this role, or an empty string if the role does not listen. The URL
    changes when the role moves to a different machine."""
    log: str = ""
    """Path of the role's log file, prefixed with ``host:`` if the role runs on a Ray cluster."""
    restarts: int = 0
    is_stopping: bool = False
    """True if the role was told to exit, so it is not restarted."""
    is_retired: bool = False
    """True if the role is no longer needed, so it cannot be started again."""
    exit_code: asyncio.Future[int] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    """The last exit code, set when the role has exited and will not be restarted."""

    def set_exit_code(self, code: int) -> None:
        """Set the exit code unless it is already set."""
        if not self.exit_code.done():
            self.exit_code.set_result(code)


class Cluster(ABC):
    def __init__(self, *, log: Callable[[str], None]) -> None:
        self.log = log
        """Called with messages for the user."""
        self.failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """A future that only ever gets an exception: the first error that made the run fail."""
        self._watchers: dict[str, asyncio.Task[None]] = {}

    @property
    @abstractmethod
    def roles(self) -> Mapping[str, RoleHandle]:
        """The roles by name, in the order of their first start."""

    @abstractmethod
    async def start(self, role: str, *arguments: str, **options: Unpack[RoleOptions]) -> RoleHandle:
        """Start a role, restart it whenever it dies, and return its handle."""

    def describe_listen_host(self, host: str) -> str:
        """Return the listening address of a role that is configured with ``host``, as text for messages."""
        return host

    async def wait(self, name: str) -> int:
        """Return the exit code once the role has exited for good. If the run fails, raise its first error."""
        exit_code = self.roles[name].exit_code
        await asyncio.wait({exit_code, self.failure}, return_when=asyncio.FIRST_COMPLETED)
        self.raise_failure()
        return exit_code.result()

    def raise_failure(self) -> None:
        if self.failure.done():
            self.failure.result()

    def fail(self, error: Exception) -> None:
        """Mark the run as failed. Only the first error is kept."""
        if not self.failure.done():
            self.failure.set_exception(error)

    def _start_watcher(self, role: RoleHandle, watch: Coroutine[Any, Any, None]) -> None:
        """Watch a role in the background. The run fails if the watcher does: nothing else notices an exit."""

        def handle_done(watcher: asyncio.Task[None]) -> None:
            if watcher.cancelled() or (error := watcher.exception()) is None:
                return
            self.fail(InstarError(f"the watcher of {role.name} failed: {type(error).__name__}: {error}"))
            if self.roles.get(role.name) is role:
                self.kill(role.name)
            role.set_exit_code(EXIT_FATAL)

        self._watchers[role.name] = asyncio.create_task(watch)
        self._watchers[role.name].add_done_callback(handle_done)

    @abstractmethod
    def signal(self, name: str, signum: int = signal.SIGTERM) -> None:
        """Send the role a signal that makes it exit. It is not restarted, even if it has just died."""

    @abstractmethod
    def kill(self, name: str) -> None:
        """Kill the role and every process that it started, and do not restart the role."""

    @abstractmethod
    async def restart(self, name: str, timeout: float = 10.0) -> None:
        """Stop the role, start it again with the same arguments, and return when the process has started. If
        the role does not exit within ``timeout`` seconds, it is killed. If it has already exited, it is only
        started. The restart does not count as a failure, and ``exit_code`` is pending afterwards."""

    async def stop(self, name: str, timeout: float = 10.0) -> bool:
        """Tell the role to exit. Return True if it exits, has already exited or was never started. After
        ``timeout`` seconds, kill the role and every process that it started, and return False."""
        role = self.roles.get(name)
        if role is None or role.exit_code.done():
            return True
        self.signal(name)
        await asyncio.wait({role.exit_code}, timeout=timeout)
        if role.exit_code.done():
            return True
        self.kill(name)
        await asyncio.wait({role.exit_code}, timeout=KILL_TIMEOUT_SECONDS)
        if not role.exit_code.done():
            self.log(f"{name} was killed but has not exited; see {role.log}")
        return False

    @abstractmethod
    async def tail(self, name: str, lines: int = 12) -> str:
        """Return the last lines of the role's log, or an empty string if the log cannot be read."""

    async def close(self) -> None:
        """Stop all roles."""
        for stage in STOP_ORDER:
            names = [name for name, handle in self.roles.items() if handle.role in stage]
            await asyncio.gather(*map(self.stop, names))
        await cancel_tasks(self._watchers.values())
        if self.failure.done():
            self.failure.exception()  # asyncio warns about exceptions that are never retrieved
        else:
            self.failure.cancel()


def describe_exit(code: int) -> str:
    """Return the cause of an exit, as in "engine-0 exited (signal SIGKILL)"."""
    if code == EXIT_STOPPED:
        return "a signal from outside the run"
    if code < 0:
        return f"signal {signal.Signals(-code).name}"
    return f"exit code {code}"
