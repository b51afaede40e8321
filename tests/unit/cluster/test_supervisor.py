"""Tests for the supervisor with real processes. Each role runs a shell script instead of Python."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncGenerator, Callable
from pathlib import Path

import pytest

from instar.cluster.base import DRAIN_SIGNAL, EXIT_FATAL, EXIT_STOPPED
from instar.cluster.layout import RunFolder
from instar.cluster.supervisor import ChildProcess, Supervisor, listener_url, open_listener
from instar.config import RunConfig
from instar.errors import InstarError

Script = Callable[[str], str]


@pytest.fixture
def script(tmp_path: Path) -> Script:
    """Return a function that writes a shell script in which `$FOLDER` is the test's folder."""

    def make(body: str) -> str:
        path = tmp_path / f"interpreter-{len(list(tmp_path.glob('interpreter-*')))}"
        path.write_text(f"#!/bin/sh\nFOLDER={tmp_path}\n{body}\n")
        path.chmod(0o755)
        return str(path)

    return make


@pytest.fixture
async def supervisor(tmp_path: Path) -> AsyncGenerator[Supervisor]:
    folder = RunFolder(tmp_path / "run")
    folder.create(RunConfig())
    events: list[str] = []
    supervisor = Supervisor(folder, log=events.append)
    yield supervisor
    await supervisor.close()


async def wait_until(condition: Callable[[], bool], timeout_seconds: float = 10) -> None:
    async with asyncio.timeout(timeout_seconds):
        while not condition():  # noqa: ASYNC110 - waits for another process
            await asyncio.sleep(0.01)


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


async def test_role_that_dies_is_restarted(supervisor: Supervisor, script: Script, tmp_path: Path) -> None:
    program = script('echo x >> $FOLDER/starts; [ "$(wc -l < $FOLDER/starts)" -ge 3 ] && exit 0; exit 1')
    await supervisor.start("rollout", python=program)
    async with asyncio.timeout(10):
        assert await supervisor.wait("rollout") == 0
    assert (tmp_path / "starts").read_text() == "x\n" * 3


async def test_role_with_a_fatal_exit_is_reported_and_not_restarted(
    supervisor: Supervisor, script: Script, tmp_path: Path
) -> None:
    sleeper = script("exec sleep 60")
    await supervisor.start("engine", python=sleeper)
    program = script(f"echo x >> $FOLDER/starts; echo Traceback; echo 'the error message'; exit {EXIT_FATAL}")
    await supervisor.start("rollout", python=program)
    with pytest.raises(InstarError, match="rollout: the error message") as raised:
        async with asyncio.timeout(10):
            await supervisor.wait("engine")
    assert "Traceback" not in str(raised.value)
    assert "rollout.log" in str(raised.value)
    assert (tmp_path / "starts").read_text() == "x\n"


async def test_role_signalled_while_down_is_not_restarted(
    supervisor: Supervisor, script: Script, tmp_path: Path
) -> None:
    role = await supervisor.start("trainer", python=script("echo x >> $FOLDER/starts; exit 1"))
    await wait_until(lambda: role.restarts == 2)
    starts_before = (tmp_path / "starts").read_text()
    supervisor.signal("trainer")
    async with asyncio.timeout(30):
        assert await supervisor.wait("trainer") == 1
    assert (tmp_path / "starts").read_text() == starts_before


async def test_role_that_does_not_stop_is_killed_with_its_children(
    supervisor: Supervisor, script: Script, tmp_path: Path
) -> None:
    program = script("trap '' TERM; sleep 60 & echo $! > $FOLDER/child; while :; do sleep 0.05; done")
    role = await supervisor.start("gateway", python=program)
    child_pid_file = tmp_path / "child"
    await wait_until(lambda: child_pid_file.exists() and child_pid_file.read_text() != "")
    started_at = time.monotonic()
    await supervisor.stop("gateway", timeout=0.3)
    assert time.monotonic() - started_at < 3
    assert await role.exit_code == -signal.SIGKILL
    await wait_until(lambda: not is_alive(int(child_pid_file.read_text())))


