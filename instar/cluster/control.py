"""Roles of a run that is up, stopped, drained and started again one by one while the others go on.

The run listens on a Unix socket in its folder that only its own user can open. A request is a line of JSON,
``{"do": "drain", "name": "engine-0", "timeout": 60}``; so is its answer, ``{"roles": [...]}`` or
``{"error": "..."}``, once what was asked for is done.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import tempfile
from collections.abc import AsyncGenerator, Generator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Literal

import msgspec

from instar.cluster.base import DRAIN_SIGNAL, Cluster, RoleHandle, describe_exit
from instar.errors import InstarError
from instar.store.base import Store
from instar.types import Endpoint

Action = Literal["restart", "drain", "stop", "start"]
DRAIN_SECONDS = 600.0
STOP_SECONDS = 10.0
DOING = {"restart": "draining", "drain": "draining", "stop": "stopping", "start": "starting"}
LONGEST_PATH = 100
"""Bytes that the path of a Unix socket may have, on every system."""


class ControlRequest(msgspec.Struct, forbid_unknown_fields=True):
    do: Literal["list", "restart", "drain", "stop", "start"]
    name: str = ""
    timeout: float = DRAIN_SECONDS
    """Seconds that a drained role has; then it is stopped."""


class RoleStatus(msgspec.Struct):
    role: str
    name: str
    state: str
    """``starting``, ``running``, ``draining``, ``stopping``, ``stopped`` (by a person), ``ended`` (by
    itself), ``failed``, or ``down`` where the run is not up."""
    pid: int = 0
    doing: str = ""
    address: str = ""
    log: str = ""
    restarts: int = 0


class ControlResponse(msgspec.Struct, omit_defaults=True):
    roles: list[RoleStatus] = []
    error: str | None = None


class RoleController:
    """What a person does to the roles of a cluster. One that was stopped so is *held*: its end is not the end
    of what it was doing."""

    def __init__(self, cluster: Cluster, store: Store, run_id: str) -> None:
        self.cluster = cluster
        self._store = store
        self._run_id = run_id
        self._held: dict[str, asyncio.Event] = {}
        """By name; set when the role is released."""
        self._doing: dict[str, str] = {}
        """What is being done to a role, by name."""
        self._ending = False

    async def wait_for_exit(self, name: str) -> int:
        """The role's exit code once it has ended, and not at a person's word: one that is held is waited for
        until it is started and ends again, or `release_all` was called. Raises the first cause when any role
        cannot go on."""
        while True:
            code = await self.cluster.wait(name)
            if (released := self._held.get(name)) is None:
                return code
            waiting = asyncio.ensure_future(released.wait())
            await asyncio.wait({waiting, self.cluster.failure}, return_when=asyncio.FIRST_COMPLETED)
            waiting.cancel()
            self.cluster.raise_failure()

    def release_all(self) -> None:
        """Hold nothing any more, and start nothing: the run is to end."""
        self._ending = True
        for name in list(self._held):
            self._release(name)

    def retire(self, name: str) -> None:
        """What the role was for has ended: it is held no more, and not started again."""
        if (role := self.cluster.roles.get(name)) is not None:
            role.is_retired = True
        self._release(name)

    async def handle(self, request: ControlRequest) -> list[RoleStatus]:
        """Raises InstarError where it cannot be done."""
        if request.do != "list":
            await self._act(request.do, self._role(request.name), request.timeout)
        return await self.list_roles()

    async def list_roles(self) -> list[RoleStatus]:
        told = {entry.name: entry for entry in await self._store.endpoints(self._run_id)}
        return [self._row(role, told.get(role.name)) for role in self.cluster.roles.values()]

    # --- what is done ------------------------------------------------------------------------------

    async def _act(self, action: Action, role: RoleHandle, timeout: float) -> None:
        name = role.name
        if name in self._doing:
            raise InstarError(f"{name} is {self._doing[name]} already")
        if action == "start" and not role.exit_code.done():
            raise InstarError(f"{name} is running")
        if action in ("drain", "stop") and role.exit_code.done():
            raise InstarError(f"{name} is not running")
        self._doing[name] = DOING[action]
        try:
            if action == "stop":
                await self._stop(role)
            elif action != "start" and not role.exit_code.done():
                await self._drain(role, timeout)
            # Its socket is still there, and whoever turned to it would wait.
            await self._store.remove_endpoint(self._run_id, role.role, name)
            if action in ("start", "restart"):
                if why := self._why_over(role):
                    raise InstarError(f"{name} is not started: {why}")
                self._doing[name] = "starting"
                await self.cluster.restart(name)
                self._release(name)
        finally:
            self._doing.pop(name, None)

    async def _drain(self, role: RoleHandle, timeout: float) -> None:
        self._hold(role)
        self.cluster.log(f"draining {role.name}")
        self.cluster.signal(role.name, DRAIN_SIGNAL)
        await asyncio.wait(
            {role.exit_code, self.cluster.failure}, timeout=timeout, return_when=asyncio.FIRST_COMPLETED
        )
        self.cluster.raise_failure()
        if not role.exit_code.done():
            self.cluster.log(f"{role.name} has not ended after {timeout:g} s of draining; stopping it")
            await self._stop(role)
        elif code := role.exit_code.result():
            self.cluster.log(
                f"{role.name} ended with {describe_exit(code)} while it was drained; see {role.log}"
            )

    async def _stop(self, role: RoleHandle) -> None:
        self._hold(role)
        self._doing[role.name] = "stopping"
        self.cluster.log(f"stopping {role.name}")
        await self.cluster.stop(role.name, STOP_SECONDS)

    def _hold(self, role: RoleHandle) -> None:
        """Unless it could not be started again: who waits for its end would wait for ever."""
        if not self._why_over(role):
            self._held.setdefault(role.name, asyncio.Event())

    def _why_over(self, role: RoleHandle) -> str:
        """Why the role is not to be started any more; empty: it may be."""
        if self._ending:
            return "the run is ending"
        replaced = self.cluster.roles.get(role.name) is not role
        return "what it was for has ended" if role.is_retired or replaced else ""

    def _release(self, name: str) -> None:
        if released := self._held.pop(name, None):
            released.set()

    # --- how they are ------------------------------------------------------------------------------

    def _role(self, name: str) -> RoleHandle:
        roles = self.cluster.roles
        if name not in roles:
            raise InstarError(f"this run has no role called {name!r}; it has {', '.join(roles)}")
        return roles[name]

    def _state(self, role: RoleHandle) -> str:
        if role.name in self._doing:
            return self._doing[role.name]
        if not role.exit_code.done():
            return "stopping" if role.is_stopping else "running"
        if role.name in self._held:
            return "stopped"
        return "failed" if role.exit_code.result() else "ended"

    def _row(self, role: RoleHandle, told: Endpoint | None) -> RoleStatus:
        up = not role.exit_code.done()
        return RoleStatus(
            role=role.role,
            name=role.name,
            state=self._state(role),
            pid=told.pid if told and up else 0,
            doing=told.doing if told and up else "",
            address=role.url,
            log=role.log,
            restarts=role.restarts,
        )


# --- over the socket --------------------------------------------------------------------------------


@asynccontextmanager
async def serve_control_socket(control: RoleController, path: Path) -> AsyncGenerator[None]:
    """Answer at this path meanwhile."""
    tasks: set[asyncio.Task[None]] = set()

    def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(_handle_connection(control, reader, writer))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    with _bound(path) as listener:
        server = await asyncio.start_unix_server(connected, sock=listener)
        try:
            yield
        finally:
            server.close()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


@contextmanager
def _bound(path: Path) -> Generator[socket.socket]:
    """A socket at this path; where that is too long for one, it is a link to a shorter one."""
    path.unlink(missing_ok=True)
    with ExitStack() as leaving:
        listener = leaving.enter_context(socket.socket(socket.AF_UNIX))
        place = path
        if len(os.fsencode(path)) > LONGEST_PATH:
            place = Path(leaving.enter_context(tempfile.TemporaryDirectory(prefix="instar-"))) / path.name
            path.symlink_to(place)
        leaving.callback(path.unlink, missing_ok=True)
        before = os.umask(0o177)  # its owner's alone from the moment it is there
        try:
            listener.bind(str(place))
        finally:
            os.umask(before)
        yield listener


async def _handle_connection(
    control: RoleController, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    """Answer line by line, until the other side has enough."""
    try:
        while line := await reader.readline():
            writer.write(msgspec.json.encode(await _answer(control, line)) + b"\n")
            await writer.drain()
    except (ConnectionError, ValueError):
        pass  # they left, or sent a line without end
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


async def _answer(control: RoleController, line: bytes) -> ControlResponse:
    try:
        return ControlResponse(await control.handle(msgspec.json.decode(line, type=ControlRequest)))
    except msgspec.DecodeError as error:
        return ControlResponse(error=f"not a request: {error}")
    except (InstarError, OSError) as error:
        return ControlResponse(error=str(error))


async def send_control_request(path: Path, request: ControlRequest) -> list[RoleStatus]:
    """What the run that listens there answers. Raises InstarError for what it refuses, and ConnectionError or
    FileNotFoundError where no run is up."""
    reader, writer = await asyncio.open_unix_connection(path.resolve())  # noqa: ASYNC240 — a local link
    try:
        writer.write(msgspec.json.encode(request) + b"\n")
        # Twice the time: what does not drain in it is stopped, and then perhaps started.
        async with asyncio.timeout(2 * request.timeout + 60):
            answer = msgspec.json.decode(
                await reader.readline() or b'{"error": "the run ended"}', type=ControlResponse
            )
    except TimeoutError:
        raise InstarError(f"the run did not answer in {2 * request.timeout + 60:g} s") from None
    finally:
        writer.close()
    if answer.error is not None:
        raise InstarError(answer.error)
    return answer.roles
