"""Start runs and roles quickly by forking them from a process that has already imported their modules.

Use `RoleServer.program` as the interpreter of a run. It passes its arguments, environment and open files to
the server, forwards signals to the forked process, and exits with the same status. If one of the two is
killed, so is the other. The program is also the `sys.executable` of the forked process, so a supervisor's
roles are forked, too.

``python -m tests.torture.role_server FOLDER MODULES PADDING`` runs the server.
"""

from __future__ import annotations

import gc
import json
import os
import random
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from fcntl import F_DUPFD_CLOEXEC, fcntl
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

from tests.torture.certificates import make_single_certificate_env

ROOT = Path(__file__).parents[2]
START_TIMEOUT_SECONDS = 180.0
MAX_MESSAGE_BYTES = 200_000
MAX_FDS = 64
MODULES = (
    "instar.cli.train",
    *(
        f"instar.cluster.roles.{role}"
        for role in ("engine", "gate", "gateway", "rewards", "rollout", "trainer")
    ),
    "tests.torture.lineage_backend",
    "tests.torture.workload",
)
"""The modules that the server imports before it forks. They import most of what a run needs."""
PROGRAM_FLAGS = "-IS"
PROGRAM = """#!{python} {flags}
import json, os, signal, socket, sys

server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
server.connect({address!r})
fds = [int(name) for name in os.listdir("/proc/self/fd") if int(name) not in (0, server.fileno())]
fds = [fd for fd in fds if os.path.exists(f"/proc/self/fd/{{fd}}")]
program, *arguments = sys.argv
request = dict(program=program, arguments=arguments, env=dict(os.environ), cwd=os.getcwd(), fds=fds)
socket.send_fds(server, [json.dumps(request).encode()], fds)
pid = int(server.recv(100))
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
    signal.signal(number, lambda number, _: os.kill(pid, number))
status = int(server.recv(100) or -signal.SIGKILL)
if status < 0:
    if status != -signal.SIGKILL:
        signal.signal(-status, signal.SIG_DFL)
    os.kill(os.getpid(), -status)
os._exit(status)
"""


def is_program(arguments: Sequence[str]) -> bool:
    """True if these are the arguments of `RoleServer.program` rather than of a role or run."""
    return arguments[1:2] == [PROGRAM_FLAGS]


