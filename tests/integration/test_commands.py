"""`instar train` and `instar serve` as a person runs them: a program as the agent, files beside the YAML, a
terminal to watch in."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
import textwrap
import urllib.request
from pathlib import Path

import pytest

from tests.tiny import make_tiny_model

pytestmark = pytest.mark.timeout(300)  # processes that each import torch, on a machine that may be busy
INSTAR = str(Path(sys.executable).with_name("instar"))
RUN = """
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
    (tmp_path / "run.yaml").write_text(RUN.replace("PYTHON", sys.executable))
    return tmp_path


def run_in_terminal(command: list[str], cwd: Path) -> tuple[int, str]:
    """Exit code, and everything that was drawn, without the colours."""
    child, terminal = pty.fork()
    if child == 0:
        os.chdir(cwd)
        os.environ.update(TERM="xterm-256color", COLUMNS="100", LINES="40")
        os.execv(command[0], command)
    drawn = bytearray()
    while True:
        try:
            part = os.read(terminal, 65536)
        except OSError:  # the terminal's other end is closed
            break
        if not part:
            break
        drawn += part
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return code, re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", drawn.decode())


def test_a_program_is_trained_and_watched_in_a_terminal(folder: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    code, drawn = run_in_terminal([INSTAR, "train", str(folder / "run.yaml")], elsewhere)
    assert code == 0, drawn
    assert "Traceback" not in drawn
    for part in (
        "instar · mine",
        "phase",
        "1 of 1",
        "policy version",
        "tokens/s",
        "held-out sampled",
        "trainer",
    ):
        assert part in drawn
    last = drawn[drawn.rindex("╭") :]
    assert re.search(r"held-out sampled +\d\.\d\d → \d\.\d\d", last), last
    assert "1 steps in" in drawn
    assert (elsewhere / "runs" / "mine" / "report" / "index.html").is_file()


def test_the_last_line_in_json_has_the_figures(folder: Path) -> None:
    command = [INSTAR, "train", "run.yaml", "--json"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout.splitlines()[-1])
    assert (summary["name"], summary["steps"], summary["version"]) == ("mine", 1, 1)
    assert {"sampled_before", "sampled_after", "seconds", "run_dir"} <= summary.keys()
    assert "held-out tasks, after, sampled" in done.stderr
    again = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=250)
    assert again.returncode == 1
    assert "Continue it with --resume" in again.stderr


def test_serve_answers_with_what_it_printed_until_it_is_stopped(folder: Path) -> None:
    process = subprocess.Popen(
        [INSTAR, "serve", "run.yaml", "--json"],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        facts = json.loads(process.stdout.readline())
        asked = urllib.request.Request(
            f"{facts['base_url']}/chat/completions",
            json.dumps({"model": "any", "messages": [{"role": "user", "content": "hi"}]}).encode(),
            {"Authorization": f"Bearer {facts['api_key']}", "Content-Type": "application/json"},
        )
        with urllib.request.urlopen(asked, timeout=60) as answer:
            assert json.load(answer)["choices"][0]["message"]["content"] in ("4", "5")
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
    finally:
        process.kill()
    assert (process.returncode, "Traceback" in said) == (0, False), said
    listed = subprocess.run(
        [INSTAR, "sessions", "ls", facts["run_dir"], "--json"], capture_output=True, text=True, check=True
    )
    (session,) = json.loads(listed.stdout)
    assert (session["channel"], session["calls"]) == ("live", 1)
