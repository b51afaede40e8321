"""Tests for controlling individual roles. Each role runs a shell script instead of Python."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import stat
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest

from instar.cluster.base import EXIT_FATAL
from instar.cluster.control import (
    ControlRequest,
    RoleController,
    RoleStatus,
    send_control_request,
    serve_control_socket,
)
from instar.cluster.layout import RunFolder
from instar.cluster.supervisor import Supervisor
from instar.config import RunConfig
from instar.errors import InstarError
from instar.store.base import Run
from instar.store.sqlite import SqliteStore
from instar.types import Endpoint
from tests.unit.cluster.test_supervisor import Script, script, wait_until

__all__ = ["script"]

TRAPS = (
    "trap 'echo drained >> $FOLDER/output; exit 0' USR1; trap 'echo stopped >> $FOLDER/output; exit 0' TERM"
)
REPORT_AND_WAIT = "echo up >> $FOLDER/output; while :; do sleep 0.02; done"


class RunHarness:
    def __init__(
        self, control: RoleController, cluster: Supervisor, folder: RunFolder, log: list[str]
    ) -> None:
        self.control = control
        self.cluster = cluster
        self.folder = folder
        self.log = log

    async def request(self, do: str, name: str = "", timeout: float = 20.0) -> list[RoleStatus]:
        return await send_control_request(self.folder.control_socket, ControlRequest(do, name, timeout))  # type: ignore[arg-type]

    async def get_state(self, name: str) -> str:
        return next(row.state for row in await self.request("list") if row.name == name)

    def read_output(self) -> list[str]:
        """Return the words that the scripts have written."""
        path = self.folder.path.parent / "output"
        return path.read_text().split() if path.exists() else []


@pytest.fixture
async def harness(tmp_path: Path) -> AsyncGenerator[RunHarness]:
    folder = RunFolder(tmp_path / "run")
    folder.create(RunConfig(dir=folder.path))
    store = SqliteStore(folder.path / "store.db")
    await store.put_run(Run("run", "run", {}))
    log: list[str] = []
    cluster = Supervisor(folder, log=log.append)
    control = RoleController(cluster, store, "run")
    async with serve_control_socket(control, folder.control_socket):
        yield RunHarness(control, cluster, folder, log)
    await cluster.close()
    await store.close()


async def start_role(
    harness: RunHarness, script: Script, name: str = "rollout", body: str = REPORT_AND_WAIT
) -> None:
    await harness.cluster.start(name, python=script(f"{TRAPS}\n{body}"))
    await wait_until(lambda: "up" in harness.read_output())


async def test_drained_role_can_be_started_while_its_exit_is_awaited(
    harness: RunHarness, script: Script
) -> None:
    await start_role(harness, script)
    wait_task = asyncio.create_task(harness.control.wait_for_exit("rollout"))
    (row,) = await harness.request("drain", "rollout")
    assert (row.name, row.state, row.pid) == ("rollout", "stopped", 0)
    await asyncio.sleep(0.1)
    assert not wait_task.done(), "the exit of a drained role does not end the wait"
    (row,) = await harness.request("start", "rollout")
    assert row.state == "running"
    await wait_until(lambda: harness.read_output().count("up") == 2)
    assert harness.read_output() == ["up", "drained", "up"]
    await harness.cluster.stop("rollout")
    assert await asyncio.wait_for(wait_task, 5) == 0, (
        "the wait ends, because no control request caused this exit"
    )


async def test_restart_drains_the_role_first(harness: RunHarness, script: Script) -> None:
    await start_role(harness, script)
    wait_task = asyncio.create_task(harness.control.wait_for_exit("rollout"))
    (row,) = await harness.request("restart", "rollout")
    assert row.state == "running"
    await wait_until(lambda: harness.read_output() == ["up", "drained", "up"])
    assert not wait_task.done()
    wait_task.cancel()


async def test_role_that_does_not_drain_in_time_is_stopped(harness: RunHarness, script: Script) -> None:
    await harness.cluster.start(
        "rollout", python=script(f"{TRAPS}; trap '' USR1; echo up >> $FOLDER/output; {REPORT_AND_WAIT}")
    )
    await wait_until(lambda: "up" in harness.read_output())
    request = asyncio.create_task(harness.request("drain", "rollout", timeout=1.0))
    await wait_until(lambda: "draining rollout" in harness.log)
    assert await harness.get_state("rollout") == "draining", "other requests are handled during the drain"
    with pytest.raises(InstarError, match="rollout is already draining"):
        await harness.request("restart", "rollout")
    (row,) = await request
    assert row.state == "stopped"
    assert harness.read_output()[-1] == "stopped"
    assert any("is still draining after 1 s" in line for line in harness.log)


async def test_stop_request_stops_the_role(harness: RunHarness, script: Script) -> None:
    await start_role(harness, script)
    (row,) = await harness.request("stop", "rollout")
    assert (row.state, harness.read_output()) == ("stopped", ["up", "stopped"])


async def test_ending_run_releases_waiters_and_rejects_starts(harness: RunHarness, script: Script) -> None:
    await start_role(harness, script)
    wait_task = asyncio.create_task(harness.control.wait_for_exit("rollout"))
    await harness.request("stop", "rollout")
    harness.control.release_all()
    assert await asyncio.wait_for(wait_task, 5) == 0
    with pytest.raises(InstarError, match="the run is ending"):
        await harness.request("start", "rollout")


async def test_ending_run_releases_a_role_that_is_draining(harness: RunHarness, script: Script) -> None:
    body = f"trap '' USR1; trap 'sleep 1; exit 0' TERM; {REPORT_AND_WAIT}"
    await start_role(harness, script, name="trainer", body=body)
    wait_task = asyncio.create_task(harness.control.wait_for_exit("trainer"))
    request = asyncio.create_task(harness.request("drain", "trainer", timeout=0.5))
    await wait_until(lambda: "draining trainer" in harness.log)
    harness.control.release_all()
    harness.cluster.signal("trainer")
    assert await asyncio.wait_for(wait_task, 60) == 0
    await request


async def test_role_retired_while_draining_is_not_started_again(harness: RunHarness, script: Script) -> None:
    await start_role(harness, script, body=f"trap '' USR1; {REPORT_AND_WAIT}")
    request = asyncio.create_task(harness.request("restart", "rollout"))
    await wait_until(lambda: "draining rollout" in harness.log)
    harness.control.retire("rollout")
    await harness.cluster.stop("rollout")
    await harness.cluster.start("rollout", python=script("exit 0"))
    with pytest.raises(InstarError, match="rollout cannot be started because it has finished its work"):
        await request
    assert await asyncio.wait_for(harness.control.wait_for_exit("rollout"), 60) == 0, (
        "the wait for the next process ends"
    )
    assert harness.read_output().count("up") == 1


async def test_role_retired_while_stopped_does_not_block_its_successor(
    harness: RunHarness, script: Script
) -> None:
    await start_role(harness, script)
    await harness.request("stop", "rollout")
    harness.control.retire("rollout")
    with pytest.raises(InstarError, match="it has finished its work"):
        await harness.request("start", "rollout")
    await harness.cluster.start("rollout", python=script("exit 0"))
    assert await asyncio.wait_for(harness.control.wait_for_exit("rollout"), 60) == 0


async def test_concurrent_starts_of_a_role_reject_one(harness: RunHarness, script: Script) -> None:
    await start_role(harness, script, body=f"trap 'exit 0' USR2; {REPORT_AND_WAIT}")
    await harness.request("stop", "rollout")
    results = await asyncio.gather(
        *(harness.request("start", "rollout") for _ in range(2)), return_exceptions=True
    )
    assert [str(result) for result in results if isinstance(result, InstarError)] == [
        "rollout is already starting"
    ]
    await wait_until(lambda: harness.read_output().count("up") == 2)
    child = harness.cluster.roles["rollout"]
    assert child.process is not None
    os.kill(child.process.pid, signal.SIGUSR2)
    assert await asyncio.wait_for(harness.control.wait_for_exit("rollout"), 60) == 0, (
        "an exit with code 0 ends the wait"
    )


async def test_restart_of_a_role_that_cannot_start_returns_the_error(
    harness: RunHarness, script: Script
) -> None:
    await start_role(harness, script)
    harness.cluster.roles["rollout"].argv = ["/missing/python"]
    with pytest.raises(InstarError, match="rollout cannot be started"):
        await harness.request("restart", "rollout")
    assert await harness.get_state("rollout") == "stopped"


async def test_wait_for_exit_raises_the_fatal_error_of_another_role(
    harness: RunHarness, script: Script
) -> None:
    await start_role(harness, script)
    wait_task = asyncio.create_task(harness.control.wait_for_exit("rollout"))
    await harness.request("stop", "rollout")
    await harness.cluster.start("engine", python=script(f"echo the cause; exit {EXIT_FATAL}"))
    with pytest.raises(InstarError, match="engine: the cause"):
        await asyncio.wait_for(wait_task, 5)


@pytest.mark.parametrize(
    ("do", "name", "message"),
    [
        ("drain", "missing", "Unknown role 'missing'. Available: rollout"),
        ("start", "rollout", "rollout is already running"),
    ],
)
async def test_invalid_request_returns_the_reason(
    harness: RunHarness, script: Script, do: str, name: str, message: str
) -> None:
    await start_role(harness, script)
    with pytest.raises(InstarError, match=message):
        await harness.request(do, name)


async def test_drain_of_a_stopped_role_is_rejected(harness: RunHarness, script: Script) -> None:
    await start_role(harness, script)
    await harness.request("stop", "rollout")
    with pytest.raises(InstarError, match="rollout is not running"):
        await harness.request("drain", "rollout")


async def test_control_socket_is_private_and_reports_invalid_requests(
    harness: RunHarness, script: Script
) -> None:
    mode = stat.S_IMODE(harness.folder.control_socket.stat().st_mode)
    assert mode == 0o600
    reader, writer = await asyncio.open_unix_connection(harness.folder.control_socket.resolve())
    writer.write(b'{"do": "unknown"}\ninvalid\n{"do": "list"}\n')
    responses = [json.loads(await asyncio.wait_for(reader.readline(), 5)) for _ in range(3)]
    assert [sorted(response) for response in responses] == [["error"], ["error"], []]
    writer.close()


async def test_list_request_returns_registered_endpoints(harness: RunHarness, script: Script) -> None:
    await start_role(harness, script)
    await harness.control._store.put_endpoint(Endpoint("run", "rollout", "rollout", "", 123, "sampling", "x"))
    (row,) = await harness.request("list")
    assert (row.role, row.state, row.pid, row.doing) == ("rollout", "running", 123, "sampling")
    assert row.log.endswith("rollout.log")


async def test_control_socket_with_a_long_path_is_a_symlink(tmp_path: Path, harness: RunHarness) -> None:
    deep = tmp_path / ("d" * 60) / ("e" * 60)
    deep.mkdir(parents=True)
    path = deep / "control.sock"
    async with serve_control_socket(harness.control, path):
        assert path.is_symlink()
        assert await send_control_request(path, ControlRequest("list")) == []
        socket_folder = path.resolve().parent
    assert not path.is_symlink()
    assert not socket_folder.exists()


async def test_control_request_without_a_socket_raises_file_not_found(
    harness: RunHarness, tmp_path: Path
) -> None:
    too_long_for_a_socket = tmp_path / ("long" * 30) / "missing.sock"
    for path in (tmp_path / "missing.sock", too_long_for_a_socket):
        with pytest.raises(FileNotFoundError):
            await send_control_request(path, ControlRequest("list"))
