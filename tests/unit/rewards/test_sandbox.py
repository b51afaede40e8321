"""Tests for sandboxed jobs and the rewards using them. Attacks are in tests/integration/rewards_sandbox."""

from __future__ import annotations

import asyncio
import os
import socket
import uuid
from pathlib import Path

import pytest

from instar.config import ScoringConfig
from instar.errors import ConfigError
from instar.rewards.base import Transcript
from instar.rewards.sandbox.base import Sandbox, SandboxJob, SandboxLimits
from instar.rewards.sandbox.factory import create_sandbox
from instar.rewards.scoring import score_sessions
from instar.types import ScoreState, Task
from tests.unit.rewards.rules import make_transcript, score_text, start_scorer
from tests.unit.rewards.sandboxes import find_processes, list_sandbox_params, run_code

pytestmark = pytest.mark.parametrize("kind", list_sandbox_params())


@pytest.fixture
async def sandbox(kind: str) -> Sandbox:
    return await create_sandbox(kind)


async def test_job_runs_in_its_own_folder(sandbox: Sandbox) -> None:
    script = 'cat "$ANSWER" && echo more > new.txt && cat new.txt >&2 && exit 3'
    job = SandboxJob(["sh", "-c", script], {"a.txt": "answer\n"}, {"ANSWER": "a.txt"})
    outcome = await sandbox.run(job, SandboxLimits())
    assert (outcome.exit_code, outcome.output, outcome.exceeded_limit) == (3, "answer\nmore\n", None)
    assert outcome.reason == "exited with code 3"
    second = await sandbox.run(SandboxJob(["ls"]), SandboxLimits())
    assert "new.txt" not in second.output
    missing = await sandbox.run(SandboxJob(["missing-program"]), SandboxLimits())
    assert (missing.exit_code, missing.output) == (127, "missing-program: No such file or directory\n")


async def test_job_has_no_privileges_and_no_secrets(
    sandbox: Sandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("A_SECRET_KEY", "the-key")
    secret = tmp_path / "id_ed25519"
    secret.write_text("the-private-key")
    environment = await run_code(sandbox, "import os; print(os.getuid(), dict(os.environ))")
    assert environment.ok
    assert not environment.output.startswith("0 ")
    assert "the-key" not in environment.output
    for path in (secret, f"/proc/{os.getpid()}/environ", f"/proc/{os.getppid()}/cmdline", "/etc/shadow"):
        assert "Error" in (await run_code(sandbox, f"print(open({str(path)!r}).read())")).output, path
    for process in ("1", "self/../1", "self/.."):
        result = await run_code(
            sandbox, f"import pathlib; print(pathlib.Path('/proc/{process}/environ').read_bytes())"
        )
        assert "the-key" not in result.output


async def test_job_reads_allowed_paths_and_changes_nothing(sandbox: Sandbox, tmp_path: Path) -> None:
    allowed, other = tmp_path / "allowed", tmp_path / "other"
    for folder in (allowed, other):
        folder.mkdir(mode=0o777)
        (folder / "file").write_text("original")
        (folder / "file").chmod(0o666)
    code = f"""
import os
print(open({str(allowed / "file")!r}).read())
for folder in ({str(allowed)!r}, {str(other)!r}, {str(Path(__file__).parent)!r}, "/usr/lib", "/etc"):
    for operation in (lambda: open(folder + "/file", "w"), lambda: open(folder + "/new", "w"),
                 lambda: os.truncate(folder + "/file", 0), lambda: os.unlink(folder + "/file"),
                 lambda: os.chmod(folder + "/file", 0), lambda: os.rename(folder + "/file", folder + "/f"),
                 lambda: os.utime(folder + "/file"), lambda: os.symlink("/", folder + "/link")):
        try:
            operation()
        except OSError:
            continue
        print("succeeded in", folder)
"""
    before = (allowed / "file").stat()  # the access time may change
    outcome = await sandbox.run(SandboxJob(["python", "-c", code], readable_paths=[allowed]), SandboxLimits())
    assert outcome.output == "original\n"
    assert [p.name for p in (*allowed.iterdir(), *other.iterdir())] == ["file", "file"]
    after = (allowed / "file").stat()
    assert (after.st_mode, after.st_uid, after.st_mtime_ns) == (
        before.st_mode,
        before.st_uid,
        before.st_mtime_ns,
    )
    assert (allowed / "file").read_text() == "original"
    assert (other / "file").read_text() == "original"


async def test_job_cannot_open_sockets(sandbox: Sandbox, tmp_path: Path) -> None:
    path = tmp_path / "socket"
    with socket.create_server(("127.0.0.1", 0)) as tcp, socket.socket(socket.AF_UNIX) as unix:
        unix.bind(str(path))
        path.chmod(0o777)
        unix.listen()
        port = tcp.getsockname()[1]
        tcp_result = await run_code(
            sandbox, f"import socket; socket.create_connection(('127.0.0.1', {port}), 5)"
        )
        assert not tcp_result.ok
        unix_code = f"import socket; socket.socket(socket.AF_UNIX).connect({str(path)!r})"
        assert not (await run_code(sandbox, unix_code)).ok
        # AF_VSOCK reaches a virtual machine's host from any network namespace.
        assert "not permitted" in (await run_code(sandbox, "import socket; socket.socket(40, 1)")).output
        for listener in (tcp, unix):
            listener.setblocking(False)
            with pytest.raises(BlockingIOError):
                listener.accept()
        allowed = await run_code(
            sandbox, f"import socket; socket.create_connection(('127.0.0.1', {port}), 5)", network=True
        )
        assert allowed.ok, allowed.output


SYSTEM_CALLS = {
    "ptrace": (101, 16, 1),
    "unshare": (272, 0x10000000, 0),
    "memfd_create": (319, 0, 0),
    "io_uring_setup": (425, 1, 0),
    "bpf": (321, 0, 0),
    "shmget": (29, 0, 4096),
}


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="the system call numbers are for x86_64")
async def test_dangerous_system_calls_are_denied(sandbox: Sandbox) -> None:
    code = (
        "import ctypes; libc = ctypes.CDLL(None, use_errno=True)\n"
        f"for name, (number, *arguments) in {SYSTEM_CALLS!r}.items():\n"
        "    done = libc.syscall(number, *arguments)\n"
        "    print(name, done, ctypes.get_errno())"
    )
    outcome = await run_code(sandbox, code)
    assert outcome.output.splitlines() == [f"{name} -1 1" for name in SYSTEM_CALLS]