class RoleServer:
    """The server process, and the program that requests forks from it."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="instar-roles-")
        folder = Path(self._folder.name)
        self.program = folder / "python"
        address = str(folder / "socket")
        self.program.write_text(PROGRAM.format(python=sys.executable, flags=PROGRAM_FLAGS, address=address))
        self.program.chmod(0o755)
        padding = "-" * 500  # makes room for a role's arguments in the process table
        self._process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "tests.torture.role_server",
                str(folder),
                ",".join(MODULES),
                padding,
            ],
            cwd=ROOT,
            env={
                **os.environ,
                **make_single_certificate_env(),
                "PYTHONPATH": str(ROOT),
                "OMP_NUM_THREADS": "1",
            },
            stdin=subprocess.PIPE,
        )
        deadline = time.monotonic() + START_TIMEOUT_SECONDS
        while not (folder / "ready").exists():
            assert self._process.poll() is None, "the role server has exited"
            assert time.monotonic() < deadline, (
                f"the role server did not start within {START_TIMEOUT_SECONDS:g} s"
            )
            time.sleep(0.05)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._folder.cleanup()


class _Server:
    def __init__(self, listener: socket.socket) -> None:
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ, self._accept)
        self._selector.register(sys.stdin, selectors.EVENT_READ, self._exit)
        self._listener = listener
        self._children: dict[socket.socket, int] = {}

    def serve(self) -> NoReturn:
        while True:
            for key, _ in self._selector.select():
                key.data(key.fileobj)

    def _exit(self, _: Any) -> NoReturn:
        """Kill all children and exit, because the parent has exited."""
        for pid in self._children.values():
            os.kill(pid, signal.SIGKILL)
        os._exit(0)

    def _accept(self, _: Any) -> None:
        """Fork a process for a program that has connected, and send the program its pid."""
        connection, _ = self._listener.accept()
        data, fds, _, _ = socket.recv_fds(connection, MAX_MESSAGE_BYTES, MAX_FDS)
        if not data:  # the program was killed
            connection.close()
            return
        pid = os.fork()
        if pid == 0:
            _run_role(json.loads(data), fds)
        for fd in fds:
            os.close(fd)
        self._children[connection] = pid
        self._selector.register(connection, selectors.EVENT_READ, self._kill)
        pidfd = os.pidfd_open(pid)
        self._selector.register(pidfd, selectors.EVENT_READ, partial(self._report_exit, connection))
        _send(connection, pid)

    def _kill(self, connection: socket.socket) -> None:
        """Kill the forked process, because the program that requested it was killed."""
        os.kill(self._children[connection], signal.SIGKILL)
        self._selector.unregister(connection)

    def _report_exit(self, connection: socket.socket, pidfd: int) -> None:
        """Reap the child and send its exit status to the program, if that is still running."""
        _, status = os.waitpid(self._children.pop(connection), 0)
        self._selector.unregister(pidfd)
        os.close(pidfd)
        if connection in self._selector.get_map():
            self._selector.unregister(connection)
            _send(connection, os.waitstatus_to_exitcode(status))
        connection.close()


def _send(connection: socket.socket, number: int) -> None:
    try:
        connection.send(str(number).encode())
    except OSError:
        return  # the program was killed


def _run_role(request: dict[str, Any], fds: list[int]) -> NoReturn:
    """Run the requested module in the forked process, with the program's environment and files, and exit."""
    code: int | str | None = 1
    try:
        os.setsid()
        _move_fds(fds, request["fds"])
        os.environ.clear()
        os.environ.update(request["env"])
        os.chdir(request["cwd"])
        flag, module, *arguments = request["arguments"]
        assert flag == "-m"
        sys.argv = [module, *arguments]
        sys.executable = request["program"]
        sys.orig_argv = [sys.executable, *request["arguments"]]
        _set_command_line(sys.orig_argv)
        random.seed()
        import_module("instar.types")._id_generator.seed(os.urandom(32))
        import_module("tests.torture.hooks.sitecustomize")
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as exit_request:
        code = exit_request.code
    except BaseException:  # noqa: BLE001 - print any exception, as the interpreter does
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else int(code is not None))


def _move_fds(fds: list[int], targets: list[int]) -> None:
    """Move the descriptors to the targets, close all others and open /dev/null as standard input."""
    min_fd = max(targets) + 1
    moved = [fcntl(fd, F_DUPFD_CLOEXEC, min_fd) for fd in fds]
    for fd in map(int, os.listdir("/proc/self/fd")):  # noqa: PTH208 - these are numbers
        if fd not in moved:
            try:
                os.close(fd)
            except OSError:
                continue  # the descriptor of the listing itself
    os.open(os.devnull, os.O_RDONLY)
    for fd, target in zip(moved, targets, strict=True):
        os.dup2(fd, target)
        os.close(fd)


def _set_command_line(arguments: list[str]) -> None:
    """Overwrite this process's command line in the process table. Tests find a run's processes by it."""
    fields = Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()
    start, end = int(fields[45]), int(fields[46])
    text = b"".join(argument.encode() + b"\0" for argument in arguments)
    assert len(text) < end - start, "the padding is too short"
    with Path("/proc/self/mem").open("r+b", buffering=0) as memory:
        memory.seek(start)
        memory.write(text.ljust(end - start, b"\0"))


def main() -> None:
    folder, modules, _ = sys.argv[1:]
    for module in modules.split(","):
        import_module(module)
    gc.freeze()  # keep the garbage collector of forked processes from copying shared memory
    assert len(list(Path("/proc/self/task").iterdir())) == 1, "a process with threads must not be forked"
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(str(Path(folder) / "socket"))
    listener.listen(64)
    (Path(folder) / "ready").touch()
    _Server(listener).serve()


if __name__ == "__main__":
    main()
