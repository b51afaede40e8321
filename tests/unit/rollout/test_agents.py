from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from instar.config import CommandAgentConfig, FunctionAgentConfig
from instar.errors import AgentError, AgentTimeout, ConfigError
from instar.rollout.agents import CommandAgent, FunctionAgent, create_agent
from instar.rollout.base import AgentResult, AgentSession
from instar.rollout.slots import run_agent_with_timeout
from instar.types import Task

MODULE = "tests.unit.rollout.test_agents"
SESSION = AgentSession("sess-1", "http://127.0.0.1:9/s/sess-1/v1", "sk-secret")
TASK = Task("t", {"question": "2 {x} 3?", "n": 5})


async def return_value(task: dict[str, Any], session: AgentSession, value: Any = None) -> Any:
    assert task == TASK.data
    assert session is SESSION
    return tuple(value) if isinstance(value, list) else value


async def exit_early(task: dict[str, Any], session: AgentSession) -> None:
    sys.exit("exited early")


def not_async(task: dict[str, Any], session: AgentSession) -> None: ...


@pytest.mark.parametrize(
    ("value", "result"),
    [
        (None, AgentResult()),
        (0.5, AgentResult(reward=0.5)),
        (True, AgentResult(reward=1.0)),
        ([3, 1], AgentResult(reward=1.0, turns=3)),
        ([3, None], AgentResult(turns=3)),
    ],
)
async def test_function_agent_accepts_none_reward_or_tuple(value: Any, result: AgentResult) -> None:
    config = FunctionAgentConfig(type="function", function=f"{MODULE}:return_value", args={"value": value})
    assert await create_agent(config).run(TASK, SESSION) == result


async def test_function_agent_rejects_other_results_and_sync_functions() -> None:
    invalid = FunctionAgent(
        FunctionAgentConfig(type="function", function=f"{MODULE}:return_value", args={"value": "ok"})
    )
    with pytest.raises(AgentError, match="not 'ok'"):
        await invalid.run(TASK, SESSION)
    with pytest.raises(AgentError, match="exited early"):
        await FunctionAgent(FunctionAgentConfig(type="function", function=f"{MODULE}:exit_early")).run(
            TASK, SESSION
        )
    with pytest.raises(ConfigError, match="is not async"):
        FunctionAgent(FunctionAgentConfig(type="function", function=f"{MODULE}:not_async"))


def make_script_agent(tmp_path: Path, text: str, *arguments: str, **fields: Any) -> CommandAgent:
    path = tmp_path / "agent.py"
    path.write_text(text)
    return CommandAgent(
        CommandAgentConfig(type="command", command=[sys.executable, str(path), *arguments], **fields)
    )


async def test_command_agent_passes_task_and_session(tmp_path: Path) -> None:
    text = """
import json, os, sys
assert os.environ["OPENAI_BASE_URL"].endswith("/s/sess-1/v1"), os.environ["OPENAI_BASE_URL"]
assert os.environ["OPENAI_API_KEY"] == "sk-secret"
assert os.environ["INSTAR_SESSION_ID"] == "sess-1"
assert json.loads(os.environ["INSTAR_TASK"]) == {"question": "2 {x} 3?", "n": 5}
assert os.environ["EXTRA"] == "1"
assert sys.argv[1:] == ["2 {x} 3?", "n=5 {other}"], sys.argv
print("x" * 200_000)
print(json.dumps({"reward": 0.25}))
"""
    agent = make_script_agent(tmp_path, text, "{question}", "n={n} {other}", env={"EXTRA": "1"}, cwd=tmp_path)
    assert (await agent.run(TASK, SESSION)).reward == 0.25


async def test_command_agent_hides_the_keys_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ["INSTAR_ADMIN_KEY", "INSTAR_ENGINE_TOKEN", "INSTAR_FEEDBACK_KEY", "INSTAR_POSTGRES_PASSWORD"]
    for name in names:
        monkeypatch.setenv(name, "secret")
    text = f"import os\nassert not [name for name in {names} if name in os.environ]"
    await make_script_agent(tmp_path, text).run(TASK, SESSION)


@pytest.mark.parametrize("last_line", ["done", "{not json", '{"score": 1}'])
async def test_command_agent_reward_is_optional(tmp_path: Path, last_line: str) -> None:
    assert (await make_script_agent(tmp_path, f"print({last_line!r})").run(TASK, SESSION)).reward is None


