"""An interpreter with a kill switch: ``python -m tests.torture.killer FOLDER -m module arguments...``

Runs the module as `python -m` would, and ends its own process by SIGKILL at the moments that
`plan.json` in the folder names, one after the other, each once. It is how a test reaches every state
of a training step without a hook in the product.
"""

from __future__ import annotations

import functools
import inspect
import os
import runpy
import signal
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import msgspec

OTHER_WITHIN = 30.0
RECOVERY = 0
"""The step of what happens before a process has taken up one."""


class Moment(msgspec.Struct, frozen=True):
    """Right after the point was passed in the step."""

    point: str
    step: int
    whole: bool = False
    """Whether the supervisor is killed first."""
    other: bool = False
    """Whether another process is killed instead. The folder's `other` holds its id; it is waited for, and
    used once."""


@dataclass(frozen=True)
class Point:
    target: str
    step_at: int | None = None
    """Place of the step among the arguments, where it is one of them."""
    where: tuple[int, str] | None = None
    """(place, value): only calls with this argument count."""
    before: bool = False
    """Whether it is passed when the call begins, and not when it has ended."""


STORE = "instar.store.sqlite:SqliteStore"
BACKEND = "instar.backends.local.backend:LocalBackend"
POINTS = {
    "claimed": Point(f"{STORE}.claim_step", 2),
    "submitted": Point(f"{STORE}.advance_step", 2, (3, "submitted")),
    "forward_backward": Point(f"{BACKEND}.forward_backward"),
    "optim_step": Point(f"{BACKEND}.optim_step"),
    "half a checkpoint": Point("instar.backends.local.state:write_tensors"),
    "checkpoint renamed": Point("instar.trainer.checkpoint:save_checkpoint"),
    "saved": Point(f"{STORE}.advance_step", 2, (3, "saved")),
    "version reserved": Point(f"{STORE}.reserve_version", 3),
    "artifact written": Point(f"{BACKEND}.publish"),
    "published": Point(f"{STORE}.publish"),
    "pushed": Point("instar.sync.files:FileSync.push"),
    "committed": Point(f"{STORE}.advance_step", 2, (3, "committed")),
}
IN_RECOVERY = {
    "state loaded": Point(f"{BACKEND}.load_state"),
    "tombstoned": Point(f"{STORE}.tombstone"),
    "released": Point(f"{STORE}.release_steps"),
}


class Switch:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.moments = msgspec.json.decode((folder / "plan.json").read_bytes(), type=list[Moment])
        self.step = RECOVERY

    def passed(self, name: str) -> None:
        number = len(list(self.folder.glob("fired-*")))
        if number == len(self.moments):
            return
        moment = self.moments[number]
        if (moment.point, moment.step) != (name, self.step):
            return
        (self.folder / f"fired-{number}").touch()
        if moment.whole:
            os.kill(os.getppid(), signal.SIGKILL)
        os.kill(self._other() if moment.other else os.getpid(), signal.SIGKILL)

    def _other(self) -> int:
        file = self.folder / "other"
        until = time.monotonic() + OTHER_WITHIN
        while not file.exists():
            assert time.monotonic() < until, "there is no other process to kill"
            time.sleep(0.01)
        process = int(file.read_text())
        file.unlink()
        return process


def arm(switch: Switch, points: Mapping[str, Point]) -> None:
    for name, point in points.items():
        module_name, _, path = point.target.partition(":")
        owner: Any = import_module(module_name)
        *parents, attribute = path.split(".")
        for parent in parents:
            owner = getattr(owner, parent)
        setattr(owner, attribute, _watched(getattr(owner, attribute), name, point, switch))


def _watched(function: Callable[..., Any], name: str, point: Point, switch: Switch) -> Callable[..., Any]:
    def before(arguments: tuple[Any, ...]) -> None:
        if point.step_at is not None:
            switch.step = arguments[point.step_at]
        if point.before:
            switch.passed(name)

    def after(arguments: tuple[Any, ...]) -> None:
        counts = point.where is None or arguments[point.where[0]] == point.where[1]
        if counts and not point.before:
            switch.passed(name)

    @functools.wraps(function)
    async def later(*arguments: Any, **named: Any) -> Any:
        before(arguments)
        result = await function(*arguments, **named)
        after(arguments)
        return result

    @functools.wraps(function)
    def at_once(*arguments: Any, **named: Any) -> Any:
        before(arguments)
        result = function(*arguments, **named)
        after(arguments)
        return result

    return later if inspect.iscoroutinefunction(function) else at_once


def name_other(folder: Path, process: int) -> None:
    """Tell the switch which other process there is."""
    scratch = folder / "other.new"
    scratch.write_text(str(process))
    scratch.rename(folder / "other")


def make_plan(folder: Path, moments: list[Moment]) -> None:
    folder.mkdir()
    (folder / "plan.json").write_bytes(msgspec.json.encode(moments))


def make_interpreter(folder: Path, moments: list[Moment]) -> Path:
    """A program to name as `backend.python`."""
    make_plan(folder, moments)
    program = folder / "python"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m tests.torture.killer "{folder}" "$@"\n')
    program.chmod(0o755)
    return program


def fired(folder: Path) -> int:
    return len(list(folder.glob("fired-*")))


def main() -> None:
    folder, flag, module, *arguments = sys.argv[1:]
    assert flag == "-m"
    arm(Switch(Path(folder)), POINTS | IN_RECOVERY)
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
