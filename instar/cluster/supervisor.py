"""Starts each role of a run as a process of its own, and starts it again when it dies.

The sockets that the engine and the gateway listen on belong to the supervisor and are handed down, so
an address outlives the process behind it: a client that connects during a restart waits instead of
being refused.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from instar.cluster.layout import RunFolder
from instar.errors import InstarError

FATAL = 70
"""Exit code of a role whose failure another start would not cure."""
BACKOFF = (0.2, 0.5, 1.0, 2.0, 4.0, 8.0)
FORGIVEN_AFTER = 120.0
"""Seconds of running after which earlier restarts are forgotten."""


def listen(host: str, port: int) -> socket.socket:
    """A listening socket that children inherit."""
    from instar.gateway.serve import bind  # with uvicorn, which most verbs do without

    try:
        server = bind(host, port)
    except OSError as error:
        raise InstarError(f"gateway.port: cannot listen on {host}:{port}: {error.strerror}") from error
    server.set_inheritable(True)
    return server


def url_of(server: socket.socket) -> str:
    host, port = server.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


@dataclass
class Role:
    name: str
    argv: Sequence[str]
    env: Mapping[str, str]
    log: Path
    fds: Sequence[int] = ()
    process: asyncio.subprocess.Process | None = None
    restarts: int = 0
    stopping: bool = False
    exit: asyncio.Future[int] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    def tail(self, lines: int = 12) -> str:
        if not self.log.is_file():
            return ""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])


class Supervisor:
    def __init__(self, folder: RunFolder, *, log: Callable[[str], None]) -> None:
        self.folder = folder
        self.log = log
        self.roles: dict[str, Role] = {}
        self.failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._watchers: set[asyncio.Task[None]] = set()
        # Nothing is ever written: a role that reads the end of it knows that this process is gone. Only
        # this process has the end to write to, so that holds however it ends.
        self._lifeline, self._alive = os.pipe()

    async def start(
        self,
        role: str,
        *arguments: str,
        name: str | None = None,
        python: str | None = None,
        env: Mapping[str, str] | None = None,
        without: Collection[str] = (),
        server: socket.socket | None = None,
    ) -> Role:
        """``name`` tells processes of the same role apart. ``without``: variables of this process that it
        does not inherit."""
        name = name or role
        argv = [
            python or sys.executable,
            "-m",
            "instar.cluster.role",
            role,
            str(self.folder.path),
            f"--name={name}",
            f"--lifeline={self._lifeline}",
            *arguments,
        ]
        fds = [self._lifeline]
        if server is not None:
            argv.append(f"--fd={server.fileno()}")
            fds.append(server.fileno())
        inherited = {key: value for key, value in os.environ.items() if key not in without}
        started = Role(name, argv, {**inherited, **(env or {})}, self.folder.log(name), fds)
        self.roles[name] = started
        await self._spawn(started)
        watcher = asyncio.create_task(self._watch(started))
        self._watchers.add(watcher)
        watcher.add_done_callback(self._watchers.discard)
        return started

    async def _spawn(self, role: Role) -> None:
        with role.log.open("ab") as log:
            role.process = await asyncio.create_subprocess_exec(
                *role.argv,
                env=dict(role.env),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=tuple(role.fds),
                start_new_session=True,  # the terminal's Ctrl-C is for the supervisor alone
            )

    async def _watch(self, role: Role) -> None:
        while True:
            assert role.process is not None
            began = time.monotonic()
            code = await role.process.wait()
            if role.stopping or code == 0:
                role.exit.set_result(code)
                return
            if time.monotonic() - began > FORGIVEN_AFTER:
                role.restarts = 0
            if code == FATAL or role.restarts >= len(BACKOFF):
                self._fail(role, code)
                return
            pause = BACKOFF[role.restarts]
            role.restarts += 1
            self.log(f"{role.name} ended with {_describe(code)}; starting it again")
            await asyncio.sleep(pause)
            if role.stopping:
                role.exit.set_result(code)
                return
            try:
                await self._spawn(role)
            except OSError as error:
                self.log(f"{role.name} cannot be started: {error}")
                self._fail(role, code)
                return

    def _fail(self, role: Role, code: int) -> None:
        role.exit.set_result(code)
        if not self.failure.done():
            what = role.tail(1) if code == FATAL else f"{_describe(code)}, and again after each restart"
            cause = f"{role.name}: {what}\n(log: {role.log})"
            if code != FATAL:
                cause = f"{cause}\n{role.tail()}"
            self.failure.set_exception(InstarError(cause))

    async def wait(self, role: str) -> int:
        """Until the role has ended. Raises the first cause when any role cannot go on."""
        ended = self.roles[role].exit
        await asyncio.wait({ended, self.failure}, return_when=asyncio.FIRST_COMPLETED)
        if self.failure.done():
            self.failure.result()
        return ended.result()

    def raise_failure(self) -> None:
        if self.failure.done():
            self.failure.result()

    def signal(self, role: str, number: int = signal.SIGTERM) -> None:
        """Ask a role to end in its own way; it is not started again, nor when it has just died."""
        if found := self.roles.get(role):
            found.stopping = True
            if found.process and found.process.returncode is None:
                found.process.send_signal(number)

    async def stop(self, role: str, timeout: float = 10.0) -> None:
        """Ask, wait, then kill the role and all it started."""
        found = self.roles.get(role)
        if found is None or found.exit.done():
            return
        self.signal(role)
        try:
            await asyncio.wait_for(asyncio.shield(found.exit), timeout)
        except TimeoutError:
            self.kill(role)
            await found.exit

    def kill(self, role: str) -> None:
        found = self.roles.get(role)
        if found and found.process and found.process.returncode is None:
            found.stopping = True
            with contextlib.suppress(ProcessLookupError):
                os.killpg(found.process.pid, signal.SIGKILL)

    async def close(self) -> None:
        """Stop everything, the ones that others depend on last."""
        for role in reversed(list(self.roles)):
            await self.stop(role)
        for watcher in list(self._watchers):
            watcher.cancel()
        if self.failure.done():
            self.failure.exception()  # retrieved, so that asyncio does not warn of it
        else:
            self.failure.cancel()
        os.close(self._alive)
        os.close(self._lifeline)


def _describe(code: int) -> str:
    if code < 0:
        return f"signal {signal.Signals(-code).name}"
    return f"exit code {code}"
