"""A cluster on this machine, in which each role is a child process.

The supervisor opens the sockets that the roles listen on and passes them to the roles, so that an address
stays valid when a process is restarted.
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
    RoleHandle,
    RoleOptions,
    describe_exit,
)
from instar.cluster.layout import RunFolder
from instar.errors import InstarError

ROLE_URL_ENV = "INSTAR_ROLE_URL"
LEASE_ENV = "INSTAR_LEASE"
"""Environment variable with the lease under which a role writes to the store."""
HOST_ENV = "INSTAR_HOST"
"""Environment variable with the address of the role's machine. Only roles on a Ray cluster have it."""


def open_listener(host: str, port: int) -> socket.socket:
    """Return a listening socket that child processes inherit."""
    from instar.gateway.serve import bind  # imports uvicorn, which most commands do not need

    try:
        listener = bind(host, port)
    except OSError as error:
        raise InstarError(
            f"cannot listen on {host}:{port}: {error.strerror}; check gateway.host and gateway.port"
        ) from error
    listener.set_inheritable(True)
    return listener


def listener_url(listener: socket.socket, host: str = "") -> str:
    """Return the URL of the socket. ``host``, if not empty, replaces the address that the socket is bound to.
    An address such as 0.0.0.0 is replaced with the loopback address."""
    bound_host, port = listener.getsockname()[:2]
    host = host or bound_host
    if ipaddress.ip_address(host).is_unspecified:
        host = "::1" if ":" in host else "127.0.0.1"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def log_location(host: str, path: Path) -> str:
    return f"{host}:{path}" if host else str(path)


@dataclass(eq=False)
class ChildProcess(RoleHandle):
    argv: Sequence[str] = ()
    env: Mapping[str, str] = field(default_factory=dict[str, str], repr=False)
    fds: Sequence[int] = ()
    listener: socket.socket | None = None
    process: asyncio.subprocess.Process | None = None
    is_restarting: bool = False
    stop_signal: int = signal.SIGTERM

    def request_stop(self, signum: int) -> None:
        """Mark the role as stopping. A process that is being started gets the signal as soon as it runs."""
        self.is_stopping, self.is_restarting, self.stop_signal = True, False, signum

    def send_signal(self, signum: int) -> None:
        if self.process and self.process.returncode is None:
            self.process.send_signal(signum)

    def kill(self) -> None:
        if self.process and self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)


