"""An interpreter with a kill switch: ``python -m tests.torture.kill_switch FOLDER -m module arguments...``

Runs the module like `python -m` and kills its own process with SIGKILL once at each of the points listed in
`FOLDER/plan.json`, in order. Tests use it to interrupt a training step in every state without hooks in the
product.
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

OTHER_PID_TIMEOUT_SECONDS = 30.0
RECOVERY_STEP = 0
"""The step number of kills before the process starts its first step."""


class PlannedKill(msgspec.Struct, frozen=True):
    """A kill when ``point`` is reached in ``step``."""

    point: str
    step: int
    kills_supervisor: bool = False
    """Also kill the supervisor, before the process itself."""
    kills_other: bool = False
    """Kill a different process instead of this one. The switch waits for the file `other` in its folder,
    reads the pid from it and deletes it."""


@dataclass(frozen=True)
class KillPoint:
    """A call at which the process can be killed."""

    target: str
    """The function, as `module:name` or `module:Class.method`."""
    step_argument: int | None = None
    """The position of the step number in the arguments, if it is passed."""
    argument_filter: tuple[int, str] | None = None
    """(position, value): only calls with this argument reach the point."""
    fires_before_call: bool = False
    """Fire before the call instead of after it."""


STORE = "instar.store.sqlite:SqliteStore"
BACKEND = "instar.backends.local.backend:LocalBackend"
STEP_POINTS = {
    "claimed": KillPoint(f"{STORE}.claim_step", 2),
    "submitted": KillPoint(f"{STORE}.advance_step", 2, (3, "submitted")),
    "forward_backward": KillPoint(f"{BACKEND}.forward_backward"),
    "optim_step": KillPoint(f"{BACKEND}.optim_step"),
    "tensors written": KillPoint("instar.backends.local.state:write_tensors"),
    "checkpoint renamed": KillPoint("instar.trainer.checkpoint:save_checkpoint"),
    "saved": KillPoint(f"{STORE}.advance_step", 2, (3, "saved")),
    "version reserved": KillPoint(f"{STORE}.reserve_version", 3),
    "artifact written": KillPoint(f"{BACKEND}.publish"),
    "published": KillPoint(f"{STORE}.publish"),
    "pushed": KillPoint("instar.sync.files:FileSync.push"),
    "committed": KillPoint(f"{STORE}.advance_step", 2, (3, "committed")),
}
RECOVERY_POINTS = {
    "state loaded": KillPoint(f"{BACKEND}.load_state"),
    "tombstoned": KillPoint(f"{STORE}.tombstone"),
    "released": KillPoint(f"{STORE}.release_steps"),
}


class KillSwitch:
    """Carries out the plan in a folder. A file per fired kill keeps the count across restarts."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.plan = msgspec.json.decode((folder / "plan.json").read_bytes(), type=list[PlannedKill])
        self.step = RECOVERY_STEP

    def fire_if_due(self, name: str) -> None:
        """Kill the process if the next kill in the plan is for this point in the current step."""
        fired = count_fired_kills(self.folder)
        if fired == len(self.plan):
            return
        kill = self.plan[fired]
        if (kill.point, kill.step) != (name, self.step):
            return
        (self.folder / f"fired-{fired}").touch()
        if kill.kills_supervisor:
            os.kill(os.getppid(), signal.SIGKILL)
        os.kill(self._take_other_pid() if kill.kills_other else os.getpid(), signal.SIGKILL)

    def _take_other_pid(self) -> int:
        path = self.folder / "other"
        deadline = time.monotonic() + OTHER_PID_TIMEOUT_SECONDS
        while not path.exists():
            assert time.monotonic() < deadline, (
                f"{path} was not written within {OTHER_PID_TIMEOUT_SECONDS:g} s"
            )
            time.sleep(0.01)
        pid = int(path.read_text())
        path.unlink()
        return pid


def install_kill_points(switch: KillSwitch, points: Mapping[str, KillPoint]) -> None:
    for name, point in points.items():
        module_name, _, path = point.target.partition(":")
        owner: Any = import_module(module_name)
        *parents, attribute = path.split(".")
        for parent in parents:
            owner = getattr(owner, parent)
        setattr(owner, attribute, _wrap_function(getattr(owner, attribute), name, point, switch))


def _wrap_function(
    function: Callable[..., Any], name: str, point: KillPoint, switch: KillSwitch
) -> Callable[..., Any]:
    def before_call(arguments: tuple[Any, ...]) -> None:
        if point.step_argument is not None:
            switch.step = arguments[point.step_argument]
        if point.fires_before_call:
            switch.fire_if_due(name)

    def after_call(arguments: tuple[Any, ...]) -> None:
        matches = (
            point.argument_filter is None or arguments[point.argument_filter[0]] == point.argument_filter[1]
        )
        if matches and not point.fires_before_call:
            switch.fire_if_due(name)

    @functools.wraps(function)
    async def call_async(*arguments: Any, **kwargs: Any) -> Any:
        before_call(arguments)
        result = await function(*arguments, **kwargs)
        after_call(arguments)
        return result

    @functools.wraps(function)
    def call_sync(*arguments: Any, **kwargs: Any) -> Any:
        before_call(arguments)
        result = function(*arguments, **kwargs)
        after_call(arguments)
        return result

    return call_async if inspect.iscoroutinefunction(function) else call_sync


def write_other_pid(folder: Path, pid: int) -> None:
    """Set the process that the next kill with ``kills_other`` will hit."""
    temporary_path = folder / "other.new"
    temporary_path.write_text(str(pid))
    temporary_path.rename(folder / "other")


def write_plan(folder: Path, plan: list[PlannedKill]) -> None:
    folder.mkdir()
    (folder / "plan.json").write_bytes(msgspec.json.encode(plan))


def write_interpreter(folder: Path, plan: list[PlannedKill]) -> Path:
    """Write the plan and a script to use as `backend.python`. Return the path of the script."""
    write_plan(folder, plan)
    program = folder / "python"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m tests.torture.kill_switch "{folder}" "$@"\n')
    program.chmod(0o755)
    return program


def count_fired_kills(folder: Path) -> int:
    return len(list(folder.glob("fired-*")))


def main() -> None:
    folder, flag, module, *arguments = sys.argv[1:]
    assert flag == "-m"
    install_kill_points(KillSwitch(Path(folder)), STEP_POINTS | RECOVERY_POINTS)
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
