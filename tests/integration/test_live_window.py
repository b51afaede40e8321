"""Tests that a run trains only in its window, with real processes and a calendar."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.integration.test_live_run import run_cli, use_agent
from tests.tiny import make_tiny_model
from tests.torture.run_process import ROOT, RunProcess, make_config

STEPS = 3


def write_calendar(path: Path, *, is_busy: bool) -> None:
    """Write a calendar that is busy from yesterday to tomorrow, or free."""
    yesterday, tomorrow = (
        time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(time.time() + days * 86400)) for days in (-1, 1)
    )
    event = ["BEGIN:VEVENT", "UID:1", f"DTSTART:{yesterday}", f"DTEND:{tomorrow}", "END:VEVENT"]
    lines = ["BEGIN:VCALENDAR", "VERSION:2.0", "PRODID:test", *(event if is_busy else []), "END:VCALENDAR"]
    scratch = path.with_suffix(".partial")
    scratch.write_text("\r\n".join(lines) + "\r\n")
    scratch.replace(path)


def run_in_terminal(*arguments: object) -> str:
    """Run a command in a terminal with 80 columns, and return what it prints."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.environ["COLUMNS"], os.environ["TERM"] = "80", "dumb"
        os.chdir(ROOT)
        os.execv(sys.executable, [sys.executable, "-m", "instar.cli.main", *map(str, arguments)])
    parts: list[bytes] = []
    while True:
        try:
            part = os.read(terminal, 65536)
        except OSError:  # the command has exited
            part = b""
        if not part:
            break
        parts.append(part)
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    return b"".join(parts).decode().replace("\r\n", "\n")


def read_trainer_activity(run: RunProcess) -> str:
    return run.query("SELECT doing FROM endpoints WHERE role = 'trainer'")[0][0]


@pytest.mark.timeout(400)
def test_live_run_trains_only_in_its_window_and_if_a_person_opens_it(tmp_path: Path) -> None:
    calendar = tmp_path / "work.ics"
    write_calendar(calendar, is_busy=True)
    config = make_config(tmp_path, make_tiny_model(tmp_path / "model"), steps=STEPS)
    del config["rollout"], config["reward"]
    config |= {"data": "live", "agents": {"learner": {"mode": "learn"}}}
    config["live"] = {"window": {"calendar": str(calendar), "idle": 0.5}}
    run = RunProcess(tmp_path, config)
    run.roles = ("engine", "gateway", "trainer")
    run.start()
    assert run.wait_until(run.is_ready), run.collect_logs()
    keys = [
        run_cli("keys", "create", run.run_dir, "--agent", "learner", *options)["key"]
        for options in ((), ("--feedback",))
    ]
    (url,) = run.query("SELECT url FROM endpoints WHERE role = 'gateway'")[0]

    def use_twice() -> None:
        for score in (0.0, 1.0):
            use_agent(url, *keys, score=score)

    use_twice()
    assert run.wait_until(lambda: "paused until" in read_trainer_activity(run)), run.collect_logs()
    assert "the calendar has an event (live.window.calendar)" in read_trainer_activity(run)
    output = run_in_terminal("status", run.run_dir)
    rows = dict(line.split("  ", 1) for line in output.splitlines() if "  " in line)
    assert rows["sessions"].strip() == "2 completed"
    serving = rows["policy tortured/learner"].strip()
    assert serving.startswith("serves version 0 (the base model), no candidate")
    assert rows["training"].strip().startswith("learner: waiting for data for step 1; paused until")
    assert rows["window"].strip().startswith("opens ")
    assert rows["external"].strip() == "nothing leaves this machine"
    status_lines = output.split("\n\n")[0].splitlines()
    assert max(map(len, status_lines)) <= 80, output
    assert run.count_committed_steps() == 0

    assert run_cli("learn", "now", run.run_dir, "--for", "1h")["open"] is True
    assert run.wait_until(lambda: run.count_committed_steps() == 1), run.collect_logs()
    learning = run_cli("status", run.run_dir)["learning"]
    assert learning["policies"][0]["candidates"] == {"1": "candidate"}
    assert learning["window"]["reason"] == "opened by `instar learn now`"

    assert run.kill_role("trainer")
    use_twice()
    assert run.wait_until(lambda: run.count_committed_steps() == 2), "the opened window must survive"

    assert run_cli("learn", "now", run.run_dir, "--stop")["open"] is False
    use_twice()
    assert run.wait_until(lambda: "paused until" in read_trainer_activity(run)), run.collect_logs()
    assert run.count_committed_steps() == 2
    write_calendar(calendar, is_busy=False)
    run.finish()
    assert run.count_committed_steps() == STEPS
    stopped = subprocess.run(
        [sys.executable, "-m", "instar.cli.main", "status", str(run.run_dir), "--json"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    assert "no, because no trainer is running" in json.loads(stopped.stdout)["learning"]["training"]