async def test_job_cannot_signal_its_parent(sandbox: Sandbox) -> None:
    """SIGUSR1 would kill this process. The target -1 means all processes that the job may signal."""
    send_signal = "import os, signal, sys; os.kill(int(sys.argv[1]), signal.SIGUSR1); print('sent')"
    assert "sent" not in (await run_code(sandbox, send_signal, str(os.getpid()))).output
    await run_code(sandbox, send_signal, "-1")


async def test_leftover_processes_are_killed_when_the_job_ends(sandbox: Sandbox) -> None:
    marker = uuid.uuid4().hex
    code = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if os.fork() == 0:
    try:
        os.setsid()
    except OSError:
        pass
    if os.fork() == 0:
        time.sleep(60)
    os._exit(0)
print("ended")
"""
    outcome = await run_code(sandbox, code, marker)
    assert (outcome.ok, outcome.output) == (True, "ended\n")
    assert find_processes(marker) == []


async def test_cancelled_job_leaves_no_process(sandbox: Sandbox) -> None:
    marker = uuid.uuid4().hex
    job = asyncio.create_task(run_code(sandbox, "import time; time.sleep(60)", marker))
    while not find_processes(marker):  # noqa: ASYNC110 - there is no event to wait for
        await asyncio.sleep(0.02)
    job.cancel()
    with pytest.raises(asyncio.CancelledError):
        await job
    assert find_processes(marker) == []


async def test_job_is_stopped_at_time_and_output_limits(sandbox: Sandbox) -> None:
    marker = uuid.uuid4().hex
    slow = await run_code(
        sandbox,
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)",
        marker,
        seconds=0.5,
    )
    assert (slow.exceeded_limit, slow.reason) == ("time", "ran longer than 0.5 s")
    verbose = await run_code(sandbox, "while True: print('x' * 1000)", marker, output_kb=64)
    assert (verbose.exceeded_limit, len(verbose.output)) == ("output", 64 * 1024)
    assert not verbose.ok
    assert find_processes(marker) == []


ANSWERS = {
    "def f(x):\n    return x + 1": (1.0, None),
    "def f(x):\n    return 2": (0.5, "1 of 2 tests passed"),
    "import os\nos._exit(0)": (0.0, "the answer exited before its tests finished"),
    "print('2 passed')\nraise SystemExit(0)": (0.0, None),
    "def f(x:": (0.0, None),
}


@pytest.mark.parametrize("runner", ["python", "pytest"])
async def test_tests_reward_counts_passed_tests(kind: str, runner: str) -> None:
    tests = ["from answer import f\ndef test_one(): assert f(1) == 2", "def test_two(): assert f(2) == 3"]
    section = {"type": "tests", "runner": runner, "reward": "share", "sandbox": {"kind": kind, "seconds": 30}}
    if runner == "python":
        tests = [test.replace("from answer import f\n", "") for test in tests]
    async with start_scorer(**section) as scorer:
        assert scorer.background
        for code, (value, reason) in ANSWERS.items():
            reward = await score_text(scorer, {"tests": tests}, f"Here it is:\n```python\n{code}\n```\nDone.")
            assert reward.value == value, (code, reward.detail)
            assert reason is None or reward.detail["reason"] == reason
        assert await scorer.score(Task("", {}), make_transcript("x")) == []


async def test_tests_reward_runs_async_tests_and_rejects_empty_ones(kind: str) -> None:
    test = "async def test_f(): assert f() == 1"
    async with start_scorer(type="tests", sandbox={"kind": kind, "seconds": 30}) as scorer:
        assert (await score_text(scorer, {"tests": test}, "def f(): return 1")).value == 1.0
        assert (await score_text(scorer, {"tests": test}, "def f(): return 2")).value == 0.0
        no_tests = await score_text(scorer, {"tests": "import math"}, "def f(): return 1")
        assert (no_tests.value, no_tests.detail["reason"]) == (0.0, "no tests were run")


async def test_answer_does_not_inherit_future_imports(kind: str) -> None:
    code = "def f(x: int): return x"
    tests = "assert f.__annotations__['x'] is int\ndef g(x: int): pass\nassert g.__annotations__['x'] is int"
    async with start_scorer(type="tests", sandbox={"kind": kind}) as scorer:
        assert (await score_text(scorer, {"tests": tests}, code)).value == 1.0


PYTEST_FILE = """import unittest
import pytest
from answer import f

