"""Tests that use the background service like its owner: start it, call it, crash it and start it again."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import openai
import pytest
import yaml

from instar.cli.service.home import Home
from instar.cli.service.lock import ServiceLock, ServiceState
from tests.tiny import make_tiny_model
from tests.torture.run_process import ROOT, is_alive, list_descendants

pytestmark = pytest.mark.timeout(300)
COMMAND = [sys.executable, "-m", "instar.cli.main"]
TIMEOUT_SECONDS = 120.0


def wait_until(is_done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while not is_done():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@dataclass
class ServiceUser:
    """Runs commands with a home of its own, and calls the service as its agent does."""

    folder: Path
    messages: list[Any] = field(default_factory=list[Any])

    @property
    def home(self) -> Home:
        return Home.locate(self.folder, {})

    @property
    def env(self) -> dict[str, str]:
        return {
            **os.environ,
            "INSTAR_HOME": str(self.folder),
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
        }

    def configure(self, model: Path, **settings: Any) -> None:
        config = {
            "model": {"name": str(model), "dtype": "fp32", "device": "cpu"},
            "engine": {"type": "scripted", "replies": ["one", "two", "three"]},
            **settings,
        }
        self.folder.mkdir(exist_ok=True)
        self.home.config_file.write_text(yaml.safe_dump(config))

    def popen(self, *arguments: object) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [*COMMAND, *map(str, arguments)],
            env=self.env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *arguments: object, code: int = 0) -> str:
        """Return the standard output of a command, or its errors if it is expected to fail."""
        process = self.popen(*arguments)
        try:
            out, err = process.communicate(timeout=TIMEOUT_SECONDS)
        finally:
            process.kill()
        assert process.returncode == code, out + err
        assert "Traceback" not in out + err
        return out if code == 0 else err

    def start(self) -> Any:
        return json.loads(self.run("start", "--json"))

    def read_status(self) -> Any:
        return json.loads(self.run("status", "--json"))

    def read_running(self) -> ServiceState | None:
        return ServiceLock(self.home).read_running()

    def call(self, connection: Any, text: str) -> tuple[str, str]:
        """Continue the conversation, and return the reply and the id of the session."""
        self.messages.append({"role": "user", "content": text})
        with openai.OpenAI(base_url=connection["base_url"], api_key=connection["api_key"]) as client:
            response = client.chat.completions.with_raw_response.create(model="any", messages=self.messages)
            reply = response.parse().choices[0].message.content
        assert reply is not None
        self.messages.append({"role": "assistant", "content": reply})
        return reply, response.headers["x-instar-session"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), context=2048)


@pytest.fixture
def user(tmp_path: Path, model: Path) -> Iterator[ServiceUser]:
    user = ServiceUser(tmp_path / "home")
    user.configure(model)
    yield user
    if (state := user.read_running()) is not None:
        pids = [state.pid, *list_descendants(state.pid)]
        ServiceLock(user.home).kill(state.pid)
        wait_until(lambda: not any(map(is_alive, pids)))


def test_key_port_and_session_survive_restart_and_sigkill(user: ServiceUser) -> None:
    connection = user.start()
    assert connection["started"] is True
    reply, session = user.call(connection, "count")
    assert reply == "one"

    restarted = json.loads(user.run("restart", "--json"))
    assert restarted["pid"] != connection["pid"]
    assert {**restarted, "pid": 0} == {**connection, "pid": 0}
    assert user.call(connection, "go on") == ("two", session)

    roles = list_descendants(restarted["pid"])
    os.kill(restarted["pid"], signal.SIGKILL)
    wait_until(lambda: user.read_running() is None)
    assert user.read_status()["running"] is False
    crashed = user.start()
    assert crashed["started"] is True
    assert not any(map(is_alive, roles))
    assert user.call(connection, "go on") == ("three", session)
    links = [
        call["link"]
        for call in json.loads(user.run("sessions", "show", connection["run_dir"], session, "--json"))[
            "calls"
        ]
    ]
    assert links == ["root", "extends", "extends"]


def test_status_describes_the_service_without_its_keys(user: ServiceUser) -> None:
    never_started = user.read_status()
    assert (never_started["running"], never_started["run_dir"]) == (False, None)
    connection = user.start()
    user.call(connection, "count")
    output = user.run("status", "--json") + user.run("status")
    assert "sk-instar" not in output
    status = json.loads(output.splitlines()[0])
    assert (status["running"], status["healthy"], status["pid"]) == (True, True, connection["pid"])
    assert f"{status['url']}/v1" == connection["base_url"]
    assert (status["sessions"], status["rewards"], status["external"]) == ({"open": 1}, {}, [])
    assert status["policy_version"] == 0
    assert [name.rpartition("-")[0] for name in status["agents"]["default"]] == ["service-agent-default"]
    assert {role["name"]: role["state"] for role in status["roles"]} == {
        "engine": "running",
        "gateway": "running",
    }
    roles = json.loads(user.run("status", status["run_dir"], "--json"))["roles"]
    for role in (*roles, *status["roles"]):
        role.pop("doing", None)  # the activity can change between the two commands
    assert roles == status["roles"]
    assert "sk-instar" not in user.run("logs", "-n", 1000)
    assert "nothing leaves this machine" in output

    again = user.run("start")
    assert "already running" in again
    assert connection["api_key"] in again
    assert "with other settings" in user.run("start", "--set", "seed=3", code=1)
    assert "Stopped the service" in user.run("stop")
    assert user.run("stop") == "The service is not running.\n"
    stopped = user.read_status()
    assert (stopped["running"], stopped["url"], stopped["sessions"]) == (False, None, {"open": 1})


def test_only_one_of_two_concurrent_starts_starts_the_service(user: ServiceUser) -> None:
    starts = [user.popen("start", "--json") for _ in range(2)]
    results: list[Any] = []
    for process in starts:
        out, err = process.communicate(timeout=TIMEOUT_SECONDS)
        assert process.returncode == 0, err
        results.append(json.loads(out))
    assert sorted(result["started"] for result in results) == [False, True]
    assert results[0]["pid"] == results[1]["pid"]
    assert results[0]["api_key"] == results[1]["api_key"]


def test_start_shows_why_the_service_ended(user: ServiceUser, model: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as blocker:
        port = blocker.getsockname()[1]
        user.configure(model, gateway={"port": port})
        error = user.run("start", code=1)
    assert f"cannot listen on 127.0.0.1:{port}" in error
    assert str(user.home.log_file) in error
    assert user.read_running() is None


def test_ctrl_c_during_start_stops_the_service(user: ServiceUser, model: Path) -> None:
    function = "tests.integration.hanging_import:reply"
    user.configure(model, engine={"type": "scripted", "function": function})
    process = user.popen("start")
    wait_until(lambda: user.read_running() is not None)
    state = user.read_running()
    assert state is not None
    wait_until(lambda: bool(list_descendants(state.pid)))
    pids = [state.pid, *list_descendants(state.pid)]
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=TIMEOUT_SECONDS)
    assert process.returncode == 130, out + err
    assert "Traceback" not in err
    assert user.read_running() is None
    wait_until(lambda: not any(map(is_alive, pids)))


def test_stop_kills_a_service_that_does_not_respond(user: ServiceUser) -> None:
    connection = user.start()
    pids = [connection["pid"], *list_descendants(connection["pid"])]
    os.kill(connection["pid"], signal.SIGSTOP)
    assert "Stopped" in user.run("stop")
    wait_until(lambda: not any(map(is_alive, pids)))


def test_foreground_service_ends_on_sigterm_and_does_not_print_keys(user: ServiceUser) -> None:
    process = user.popen("start", "--foreground")
    wait_until(lambda: bool((state := user.read_running()) and state.url))
    assert user.start()["started"] is False
    assert "runs in the foreground" in user.run("restart", code=1)
    assert "runs in the foreground" in user.run("logs", code=1)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=TIMEOUT_SECONDS)
    assert process.returncode == 0, err
    assert "serving at http://127.0.0.1:" in err
    assert "sk-instar" not in out + err


def test_serve_without_a_file_has_the_port_keys_and_sessions_of_the_service(user: ServiceUser) -> None:
    connections: list[Any] = []
    sessions: list[str] = []
    for _ in range(2):
        process = user.popen("serve", "--json")
        try:
            assert process.stdout is not None
            connections.append(json.loads(process.stdout.readline()))
            sessions.append(user.call(connections[-1], "count")[1])
            if len(connections) == 1:
                assert "already running" in user.run("serve", code=1)
            process.send_signal(signal.SIGINT)
            _, err = process.communicate(timeout=TIMEOUT_SECONDS)
        finally:
            process.kill()
        assert process.returncode == 0, err
    assert connections[0] == connections[1]
    assert sessions[0] == sessions[1]
    started = user.start()
    assert {name: started[name] for name in connections[0]} == connections[0]
