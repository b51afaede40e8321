"""List the roles of a run, and stop, drain, restart or start one role while the others keep running.

The run listens on a Unix socket in its folder that only its own user can open. A request is a line of JSON
such as ``{"do": "drain", "name": "engine-0", "timeout": 60}``. When the action is complete, the response is a
line with ``{"roles": [...]}`` or ``{"error": "..."}``.
"""

from __future__ import annotations

import asyncio
import os
import socket
import tempfile
from collections.abc import AsyncGenerator, Generator
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Literal

import msgspec

from instar.cluster.base import DRAIN_SIGNAL, Cluster, RoleHandle, describe_exit
from instar.cluster.tasks import cancel_tasks, log_error, run_until_first
from instar.errors import InstarError
from instar.store.base import Store
from instar.types import Endpoint
from instar.umask import use_umask

Action = Literal["restart", "drain", "stop", "start"]
DRAIN_TIMEOUT_SECONDS = 600.0
STOP_TIMEOUT_SECONDS = 10.0
STATES_DURING_ACTION = {"restart": "draining", "drain": "draining", "stop": "stopping", "start": "starting"}
MAX_SOCKET_PATH_BYTES = 100
"""Maximum length of a Unix socket's path that every operating system allows."""


class ControlRequest(msgspec.Struct, forbid_unknown_fields=True):
    do: Literal["list", "restart", "drain", "stop", "start"]
    name: str = ""
    timeout: float = DRAIN_TIMEOUT_SECONDS
    """Seconds that a role has to drain, for `drain` and `restart`, before it is stopped."""


class RoleStatus(msgspec.Struct):
    role: str
    name: str
    state: str
    """One of ``starting``, ``running``, ``draining``, ``stopping``, ``stopped`` (by the user), ``ended`` (on
    its own), ``failed`` and ``down`` (the run is not running)."""
    pid: int = 0
    doing: str = ""
    address: str = ""
    log: str = ""
    restarts: int = 0


class ControlResponse(msgspec.Struct, omit_defaults=True):
    roles: list[RoleStatus] = []
    error: str | None = None


class RoleController:
    """Carries out the user's requests. A role that the user stopped or drained is *held*: the run waits until
    the user starts it again, because its exit does not mean that its work is finished."""

    def __init__(self, cluster: Cluster, store: Store, run_id: str) -> None:
        self.cluster = cluster
        self._store = store
        self._run_id = run_id
        self._held: dict[str, asyncio.Event] = {}
        """The held roles by name, each with an event that is set when the role is released."""
        self._pending_states: dict[str, str] = {}
        """The state, such as ``draining``, of each role that a request is acting on."""
        self._is_ending = False

    async def wait_for_exit(self, name: str) -> int:
        """Return the role's exit code once it has exited and is not held: a held role must first be released,
        or be started again and exit. If the run fails, raise its error."""
        while True:
            code = await self.cluster.wait(name)
            if (released := self._held.get(name)) is None:
                return code
            await run_until_first(released.wait(), asyncio.shield(self.cluster.failure))

    def release_all(self) -> None:
        """Mark the run as ending: release all held roles, and reject later requests to start a role."""
        self._is_ending = True
        for name in list(self._held):
            self._release(name)

    def retire(self, name: str) -> None:
        """Mark the role as no longer needed: release it, and reject later requests to start it."""
        if (role := self.cluster.roles.get(name)) is not None:
            role.is_retired = True
        self._release(name)

    async def handle(self, request: ControlRequest) -> list[RoleStatus]:
        """Carry out a request and return the status of all roles. Raises InstarError if it fails."""
        if request.do != "list":
            roles = self.cluster.roles
            if request.name not in roles:
                raise InstarError(f"Unknown role {request.name!r}. Available: {', '.join(roles)}")
            await self._act(request.do, roles[request.name], request.timeout)
        endpoints = {entry.name: entry for entry in await self._store.endpoints(self._run_id)}
        return [self._status(role, endpoints.get(role.name)) for role in self.cluster.roles.values()]

    async def _act(self, action: Action, role: RoleHandle, timeout: float) -> None:
        name = role.name
        if name in self._pending_states:
            raise InstarError(f"{name} is already {self._pending_states[name]}")
        if action == "start" and not role.exit_code.done():
            raise InstarError(f"{name} is already running")
        if action in ("drain", "stop") and role.exit_code.done():
            raise InstarError(f"{name} is not running")
        self._pending_states[name] = STATES_DURING_ACTION[action]
        try:
            if action == "stop":
                await self._stop(role)
            elif action != "start" and not role.exit_code.done():
                await self._drain(role, timeout)
            # Remove the address: the role's socket stays open, so clients that find it would wait.
            await self._store.remove_endpoint(self._run_id, role.role, name)
            if action in ("start", "restart"):
                if reason := self._find_refusal_reason(role):
                    raise InstarError(f"{name} cannot be started because {reason}")
                self._pending_states[name] = "starting"
                await self.cluster.restart(name)
                self._release(name)
        finally:
            self._pending_states.pop(name, None)

    async def _drain(self, role: RoleHandle, timeout: float) -> None:
        self._hold(role)
        self.cluster.log(f"draining {role.name}")
        self.cluster.signal(role.name, DRAIN_SIGNAL)
        await asyncio.wait(
            {role.exit_code, self.cluster.failure}, timeout=timeout, return_when=asyncio.FIRST_COMPLETED
        )
        self.cluster.raise_failure()
        if not role.exit_code.done():
            self.cluster.log(f"{role.name} is still draining after {timeout:g} s; stopping it")
            await self._stop(role)
        elif code := role.exit_code.result():
            self.cluster.log(f"{role.name} exited ({describe_exit(code)}) while draining; see {role.log}")

    async def _stop(self, role: RoleHandle) -> None:
        self._hold(role)
        self._pending_states[role.name] = "stopping"
        self.cluster.log(f"stopping {role.name}")
        await self.cluster.stop(role.name, STOP_TIMEOUT_SECONDS)

    def _hold(self, role: RoleHandle) -> None:
        """Hold the role, unless it cannot be started again. The run would wait for such a role forever."""
        if not self._find_refusal_reason(role):
            self._held.setdefault(role.name, asyncio.Event())

    def _find_refusal_reason(self, role: RoleHandle) -> str:
        """Return why the role cannot be started again, or an empty string if it can."""
        if self._is_ending:
            return "the run is ending"
        is_replaced = self.cluster.roles.get(role.name) is not role
        return "it has finished its work" if role.is_retired or is_replaced else ""

    def _release(self, name: str) -> None:
        if released := self._held.pop(name, None):
            released.set()

    def _state(self, role: RoleHandle) -> str:
        if role.name in self._pending_states:
            return self._pending_states[role.name]
        if not role.exit_code.done():
            return "stopping" if role.is_stopping else "running"
        if role.name in self._held:
            return "stopped"
        return "failed" if role.exit_code.result() else "ended"

    def _status(self, role: RoleHandle, endpoint: Endpoint | None) -> RoleStatus:
        announced = None if role.exit_code.done() else endpoint
        return RoleStatus(
            role=role.role,
            name=role.name,
            state=self._state(role),
            pid=announced.pid if announced else 0,
            doing=announced.doing if announced else "",
            address=role.url,
            log=role.log,
            restarts=role.restarts,
        )


