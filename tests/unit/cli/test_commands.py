"""Tests for `sessions`, `report` and `doctor`, and for the help and error output of all commands."""

from __future__ import annotations

import asyncio
import os
import pty
import re
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from instar.cli.main import COMMANDS, load_command
from instar.cluster.layout import RunFolder
from instar.config import RunConfig
from instar.store.factory import open_store
from instar.types import Call, Channel, Message, Reward, RewardSource, Session, SessionStatus, new_id
from tests.unit.cli.conftest import Instar, SmallRun


def test_sessions_ls_lists_newest_last(instar: Instar, small_run: SmallRun) -> None:
    rows = instar("sessions", "ls", small_run.folder, "--json").json
    assert len(rows) == 8
    first = rows[0]
    assert (first["session_id"], first["channel"], first["status"]) == (
        small_run.sessions["trained"],
        "train",
        "completed",
    )
    assert (first["calls"], first["sampled_tokens"], first["reward"]) == (2, 4, 1.0)
    table = instar("sessions", "ls", small_run.folder).out
    assert all(row["session_id"] in table for row in rows)


async def make_live_run(folder: Path, session_id: str) -> None:
    config = RunConfig(name="live", dir=folder)
    RunFolder(folder).create(config)
    store = open_store(config)
    session = Session(session_id, "live", "support-agent-of-the-shop", "live", Channel.LIVE)
    await store.open_session(replace(session, created_at=time.time()))
    call = Call(
        call_id="c",
        session_id=session_id,
        run_id="live",
        agent_id=session.agent_id,
        policy_id="live",
        request_id="r",
        messages=(
            Message(role="system", content="You are helpful."),
            Message(role="user", content="Where is\nmy order? " * 50),
        ),
        reply=Message(role="assistant", content="On its way."),
        prompt_ids=np.zeros(3, np.int32),
        finish_reason="stop",
        sampled_ids=np.zeros(12345, np.int32),
        logprobs=np.zeros(12345, np.float32),
        versions=np.zeros(12345, np.int32),
    )
    await store.add_calls([call])
    reward = Reward(session_id, -0.125, RewardSource.HUMAN)
    await store.end_session(session_id, SessionStatus.COMPLETED, rewards=[reward])
    await store.close()


def test_sessions_ls_in_a_terminal_of_100_columns_prints_one_line_per_session(tmp_path: Path) -> None:
    session_id = new_id("sess")
    asyncio.run(make_live_run(tmp_path, session_id))
    reader, terminal = pty.openpty()
    command = [sys.executable, "-m", "instar.cli.main", "sessions", "ls", str(tmp_path)]
    environment = {**os.environ, "COLUMNS": "100", "TERM": "xterm"}
    subprocess.run(command, stdout=terminal, stderr=terminal, env=environment, check=True, timeout=60)
    os.close(terminal)
    lines = re.sub(r"\x1b\[[0-9;]*m", "", os.read(reader, 100_000).decode()).splitlines()
    os.close(reader)
    names = ["session", "started", "agent", "status", "first", "message", "turns", "tokens", "reward"]
    assert lines[0].split() == names
    assert len(lines) == 2
    assert all(len(line) <= 100 for line in lines)
    columns = lines[1].split()
    assert columns[:2] == [session_id, "today"]
    assert columns[3:5] == ["support-agent-o…", "completed"]
    assert columns[-3:] == ["1", "12345", "-0.125"]
    assert "Where is my" in lines[1]


def test_sessions_ls_json_has_the_agent_and_the_first_message(instar: Instar, small_run: SmallRun) -> None:
    row = instar("sessions", "ls", small_run.folder, "--limit", "1", "--json").json[0]
    assert (row["agent_id"], row["first_message"]) == ("default", "What is <2> plus 2?")
    assert row["created_at"] <= row["ended_at"]


def test_sessions_can_be_filtered(instar: Instar, small_run: SmallRun) -> None:
    def list_ids(*options: str) -> list[str]:
        rows = instar("sessions", "ls", small_run.folder, "--json", *options).json
        return [row["session_id"] for row in rows]

    assert list_ids("--status", "failed") == [small_run.sessions["failed"]]
    assert list_ids("--channel", "val") == [small_run.sessions["before"], small_run.sessions["after"]]
    assert list_ids("--limit", "1") == [small_run.sessions["after"]]
    assert list_ids("--channel", "live") == []


