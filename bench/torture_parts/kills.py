"""Inject faults into many runs, a few at a time, until enough of their processes have been killed."""

from __future__ import annotations

import shutil
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.postgres import find_server_binaries
from tests.tiny import make_tiny_model
from tests.torture.role_server import RoleServer
from tests.torture.run_process import Fingerprint
from tests.torture.torture_run import Setup, TortureConfig, TortureResult, TortureRun
from torture_parts.state import StateFile

REQUIRED_KILLS = 1000
REQUIRED_KILLS_IN_STEP = 300
KILL_FRACTIONS = {
    Setup("sqlite", "local", "sync"): 0.35,
    Setup("sqlite", "local", "async"): 0.15,
    Setup("postgres", "local", "sync"): 0.2,
    Setup("postgres", "local", "async"): 0.1,
    Setup("sqlite", "ray", "sync"): 0.1,
    Setup("postgres", "ray", "async"): 0.1,
}
"""The fraction of all kills that each setup gets. It is small for Ray, where runs start slowly."""
STEPS = 24
KILLS_PER_RUN = 40
PROGRESS_INTERVAL_SECONDS = 10.0
MIN_RUN_SECONDS = 30.0
"""With less time left, no run is started, because it would see almost no faults."""
CONCURRENT_RUNS = 3
"""More than a small machine has cores, because a run is idle while its roles restart."""


@dataclass(frozen=True)
class FinishedRun:
    setup: str
    number: int
    result: TortureResult


@dataclass
class KillCampaign:
    """The results of all runs so far."""

    quotas: Mapping[Setup, float]
    """The number of kills that each setup needs."""
    runs: list[FinishedRun] = field(default_factory=list[FinishedRun])

    @property
    def results(self) -> list[TortureResult]:
        return [run.result for run in self.runs]

    @property
    def kills(self) -> int:
        return sum(result.kill_count for result in self.results)

    @property
    def kills_in_step(self) -> int:
        return sum(result.kills_in_step for result in self.results)

    @property
    def coverage(self) -> float:
        """The completed fraction of all required kills, or of those in a step, whichever is lower.

        Among all kills, those beyond a setup's quota do not count.
        """
        covered = sum(min(self.count_kills(setup.name), quota) for setup, quota in self.quotas.items())
        total = sum(self.quotas.values())
        return min(
            covered / total, self.kills_in_step / (REQUIRED_KILLS_IN_STEP * total / REQUIRED_KILLS), 1.0
        )

    def count_kills(self, setup: str) -> int:
        return sum(run.result.kill_count for run in self.runs if run.setup == setup)

    def count_other_faults(self) -> Counter[str]:
        counts: Counter[str] = Counter()
        for result in self.results:
            counts.update(result.other_faults)
        return counts

    def count_kills_by_target(self) -> Counter[str]:
        counts: Counter[str] = Counter()
        for result in self.results:
            counts.update(result.kills)
        return counts

    def choose_setup(self, running: Collection[Setup]) -> Setup | None:
        """Return the setup that is farthest from its quota, or None if no further run is needed now."""
        if self.coverage == 1.0:
            return None
        missing_fractions = {
            setup: 1 - (self.count_kills(setup.name) + KILLS_PER_RUN * Counter(running)[setup]) / quota
            for setup, quota in self.quotas.items()
            # A second Ray cluster would only compete for the cores.
            if quota > 0 and not (setup.runner == "ray" and any(other.runner == "ray" for other in running))
        }
        setup = max(missing_fractions, key=lambda setup: missing_fractions[setup], default=None)
        if setup is not None and missing_fractions[setup] <= 0 and running:
            return None
        return setup


def list_available_setups(names: Sequence[str], log: Callable[[str], None]) -> list[Setup]:
    """Return the named setups (or all, if there are no names) whose requirements are installed.

    Log which setups are skipped.
    """
    setups = [setup for setup in KILL_FRACTIONS if not names or setup.name in names]
    try:
        find_server_binaries()
    except pytest.skip.Exception as reason:
        log(f"skipping the PostgreSQL setups: {reason}")
        setups = [setup for setup in setups if setup.store != "postgres"]
    if find_spec("ray") is None:
        log("skipping the Ray setups: ray is not installed")
        setups = [setup for setup in setups if setup.runner != "ray"]
    return setups