class Supervisor(Cluster):
    def __init__(self, folder: RunFolder, *, log: Callable[[str], None], host: str = "") -> None:
        """``host``, if not empty, is the host in the roles' URLs and the prefix of their log paths."""
        super().__init__(log=log)
        self.folder = folder
        self._host = host
        self._children: dict[str, ChildProcess] = {}
        # Nothing is ever written to this pipe. Only this process has the write end, so a role that reads
        # end-of-file knows that this process has exited.
        self._lifeline_read, self._lifeline_write = os.pipe()

    @property
    def roles(self) -> Mapping[str, ChildProcess]:
        return self._children

    async def start(self, role: str, *arguments: str, **options: Unpack[RoleOptions]) -> ChildProcess:
        name = options.get("name") or role
        log = log_location(self._host, self.folder.log(name))
        child = ChildProcess(role, name, log=log, fds=[self._lifeline_read])
        argv = [
            options.get("python") or sys.executable,
            "-m",
            "instar.cluster.role",
            role,
            str(self.folder.path),
            f"--name={name}",
            f"--lifeline={self._lifeline_read}",
            *arguments,
        ]
        listen_env: dict[str, str] = {}
        if address := options.get("listen"):
            previous = self._children.get(name)
            child.listener = previous.listener if previous and previous.listener else open_listener(*address)
            child.url = listen_env[ROLE_URL_ENV] = listener_url(child.listener, self._host)
            argv.append(f"--fd={child.listener.fileno()}")
            child.fds = [self._lifeline_read, child.listener.fileno()]
        inherited = {k: v for k, v in os.environ.items() if k not in options.get("exclude_env", ())}
        child.argv, child.env = argv, {**inherited, **options.get("env", {}), **listen_env}
        self._children[name] = child
        await self._start_child(child)
        return child

    async def _start_child(self, child: ChildProcess) -> None:
        try:
            await self._spawn(child)
        except BaseException as error:  # whatever the failure, nothing else would set the exit code
            child.exit_code.set_result(EXIT_FATAL)
            if isinstance(error, OSError):
                raise InstarError(f"{child.name} cannot be started: {error}") from error
            raise
        self._start_watcher(child, self._watch(child))

    async def _spawn(self, child: ChildProcess) -> None:
        with self.folder.log(child.name).open("ab") as log:
            child.process = await asyncio.create_subprocess_exec(
                *child.argv,
                env=dict(child.env),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=tuple(child.fds),
                start_new_session=True,  # Ctrl-C in the terminal must reach only the supervisor
            )
        child.is_restarting = False
        if child.is_stopping:
            child.send_signal(child.stop_signal)

    async def _watch(self, child: ChildProcess) -> None:
        while True:
            assert child.process is not None
            started_at = time.monotonic()
            code = await child.process.wait()
            if not child.is_restarting:
                if child.is_stopping or (code == 0 and child.role not in LONG_RUNNING_ROLES):
                    child.exit_code.set_result(_normalize_exit_code(code))
                    return
                if time.monotonic() - started_at > RESTART_RESET_SECONDS:
                    child.restarts = 0
                if code == EXIT_FATAL or child.restarts >= len(RESTART_BACKOFF):
                    await self._give_up(child, code)
                    return
                delay = RESTART_BACKOFF[child.restarts]
                child.restarts += 1
                self.log(f"{child.name} exited ({describe_exit(code)}); restarting it")
                await asyncio.sleep(delay)
                if child.is_stopping:
                    child.exit_code.set_result(_normalize_exit_code(code))
                    return
            try:
                await self._spawn(child)
            except OSError as error:
                self.log(f"{child.name} cannot be started: {error}")
                await self._give_up(child, code)
                return

    async def _give_up(self, child: ChildProcess, code: int) -> None:
        child.exit_code.set_result(code)
        if code == EXIT_FATAL:
            message = f"{child.name}: {await self.tail(child.name, 1)}\n(log: {child.log})"
        else:
            symptom = f"exited ({describe_exit(code)}), and restarting it did not help"
            message = f"{child.name}: {symptom}\n(log: {child.log})\n{await self.tail(child.name)}"
        self.fail(InstarError(message))

    def signal(self, name: str, signum: int = signal.SIGTERM) -> None:
        if child := self._children.get(name):
            child.request_stop(signum)
            child.send_signal(signum)

    def kill(self, name: str) -> None:
        if child := self._children.get(name):
            child.request_stop(signal.SIGKILL)
            child.kill()

    async def restart(self, name: str, timeout: float = 10.0) -> None:
        child = self._children[name]
        child.is_stopping = False
        if child.exit_code.done():
            child.exit_code = asyncio.get_running_loop().create_future()
            await self._start_child(child)
            return
        previous = child.process
        child.is_restarting = True
        child.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + timeout
        # The watcher starts the new process, even if it is currently waiting before a restart.
        while child.process is previous and not child.exit_code.done():
            if time.monotonic() > deadline:
                child.kill()
            await asyncio.sleep(0.02)

    async def tail(self, name: str, lines: int = 12) -> str:
        path = self.folder.log(name)
        return "\n".join(path.read_text(errors="replace").splitlines()[-lines:]) if path.is_file() else ""

    async def close(self) -> None:
        await super().close()
        for child in self._children.values():
            if child.listener is not None:
                child.listener.close()
        os.close(self._lifeline_write)
        os.close(self._lifeline_read)


def _normalize_exit_code(code: int) -> int:
    """Return 0 if a stop signal made the role exit or killed it, else ``code``. Roles handle stop signals
    while they work, so such a signal can only kill a role that is starting or exiting."""
    return 0 if code in (EXIT_STOPPED, -signal.SIGTERM, -DRAIN_SIGNAL) else code