@pytest.fixture
def breaks():
    yield
    raise ValueError

def test_one(breaks): assert f() == 1
@pytest.mark.skip
def test_two(): assert f() == 2
def test_three(): pytest.skip("not here")
@pytest.mark.xfail
def test_four(): assert f() == 2
class Five(unittest.TestCase):
    @unittest.skip("not yet")
    def test_five(self): raise ValueError
    @unittest.expectedFailure
    def test_six(self): raise ValueError
    def test_seven(self): assert f() == 1
"""


async def test_pytest_runner_ignores_tests_that_the_file_skips(kind: str) -> None:
    section = {"type": "tests", "runner": "pytest", "sandbox": {"kind": kind, "seconds": 30}}
    async with start_scorer(**section, reward="share") as scorer:
        skip_call = "__import__('pytest').skip('no')"
        for code, (passed, total) in {"1": (1, 2), "0": (0, 2), skip_call: (0, 2)}.items():
            reward = await score_text(scorer, {"tests": PYTEST_FILE}, f"def f(): return {code}")
            assert (reward.detail["passed"], reward.detail["total"]) == (passed, total), reward.detail
            assert reward.value == passed / total
    async with start_scorer(**section) as scorer:
        passing_tests = PYTEST_FILE.replace("    raise ValueError\n\ndef", "\ndef")
        assert (await score_text(scorer, {"tests": passing_tests}, "def f(): return 1")).value == 1.0


@pytest.mark.parametrize("isolate", [True, False])
async def test_thread_left_by_an_answer_does_not_delay_its_score(kind: str, isolate: bool) -> None:
    code = (
        "import threading, time\nthreading.Thread(target=time.sleep, args=(600,)).start()\ndef f(): return 1"
    )
    tests = {"tests": "from answer import f\ndef test_f(): assert f() == 1"}
    for runner in ("python", "pytest"):
        sandbox = {"kind": kind, "seconds": 50}
        async with start_scorer(type="tests", runner=runner, isolate=isolate, sandbox=sandbox) as scorer:
            assert (await score_text(scorer, tests, code)).value == 1.0


async def test_isolated_answer_finds_no_tests_in_its_files(kind: str) -> None:
    code = "import os\ndef f(): return sorted(name for _, _, names in os.walk('.') for name in names)"
    async with start_scorer(type="tests", sandbox={"kind": kind, "seconds": 60}) as scorer:
        tests = "assert 'run_answer.py' in f()\nassert not {'tests.json', 'run_tests.py', 'key'} & set(f())"
        assert (await score_text(scorer, {"tests": tests}, code)).value == 1.0


async def test_endless_answers_score_zero_under_contention(kind: str) -> None:
    config = ScoringConfig(deadline=3.0, retries=0)
    sandbox = {"kind": kind, "seconds": 0.6, "concurrency": 1}

    async def load() -> list[Transcript]:
        return [make_transcript("while True: pass")]

    async with start_scorer(type="tests", sandbox=sandbox) as scorer:
        task = Task("t", {"tests": "assert True"})
        results = await asyncio.gather(*(score_sessions(scorer, task, ["s"], load, config) for _ in range(8)))
    assert {score.state for result in results for score in result.scores} == {ScoreState.SCORED}
    assert [reward.value for result in results for reward in result.rewards] == [0.0] * 8


async def test_tests_reward_supports_all_mode_and_custom_commands(kind: str) -> None:
    tests = {"tests": ["assert f(1) == 2", "assert f(2) == 3"]}
    async with start_scorer(type="tests", sandbox={"kind": kind}) as scorer:
        assert (await score_text(scorer, tests, "def f(x): return 2")).value == 0.0
        assert (await score_text(scorer, tests, "def f(x): return x + 1")).value == 1.0
    custom_tests = {"tests": "from answer import f\nassert f(1) == 2"}
    async with start_scorer(
        type="tests", runner=["python", "test_answer.py"], isolate=False, sandbox={"kind": kind}
    ) as scorer:
        assert (await score_text(scorer, custom_tests, "def f(x): return 2")).value == 1.0
        assert (await score_text(scorer, custom_tests, "def f(x): return 1")).value == 0.0


async def test_command_reward_uses_exit_code(kind: str, tmp_path: Path) -> None:
    script = tmp_path / "check.py"
    script.write_text(
        "import json, os\n"
        "answer = open(os.environ['INSTAR_ANSWER']).read()\n"
        "task = json.load(open(os.environ['INSTAR_TASK']))\n"
        "raise SystemExit(answer != task['expected'])\n"
    )
    section = {"type": "command", "command": ["python", "check.py"], "sandbox": {"kind": kind}}
    async with start_scorer(**section, files=[str(script)]) as scorer:
        first_version = scorer.version
        assert (await score_text(scorer, {"expected": "yes"}, "yes")).value == 1.0
        wrong = await score_text(scorer, {"expected": "yes"}, "no")
        assert (wrong.value, wrong.detail["reason"]) == (0.0, "exited with code 1")
    script.write_text("raise SystemExit(0)")
    async with start_scorer(**section, files=[str(script)]) as scorer:
        assert scorer.version != first_version
    with pytest.raises(
        ConfigError, match=r"reward.command does not run in the sandbox: missing-program was not found"
    ):
        async with start_scorer(**{**section, "command": ["missing-program"]}):
            pass


@pytest.mark.parametrize("program", ["./check.sh", "check.sh"])
async def test_command_reward_runs_a_listed_script(kind: str, program: str, tmp_path: Path) -> None:
    script = tmp_path / "check.sh"
    section = {"type": "command", "command": [program, "yes"], "sandbox": {"kind": kind}}
    script.write_text('#!/bin/sh\ntest "$(cat "$INSTAR_ANSWER")" = "$1"\n')
    async with start_scorer(**section, files=[str(script)]) as scorer:
        assert (await score_text(scorer, {}, "yes")).value == 1.0
        wrong = await score_text(scorer, {}, "no")
        assert (wrong.value, wrong.detail["reason"]) == (0.0, "exited with code 1")
    for first_line, message in {"true": "has no shebang line", "#!/no/sh": "/no/sh was not found"}.items():
        script.write_text(f"{first_line}\n")
        with pytest.raises(ConfigError, match=f"reward.command.*{message}"):
            async with start_scorer(**section, files=[str(script)]):
                pass
