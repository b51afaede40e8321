"""Tests that run `instar train` and `instar serve` like a user: with an agent command, and with files next to
the YAML."""

from __future__ import annotations

import json
import os
import pty
import re
import shlex
import signal
import subprocess
import sys
import textwrap
import urllib.request
from pathlib import Path

import pytest

from tests.tiny import make_tiny_model

pytestmark = pytest.mark.timeout(300)  # each process imports torch, and the machine may be busy
INSTAR = str(Path(sys.executable).with_name("instar"))
RUN_YAML = """
name: mine
model: {name: ./model, dtype: fp32, device: cpu}
engine: {type: scripted, function: "replies:reply"}
trainer: {steps: 1, groups_per_step: 1}
rollout:
  tasks: {type: jsonl, path: tasks.jsonl}
  agent: {type: command, command: [PYTHON, agent.py]}
  group_size: 3
reward: {type: rule, function: "score:score"}
eval:
  tasks: {type: jsonl, path: tasks.jsonl, limit: 1}
  modes: {sampled: {}}
"""
FILES = {
    "tasks.jsonl": '{"question": "2 + 2?", "answer": "4"}\n{"question": "2 + 3?", "answer": "5"}\n',
    "agent.py": """
        import json, os
        from openai import OpenAI

        task = json.loads(os.environ["INSTAR_TASK"])
        OpenAI().chat.completions.create(
            model="any", messages=[{"role": "user", "content": task["question"]}]
        )
        """,
    "score.py": """
        def score(task, transcript):
            return float(task["answer"] in transcript.final_text)
        """,
    "replies.py": """
        def reply(prompt, seed):
            return "4" if (seed or 0) % 2 else "5"
        """,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_tiny_model(tmp_path / "model")
    for name, text in FILES.items():
        (tmp_path / name).write_text(textwrap.dedent(text))
    (tmp_path / "run.yaml").write_text(RUN_YAML.replace("PYTHON", sys.executable))
    return tmp_path


def run_in_terminal(command: list[str], cwd: Path) -> tuple[int, str]:
    """Run the command in a pseudo-terminal. Return its exit code and its output without escape sequences."""
    child_pid, terminal = pty.fork()
    if child_pid == 0:
        os.chdir(cwd)
        os.environ.update(TERM="xterm-256color", COLUMNS="100", LINES="40")
        os.execv(command[0], command)
    output = bytearray()
    while True:
        try:
            data = os.read(terminal, 65536)
        except OSError:  # the child has closed the terminal
            break
        if not data:
            break
        output += data
    code = os.waitstatus_to_exitcode(os.waitpid(child_pid, 0)[1])
    return code, re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", output.decode())


def test_train_in_terminal_shows_progress_and_writes_report(folder: Path, tmp_path: Path) -> None:
    working_dir = tmp_path / "working_dir"
    working_dir.mkdir()
    code, output = run_in_terminal([INSTAR, "train", str(folder / "run.yaml")], working_dir)
    assert code == 0, output
    assert "Traceback" not in output
    for part in (
        "instar · mine",
        "phase",
        "1 of 1",
        "policy version",
        "tokens/s",
        "held-out sampled",
        "trainer",
    ):
        assert part in output
    last_frame = output[output.rindex("╭") :]
    assert re.search(r"held-out sampled +\d\.\d\d → \d\.\d\d", last_frame), last_frame
    assert "1 steps in" in output
    assert (working_dir / "runs" / "mine" / "report" / "index.html").is_file()
    assert "Report: runs/mine/report/index.html" in output
    commands = [line.split("  #")[0].strip() for line in output.splitlines() if "  # " in line]
    assert [command.split()[1] for command in commands] == ["serve", "chat", "-r", "sessions", "sessions"]
    for command in commands[1:]:
        program, *arguments = shlex.split(command)
        completed = subprocess.run(
            [INSTAR if program == "instar" else program, *arguments],
            cwd=working_dir,
            input="2 + 2?\n",
            capture_output=True,
            text=True,
            timeout=100,
        )
        assert completed.returncode == 0, (command, completed.stderr)
        if "chat" in command:
            assert completed.stdout == "version 1: 5\nbase: 5\n"
    assert (working_dir / "mine-v1" / "adapter_config.json").is_file()
    assert (working_dir / "mine-data" / "sessions.jsonl").is_file()


def test_train_with_json_prints_summary_and_rejects_second_run(folder: Path) -> None:
    command = [INSTAR, "train", "run.yaml", "--json"]
    completed = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=250)
    assert completed.returncode == 0, completed.stderr
    summary = json.loads(completed.stdout.splitlines()[-1])
    assert (summary["name"], summary["steps"], summary["version"]) == ("mine", 1, 1)
    assert {"sampled_before", "sampled_after", "seconds", "run_dir"} <= summary.keys()
    assert "held-out tasks, after, sampled" in completed.stderr
    repeated = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=250)
    assert repeated.returncode == 1
    assert "Continue the run with --resume" in repeated.stderr


def test_serve_responds_at_printed_url_until_interrupted(folder: Path) -> None:
    process = subprocess.Popen(
        [INSTAR, "serve", "run.yaml", "--json"],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        connection_info = json.loads(process.stdout.readline())
        request = urllib.request.Request(
            f"{connection_info['base_url']}/chat/completions",
            json.dumps({"model": "any", "messages": [{"role": "user", "content": "hi"}]}).encode(),
            {"Authorization": f"Bearer {connection_info['api_key']}", "Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as response:
            assert json.load(response)["choices"][0]["message"]["content"] in ("4", "5")
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 0, stderr
    assert "Traceback" not in stderr
    listing = subprocess.run(
        [INSTAR, "sessions", "ls", connection_info["run_dir"], "--json"],
        capture_output=True,
        text=True,
        check=True,
    )
    (session,) = json.loads(listing.stdout)
    assert (session["channel"], session["calls"]) == ("live", 1)