async def test_command_agent_failure_contains_stderr(tmp_path: Path) -> None:
    with pytest.raises(AgentError, match=r"exited with code 3: .*the disk is full"):
        await make_script_agent(
            tmp_path, "import sys; print('the disk is full', file=sys.stderr); sys.exit(3)"
        ).run(TASK, SESSION)
    with pytest.raises(AgentError, match="signal 9"):
        await make_script_agent(tmp_path, "import os; os.kill(os.getpid(), 9)").run(TASK, SESSION)
    with pytest.raises(AgentError, match="cannot start '/missing/program': No such file"):
        await CommandAgent(CommandAgentConfig(type="command", command=["/missing/program"])).run(
            TASK, SESSION
        )


def is_running(pid: int) -> bool:
    """True if the process is running. A zombie, which a killed orphan may become, does not count."""
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False


async def wait_until_exited(pid: int) -> None:
    for _ in range(100):
        if not is_running(pid):
            return
        await asyncio.sleep(0.05)
    raise AssertionError(f"process {pid} is still running")


CHILD = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
open(sys.argv[1], "w").write(str(child.pid))
"""


DETACHED_CHILD = """
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
with open(sys.argv[1] + ".partial", "w") as file:
    print(os.getpid(), child.pid, file=file)
os.rename(sys.argv[1] + ".partial", sys.argv[1])
time.sleep(60)
"""


async def test_command_agent_programs_are_killed_with_the_rollout(tmp_path: Path) -> None:
    pid_file = tmp_path / "pids"
    code = f"""
import asyncio
from instar.config import CommandAgentConfig
from instar.rollout.agents import CommandAgent
from instar.rollout.base import AgentSession
from instar.types import Task
config = CommandAgentConfig(type="command", command={[sys.executable, "-c", DETACHED_CHILD, str(pid_file)]!r})
asyncio.run(CommandAgent(config).run(Task("t", {{}}), AgentSession("s", "http://127.0.0.1:9/v1", "k")))
"""
    rollout = await asyncio.create_subprocess_exec(sys.executable, "-c", code, start_new_session=True)
    async with asyncio.timeout(60):
        while not pid_file.exists():  # noqa: ASYNC110 - another process writes the file
            await asyncio.sleep(0.02)
    os.killpg(rollout.pid, signal.SIGKILL)  # as the supervisor does
    await rollout.wait()
    for pid in pid_file.read_text().split():
        await wait_until_exited(int(pid))


async def test_command_agent_timeout_kills_grandchildren(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    agent = make_script_agent(tmp_path, CHILD + "time.sleep(600)\n", str(pid_file))
    start_time = time.monotonic()
    with pytest.raises(AgentTimeout, match=r"within 1\.5 s"):
        await run_agent_with_timeout(1.5, agent.run(TASK, SESSION), "the agent")
    assert time.monotonic() - start_time < 6
    await wait_until_exited(int(pid_file.read_text()))


async def test_command_agent_timeout_kills_program_that_ignores_sigterm(tmp_path: Path) -> None:
    text = "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\ntime.sleep(600)"
    start_time = time.monotonic()
    with pytest.raises(AgentTimeout):
        await run_agent_with_timeout(1.5, make_script_agent(tmp_path, text).run(TASK, SESSION), "the agent")
    assert time.monotonic() - start_time < 6


async def test_command_agent_program_has_own_session_and_signals(tmp_path: Path) -> None:
    """The program ignores only the signals that this process or Python ignores."""
    text = """
import os, signal, sys
assert os.getsid(0) == os.getpgid(0) == os.getpid()
assert not sys.stdin.read()
ignored = int(next(line for line in open("/proc/self/status") if line.startswith("SigIgn")).split()[1], 16)
ignored_by_python = (1 << signal.SIGPIPE - 1) | (1 << signal.SIGXFSZ - 1)
assert not ignored & ~ignored_by_python & ~int(sys.argv[1], 16), hex(ignored)
os.killpg(0, signal.SIGTERM)
"""
    with pytest.raises(AgentError, match="signal 15"):
        await make_script_agent(tmp_path, text, read_ignored_signals()).run(TASK, SESSION)


def read_ignored_signals() -> str:
    status = Path("/proc/self/status").read_text().splitlines()
    return next(line for line in status if line.startswith("SigIgn")).split()[1]


async def test_command_agent_kills_remaining_children(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    await asyncio.wait_for(make_script_agent(tmp_path, CHILD, str(pid_file)).run(TASK, SESSION), 20)
    await wait_until_exited(int(pid_file.read_text()))