@asynccontextmanager
async def serve_control_socket(control: RoleController, path: Path) -> AsyncGenerator[None]:
    tasks: set[asyncio.Task[None]] = set()

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(_handle_connection(control, reader, writer))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        task.add_done_callback(log_error)

    with _bind_socket(path) as listener:
        server = await asyncio.start_unix_server(accept, sock=listener)
        try:
            yield
        finally:
            server.close()
            await cancel_tasks(tasks)


@contextmanager
def _bind_socket(path: Path) -> Generator[socket.socket]:
    """Yield a socket that is bound to ``path``. If ``path`` is too long, it becomes a link to the socket."""
    path.unlink(missing_ok=True)
    with ExitStack() as resources:
        listener = resources.enter_context(socket.socket(socket.AF_UNIX))
        socket_path = path
        if len(os.fsencode(path)) > MAX_SOCKET_PATH_BYTES:
            folder = resources.enter_context(tempfile.TemporaryDirectory(prefix="instar-"))
            socket_path = Path(folder) / path.name
            path.symlink_to(socket_path)
        resources.callback(path.unlink, missing_ok=True)
        with use_umask(0o177):  # other users must not have access, not even for a moment
            listener.bind(str(socket_path))
        yield listener


async def _handle_connection(
    control: RoleController, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    try:
        while line := await reader.readline():
            writer.write(msgspec.json.encode(await _handle_line(control, line)) + b"\n")
            await writer.drain()
    except (ConnectionError, ValueError):
        pass  # the client disconnected, or sent a line that is too long
    finally:
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()


async def _handle_line(control: RoleController, line: bytes) -> ControlResponse:
    try:
        return ControlResponse(await control.handle(msgspec.json.decode(line, type=ControlRequest)))
    except msgspec.DecodeError as error:
        return ControlResponse(error=f"invalid request: {error}")
    except (InstarError, OSError) as error:
        return ControlResponse(error=str(error))


async def send_control_request(path: Path, request: ControlRequest) -> list[RoleStatus]:
    """Send a request to the run that listens at ``path``, and return the roles in its response. Raises
    InstarError if the run rejects the request or does not respond in time, and ConnectionError or
    FileNotFoundError if nothing listens at ``path``."""
    # The path of a missing link could be too long for a socket, which would be a different error.
    socket_path = path.resolve(strict=True)  # noqa: ASYNC240 — a local link
    reader, writer = await asyncio.open_unix_connection(socket_path)
    try:
        writer.write(msgspec.json.encode(request) + b"\n")
        # Twice the timeout, because a role that does not drain in time is stopped and may be started again.
        async with asyncio.timeout(2 * request.timeout + 60):
            line = await reader.readline() or b'{"error": "the run has ended"}'
            response = msgspec.json.decode(line, type=ControlResponse)
    except TimeoutError:
        raise InstarError(f"the run did not respond within {2 * request.timeout + 60:g} s") from None
    finally:
        writer.close()
    if response.error is not None:
        raise InstarError(response.error)
    return response.roles
