"""A run that is hit by faults at random moments: kills, suspended processes, full disks and clock jumps."""

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
from tests.torture.certificates import make_single_certificate_env
from tests.torture.faults import HOOKS, Clock, Disk, FileSizeLimit, SmallDisk, suspend_process
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

KILL_WEIGHTS = {
    "trainer": 9,
    "gateway": 3,
    "rollout": 3,
    "engine": 2,
    "rewards": 2,
    "supervisor": 1,
    "process tree": 1,
}
"""The relative frequency with which each target is killed."""
OTHER_FAULT_WEIGHTS = {"suspend": 3, "full disk": 2, "clock jump": 2}
"""The relative frequency of each other fault, on the same scale."""
WHOLE_RUN_TARGETS = ("supervisor", "process tree")
"""Killing one of these targets ends the run, which must then be resumed."""
TRAFFIC_TARGETS = ("gateway", "rollout", "engine")
"""The targets that are killed while a session is open."""
MAX_KILLS_PER_ROLE = {"local": 4, "ray": 6}
"""The maximum number of kills of one role until the run is resumed, by runner.

The supervisor gives up on a role that crashes more than six times. The local runner has a lower limit,
because resuming the run is faster than waiting for the supervisor's backoff."""
RAY_WEIGHT_FACTOR = 0.3
"""Makes kills that also take Ray down less frequent, because restarting Ray is slow."""
MAX_FAILURES = 20
"""The maximum number of failures without a kill, for example because a disk was full for too long."""
READY_PROBABILITY = 0.6
"""The probability that a fault waits until all roles are ready. Otherwise it may hit a starting role."""
MAX_PAUSE_SECONDS = 1.0
"""The maximum time before a fault that waits neither for a step nor for a session."""
MAX_KILL_DELAY_SECONDS = 0.4
"""The maximum time between the start of a step or session and a kill in it."""
CALL_SECONDS = 0.12
"""The minimum duration of a backend call, so that a step lasts longer than MAX_KILL_DELAY_SECONDS."""
MAX_SUSPEND_SECONDS = 3.0
MAX_FULL_DISK_SECONDS = 3.0
CLOCK_JUMP_SECONDS = (-86_400, -3600, -60, -2, 2, 60, 3600, 86_400)
TIMEOUT_SECONDS = 240.0
"""The time allowed until the roles are ready, until a step or session begins, and until the run ends."""
RUN_DISK_MEGABYTES = 64
SERVER_DISK_MEGABYTES = 320
OPEN_STEP_SQL = (
    "SELECT 1 FROM steps WHERE state = 'saved' OR (state IN ('claimed', 'submitted') AND version IS NULL)"
)
"""Selects steps in progress. An unsaved step that has a version is done and waits for a later checkpoint."""


@dataclass(frozen=True)
class Setup:
    """The store, runner and training mode of a torture run."""

    store: Literal["sqlite", "postgres"] = "sqlite"
    runner: Literal["local", "ray"] = "local"
    mode: Literal["sync", "async"] = "sync"

    @property
    def name(self) -> str:
        return f"{self.store} {self.runner} {self.mode}"


@dataclass(frozen=True)
class TortureConfig:
    """The length of a run, and the faults that hit it."""

    steps: int
    max_kills: int
    """The number of kills after which no more faults are injected, so that the run can finish."""
    fault_weights: Mapping[str, float] = field(
        default_factory=lambda: {**KILL_WEIGHTS, **OTHER_FAULT_WEIGHTS}
    )
    """The relative frequency of each fault."""
    bug: str | None = None
    """The name of a bug to plant in the run."""
    python: str = sys.executable
    """The interpreter of the run and its roles. May be `RoleServer.program`. On Ray, which starts its own
    processes, only the trainer uses it."""
    use_small_disk: bool = field(default_factory=lambda: os.getuid() == 0)
    """Simulate full disks by filling small ones, which requires root. Otherwise, limit the size of files."""


@dataclass
class TortureResult:
    kills: dict[str, int] = field(default_factory=dict[str, int])
    """The number of kills by target."""
    kills_in_step: int = 0
    """The number of kills that ended the trainer while a step was in progress."""
    other_faults: dict[str, int] = field(default_factory=dict[str, int])
    """The number of other faults by name."""
    failures: int = 0
    """The number of times that the run failed without a kill."""
    acknowledged: int = 0
    """The number of replies that the agents received in full."""
    lost: list[str] = field(default_factory=list[str])
    """The ids of replies that an agent received but that are not in the store."""
    trained_twice: list[str] = field(default_factory=list[str])
    """The keys of samples that the final weights were trained on more than once."""
    problem: str = ""
    """The first other difference from an undisturbed run, or an empty string."""
    seconds: float = 0.0

    @property
    def kill_count(self) -> int:
        return sum(self.kills.values())

    @property
    def is_correct(self) -> bool:
        return not (self.lost or self.trained_twice or self.problem)