async def test_restarted_role_gets_the_same_socket(
    supervisor: Supervisor, script: Script, tmp_path: Path
) -> None:
    program = script('echo "$@" >> $FOLDER/arguments; echo $INSTAR_ROLE_URL >> $FOLDER/urls; exit 1')
    role = await supervisor.start("gateway", python=program, listen=("127.0.0.1", 0))
    await wait_until(lambda: role.restarts == 2)
    assert role.listener is not None
    first, second = (tmp_path / "arguments").read_text().splitlines()[:2]
    assert first == second
    assert f"--fd={role.listener.fileno()}" in first
    assert (tmp_path / "urls").read_text().splitlines()[:2] == [role.url, role.url]
    _, writer = await asyncio.open_connection("127.0.0.1", int(role.url.rsplit(":", 1)[1]))
    writer.close()  # the connection was accepted although no process serves it yet


async def test_requested_restart_is_not_counted_as_a_failure(
    supervisor: Supervisor, script: Script, tmp_path: Path
) -> None:
    program = script("echo x >> $FOLDER/starts; trap 'echo x >> $FOLDER/ends; exit 3' TERM; sleep 60 & wait")
    role = await supervisor.start("gateway", python=program)
    starts, ends = tmp_path / "starts", tmp_path / "ends"
    for count in (1, 2):
        await wait_until(lambda: starts.exists() and starts.read_text() == count * "x\n")  # noqa: B023 - awaited
        await asyncio.sleep(0.1)  # until the script has set its trap
        await supervisor.restart("gateway")
        assert ends.read_text() == count * "x\n"
    assert (role.restarts, role.exit_code.done()) == (0, False)
    await wait_until(lambda: starts.read_text() == 3 * "x\n")
    await supervisor.stop("gateway")
    assert role.exit_code.done()
    await supervisor.restart("gateway")  # works even after the role has exited
    await wait_until(lambda: starts.read_text() == 4 * "x\n")
    assert not role.exit_code.done()


async def test_restart_kills_a_role_that_does_not_stop(
    supervisor: Supervisor, script: Script, tmp_path: Path
) -> None:
    program = script("trap '' TERM; echo $$ >> $FOLDER/starts; while :; do sleep 0.05; done")
    await supervisor.start("engine", python=program)
    starts = tmp_path / "starts"
    await wait_until(lambda: starts.exists() and starts.read_text() != "")
    first_pid = int(starts.read_text())
    await supervisor.restart("engine", timeout=0.3)
    await wait_until(lambda: len(starts.read_text().split()) == 2)
    assert not is_alive(first_pid)


async def test_role_that_cannot_be_started_can_be_stopped(supervisor: Supervisor, script: Script) -> None:
    with pytest.raises(InstarError, match=r"engine cannot be started: .*missing/python"):
        await supervisor.start("engine", python="/missing/python")
    role = await supervisor.start("trainer", python=script("exit 0"))
    async with asyncio.timeout(10):
        await role.exit_code
    role.argv = ["/missing/python"]
    with pytest.raises(InstarError, match="trainer cannot be started"):
        await supervisor.restart("trainer")
    async with asyncio.timeout(30):
        await supervisor.stop("engine")
        await supervisor.stop("trainer")


async def test_role_whose_start_is_cancelled_can_be_stopped(supervisor: Supervisor, script: Script) -> None:
    start_task = asyncio.create_task(supervisor.start("engine", python=script("exec sleep 60")))
    await asyncio.sleep(0)
    start_task.cancel()
    await asyncio.gather(start_task, return_exceptions=True)
    assert start_task.cancelled()
    async with asyncio.timeout(30):
        await supervisor.stop("engine")