def test_sessions_show_prints_messages_rewards_and_claims(instar: Instar, small_run: SmallRun) -> None:
    output = instar("sessions", "show", small_run.folder, small_run.sessions["trained"]).out
    for part in (
        "call 1 · root · 2 prompt + 2 sampled tokens · version 9–10 · stop",
        "What is <2> plus 2?",
        '→ calc({"expression": "2 + 2"})',
        "call 2 · extends · 5 prompt + 2 sampled tokens",
        "not trainable: logprobs are missing",
        "reward 1 from rule rule",
        "group small/train/000000: rewards 1 0",
        "advantage +1.000 → trained in step 1, 1 step(s) stale",
    ):
        assert part in output
    assert output.count("What is <2> plus 2?") == 1, "a later call shows only its new messages"


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        ("equal", "→ dropped: zero_signal"),
        ("waiting", "not claimed yet: the session's group is waiting for a step"),
        ("failed", "reason: the agent crashed"),
        ("failed", "no reward"),
        ("after", "not claimed: val sessions are not trained on"),
    ],
)
def test_sessions_show_explains_why_a_session_was_not_trained(
    instar: Instar, small_run: SmallRun, case: str, expected: str
) -> None:
    assert expected in instar("sessions", "show", small_run.folder, small_run.sessions[case]).out


def test_sessions_show_json_keeps_missing_logprobs_null(instar: Instar, small_run: SmallRun) -> None:
    details = instar("sessions", "show", small_run.folder, small_run.sessions["trained"], "--json").json
    first, second = details["calls"]
    assert (first["sampled_ids"], first["logprobs"], first["versions"]) == ([7, 8], [-0.5, -0.25], [9, 10])
    assert second["logprobs"] == [None, -0.25]
    assert details["rewards"][0]["source"] == "rule"
    assert details["claims"][0]["outcome"] == "trained"
    assert list(details["group"]["rewards"].values()) == [1.0, 0.0]


def test_sessions_show_accepts_a_unique_id_prefix(instar: Instar, small_run: SmallRun) -> None:
    trained = small_run.sessions["trained"]
    result = instar("sessions", "show", small_run.folder, trained[:-1], "--json")
    assert result.json["session_id"] == trained
    result = instar("sessions", "show", small_run.folder, "sess-")
    assert result.code == 1
    assert result.err.startswith("error: 8 session ids start with 'sess-' (sess-")
    assert result.err.endswith(", ...); pass more characters.\n")
    result = instar("sessions", "show", small_run.folder, "unknown")
    assert (result.code, result.err) == (
        1,
        "error: No session id in this run starts with 'unknown'; see `instar sessions ls`.\n",
    )


def test_moved_run_folder_can_be_read(instar: Instar, small_run: SmallRun, tmp_path: Path) -> None:
    moved = tmp_path / "moved"
    shutil.copytree(small_run.folder, moved)
    (small_run.folder / "store.db").rename(small_run.folder / "hidden.db")
    try:
        assert len(instar("sessions", "ls", moved, "--json").json) == 8
    finally:
        (small_run.folder / "hidden.db").rename(small_run.folder / "store.db")


# --- report ---------------------------------------------------------------------------------------


def test_report_writes_png_and_self_contained_page(instar: Instar, small_run: SmallRun) -> None:
    page = Path(instar("report", small_run.folder, "--json").json["report"])
    text = page.read_text(encoding="utf-8")
    assert (page.parent / "reward.png").read_bytes().startswith(b"\x89PNG")
    assert "src='data:image/png;base64," in text
    assert "http" not in text.split("<h2>Settings")[0]
    assert "<script src" not in text
    assert "<link" not in text
    assert "<td>0.250</td><td>0.750</td><td>+0.500</td>" in text


def test_report_shows_tasks_before_and_after(instar: Instar, small_run: SmallRun) -> None:
    page = Path(instar("report", small_run.folder, "--json").json["report"]).read_text(encoding="utf-8")
    before, after = page.index("<b>before</b>"), page.index("<b>after</b>")
    assert before < after
    assert "What is &lt;2&gt; plus 2?" in page[before:after]
    assert "reward 0" in page[before:after]
    assert "reward 1" in page[after:]


def test_report_shows_staleness_and_dropped_samples(instar: Instar, small_run: SmallRun) -> None:
    page = Path(instar("report", small_run.folder, "--json").json["report"]).read_text(encoding="utf-8")
    assert "<td>0</td><td>450</td><td>75.0%</td>" in page
    assert "<td>2</td><td>150</td><td>25.0%</td>" in page
    assert "<td>stale</td><td>6</td>" in page


