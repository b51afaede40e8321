"""Tests that submissions that attack the machine are stopped, get no reward and do no damage."""

from __future__ import annotations

import asyncio
import socket
import tempfile
import uuid
from pathlib import Path

import pytest

from tests.unit.rewards.rules import score_text, start_scorer
from tests.unit.rewards.sandboxes import find_processes, list_names, list_sandbox_params

MAX_PROCESSES = 32
LIMITS = {"seconds": 3.0, "memory_mb": 256, "processes": MAX_PROCESSES, "files_mb": 16, "output_kb": 64}
TESTS = {"tests": ["assert f(1) == 2"]}

ATTACKS = {
    "reads a secret": "SECRET = open({secret!r}).read()",
    "lists a home folder": "import os\nassert os.listdir({home!r})",
    "opens a socket": "import socket\nsocket.create_connection(('127.0.0.1', {port}), 2)",
    "forks endlessly": """
import os
while True:
    try:
        os.fork()
    except OSError:
        pass
""",
    "starts threads endlessly": """
import threading, time
while True:
    try:
        threading.Thread(target=time.sleep, args=(60,)).start()
    except RuntimeError:
        time.sleep(0.01)
""",
    "exhausts memory": "x = []\nwhile True: x.append(bytearray(10**7))",
    "exhausts memory with many small processes": """
import os, time
for _ in range(20):
    if os.fork() == 0:
        x = os.urandom(40 * 2**20)
        time.sleep(60)
time.sleep(60)
""",
    "exhausts memory with shared mappings": """
import mmap, os, time
for _ in range(20):
    if os.fork() == 0:
        x = mmap.mmap(-1, 40 * 2**20)
        x.write(os.urandom(40 * 2**20))
        time.sleep(60)
time.sleep(60)
""",
    "fills the disk": "n = 0\nwhile True:\n    n += 1\n    open(f'f{{n}}', 'wb').write(bytes(10**6))",
    "fills the disk with deleted files": """
import os
kept = []
while True:
    kept.append(open('f', 'wb'))
    kept[-1].write(os.urandom(10**6))
    kept[-1].flush()
    os.unlink('f')
""",
    "fills the temporary folder": """
import tempfile
while True:
    with tempfile.NamedTemporaryFile(delete=False) as file:
        file.write(bytes(10**6))
""",
    "creates empty files endlessly": "n = 0\nwhile True:\n    n += 1\n    open(f'f{{n}}', 'w').close()",
    "writes an endless file": "with open('f', 'wb') as file:\n    while True: file.write(bytes(10**6))",
    "prints endlessly": "while True: print('x' * 1000)",
    "sleeps past the time limit": "import time\ntime.sleep(60)",
    "ignores SIGTERM": """
import signal, time
for number in range(1, 32):
    if number not in (signal.SIGKILL, signal.SIGSTOP):
        signal.signal(number, signal.SIG_IGN)
while True: time.sleep(1)
""",
    "becomes a daemon": """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        time.sleep(60)
    os._exit(0)
os._exit(0)
""",
    "kills all processes": "import os, signal, time\nos.kill(-1, signal.SIGKILL)\ntime.sleep(60)",
    "prints a false success message": "print('1 passed')\nimport os\nos._exit(0)",
}


@pytest.mark.timeout(120)
@pytest.mark.parametrize("kind", list_sandbox_params())
@pytest.mark.parametrize("attack", ATTACKS)
async def test_attack_fails_and_leaves_no_trace(
    kind: str, attack: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sandbox_parent = tmp_path / "folders"
    sandbox_parent.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(sandbox_parent))
    marker = uuid.uuid4().hex
    secret = tmp_path / "id_ed25519"
    secret.write_text("the-private-key")
    with socket.create_server(("127.0.0.1", 0)) as server:
        code = ATTACKS[attack].format(secret=str(secret), home=str(tmp_path), port=server.getsockname()[1])
        server.setblocking(False)
        # Every process of the job has the file name in its arguments, so `find_processes` finds it.
        section = {"type": "tests", "file": f"{marker}.py", "sandbox": {"kind": kind, **LIMITS}}
        async with start_scorer(**section) as scorer:
            score_task = asyncio.create_task(score_text(scorer, TESTS, f"```python\n{code}\n```"))
            peak_process_count = 0
            while not score_task.done():
                peak_process_count = max(peak_process_count, len(find_processes(marker)))
                await asyncio.wait([score_task], timeout=0.2)
            reward = await score_task
        with pytest.raises(BlockingIOError):
            server.accept()
    assert reward.value == 0.0
    assert reward.detail["reason"]
    assert peak_process_count <= MAX_PROCESSES + 6  # bubblewrap or the launcher, and the tests, add a few
    assert find_processes(marker) == []
    assert list_names(tmp_path) == ["folders", "id_ed25519"]
    assert list_names(sandbox_parent) == []
    assert secret.read_text() == "the-private-key"


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", list_sandbox_params())
async def test_correct_answer_passes_under_the_same_limits(kind: str) -> None:
    async with start_scorer(type="tests", sandbox={"kind": kind, **LIMITS}) as scorer:
        scores = [score_text(scorer, TESTS, "def f(x): return x + 1") for _ in range(3)]
        assert [reward.value for reward in await asyncio.gather(*scores)] == [1.0] * 3
