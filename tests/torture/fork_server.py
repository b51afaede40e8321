"""Processes that start immediately: each is forked from one that has already imported its modules.

As a program, ``python -m tests.torture.fork_server module...`` imports the modules, forks a child for every
line on standard input, waits for the child to exit and prints its exit code.
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
"""Seconds for the imports, and for a child to exit after `wait` was called."""


class ChildSpec(msgspec.Struct):
    function: str
    """`module:name`, called without arguments; the process exits with 1 if it raises."""
    arguments: list[str]
    """The arguments in `sys.argv`."""
    env: dict[str, str]
    output: str
    """The file that receives standard output and standard error."""


class ForkServer:
    """A process that forks one child at a time."""

    def __init__(self, *modules: str, python: str = sys.executable) -> None:
        self._process = subprocess.Popen(
            [python, "-m", "tests.torture.fork_server", *modules],
            cwd=ROOT,
            env={**os.environ, **single_certificate_env(), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self.pid: int | None = None
        """The child's process id until `wait` has returned its exit code."""

    def start(self, spec: ChildSpec) -> None:
        assert self.pid is None
        assert self._process.stdin is not None
        self._process.stdin.write(msgspec.json.encode(spec) + b"\n")
        self._process.stdin.flush()
        self.pid = self._read_integer()

    def signal(self, number: int) -> None:
        assert self.pid is not None
        # The fork server reaps the child only when `wait` asks, so the id still belongs to this child.
        os.kill(self.pid, number)

    def wait(self) -> int:
        """Return the child's exit code; it is negative after a signal, as in `subprocess`."""
        assert self.pid is not None
        assert self._process.stdin is not None
        self._process.stdin.write(b"\n")
        self._process.stdin.flush()
        code = self._read_integer()
        self.pid = None
        return code

    def has_exited(self) -> bool:
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
        readable, _, _ = select.select([self._process.stdout], [], [], DEADLINE)
        assert readable, f"the fork server did not answer within {DEADLINE:g} s"
        line = self._process.stdout.readline()
        assert line, "the fork server has died"
        return int(line)


def run_child(spec: ChildSpec) -> NoReturn:
    code = 1
    try:
        output = os.open(spec.output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        for descriptor in (1, 2):
            os.dup2(output, descriptor)
        sys.stdout.reconfigure(line_buffering=True)  # pyright: ignore - it is a TextIOWrapper
        os.close(0)
        os.environ.update(spec.env)
        sys.argv = [spec.function, *spec.arguments]
        module, _, name = spec.function.partition(":")
        getattr(import_module(module), name)()
        code = 0
    except BaseException:  # noqa: BLE001 - the interpreter, too, prints whatever ends a program
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def main() -> None:
    for module in sys.argv[1:]:
        import_module(module)
    assert len(list(Path("/proc/self/task").iterdir())) == 1, "a process with threads must not be forked"
    while line := sys.stdin.buffer.readline():
        pid = os.fork()
        if pid == 0:
            run_child(msgspec.json.decode(line, type=ChildSpec))
        print(pid, flush=True)
        if not sys.stdin.buffer.readline():  # the parent has exited
            os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    main()