def test_report_without_metrics_fails(instar: Instar, small_run: SmallRun, tmp_path: Path) -> None:
    shutil.copy(small_run.folder / "config.json", tmp_path)
    result = instar("report", tmp_path)
    assert (result.code, len(result.err.splitlines())) == (1, 1)
    assert "nothing to report yet" in result.err


# --- doctor, failures and help ----------------------------------------------------------------------


def test_doctor_lists_findings(instar: Instar) -> None:
    findings = instar("doctor", "--json").json
    states = {finding["what"]: finding["state"] for finding in findings}
    assert states["python"] == "ok"
    assert states["torch"] == "ok"
    assert {"machine", "compute", "disk", "sandbox", "default model"} <= states.keys()
    assert "renderers" in instar("doctor").out


FAILURES = {
    "train without a file": ("train missing.yaml", "missing.yaml: the file does not exist"),
    "train with an evaluation but no rollout": (
        "train run.yaml --set eval.tasks.type=python --set eval.tasks.function=instar.demo.tasks:train_tasks",
        "rollout: this section is missing; `eval` needs its agent",
    ),
    "train into an existing run folder": ("train existing.yaml", "Continue the run with --resume"),
    "resume without a run": ("train fresh.yaml --resume", "--resume: there is no run in"),
    "serve without a file": ("serve missing.yaml", "missing.yaml: the file does not exist"),
    "a missing model": (
        "serve run.yaml --set model.name=./missing",
        "model.name: the folder './missing' does not exist",
    ),
    "sessions without a run": ("sessions ls .", "is not a run folder"),
    "one session without a run": ("sessions show . sess", "is not a run folder"),
    "a run folder with an unknown setting": ("sessions ls existing", "trainer.stepz"),
    "report without a run": ("report .", "is not a run folder"),
    "show without a file": ("config show missing.yaml", "missing.yaml: the file does not exist"),
    "unknown channel": (
        "sessions ls . --channel trian",
        "Unknown channel 'trian'. Available: train, val",
    ),
}


@pytest.mark.parametrize(("command", "expected"), FAILURES.values(), ids=FAILURES.keys())
def test_command_failure_prints_one_line_and_exits_1(
    instar: Instar, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, expected: str
) -> None:
    rollout = (
        "rollout: {tasks: {type: python, function: 'instar.demo.tasks:train_tasks'}, "
        "agent: {type: function, function: 'instar.demo.agent:solve'}, group_size: 2}"
    )
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    engine_and_model = "engine: {type: scripted}\nmodel: {name: model}\n"
    (tmp_path / "run.yaml").write_text(engine_and_model)
    (tmp_path / "existing.yaml").write_text(f"dir: existing\n{engine_and_model}{rollout}")
    (tmp_path / "fresh.yaml").write_text(f"dir: fresh\n{engine_and_model}{rollout}")
    (tmp_path / "existing").mkdir()
    (tmp_path / "existing" / "config.json").write_text('{"trainer": {"stepz": 1}}')
    monkeypatch.chdir(tmp_path)
    result = instar(*command.split())
    assert (result.code, result.out) == (1, "")
    assert result.err.startswith("error: ")
    assert expected in result.err
    assert len(result.err.splitlines()) == 1


def test_serve_explains_an_invalid_setting(instar: Instar) -> None:
    result = instar("serve", "--set", "engine.type=local", "--set", "engine.max_batch=0")
    assert result.code == 1
    assert "engine.max_batch: must be greater than or equal to 1, got 0" in result.err


def test_installed_command_failure_prints_one_line() -> None:
    command = [str(Path(sys.executable).with_name("instar")), "sessions", "ls", "/missing"]
    completed = subprocess.run(command, capture_output=True, text=True)
    assert (completed.returncode, completed.stdout) == (1, "")
    assert completed.stderr == "error: /missing is not a run folder: it has no config.json\n"


def test_version_option_prints_the_version(instar: Instar) -> None:
    assert instar("--version").out.startswith("instar ")


def list_command_paths() -> list[tuple[str, ...]]:
    paths: list[tuple[str, ...]] = []
    for name in COMMANDS:
        subcommands = getattr(load_command(name), "commands", {})
        paths += [(name,), *((name, subcommand) for subcommand in subcommands)]
    return paths


@pytest.mark.parametrize("path", list_command_paths(), ids=" ".join)
def test_command_help_shows_options_with_printable_defaults(instar: Instar, path: tuple[str, ...]) -> None:
    result = instar(*path, "--help")
    assert (result.code, result.err) == (0, "")
    assert "--json" in result.out or "Commands" in result.out
    assert " object" not in result.out
    assert "<member" not in result.out
