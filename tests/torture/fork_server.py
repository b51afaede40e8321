"""Start processes quickly by forking them from a process that has already imported their modules.

``python -m tests.torture.fork_server module...`` imports the modules and reads pairs of lines from standard
input: a `ChildSpec` in JSON makes it fork a child and print its pid, and an empty line makes it wait for the
child and print its exit code.
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

from tests.torture.certificates import make_single_certificate_env

ROOT = Path(__file__).parents[2]
TIMEOUT_SECONDS = 120.0
"""The time allowed for the imports, and for a child to exit after `wait` is called."""


class ChildSpec(msgspec.Struct):
    function: str
    """`module:name`, called without arguments. If it raises, the process exits with code 1."""
    arguments: list[str]
    """The rest of `sys.argv`."""
    env: dict[str, str]
    output: str
    """The file to which standard output and standard error are appended."""


class ForkServer:
    """A process that forks one child at a time."""

    def __init__(self, *modules: str, python: str = sys.executable) -> None:
        self._process = subprocess.Popen(
            [python, "-m", "tests.torture.fork_server", *modules],
            cwd=ROOT,
            env={
                **os.environ,
                **make_single_certificate_env(),
                "PYTHONPATH": str(ROOT),
                "OMP_NUM_THREADS": "1",
            },
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self.pid: int | None = None
        """The child's pid, or None if no child is running or waiting to be reaped."""

    def start(self, spec: ChildSpec) -> None:
        assert self.pid is None
        assert self._process.stdin is not None
        self._process.stdin.write(msgspec.json.encode(spec) + b"\n")
        self._process.stdin.flush()
        self.pid = self._read_integer()

    def signal(self, number: int) -> None:
        assert self.pid is not None
        # The fork server reaps the child only in `wait`, so its pid cannot have been reused.
        os.kill(self.pid, number)

    def wait(self) -> int:
        """Wait for the child and return its exit code (negative after a signal, as in `subprocess`)."""
        assert self.pid is not None
        assert self._process.stdin is not None
        self._process.stdin.write(b"\n")
        self._process.stdin.flush()
        code = self._read_integer()
        self.pid = None
        return code

    def has_exited(self) -> bool:
        """True if the child has exited and waits to be reaped."""
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
        readable, _, _ = select.select([self._process.stdout], [], [], TIMEOUT_SECONDS)
        assert readable, f"the fork server did not respond within {TIMEOUT_SECONDS:g} s"
        line = self._process.stdout.readline()
        assert line, "the fork server has exited"
        return int(line)


def run_child(spec: ChildSpec) -> NoReturn:
    """Call the function in the forked process, and exit."""
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
    except BaseException:  # noqa: BLE001 - print any exception, as the interpreter does
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
