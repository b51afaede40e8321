"""Roles ended and started one by one: each is a small shell script, named as its interpreter."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import stat
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest

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
from tests.unit.cluster.test_supervisor import Script, script, until

__all__ = ["script"]

POLITE = "trap 'echo drained >> $FOLDER/said; exit 0' USR1; trap 'echo stopped >> $FOLDER/said; exit 0' TERM"
WAIT = "echo up >> $FOLDER/said; while :; do sleep 0.02; done"


class House:
    def __init__(
        self, control: RoleController, cluster: Supervisor, folder: RunFolder, log: list[str]
    ) -> None:
        self.control = control
        self.cluster = cluster
        self.folder = folder
        self.log = log

    async def ask(self, do: str, name: str = "", timeout: float = 20.0) -> list[RoleStatus]:
        return await send_control_request(self.folder.control_socket, ControlRequest(do, name, timeout))  # type: ignore[arg-type]

    async def state(self, name: str) -> str:
        return next(row.state for row in await self.ask("list") if row.name == name)

    def said(self) -> list[str]:
        path = self.folder.path.parent / "said"
        return path.read_text().split() if path.exists() else []


@pytest.fixture
async def house(tmp_path: Path) -> AsyncGenerator[House]:
    folder = RunFolder(tmp_path / "run")
    folder.create(RunConfig(dir=folder.path))
    store = SqliteStore(folder.path / "store.db")
    await store.put_run(Run("run", "run", {}))
    log: list[str] = []
    cluster = Supervisor(folder, log=log.append)
    control = RoleController(cluster, store, "run")
    async with serve_control_socket(control, folder.control_socket):
        yield House(control, cluster, folder, log)
    await cluster.close()
    await store.close()


async def start(house: House, script: Script, name: str = "rollout", body: str = WAIT) -> None:
    await house.cluster.start(name, python=script(f"{POLITE}\n{body}"))
    await until(lambda: "up" in house.said())


async def test_a_role_is_drained_and_started_again_while_its_end_is_waited_for(
    house: House, script: Script
) -> None:
    await start(house, script)
    waiting = asyncio.create_task(house.control.wait_for_exit("rollout"))
    (row,) = await house.ask("drain", "rollout")
    assert (row.name, row.state, row.pid) == ("rollout", "stopped", 0)
    await asyncio.sleep(0.1)
    assert not waiting.done(), "its end is not the end of what it does"
    (row,) = await house.ask("start", "rollout")
    assert row.state == "running"
    await until(lambda: house.said().count("up") == 2)
    assert house.said() == ["up", "drained", "up"]
    await house.cluster.stop("rollout")
    assert await asyncio.wait_for(waiting, 5) == 0, "nobody asked for this end"


async def test_restart_drains_first(house: House, script: Script) -> None:
    await start(house, script)
    waiting = asyncio.create_task(house.control.wait_for_exit("rollout"))
    (row,) = await house.ask("restart", "rollout")
    assert row.state == "running"
    await until(lambda: house.said() == ["up", "drained", "up"])
    assert not waiting.done()
    waiting.cancel()


async def test_what_does_not_drain_in_time_is_stopped(house: House, script: Script) -> None:
    await house.cluster.start(
        "rollout", python=script(f"{POLITE}; trap '' USR1; echo up >> $FOLDER/said; {WAIT}")
    )
    await until(lambda: "up" in house.said())
    asking = asyncio.create_task(house.ask("drain", "rollout", timeout=1.0))
    await until(lambda: "draining rollout" in house.log)
    assert await house.state("rollout") == "draining", "others may look meanwhile"
    with pytest.raises(InstarError, match="rollout is already draining"):
        await house.ask("restart", "rollout")
    (row,) = await asking
    assert row.state == "stopped"
    assert house.said()[-1] == "stopped"
    assert any("has not ended after 1 s of draining" in line for line in house.log)


async def test_a_role_is_stopped(house: House, script: Script) -> None:
    await start(house, script)
    (row,) = await house.ask("stop", "rollout")
    assert (row.state, house.said()) == ("stopped", ["up", "stopped"])


async def test_a_run_that_ends_waits_for_nobody(house: House, script: Script) -> None:
    await start(house, script)
    waiting = asyncio.create_task(house.control.wait_for_exit("rollout"))
    await house.ask("stop", "rollout")
    house.control.release_all()
    assert await asyncio.wait_for(waiting, 5) == 0
    with pytest.raises(InstarError, match="the run is ending"):
        await house.ask("start", "rollout")


async def test_a_run_that_ends_holds_nothing(house: House, script: Script) -> None:
    body = f"trap '' USR1; trap 'sleep 1; exit 0' TERM; {WAIT}"
    await start(house, script, name="trainer", body=body)
    waiting = asyncio.create_task(house.control.wait_for_exit("trainer"))
    asking = asyncio.create_task(house.ask("drain", "trainer", timeout=0.5))
    await until(lambda: "draining trainer" in house.log)
    house.control.release_all()
    house.cluster.signal("trainer")
    assert await asyncio.wait_for(waiting, 10) == 0
    await asking


async def test_what_a_role_was_for_ends_while_it_is_drained(house: House, script: Script) -> None:
    await start(house, script, body=f"trap '' USR1; {WAIT}")
    asking = asyncio.create_task(house.ask("restart", "rollout"))
    await until(lambda: "draining rollout" in house.log)
    house.control.retire("rollout")
    await house.cluster.stop("rollout")
    await house.cluster.start("rollout", python=script("exit 0"))
    with pytest.raises(InstarError, match="rollout is not started: its work is done"):
        await asking
    assert await asyncio.wait_for(house.control.wait_for_exit("rollout"), 10) == 0, "the next one is not held"
    assert house.said().count("up") == 1


async def test_a_role_that_was_held_when_its_work_ended_holds_up_nobody(house: House, script: Script) -> None:
    await start(house, script)
    await house.ask("stop", "rollout")
    house.control.retire("rollout")
    with pytest.raises(InstarError, match="its work is done"):
        await house.ask("start", "rollout")
    await house.cluster.start("rollout", python=script("exit 0"))
    assert await asyncio.wait_for(house.control.wait_for_exit("rollout"), 10) == 0


async def test_of_two_starts_at_once_one_is_refused(house: House, script: Script) -> None:
    await start(house, script, body=f"trap 'exit 0' HUP; {WAIT}")
    await house.ask("stop", "rollout")
    both = await asyncio.gather(*(house.ask("start", "rollout") for _ in range(2)), return_exceptions=True)
    assert [str(refused) for refused in both if isinstance(refused, InstarError)] == [
        "rollout is already starting"
    ]
    await until(lambda: house.said().count("up") == 2)
    child = house.cluster.roles["rollout"]
    assert child.process is not None
    os.kill(child.process.pid, signal.SIGHUP)
    assert await asyncio.wait_for(house.control.wait_for_exit("rollout"), 10) == 0, "what ended well is done"


async def test_a_role_that_cannot_be_started_is_said_to_whom_asked(house: House, script: Script) -> None:
    await start(house, script)
    house.cluster.roles["rollout"].argv = ["/no/such/python"]
    with pytest.raises(InstarError, match="rollout cannot be started"):
        await house.ask("restart", "rollout")
    assert await house.state("rollout") == "stopped"


async def test_another_role_that_cannot_go_on_is_told_to_who_waits(house: House, script: Script) -> None:
    await start(house, script)
    waiting = asyncio.create_task(house.control.wait_for_exit("rollout"))
    await house.ask("stop", "rollout")
    await house.cluster.start("engine", python=script("echo the cause; exit 70"))
    with pytest.raises(InstarError, match="engine: the cause"):
        await asyncio.wait_for(waiting, 5)


@pytest.mark.parametrize(
    ("do", "name", "said"),
    [
        ("drain", "nobody", "no role 'nobody'; its roles are rollout"),
        ("start", "rollout", "rollout is running"),
    ],
)
async def test_what_cannot_be_done_is_said(
    house: House, script: Script, do: str, name: str, said: str
) -> None:
    await start(house, script)
    with pytest.raises(InstarError, match=said):
        await house.ask(do, name)


async def test_a_role_that_is_down_is_not_drained(house: House, script: Script) -> None:
    await start(house, script)
    await house.ask("stop", "rollout")
    with pytest.raises(InstarError, match="rollout is not running"):
        await house.ask("drain", "rollout")


async def test_only_its_owner_opens_the_socket_and_nonsense_is_answered(house: House, script: Script) -> None:
    mode = stat.S_IMODE(house.folder.control_socket.stat().st_mode)
    assert mode == 0o600
    reader, writer = await asyncio.open_unix_connection(house.folder.control_socket.resolve())
    writer.write(b'{"do": "explode"}\nnonsense\n{"do": "list"}\n')
    answers = [json.loads(await asyncio.wait_for(reader.readline(), 5)) for _ in range(3)]
    assert [sorted(answer) for answer in answers] == [["error"], ["error"], []]
    writer.close()


async def test_rows_say_what_the_roles_say_of_themselves(house: House, script: Script) -> None:
    await start(house, script)
    await house.control._store.put_endpoint(Endpoint("run", "rollout", "rollout", "", 123, "asking", "x"))
    (row,) = await house.ask("list")
    assert (row.role, row.state, row.pid, row.doing) == ("rollout", "running", 123, "asking")
    assert row.log.endswith("rollout.log")


async def test_a_folder_whose_path_is_too_long_for_a_socket(tmp_path: Path, house: House) -> None:
    deep = tmp_path / ("d" * 60) / ("e" * 60)
    deep.mkdir(parents=True)
    path = deep / "control.sock"
    async with serve_control_socket(house.control, path):
        assert path.is_symlink()
        assert await send_control_request(path, ControlRequest("list")) == []
        private = path.resolve().parent
    assert not path.is_symlink()
    assert not private.exists()


async def test_nobody_answers_once_the_run_is_over(house: House, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        await send_control_request(tmp_path / "elsewhere.sock", ControlRequest("list"))
