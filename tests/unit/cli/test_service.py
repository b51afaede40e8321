"""Tests for the parts of the background service: its folders, lock, settings, logs and systemd unit."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from instar.cli.service.external import list_external_services
from instar.cli.service.home import DEFAULT_PORT, Home, ServiceSettings, choose_port, ensure_keys
from instar.cli.service.lock import Launch, ServiceLock, ServiceState
from instar.cli.service.logs import follow, get_rotated_path, read_last_lines, rotate
from instar.cli.service.process import load_service_config, make_launch
from instar.cli.service.systemd import make_unit
from instar.cluster.layout import RunFolder
from instar.config import RunConfig
from instar.errors import ConfigError, InstarError
from instar.http.auth import hash_key
from instar.store.factory import open_store
from tests.unit.cli.conftest import Instar


@pytest.fixture
def home(tmp_path: Path) -> Home:
    home = Home.locate(tmp_path / "home", {})
    home.create()
    return home


def make_state(pid: int, **changes: Any) -> ServiceState:
    fields: dict[str, Any] = {
        "pid": pid,
        "launch": Launch(cwd="/"),
        "instar_version": "1",
        "is_background": True,
        "started_at": 0.0,
        "run_dir": "/",
        **changes,
    }
    return ServiceState(**fields)


@pytest.fixture
def foreign_process() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    yield process
    process.kill()
    process.wait()


# --- folders and settings -------------------------------------------------------------------------


def test_home_follows_the_xdg_variables_and_ignores_relative_ones(tmp_path: Path) -> None:
    env = {"XDG_DATA_HOME": str(tmp_path / "data"), "XDG_STATE_HOME": "relative"}
    home = Home.locate(None, env)
    assert home.settings_file == tmp_path / "data" / "instar" / "service.json"
    assert home.log_file == Path.home() / ".local" / "state" / "instar" / "service.log"
    assert home.config_file == Path.home() / ".config" / "instar" / "config.yaml"


def test_home_option_puts_all_files_in_one_private_folder(home: Home, tmp_path: Path) -> None:
    ServiceSettings(port=1, keys={"service-admin": "k"}).write(home)
    files = (home.config_file, home.settings_file, home.lock_file, home.log_file, home.runs)
    assert {file.parent for file in files} == {tmp_path / "home"}
    assert home.data.stat().st_mode & 0o777 == 0o700
    assert home.settings_file.stat().st_mode & 0o777 == 0o600
    assert ServiceSettings.read(home).keys == {"service-admin": "k"}


def test_damaged_settings_are_an_error_that_names_the_file(home: Home) -> None:
    home.settings_file.write_text("{")
    with pytest.raises(InstarError, match=r"service\.json.*repair the file"):
        ServiceSettings.read(home)


def test_port_is_another_one_if_the_default_is_taken_and_is_kept(home: Home) -> None:
    with socket.socket() as blocker:
        blocker.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            blocker.bind(("127.0.0.1", DEFAULT_PORT))
            blocker.listen()
        except OSError:
            pass  # another program has taken it, which serves the test as well
        port = choose_port(home, "127.0.0.1")
    assert port != DEFAULT_PORT
    assert choose_port(home, "127.0.0.1") == port


async def test_keys_are_kept_for_a_new_store_and_replaced_if_revoked(home: Home, tmp_path: Path) -> None:
    keys: list[str] = []
    for name in ("first", "first", "second"):
        store = open_store(RunConfig(name=name, dir=tmp_path / name))
        settings = await ensure_keys(home, store, "coder")
        keys.append(settings.get_key("agent", "coder"))
        row = await store.key(hash_key(keys[-1]))
        assert row is not None
        assert (row.kind, row.agent_id) == ("agent", "coder")
        assert len(await store.keys()) == 3
        await store.close()
    assert len(set(keys)) == 1
    store = open_store(RunConfig(name="second", dir=tmp_path / "second"))
    await store.revoke_key(hash_key(keys[0]))
    replaced = (await ensure_keys(home, store, "coder")).get_key("agent", "coder")
    assert replaced != keys[0]
    assert ServiceSettings.read(home).get_key("agent", "coder") == replaced
    await store.close()


# --- settings of the run --------------------------------------------------------------------------


def test_service_config_has_one_run_per_model_in_the_home(home: Home) -> None:
    default = load_service_config(home, make_launch(None, ()))
    assert default.run_dir == home.runs / "smollm2-135m"
    other = load_service_config(home, make_launch(None, ["model.name=Qwen/Qwen3-0.6B"]))
    assert other.run_dir == home.runs / "Qwen-Qwen3-0.6B"
    upstream = load_service_config(home, make_launch(None, ["engine={type: upstream, base_url: 'http://x'}"]))
    assert upstream.run_dir == home.runs / "providers"
    folders = [load_service_config(home, make_launch(None, [f"model.name=/{x}/m"])).name for x in "ab"]
    assert folders[0] != folders[1]


def test_service_config_reads_the_file_in_the_home_unless_another_is_named(
    home: Home, tmp_path: Path
) -> None:
    home.config_file.write_text("agent_id: mine\n")
    (tmp_path / "other.yaml").write_text(f"name: other\ndir: {tmp_path}/run\n")
    assert load_service_config(home, make_launch(None, ())).agent_id == "mine"
    other = load_service_config(home, make_launch(tmp_path / "other.yaml", ()))
    assert (other.agent_id, other.run_dir) == ("default", tmp_path / "run")


def test_service_config_with_another_model_for_a_named_run_is_an_error(home: Home) -> None:
    config = load_service_config(home, make_launch(None, ["name=mine"]))
    RunFolder(config.run_dir).create(config)
    with pytest.raises(ConfigError, match=r"model\.name: the run 'mine' has recorded .*'smollm2-135m'"):
        load_service_config(home, make_launch(None, ["name=mine", "model.name=other"]))


def test_start_with_a_key_in_an_override_is_an_error_without_the_key(home: Home, instar: Instar) -> None:
    result = instar("start", "--home", home.data, "--set", "backend.api_key=tml-secret")
    assert result.code == 1
    assert "name it in backend.api_key_env" in result.err
    assert "tml-secret" not in result.err


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, []),
        ({"engine": {"type": "upstream", "base_url": "http://127.0.0.1:1/v1"}}, []),
        ({"store": {"type": "postgres"}}, []),
        ({"engine": {"type": "upstream", "base_url": "https://api.openai.com/v1"}}, ["engine"]),
        ({"backend": {"type": "tinker"}, "engine": {"type": "cloud"}}, ["engine", "backend"]),
        ({"upstreams": {"claude": {"base_url": "https://api.anthropic.com"}}}, ["upstreams.claude"]),
        ({"reward": {"type": "judge", "endpoint": "https://api.openai.com/v1", "model": "m"}}, ["reward.0"]),
        ({"reward": {"type": "judge", "endpoint": "self"}}, []),
        ({"store": {"type": "postgres", "url": "postgresql://db.example.org/instar"}}, ["store"]),
        ({"engine": {"type": "vllm", "servers": ["http://gpu:8000", "http://localhost:8000"]}}, ["engine"]),
        ({"cluster": {"type": "ray", "address": "head:6379"}}, ["cluster"]),
    ],
)
def test_external_services_are_those_on_other_machines(settings: Any, expected: list[str]) -> None:
    services = list_external_services(RunConfig.model_validate(settings))
    assert [service.setting for service in services] == expected


# --- the lock -------------------------------------------------------------------------------------


def test_lock_is_held_by_one_process_and_free_after_its_release(home: Home) -> None:
    first, second = ServiceLock(home), ServiceLock(home)
    assert first.read_running() is None
    assert first.acquire(make_state(os.getpid(), run_dir="/first"))
    assert not second.acquire(make_state(os.getpid(), run_dir="/second"))
    first.set_url("http://127.0.0.1:1")
    running = second.read_running()
    assert running is not None
    assert (running.run_dir, running.url) == ("/first", "http://127.0.0.1:1")
    first.release()
    assert second.read_running() is None
    last = second.read_last()
    assert last is not None
    assert last.run_dir == "/first"
    assert second.acquire(make_state(os.getpid()))
    second.release()


def test_state_of_a_crashed_service_never_signals_the_process_that_has_its_id_now(
    home: Home, instar: Instar, foreign_process: subprocess.Popen[bytes]
) -> None:
    crashed = ServiceLock(home)
    assert crashed.acquire(make_state(foreign_process.pid))
    crashed.release()
    stopped = instar("stop", "--home", home.data)
    assert (stopped.code, stopped.out) == (0, "The service is not running.\n")
    ServiceLock(home).kill(foreign_process.pid)
    assert foreign_process.poll() is None
    assert instar("status", "--home", home.data, "--json").json["running"] is False


COUNT_SIGNALS = """
import signal
signal.signal(signal.SIGTERM, lambda *_: print("stop", flush=True))
signal.signal(signal.SIGWINCH, lambda *_: print("end", flush=True))
print("ready", flush=True)
while True:
    signal.pause()
