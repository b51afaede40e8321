"""A run that is killed, stopped, and left without disk space or with a wrong clock at random moments."""

from __future__ import annotations

import os
import random
import shutil
import sqlite3
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from tests.postgres import PostgresTestServer
from tests.torture.certificates import single_certificate_env
from tests.torture.faults import HOOKS, Clock, Disk, FileSizeLimit, SmallDisk, stop_process
from tests.torture.hooks.sitecustomize import BUG_ENV, CLOCK_ENV
from tests.torture.lineage_backend import read_lineage
from tests.torture.postgres_run import PostgresRun
from tests.torture.run_process import (
    ROLES,
    ROOT,
    WORKLOAD_MODULE,
    Fingerprint,
    RunProcess,
    list_descendants,
    make_config,
)

KILLS = {
    "trainer": 9,
    "gateway": 3,
    "rollout": 3,
    "engine": 2,
    "rewards": 2,
    "supervisor": 1,
    "process tree": 1,
}
"""The weights of the victims of SIGKILL."""
OTHER_FAULTS = {"stop": 3, "full disk": 2, "clock jump": 2}
KILLS_OF_ALL = ("supervisor", "process tree")
KILLS_OF_TRAFFIC = ("gateway", "rollout", "engine")
"""The victims that are killed while agents run."""
MAX_RESTARTS = {"local": 4, "ray": 6}
"""The most kills of one role under one supervisor, by runner. The supervisor gives up on a role that crashes
more than six times, and the last restarts take longer than starting a run anew, except on Ray."""
RAY_SHARE = 0.3
"""The factor of the weights of kills after which Ray itself must be started again."""
MAX_FAILURES = 20
"""The number of times that a run may fail by itself, for example because its disk was full for too long."""
READY_SHARE = 0.6
"""The share of faults that wait until all roles run. The others may hit a role that starts or recovers."""
MAX_PAUSE_SECONDS = 1.0
MAX_STEP_SECONDS = 0.4
"""The longest time between the start of a step or session and a kill in it."""
CALL_SECONDS = 0.12
"""The time that each call to the backend takes at least, so that a step lasts longer than the above."""
MAX_STOP_SECONDS = 3.0
MAX_FULL_SECONDS = 3.0
JUMPS = (-86_400, -3600, -60, -2, 2, 60, 3600, 86_400)
"""The jumps of the clock, in seconds."""
DEADLINE = 240.0
"""Seconds until the roles are ready, until the next step begins, and until the run ends without faults."""
RUN_DISK_MEGABYTES = 64
SERVER_DISK_MEGABYTES = 320
OPEN_STEP_SQL = (
    "SELECT 1 FROM steps WHERE state = 'saved' OR (state IN ('claimed', 'submitted') AND version IS NULL)"
)
"""A step that is not saved but has a version waits for the checkpoint of a later step."""


@dataclass(frozen=True)
class Setup:
    """The parts that a tortured run is made of."""

    store: Literal["sqlite", "postgres"] = "sqlite"
    runner: Literal["local", "ray"] = "local"
    mode: Literal["sync", "async"] = "sync"

    @property
    def name(self) -> str:
        return f"{self.store} {self.runner} {self.mode}"


@dataclass(frozen=True)
class Torture:
    steps: int
    max_kills: int
    """The number of kills after which the run is left alone, so that it ends."""
    faults: Mapping[str, float] = field(default_factory=lambda: {**KILLS, **OTHER_FAULTS})
    bug: str | None = None
    """The name of a bug to plant in the run."""
    python: str = sys.executable
    """The program that starts the run and its roles, such as that of a `RoleServer`. On Ray, which starts its
    own processes, it starts only the trainer."""
    has_small_disk: bool = field(default_factory=lambda: os.getuid() == 0)
    """True if disks are filled. Otherwise, the size of files is limited, which needs no rights."""


@dataclass
class TortureResult:
    kills: dict[str, int] = field(default_factory=dict[str, int])
    """The number of kills by victim."""
    kills_in_step: int = 0
    """The number of kills that ended the trainer between the claim and the commit of a step."""
    other_faults: dict[str, int] = field(default_factory=dict[str, int])
    failures: int = 0
    """The number of times that the run failed by itself and was resumed."""
    acknowledged: int = 0
    lost: list[str] = field(default_factory=list[str])
    """The replies that an agent received and that are not in the store."""
    twice: list[str] = field(default_factory=list[str])
    """The samples that are in the final weights twice."""
    problem: str = ""
    """The first other difference from an undisturbed run, or an empty text."""
    seconds: float = 0.0

    @property
    def kill_count(self) -> int:
        return sum(self.kills.values())

    @property
    def is_correct(self) -> bool:
        return not (self.lost or self.twice or self.problem)