@dataclass
class KillRunner:
    """Runs the campaign. Copies the folder of each wrong run to ``wrong_runs_folder``."""

    config: TortureConfig
    wrong_runs_folder: Path
    log: Callable[[str], None]
    _timed_out: threading.Event = field(default_factory=threading.Event)
    _active_runs: list[TortureRun] = field(default_factory=list[TortureRun])
    _logged_at: float = 0.0

    def run(
        self, campaign: KillCampaign, state: StateFile, *, timeout_seconds: float | None, concurrent_runs: int
    ) -> None:
        """Add runs to the campaign, starting with those in the state file, until it is complete.

        When the timeout expires, no further run is started, and the active runs get no further faults.
        """
        campaign.runs += [
            FinishedRun(row["setup"], row["number"], TortureResult(**row["result"])) for row in state.rows
        ]
        next_numbers = Counter({setup.name: 0 for setup in campaign.quotas})
        for run in campaign.runs:
            next_numbers[run.setup] = max(next_numbers[run.setup], run.number + 1)
        deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        running: dict[Future[FinishedRun], Setup] = {}
        with ExitStack() as resources:
            folder = Path(resources.enter_context(tempfile.TemporaryDirectory(prefix="instar-torture-")))
            model = make_tiny_model(folder / "model", hidden=32, context=2048)
            server = RoleServer()
            resources.callback(server.close)
            pool = resources.enter_context(ThreadPoolExecutor())
            self.config = replace(self.config, python=str(server.program))
            self.log("training the reference run without faults")
            reference = self._train_reference(folder / "reference", model)
            try:
                while True:
                    if deadline is not None and time.monotonic() > deadline:
                        self._timed_out.set()
                    can_start = deadline is None or time.monotonic() + MIN_RUN_SECONDS < deadline
                    while len(running) < concurrent_runs and (can_start or not campaign.runs):
                        if (setup := campaign.choose_setup(running.values())) is None:
                            break
                        number = next_numbers[setup.name]
                        next_numbers[setup.name] += 1
                        running[pool.submit(self._torture, folder, model, setup, number, reference)] = setup
                    if not running:
                        return
                    self._log_progress(campaign)
                    for future in wait(running, timeout=1.0, return_when=FIRST_COMPLETED).done:
                        del running[future]
                        campaign.runs.append(future.result())
                        state.append(asdict(campaign.runs[-1]))
                        self._log_run(campaign)
            except KeyboardInterrupt:
                for active_run in list(self._active_runs):
                    active_run.abort()
                raise

    def _train_reference(self, folder: Path, model: Path) -> Fingerprint:
        with TortureRun(folder, model, Setup(), replace(self.config, bug=None), "") as run:
            return run.run_undisturbed()

    def _torture(
        self, folder: Path, model: Path, setup: Setup, number: int, reference: Fingerprint
    ) -> FinishedRun:
        name = f"{setup.name} {number}"
        folder = folder / name.replace(" ", "-")
        with TortureRun(folder, model, setup, self.config, name) as run:
            self._active_runs.append(run)
            result = run.run(reference if setup.mode == "sync" else None, should_stop=self._timed_out.is_set)
            self._active_runs.remove(run)
            if not result.is_correct:
                with suppress(shutil.Error):  # sockets cannot be copied
                    shutil.copytree(folder, self.wrong_runs_folder / folder.name, dirs_exist_ok=True)
        shutil.rmtree(folder, ignore_errors=True)
        return FinishedRun(setup.name, number, result)

    def _log_progress(self, campaign: KillCampaign) -> None:
        if time.monotonic() - self._logged_at > PROGRESS_INTERVAL_SECONDS:
            results = [run.result for run in self._active_runs]
            kills = campaign.kills + sum(result.kill_count for result in results)
            kills_in_step = campaign.kills_in_step + sum(result.kills_in_step for result in results)
            self._logged_at = time.monotonic()
            self.log(f"{kills} of {sum(campaign.quotas.values()):.0f} kills, {kills_in_step} in a step")

    def _log_run(self, campaign: KillCampaign) -> None:
        run = campaign.runs[-1]
        result = run.result
        outcome = "correct" if result.is_correct else "WRONG"
        self.log(
            f"{run.setup} {run.number}: {outcome} after {result.kill_count} kills in {result.seconds:.0f} s"
        )