"""


@pytest.fixture
def counting_process() -> Iterator[subprocess.Popen[str]]:
    """A process that prints a line for each signal to stop."""
    command = [sys.executable, "-c", COUNT_SIGNALS]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield process
        process.kill()


def test_request_stop_sends_only_one_signal(home: Home, counting_process: subprocess.Popen[str]) -> None:
    lock = ServiceLock(home)
    assert lock.acquire(make_state(counting_process.pid))
    assert counting_process.stdout is not None
    state = lock.request_stop()
    assert state is not None
    assert state.is_stopping
    assert counting_process.stdout.readline() == "stop\n"
    lock.request_stop()
    counting_process.send_signal(signal.SIGWINCH)  # handled after SIGTERM, which has a lower number
    assert counting_process.stdout.readline() == "end\n"
    lock.release()
    assert lock.request_stop() is None


def test_kill_only_reaches_the_service_that_it_names(
    home: Home, counting_process: subprocess.Popen[str], foreign_process: subprocess.Popen[bytes]
) -> None:
    lock = ServiceLock(home)
    assert lock.acquire(make_state(counting_process.pid))
    lock.kill(foreign_process.pid)
    lock.kill(counting_process.pid)
    assert counting_process.wait(10) == -signal.SIGKILL
    assert foreign_process.poll() is None
    lock.release()


def test_lock_of_an_unknown_version_is_an_error_not_a_stopped_service(home: Home) -> None:
    lock = ServiceLock(home)
    assert lock.acquire(make_state(os.getpid()))
    home.state_file.write_text('{"format": "of the future"}')
    with pytest.raises(InstarError, match="another version of Instar"):
        lock.read_running()
    lock.release()
    assert lock.read_running() is None


# --- logs -----------------------------------------------------------------------------------------


def test_rotate_bounds_a_log_that_a_process_has_open(tmp_path: Path) -> None:
    path = tmp_path / "service.log"
    with path.open("ab", buffering=0) as log:
        for number in range(30):
            log.write(b"%02d %s\n" % (number, b"x" * 96))
            rotate(path, 1000)
    rotated = get_rotated_path(path)
    assert path.stat().st_size <= 1000
    assert rotated.stat().st_size <= 1100
    assert rotated.stat().st_mode & 0o777 == 0o600
    text, position = read_last_lines(path, 12)
    assert [int(line[:2]) for line in text.splitlines()] == list(range(18, 30))
    assert position == path.stat().st_size


def test_follow_yields_appended_text_and_starts_over_after_a_truncation(tmp_path: Path) -> None:
    path = tmp_path / "service.log"
    path.write_text("old\n")
    stream = follow(path, path.stat().st_size)
    with path.open("a") as log:
        log.write("new\n")
    assert next(stream) == "new\n"
    path.write_text("a\n")
    assert next(stream) == "a\n"


def test_logs_prints_the_last_lines(home: Home, instar: Instar) -> None:
    assert "start the service with `instar start`" in instar("logs", "--home", home.data).err
    home.log_file.write_text("one\ntwo\nthree\n")
    assert instar("logs", "--home", home.data, "-n", 2).out == "two\nthree\n"
    as_json = instar("logs", "--home", home.data, "-n", 1, "--json").json
    assert as_json == {"path": str(home.log_file), "lines": ["three"]}
    assert "'gateway' has no log" in instar("logs", "gateway", "--home", home.data).err


# --- systemd --------------------------------------------------------------------------------------


def test_systemd_unit_runs_the_service_in_the_foreground_with_quoted_arguments(tmp_path: Path) -> None:
    home = Home.locate(tmp_path / "my home", {})
    launch = Launch(config="/my config.yaml", overrides=["agent_id=50%"], cwd="/my folder")
    lines = make_unit(home, launch, {}).splitlines()
    assert (
        f'ExecStart={sys.executable} -m instar.cli.main start --foreground "--home={tmp_path}/my home" '
        '"--set=agent_id=50%%" "/my config.yaml"' in lines
    )
    assert "WorkingDirectory=/my folder" in lines
    assert f"EnvironmentFile=-{tmp_path}/my home/service.env" in lines


def test_systemd_option_prints_or_writes_the_unit(
    instar: Instar, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    printed = instar("start", "--systemd")
    assert "ExecStart=" in printed.out
    assert "systemctl --user enable --now instar.service" in printed.err
    assert f"Environment=XDG_CONFIG_HOME={tmp_path}/config" in printed.out
    unit = tmp_path / "config" / "systemd" / "user" / "instar.service"
    assert not unit.exists()
    assert "systemctl --user enable" in instar("start", "--systemd", "--write").out
    assert unit.read_text() == printed.out
    assert "--write needs --systemd" in instar("start", "--write").err
    assert "mutually exclusive" in instar("start", "--foreground", "--systemd").err


def test_start_with_invalid_settings_explains_them_and_starts_nothing(
    home: Home, instar: Instar, tmp_path: Path
) -> None:
    (tmp_path / "bad.yaml").write_text("engine: {type: scriptd}\n")
    result = instar("start", tmp_path / "bad.yaml", "--home", home.data)
    assert result.code == 1
    assert "engine.type: must be" in result.err
    assert not home.log_file.exists()
    assert ServiceLock(home).read_running() is None