def make_tortured_config(folder: Path, model: Path, setup: Setup, torture: Torture) -> dict[str, Any]:
    trainer = {} if setup.mode == "sync" else {"mode": "async", "checkpoint_every": 2, "keep_checkpoints": 1}
    config = make_config(folder, model, steps=torture.steps, **trainer)
    config["dir"] = str(folder / "disk" / "run")
    config["backend"] = {
        "type": "plugin",
        "name": "tests.torture.lineage_backend:LineageBackend",
        "args": {"threads": 1, "lora": {"rank": 4}, "call_seconds": CALL_SECONDS},
        "python": torture.python,
    }
    config["reward"] = {"type": "plugin", "name": f"{WORKLOAD_MODULE}:BackgroundRule"}
    config["rollout"]["retries"] = 50
    if setup.runner == "ray":
        config["cluster"] = {"type": "ray", "env": [CLOCK_ENV, BUG_ENV]}
    return config


class TorturedRun:
    """A run in a new folder. Use it as a context manager, which ends the run and removes its disks."""

    def __init__(self, folder: Path, model: Path, setup: Setup, torture: Torture, seed: str) -> None:
        self.folder = folder
        self.result = TortureResult()
        self._setup = setup
        self._torture = torture
        self._rng = random.Random(seed)
        self._resources = ExitStack()
        self._restarts: Counter[str] = Counter()
        self._is_aborted = False
        (folder / "disk").mkdir(parents=True)
        self._clock = Clock(folder / "clock")
        self._disks: list[Disk] = []
        self._add_disk(folder / "disk", RUN_DISK_MEGABYTES)
        self._server: PostgresTestServer | None = None
        config = make_tortured_config(folder, model, setup, torture)
        if setup.store == "postgres":
            self._server = self._start_server()
            self._run: RunProcess = PostgresRun(folder, config, self._server)
        else:
            self._run = RunProcess(folder, config)
        self._run.roles = (*ROLES, "rewards")
        if setup.runner == "local":
            self._run.python = torture.python
        if not self._disks:
            self._disks.append(FileSizeLimit(self._list_tree))

    def _add_disk(self, folder: Path, megabytes: int) -> None:
        if self._torture.has_small_disk:
            self._disks.append(SmallDisk(folder, megabytes))
            self._resources.callback(self._disks[-1].remove)

    def _start_server(self) -> PostgresTestServer:
        # Not in the folder of the run, which another user may not enter.
        folder = Path(tempfile.mkdtemp(prefix="instar-pg-", dir="/tmp"))
        self._resources.callback(shutil.rmtree, folder, ignore_errors=True)
        self._add_disk(folder, SERVER_DISK_MEGABYTES)
        server = PostgresTestServer(folder=folder)
        self._resources.callback(server.remove)
        return server

    def __enter__(self) -> TorturedRun:
        return self

    def __exit__(self, *error: object) -> None:
        self.abort()
        self._resources.close()

    def abort(self) -> None:
        """End the run if it has not ended. It is not resumed."""
        self._is_aborted = True
        if self._run.process is not None and not self._run.has_exited():
            self._run.kill_tree()

    # --- the life of the run -----------------------------------------------------------------------

    def run_undisturbed(self) -> Fingerprint:
        self._start()
        self._run.finish(DEADLINE)
        return self._run.fingerprint()

    def run(
        self,
        reference: Fingerprint | None,
        *,
        should_end: Callable[[], bool] = lambda: False,
        report: Callable[[str], None] = lambda _: None,
    ) -> TortureResult:
        """Inject faults until the run ends or has had enough of them, and compare it with the reference."""
        began = time.monotonic()
        try:
            self._start()
            while not self._is_finished():
                if should_end() or self.result.kill_count >= self._torture.max_kills:
                    self._run.wait_until(lambda: False, DEADLINE)
                elif fault := self._inject():
                    self._write_log(fault)
                    report(f"{fault}, {self._run.progress()}")
            self._check(reference)
        except Exception as error:  # noqa: BLE001 - whatever goes wrong in a run is what the torture looks for
            self.result.problem = f"{type(error).__name__}: {error}"
            self._write_log(self.result.problem)
        self.result.seconds = time.monotonic() - began
        return self.result

    def _start(self) -> None:
        path = os.pathsep.join(map(str, (HOOKS, ROOT)))
        bug = {} if self._torture.bug is None else {BUG_ENV: self._torture.bug}
        env = {"PYTHONPATH": path, "RAY_worker_niceness": "0", **single_certificate_env()}
        self._restarts.clear()
        self._run.start(resume=(self._run.run_dir / "config.json").exists(), **env, **self._clock.env, **bug)

    def _is_finished(self) -> bool:
        """True if the run has ended successfully. A run that has failed is resumed."""
        if not self._run.has_exited():
            return False
        if self._run.wait() == 0:
            return True
        assert not self._is_aborted, "the run was aborted"
        self.result.failures += 1
        self._write_log(f"the run failed: {self._run.output.read_text(errors='replace')[-300:]}")
        assert self.result.failures <= MAX_FAILURES, f"the run keeps failing\n{self._run.explain()}"
        self._start()
        return False

    def _check(self, reference: Fingerprint | None) -> None:
        run, result = self._run, self.result
        result.acknowledged = len(run.list_acknowledged())
        result.lost = run.list_lost()
        (state,) = run.query("SELECT state_path FROM steps ORDER BY step DESC LIMIT 1")[0]
        trained = [key for keys in read_lineage(Path(state) / "backend") for key in keys]
        result.twice = sorted(key for key, count in Counter(trained).items() if count > 1)
        claims = {key for (key,) in run.query("SELECT sample_key FROM claims WHERE outcome = 'trained'")}
        assert claims.issuperset(trained), f"trained without a claim: {sorted(set(trained) - claims)}"
        if reference is None:
            run.assert_consistent()
        else:
            different = run.fingerprint().list_differences(reference)
            assert not different, f"the result differs from that of an undisturbed run: {different}"

    def _write_log(self, text: str) -> None:
        with (self.folder / "faults.txt").open("a") as file:
            file.write(f"{time.strftime('%H:%M:%S')} {text}\n")

    # --- faults ------------------------------------------------------------------------------------

    def _inject(self) -> str | None:
        """Inject a random fault and return its description, or None if the run exited before."""
        if self._rng.random() < READY_SHARE and not self._run.wait_until(self._run.is_ready, DEADLINE):
            return None
        faults, runner = dict(self._torture.faults), self._setup.runner
        if runner == "ray":
            faults |= {name: RAY_SHARE * faults.get(name, 0) for name in KILLS_OF_ALL}
        (fault,) = self._rng.choices(list(faults), list(faults.values()))
        is_in_step = fault == "trainer"
        if self._restarts[fault] == MAX_RESTARTS[runner]:
            fault = self._rng.choice(KILLS_OF_ALL)
        condition = (
            self._is_in_step
            if is_in_step
            else (self._has_open_session if fault in KILLS_OF_TRAFFIC else None)
        )
        if condition is None:
            time.sleep(self._rng.uniform(0, MAX_PAUSE_SECONDS))
        elif self._run.wait_until(condition, DEADLINE):
            time.sleep(self._rng.uniform(0, MAX_STEP_SECONDS))
        if self._run.has_exited():
            return None
        if fault not in OTHER_FAULTS:
            return self._kill(fault)
        inject = {"stop": self._stop, "full disk": self._fill_disk, "clock jump": self._jump}[fault]
        description = inject()
        self.result.other_faults[fault] = self.result.other_faults.get(fault, 0) + 1
        return description

    def _is_in_step(self) -> bool:
        return self._has_recovered() and bool(self._run.query(OPEN_STEP_SQL))

    def _has_open_session(self) -> bool:
        try:
            return bool(self._run.query("SELECT 1 FROM sessions WHERE status = 'open' LIMIT 1"))
        except sqlite3.OperationalError:
            return False  # the store does not exist yet

    def _has_recovered(self) -> bool:
        """True if the trainer runs and has released the steps that an earlier trainer left open."""
        try:
            trainers = self._run.query("SELECT pid, doing FROM endpoints WHERE role = 'trainer'")
        except sqlite3.OperationalError:
            return False  # the store does not exist yet
        return any(
            doing.startswith(("waiting", "step")) and self._run.find_role(pid) for pid, doing in trainers
        )

    def _kill(self, victim: str) -> str | None:
        has_recovered = victim in ("trainer", *KILLS_OF_ALL) and self._has_recovered()
        if victim in KILLS_OF_ALL:
            (self._run.kill if victim == "supervisor" else self._run.kill_tree)()
            self._run.assert_no_orphans(30.0 if self._setup.runner == "ray" else 5.0)
        elif not self._run.kill_role(victim):
            return None
        is_in_step = has_recovered and bool(self._run.query(OPEN_STEP_SQL))
        self.result.kills_in_step += is_in_step
        self.result.kills[victim] = self.result.kills.get(victim, 0) + 1
        self._restarts[victim] += 1
        if victim in KILLS_OF_ALL:
            self._start()
        return f"killed the {victim}{' in a step' if is_in_step else ''}"

    def _list_tree(self) -> set[int]:
        pid = self._run.supervisor_pid
        return {pid, *list_descendants(pid), *self._run.list_processes()}

    def _stop(self) -> str:
        processes = {**self._run.list_processes(), self._run.supervisor_pid: "supervisor"}
        pid = self._rng.choice(sorted(processes))
        seconds = self._rng.uniform(0.1, MAX_STOP_SECONDS)
        stop_process(pid, seconds)
        return f"stopped the {processes[pid]} for {seconds:.1f} s"

    def _fill_disk(self) -> str:
        disk, seconds = self._rng.choice(self._disks), self._rng.uniform(0.2, MAX_FULL_SECONDS)
        try:
            disk.fill()
            time.sleep(seconds)
        finally:
            disk.free()
        if self._server is not None and self._server.has_exited():
            self._server.start()  # a server that cannot write its log exits, and an operator restarts it
        return f"filled a disk for {seconds:.1f} s"

    def _jump(self) -> str:
        seconds = self._rng.choice(JUMPS)
        self._clock.jump(seconds)
        return f"moved the clock by {seconds} s"
