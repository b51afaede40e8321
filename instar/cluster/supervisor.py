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
    BACKOFF,
    DRAIN,
    ENDLESS,
    FATAL,
    FORGIVEN_AFTER,
    STOPPED,
    Address,
    Cluster,
    Options,
    Role,
    describe,
)
from instar.cluster.layout import RunFolder
from instar.errors import InstarError

ROLE_URL = "INSTAR_ROLE_URL"
"""Where a role listens itself, as others reach it."""
LEASE = "INSTAR_LEASE"
"""The lease that a role writes to the store under."""
HOST = "INSTAR_HOST"
"""The host's name before a role's log file, where there are several."""


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
    """As this machine reaches it."""
    host, port = server.getsockname()[:2]
    if ipaddress.ip_address(host).is_unspecified:
        host = "::1" if ":" in host else "127.0.0.1"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def log_name(host: str, path: Path) -> str:
    """How people are told of a log file."""
    return f"{host}:{path}" if host else str(path)


@dataclass(eq=False)
class Child(Role):
    """A role as a process of this machine."""

    argv: Sequence[str] = ()
    env: Mapping[str, str] = field(default_factory=dict[str, str], repr=False)
    fds: Sequence[int] = ()
    server: socket.socket | None = None
    process: asyncio.subprocess.Process | None = None
    restarting: bool = False
    """Whether its end is wanted for a new start."""
    asked: int = signal.SIGTERM
    """The last signal that it was to end by."""

    def end_by(self, number: int) -> None:
        """It is to end for good. A process that is just being started is sent the signal once it is there."""
        self.stopping, self.restarting, self.asked = True, False, number

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
        url: Callable[[socket.socket], str] = url_of,
        host: str = "",
    ) -> None:
        """``url``: how others reach a socket of this machine. ``host``: its name, where there are several."""
        super().__init__(log=log)
        self.folder = folder
        self._url = url
        self._host = host
        self._children: dict[str, Child] = {}
        self._watchers: dict[str, asyncio.Task[None]] = {}
        # Nothing is ever written: a role that reads the end of it knows that this process is gone. Only
        # this process has the end to write to, so that holds however it ends.
        self._lifeline, self._alive = os.pipe()

    @property
    def roles(self) -> Mapping[str, Child]:
        return self._children

    async def start(self, role: str, *arguments: str, **options: Unpack[Options]) -> Child:
        name = options.get("name") or role
        child = Child(role, name, log=log_name(self._host, self.folder.log(name)), fds=[self._lifeline])
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
            child.url = told[ROLE_URL] = self._url(child.server)
            argv.append(f"--fd={child.server.fileno()}")
            child.fds = [self._lifeline, child.server.fileno()]
        inherited = {k: v for k, v in os.environ.items() if k not in options.get("without", ())}
        child.argv, child.env = argv, {**inherited, **options.get("env", {}), **told}
        self._children[name] = child
        await self._run(child)
        return child

    def _listen(self, name: str, address: Address) -> socket.socket:
        """A role that is started anew keeps the socket of the one before."""
        before = self._children.get(name)
        return before.server if before and before.server else listen(*address)

    async def _run(self, child: Child) -> None:
        try:
            await self._spawn(child)
        except BaseException as error:
            child.exit.set_result(FATAL)  # nobody watches it
            if isinstance(error, OSError):
                raise InstarError(f"{child.name} cannot be started: {error}") from error
            raise
        self._watchers[child.name] = asyncio.create_task(self._watch(child))

    async def _spawn(self, child: Child) -> None:
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
        child.restarting = False
        if child.stopping:
            child.send(child.asked)

    async def _watch(self, child: Child) -> None:
        while True:
            assert child.process is not None
            began = time.monotonic()
            code = await child.process.wait()
            if not child.restarting:
                if child.stopping or (code == 0 and child.role not in ENDLESS):
                    child.exit.set_result(_as_asked(code))
                    return
                if time.monotonic() - began > FORGIVEN_AFTER:
                    child.restarts = 0
                if code == FATAL or child.restarts >= len(BACKOFF):
                    self._give_up(child, code)
                    return
                pause = BACKOFF[child.restarts]
                child.restarts += 1
                self.log(f"{child.name} ended with {describe(code)}; starting it again")
                await asyncio.sleep(pause)
                if child.stopping:
                    child.exit.set_result(_as_asked(code))
                    return
            try:
                await self._spawn(child)
            except OSError as error:
                self.log(f"{child.name} cannot be started: {error}")
                self._give_up(child, code)
                return

    def _give_up(self, child: Child, code: int) -> None:
        child.exit.set_result(code)
        if code == FATAL:
            cause = f"{child.name}: {self._tail(child.name, 1)}\n(log: {child.log})"
        else:
            again = f"{describe(code)}, and again after each restart"
            cause = f"{child.name}: {again}\n(log: {child.log})\n{self._tail(child.name)}"
        self.fail(InstarError(cause))

    def signal(self, name: str, number: int = signal.SIGTERM) -> None:
        if child := self._children.get(name):
            child.end_by(number)
            child.send(number)

    def kill(self, name: str) -> None:
        if child := self._children.get(name):
            child.end_by(signal.SIGKILL)
            child.kill()

    async def restart(self, name: str, timeout: float = 10.0) -> None:
        child = self._children[name]
        child.stopping = False
        if child.exit.done():
            child.exit = asyncio.get_running_loop().create_future()
            await self._run(child)
            return
        before = child.process
        child.restarting = True
        child.send(signal.SIGTERM)
        deadline = time.monotonic() + timeout
        # The watcher starts it again; one that waits out its pause does so too.
        while child.process is before and not child.exit.done():
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
    return 0 if code in (STOPPED, -signal.SIGTERM, -DRAIN) else code