@pytest.mark.parametrize(("role", "code"), [("engine", 0), ("gateway", 0), ("trainer", EXIT_STOPPED)])
async def test_unrequested_exit_restarts_the_role(
    supervisor: Supervisor, script: Script, tmp_path: Path, role: str, code: int
) -> None:
    program = script(f"trap 'exit {code}' TERM; echo x >> $FOLDER/starts; while :; do sleep 0.02; done")
    child = await supervisor.start(role, python=program)
    starts = tmp_path / "starts"
    await wait_until(starts.exists)
    assert child.process is not None
    os.kill(child.process.pid, signal.SIGTERM)
    await wait_until(lambda: starts.read_text() == "x\n" * 2)
    assert (child.restarts, child.exit_code.done()) == (1, False)
    await supervisor.stop(role)
    assert await child.exit_code == 0, "a requested exit is a success"


async def test_role_signalled_before_it_handles_signals_exits_with_0(
    supervisor: Supervisor, script: Script
) -> None:
    for signal_number in (signal.SIGTERM, DRAIN_SIGNAL):
        child = await supervisor.start("trainer", python=script("exec sleep 60"))
        supervisor.signal("trainer", signal_number)
        async with asyncio.timeout(10):
            assert await child.exit_code == 0


class InterruptedSupervisor(Supervisor):
    """A supervisor that calls ``on_spawn`` while it starts a role."""

    on_spawn: Callable[[], object] | None = None

    async def _spawn(self, child: ChildProcess) -> None:
        spawn_task = asyncio.create_task(super()._spawn(child))
        await asyncio.sleep(0)
        if self.on_spawn is not None:
            self.on_spawn()
        await spawn_task


@pytest.mark.parametrize("signal_number", [signal.SIGTERM, DRAIN_SIGNAL, signal.SIGKILL])
async def test_signal_during_a_restart_reaches_the_new_process(
    supervisor: Supervisor, script: Script, tmp_path: Path, signal_number: signal.Signals
) -> None:
    interrupted = InterruptedSupervisor(supervisor.folder, log=print)
    # The first process exits after the callback below is set; the second process keeps running.
    program = script(
        "[ -e $FOLDER/started ] && exec sleep 60; touch $FOLDER/started; "
        "while [ ! -e $FOLDER/exit ]; do sleep 0.02; done; exit 1"
    )
    child = await interrupted.start("rollout", python=program)
    interrupted.on_spawn = (
        (lambda: interrupted.kill("rollout"))
        if signal_number == signal.SIGKILL
        else (lambda: interrupted.signal("rollout", signal_number))
    )
    (tmp_path / "exit").touch()
    async with asyncio.timeout(60):
        await child.exit_code
    assert child.is_stopping
    await interrupted.close()


def test_open_listener_on_a_used_port_names_the_setting() -> None:
    listener = open_listener("127.0.0.1", 0)
    port = int(listener_url(listener).rsplit(":", 1)[1])
    with pytest.raises(InstarError, match=f"cannot listen on 127.0.0.1:{port}.*check gateway.host and"):
        open_listener("127.0.0.1", port)
    listener.close()


@pytest.mark.parametrize(
    ("host", "url"),
    [("0.0.0.0", "http://127.0.0.1:"), ("::", "http://[::1]:"), ("127.0.0.2", "http://127.0.0.2:")],
)
def test_listener_url_replaces_a_wildcard_address_with_the_loopback(host: str, url: str) -> None:
    server = open_listener(host, 0)
    assert listener_url(server).startswith(url)
    server.close()


async def test_supervisor_whose_watcher_fails_reports_the_error(tmp_path: Path, script: Script) -> None:
    def fail(message: str) -> None:
        raise ValueError("the log is closed")

    folder = RunFolder(tmp_path / "run")
    folder.create(RunConfig())
    supervisor = Supervisor(folder, log=fail)
    role = await supervisor.start("rollout", python=script("exit 1"))
    with pytest.raises(InstarError, match="ValueError: the log is closed"):
        await asyncio.wait_for(supervisor.wait("rollout"), 10)
    assert role.exit_code.result() == EXIT_FATAL
    await supervisor.close()