def make_run_config(folder: Path, model: Path, setup: Setup, torture: TortureConfig) -> dict[str, Any]:
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


class TortureRun:
    """A run in a new folder. On exit, the context manager kills the run and removes its disks."""

    def __init__(self, folder: Path, model: Path, setup: Setup, config: TortureConfig, seed: str) -> None:
        self.folder = folder
        self.result = TortureResult()
        self._setup = setup
        self._config = config
        self._rng = random.Random(seed)
        self._resources = ExitStack()
        self._kills_since_start: Counter[str] = Counter()
        self._is_aborted = False
        (folder / "disk").mkdir(parents=True)
        self._clock = Clock(folder / "clock")
        self._disks: list[Disk] = []
        self._add_disk(folder / "disk", RUN_DISK_MEGABYTES)
        self._server: PostgresTestServer | None = None
        run_config = make_run_config(folder, model, setup, config)
        if setup.store == "postgres":
            self._server = self._start_server()
            self._run: RunProcess = PostgresRun(folder, run_config, self._server)
        else:
            self._run = RunProcess(folder, run_config)
        self._run.roles = (*ROLES, "rewards")
        if setup.runner == "local":
            self._run.python = config.python
        if not self._disks:
            self._disks.append(FileSizeLimit(self._list_pids))

    def _add_disk(self, folder: Path, megabytes: int) -> None:
        if self._config.use_small_disk:
            self._disks.append(SmallDisk(folder, megabytes))
            self._resources.callback(self._disks[-1].remove)

    def _start_server(self) -> PostgresTestServer:
        # Not in the run's folder, which the server's user may not be allowed to enter.
        folder = Path(tempfile.mkdtemp(prefix="instar-pg-", dir="/tmp"))
        self._resources.callback(shutil.rmtree, folder, ignore_errors=True)
        self._add_disk(folder, SERVER_DISK_MEGABYTES)
        server = PostgresTestServer(folder=folder)
        self._resources.callback(server.remove)
        return server

    def __enter__(self) -> TortureRun:
        return self

    def __exit__(self, *error: object) -> None:
        self.abort()
        self._resources.close()

    def abort(self) -> None:
        """Kill the run if it has not ended, and do not resume it."""
        self._is_aborted = True
        if self._run.process is not None and not self._run.has_exited():
            self._run.kill_tree()

    # --- start and end -----------------------------------------------------------------------------

    def run_undisturbed(self) -> Fingerprint:
        self._start()
        self._run.finish(TIMEOUT_SECONDS)
        return self._run.read_fingerprint()

    def run(
        self,
        reference: Fingerprint | None,
        *,
        should_stop: Callable[[], bool] = lambda: False,
        report: Callable[[str], None] = lambda _: None,
    ) -> TortureResult:
        """Inject faults into the run, and compare its result with the reference if there is one.

        Faults stop when ``should_stop()`` is true or `max_kills` is reached; the run then finishes
        undisturbed. Any error is returned as the result's ``problem``.
        """
        started_at = time.monotonic()
        try:
            self._start()
            while (exit_code := self._run.exit_code) != 0:
                if exit_code is not None:
                    self._resume_after_failure()
                if should_stop() or self.result.kill_count >= self._config.max_kills:
                    self._run.wait_until(self._run.has_exited, TIMEOUT_SECONDS)
                elif fault := self._inject():
                    self._write_log(fault)
                    report(f"{fault}, {self._run.describe_progress()}")
            self._check_result(reference)
        except Exception as error:  # noqa: BLE001 - any error is a problem of the run
            self.result.problem = f"{type(error).__name__}: {error}"
            self._write_log(self.result.problem)
        self.result.seconds = time.monotonic() - started_at
        return self.result

    def _start(self) -> None:
        path = os.pathsep.join(map(str, (HOOKS, ROOT)))
        bug_env = {} if self._config.bug is None else {BUG_ENV: self._config.bug}
        env = {"PYTHONPATH": path, "RAY_worker_niceness": "0", **make_single_certificate_env()}
        self._kills_since_start.clear()
        self._run.start(
            resume=(self._run.run_dir / "config.json").exists(), **env, **self._clock.env, **bug_env
        )

    def _resume_after_failure(self) -> None:
        assert not self._is_aborted, "the run was aborted"
        self.result.failures += 1
        self._write_log(f"the run failed: {self._run.output.read_text(errors='replace')[-300:]}")
        assert self.result.failures <= MAX_FAILURES, f"the run keeps failing\n{self._run.collect_logs()}"
        self._start()

    def _check_result(self, reference: Fingerprint | None) -> None:
        run, result = self._run, self.result
        result.acknowledged = len(run.read_acknowledged_ids())
        result.lost = run.find_lost_ids()
        (state,) = run.query("SELECT state_path FROM steps ORDER BY step DESC LIMIT 1")[0]
        trained = [key for keys in read_lineage(Path(state) / "backend") for key in keys]
        result.trained_twice = sorted(key for key, count in Counter(trained).items() if count > 1)
        claims = {key for (key,) in run.query("SELECT sample_key FROM claims WHERE outcome = 'trained'")}
        assert claims.issuperset(trained), f"trained but not claimed: {sorted(set(trained) - claims)}"
        if reference is None:
            run.assert_consistent()
        else:
            differences = run.read_fingerprint().list_differences(reference)
            assert not differences, f"the result differs from an undisturbed run: {differences}"

    def _write_log(self, text: str) -> None:
        with (self.folder / "faults.txt").open("a") as file:
            file.write(f"{time.strftime('%H:%M:%S')} {text}\n")

    # --- faults ------------------------------------------------------------------------------------

    def _inject(self) -> str | None:
        """Inject a random fault and return its description, or None if the run or the target has exited."""
        if self._rng.random() < READY_PROBABILITY and not self._run.wait_until(
            self._run.is_ready, TIMEOUT_SECONDS
        ):
            return None
        weights, runner = dict(self._config.fault_weights), self._setup.runner
        if runner == "ray":
            weights |= {name: RAY_WEIGHT_FACTOR * weights.get(name, 0) for name in WHOLE_RUN_TARGETS}
        (fault,) = self._rng.choices(list(weights), list(weights.values()))
        waits_for_step = fault == "trainer"
        if self._kills_since_start[fault] == MAX_KILLS_PER_ROLE[runner]:
            fault = self._rng.choice(WHOLE_RUN_TARGETS)
        condition = (
            self._is_in_step
            if waits_for_step
            else (self._has_open_session if fault in TRAFFIC_TARGETS else None)
        )
        if condition is None:
            time.sleep(self._rng.uniform(0, MAX_PAUSE_SECONDS))
        elif self._run.wait_until(condition, TIMEOUT_SECONDS):
            time.sleep(self._rng.uniform(0, MAX_KILL_DELAY_SECONDS))
        if self._run.has_exited():
            return None
        if fault not in OTHER_FAULT_WEIGHTS:
            return self._kill(fault)
        inject = {"suspend": self._suspend, "full disk": self._fill_disk, "clock jump": self._jump_clock}
        description = inject[fault]()
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
        """True if the trainer is running and has released the steps that an earlier trainer left open."""
        try:
            trainers = self._run.query("SELECT pid, doing FROM endpoints WHERE role = 'trainer'")
        except sqlite3.OperationalError:
            return False  # the store does not exist yet
        return any(
            doing.startswith(("waiting", "step")) and self._run.find_role(pid) for pid, doing in trainers
        )

    def _kill(self, target: str) -> str | None:
        has_recovered = target in ("trainer", *WHOLE_RUN_TARGETS) and self._has_recovered()
        if target in WHOLE_RUN_TARGETS:
            (self._run.kill if target == "supervisor" else self._run.kill_tree)()
            self._run.assert_no_orphans(30.0 if self._setup.runner == "ray" else 5.0)
        elif not self._run.kill_role(target):
            return None
        is_in_step = has_recovered and bool(self._run.query(OPEN_STEP_SQL))
        self.result.kills_in_step += is_in_step
        self.result.kills[target] = self.result.kills.get(target, 0) + 1
        self._kills_since_start[target] += 1
        if target in WHOLE_RUN_TARGETS:
            self._start()
        return f"killed the {target}{' in a step' if is_in_step else ''}"

    def _list_pids(self) -> set[int]:
        pid = self._run.supervisor_pid
        return {pid, *list_descendants(pid), *self._run.list_processes()}

    def _suspend(self) -> str:
        processes = {**self._run.list_processes(), self._run.supervisor_pid: "supervisor"}
        pid = self._rng.choice(sorted(processes))
        seconds = self._rng.uniform(0.1, MAX_SUSPEND_SECONDS)
        suspend_process(pid, seconds)
        return f"suspended the {processes[pid]} for {seconds:.1f} s"

    def _fill_disk(self) -> str:
        disk, seconds = self._rng.choice(self._disks), self._rng.uniform(0.2, MAX_FULL_DISK_SECONDS)
        try:
            disk.fill()
            time.sleep(seconds)
        finally:
            disk.free()
        if self._server is not None and self._server.has_exited():
            self._server.start()  # a server that cannot write its log exits; restart it as an operator would
        return f"filled a disk for {seconds:.1f} s"

    def _jump_clock(self) -> str:
        seconds = self._rng.choice(CLOCK_JUMP_SECONDS)
        self._clock.jump(seconds)
        return f"moved the clock by {seconds} s"
