"""Processes that are up at once: each is forked from one that has imported what they need.

As a program, ``python -m tests.torture.fork_server module...`` imports the modules, then forks for every line
that it is sent, waits for the child's end and tells how it ended.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import traceback
from importlib import import_module
from pathlib import Path
from typing import NoReturn

import msgspec

from tests.torture.certificates import single_certificate_env

ROOT = Path(__file__).parents[2]
DEADLINE = 120.0
"""For its imports, and for the end of a child that is waited for."""


class ChildSpec(msgspec.Struct):
    function: str
    """`module:name`, called without arguments; what it raises ends the process with 1."""
    arguments: list[str]
    """What it finds in `sys.argv`."""
    env: dict[str, str]
    output: str
    """File that it writes to."""


class ForkServer:
    """Has one child at a time."""

    def __init__(self, *modules: str, python: str = sys.executable) -> None:
        self._process = subprocess.Popen(
            [python, "-m", "tests.torture.fork_server", *modules],
            cwd=ROOT,
            env={**os.environ, **single_certificate_env(), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self.pid: int | None = None
        """Of the child, if there is one whose end is not known yet."""

    def start(self, life: ChildSpec) -> None:
        assert self.pid is None
        assert self._process.stdin is not None
        self._process.stdin.write(msgspec.json.encode(life) + b"\n")
        self._process.stdin.flush()
        self.pid = self._read_integer()

    def signal(self, number: int) -> None:
        assert self.pid is not None
        # Not reaped before `wait` is told, so that the id is still this child's.
        os.kill(self.pid, number)

    def wait(self) -> int:
        """Its exit code, as `subprocess` has them."""
        assert self.pid is not None
        assert self._process.stdin is not None
        self._process.stdin.write(b"\n")
        self._process.stdin.flush()
        code = self._read_integer()
        self.pid = None
        return code

    def has_exited(self) -> bool:
        """Whether the child has ended."""
        assert self.pid is not None
        stat = Path(f"/proc/{self.pid}/stat").read_text()
        return stat.rsplit(")", 1)[1].split()[0] == "Z"

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        self.wait()

    def close(self) -> None:
        if self.pid is not None:
            self.kill()
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()

    def _read_integer(self) -> int:
        assert self._process.stdout is not None
        there, _, _ = select.select([self._process.stdout], [], [], DEADLINE)
        assert there, f"nothing came of it within {DEADLINE:g} s"
        line = self._process.stdout.readline()
        assert line, "the nursery has died"
        return int(line)


def run_child(life: ChildSpec) -> NoReturn:
    code = 1
    try:
        output = os.open(life.output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        for descriptor in (1, 2):
            os.dup2(output, descriptor)
        sys.stdout.reconfigure(line_buffering=True)  # pyright: ignore - it is a TextIOWrapper
        os.close(0)
        os.environ.update(life.env)
        sys.argv = [life.function, *life.arguments]
        module, _, name = life.function.partition(":")
        getattr(import_module(module), name)()
        code = 0
    except BaseException:  # noqa: BLE001 - as the interpreter does
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def main() -> None:
    for module in sys.argv[1:]:
        import_module(module)
    assert len(list(Path("/proc/self/task").iterdir())) == 1, "a process with threads is not to be forked"
    while line := sys.stdin.buffer.readline():
        pid = os.fork()
        if pid == 0:
            run_child(msgspec.json.decode(line, type=ChildSpec))
        print(pid, flush=True)
        if not sys.stdin.buffer.readline():  # who asked for the child is gone
            os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    main()
