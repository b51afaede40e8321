"""Starts each role of a run as a process on this machine, and starts it again when it dies.

The sockets that roles listen on belong to the supervisor and are handed down, so an address outlives the
process behind it.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Unpack

from instar.cluster.base import (
    DRAIN_SIGNAL,
    EXIT_FATAL,
    EXIT_STOPPED,
    LONG_RUNNING_ROLES,
    RESTART_BACKOFF,
    RESTART_RESET_SECONDS,
    Cluster,
    ListenAddress,
    RoleHandle,
    RoleOptions,
    describe_exit,
)
from instar.cluster.layout import RunFolder
from instar.errors import InstarError

ROLE_URL_ENV = "INSTAR_ROLE_URL"
"""Where a role listens itself, as others reach it."""
LEASE_ENV = "INSTAR_LEASE"
"""The lease that a role writes to the store under."""
HOST_ENV = "INSTAR_HOST"
"""The host's name before a role's log file, where there are several."""


def open_listener(host: str, port: int) -> socket.socket:
    """A listening socket that children inherit."""
    from instar.gateway.serve import bind  # with uvicorn, which most verbs do without

    try:
        server = bind(host, port)
    except OSError as error:
        raise InstarError(f"gateway.port: cannot listen on {host}:{port}: {error.strerror}") from error
    server.set_inheritable(True)
    return server


def listener_url(server: socket.socket) -> str:
    """As this machine reaches it."""
    host, port = server.getsockname()[:2]
    if ipaddress.ip_address(host).is_unspecified:
        host = "::1" if ":" in host else "127.0.0.1"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def log_location(host: str, path: Path) -> str:
    """How people are told of a log file."""
    return f"{host}:{path}" if host else str(path)


@dataclass(eq=False)
class ChildProcess(RoleHandle):
    """A role as a process of this machine."""

    argv: Sequence[str] = ()
    env: Mapping[str, str] = field(default_factory=dict[str, str], repr=False)
    fds: Sequence[int] = ()
    server: socket.socket | None = None
    process: asyncio.subprocess.Process | None = None
    is_restarting: bool = False
    """Whether its end is wanted for a new start."""
    stop_signal: int = signal.SIGTERM
    """The last signal that it was to end by."""

    def request_stop(self, number: int) -> None:
        """It is to end for good. A process that is just being started is sent the signal once it is there."""
        self.is_stopping, self.is_restarting, self.stop_signal = True, False, number

    def send(self, number: int) -> None:
        if self.process and self.process.returncode is None:
            self.process.send_signal(number)

    def kill(self) -> None:
        """With all that it started."""
        if self.process and self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)


class Supervisor(Cluster):
    def __init__(
        self,
        folder: RunFolder,
        *,
        log: Callable[[str], None],
        url: Callable[[socket.socket], str] = listener_url,
        host: str = "",
    ) -> None:
        """``url``: how others reach a socket of this machine. ``host``: its name, where there are several."""
        super().__init__(log=log)
        self.folder = folder
        self._url = url
        self._host = host
        self._children: dict[str, ChildProcess] = {}
        self._watchers: dict[str, asyncio.Task[None]] = {}
        # Nothing is ever written: a role that reads the end of it knows that this process is gone. Only
        # this process has the end to write to, so that holds however it ends.
        self._lifeline, self._alive = os.pipe()

    @property
    def roles(self) -> Mapping[str, ChildProcess]:
        return self._children

    async def start(self, role: str, *arguments: str, **options: Unpack[RoleOptions]) -> ChildProcess:
        name = options.get("name") or role
        child = ChildProcess(
            role, name, log=log_location(self._host, self.folder.log(name)), fds=[self._lifeline]
        )
        argv = [
            options.get("python") or sys.executable,
            "-m",
            "instar.cluster.role",
            role,
            str(self.folder.path),
            f"--name={name}",
            f"--lifeline={self._lifeline}",
            *arguments,
        ]
        told: dict[str, str] = {}
        if address := options.get("listen"):
            child.server = self._listen(name, address)
            child.url = told[ROLE_URL_ENV] = self._url(child.server)
            argv.append(f"--fd={child.server.fileno()}")
            child.fds = [self._lifeline, child.server.fileno()]
        inherited = {k: v for k, v in os.environ.items() if k not in options.get("exclude_env", ())}
        child.argv, child.env = argv, {**inherited, **options.get("env", {}), **told}
        self._children[name] = child
        await self._run(child)
        return child

    def _listen(self, name: str, address: ListenAddress) -> socket.socket:
        """A role that is started anew keeps the socket of the one before."""
        before = self._children.get(name)
        return before.server if before and before.server else open_listener(*address)

    async def _run(self, child: ChildProcess) -> None:
        try:
            await self._spawn(child)
        except BaseException as error:
            child.exit_code.set_result(EXIT_FATAL)  # nobody watches it
            if isinstance(error, OSError):
                raise InstarError(f"{child.name} cannot be started: {error}") from error
            raise
        self._watchers[child.name] = asyncio.create_task(self._watch(child))

    async def _spawn(self, child: ChildProcess) -> None:
        with self.folder.log(child.name).open("ab") as log:
            child.process = await asyncio.create_subprocess_exec(
                *child.argv,
                env=dict(child.env),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=tuple(child.fds),
                start_new_session=True,  # the terminal's Ctrl-C is for the supervisor alone
            )
        child.is_restarting = False
        if child.is_stopping:
            child.send(child.stop_signal)

    async def _watch(self, child: ChildProcess) -> None:
        while True:
            assert child.process is not None
            began = time.monotonic()
            code = await child.process.wait()
            if not child.is_restarting:
                if child.is_stopping or (code == 0 and child.role not in LONG_RUNNING_ROLES):
                    child.exit_code.set_result(_as_asked(code))
                    return
                if time.monotonic() - began > RESTART_RESET_SECONDS:
                    child.restarts = 0
                if code == EXIT_FATAL or child.restarts >= len(RESTART_BACKOFF):
                    self._give_up(child, code)
                    return
                pause = RESTART_BACKOFF[child.restarts]
                child.restarts += 1
                self.log(f"{child.name} ended with {describe_exit(code)}; starting it again")
                await asyncio.sleep(pause)
                if child.is_stopping:
                    child.exit_code.set_result(_as_asked(code))
                    return
            try:
                await self._spawn(child)
            except OSError as error:
                self.log(f"{child.name} cannot be started: {error}")
                self._give_up(child, code)
                return

    def _give_up(self, child: ChildProcess, code: int) -> None:
        child.exit_code.set_result(code)
        if code == EXIT_FATAL:
            cause = f"{child.name}: {self._tail(child.name, 1)}\n(log: {child.log})"
        else:
            again = f"{describe_exit(code)}, and again after each restart"
            cause = f"{child.name}: {again}\n(log: {child.log})\n{self._tail(child.name)}"
        self.fail(InstarError(cause))

    def signal(self, name: str, number: int = signal.SIGTERM) -> None:
        if child := self._children.get(name):
            child.request_stop(number)
            child.send(number)

    def kill(self, name: str) -> None:
        if child := self._children.get(name):
            child.request_stop(signal.SIGKILL)
            child.kill()

    async def restart(self, name: str, timeout: float = 10.0) -> None:
        child = self._children[name]
        child.is_stopping = False
        if child.exit_code.done():
            child.exit_code = asyncio.get_running_loop().create_future()
            await self._run(child)
            return
        before = child.process
        child.is_restarting = True
        child.send(signal.SIGTERM)
        deadline = time.monotonic() + timeout
        # The watcher starts it again; one that waits out its pause does so too.
        while child.process is before and not child.exit_code.done():
            if time.monotonic() > deadline:
                child.kill()
            await asyncio.sleep(0.02)

    async def tail(self, name: str, lines: int = 12) -> str:
        return self._tail(name, lines)

    def _tail(self, name: str, lines: int = 12) -> str:
        path = self.folder.log(name)
        if not path.is_file():
            return ""
        return "\n".join(path.read_text(errors="replace").splitlines()[-lines:])

    async def close(self) -> None:
        await super().close()
        for watcher in self._watchers.values():
            watcher.cancel()
        for child in self._children.values():
            if child.server is not None:
                child.server.close()
        os.close(self._alive)
        os.close(self._lifeline)


def _as_asked(code: int) -> int:
    """The exit code of a role that was asked to end. A signal that it does not handle yet, or no more, ends
    it before it began anything or after it was done."""
    return 0 if code in (EXIT_STOPPED, -signal.SIGTERM, -DRAIN_SIGNAL) else code
