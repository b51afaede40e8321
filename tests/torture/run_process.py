"""A run that tests can start, kill and compare with another run."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from instar.backends.local.state import hash_adapter
from tests.torture.role_server import is_program

ROOT = Path(__file__).parents[2]
WORKLOAD_MODULE = "tests.torture.workload"
ROLES = ("engine", "gateway", "trainer", "rollout")


def make_config(folder: Path, model: Path, *, steps: int, **trainer_settings: Any) -> dict[str, Any]:
    """Return the config of a run whose result depends only on its seed."""
    return {
        "name": "tortured",
        "dir": str(folder / "run"),
        "seed": 11,
        "model": {"name": str(model), "dtype": "fp32", "device": "cpu"},
        "engine": {"type": "scripted", "function": f"{WORKLOAD_MODULE}:make_reply", "delay": 0.002},
        "backend": {"type": "local", "threads": 1, "lora": {"rank": 4}},
        "trainer": {
            "mode": "sync",
            "steps": steps,
            "groups_per_step": 2,
            "adam": {"lr": 1e-2},
            "loss": {"name": "importance_sampling"},
            "tensorboard": False,
            **trainer_settings,
        },
        "rollout": {
            "tasks": {"type": "python", "function": f"{WORKLOAD_MODULE}:make_tasks"},
            "agent": {
                "type": "function",
                "function": f"{WORKLOAD_MODULE}:agent",
                "args": {"ledger": str(folder / "ledger.txt")},
            },
            "group_size": 4,
            "timeout": 120,
            "retries": 6,
        },
        "reward": {"type": "rule", "function": f"{WORKLOAD_MODULE}:score_answer"},
    }


@dataclass(frozen=True)
class Fingerprint:
    """The result of a run. Two runs that trained identically have equal fingerprints."""

    trained: tuple[tuple[int, str, float, float], ...]
    """(step, group and slot, reward, advantage), in order. The sample's number within its session is left
    out, because it also counts replies that a killed engine did not finish."""
    dropped: tuple[tuple[int, str, str], ...]
    """(step, group and slot, reason)."""
    adapter: str
    """A hash of the published adapter."""
    optimizer: str
    """A hash of the saved weights and optimizer state."""

    def list_differences(self, other: Fingerprint) -> list[str]:
        """Return the names of the hashes that differ, and the rows that only one of the two has."""
        own, others = (Counter([*run.trained, *run.dropped]) for run in (self, other))
        rows = [*(own - others), *(others - own)]
        hashes = [name for name in ("adapter", "optimizer") if getattr(self, name) != getattr(other, name)]
        return [*hashes, *sorted(map(str, rows))]


def is_alive(pid: int) -> bool:
    """True if the process exists and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


class StoredRun:
    """A finished or running run, as recorded in its store."""

    def __init__(self, run_dir: Path, steps: int) -> None:
        self.run_dir = run_dir
        self.steps = steps

    def query(self, sql: str, *values: object) -> list[Any]:
        store = sqlite3.connect(f"file:{self.run_dir / 'store.db'}?mode=ro", uri=True)
        try:
            return store.execute(sql, values).fetchall()
        finally:
            store.close()

    def describe_progress(self) -> str:
        """Describe the progress of the run for a log line."""
        return f"{self.count_committed_steps()} steps committed"

    def count_committed_steps(self) -> int:
        """Return the number of committed steps, or 0 if the store has no tables yet."""
        try:
            return len(self.query("SELECT 1 FROM steps WHERE state = 'committed'"))
        except sqlite3.OperationalError:
            return 0

    def read_fingerprint(self) -> Fingerprint:
        """Check that the run is consistent, and return its fingerprint."""
        self.assert_consistent()
        (artifact,) = self.query(
            "SELECT artifact_path FROM policies WHERE state = 'published' ORDER BY version DESC LIMIT 1"
        )[0]
        (state,) = self.query("SELECT state_path FROM steps ORDER BY step DESC LIMIT 1")[0]
        trained = self.query(
            "SELECT step, sample_key, reward, advantage FROM claims WHERE outcome = 'trained' "
            "ORDER BY step, sample_key"
        )
        dropped = self.query(
            "SELECT step, sample_key, reason FROM claims WHERE outcome = 'dropped' "
            "AND step IS NOT NULL ORDER BY step, sample_key"
        )
        return Fingerprint(
            trained=tuple((step, key.rpartition("/")[0], *rest) for step, key, *rest in trained),
            dropped=tuple((step, key.rpartition("/")[0], *rest) for step, key, *rest in dropped),
            adapter=hash_adapter(self.resolve_adapter_folder(artifact)),
            optimizer=hash_adapter(self.resolve_state_folder(Path(state) / "backend")),
        )

    def resolve_adapter_folder(self, artifact: str) -> Path:
        """Return the folder of a published adapter."""
        return Path(artifact)

    def resolve_state_folder(self, saved: Path) -> Path:
        """Return the folder with the weights and optimizer state that the backend saved to ``saved``."""
        return saved

    def assert_consistent(self) -> None:
        """Check the invariants that hold after any sequence of crashes."""
        steps = self.query("SELECT step, state, version FROM steps ORDER BY step")
        assert [step for step, _, _ in steps] == list(range(1, self.steps + 1))
        assert {state for _, state, _ in steps} == {"committed"}, steps
        duplicates = self.query(
            "SELECT sample_key FROM claims GROUP BY epoch, sample_key HAVING COUNT(*) > 1"
        )
        assert not duplicates, f"claimed twice: {duplicates}"
        unfinished = self.query(
            "SELECT c.session_id, s.status FROM claims c JOIN sessions s USING (session_id) "
            "WHERE c.outcome = 'trained' AND s.status != 'completed'"
        )
        assert not unfinished, f"trained on sessions that were not completed: {unfinished}"
        versions = self.query("SELECT version, state FROM policies ORDER BY version")
        assert [version for version, _ in versions] == list(range(1, len(versions) + 1))
        assert {state for _, state in versions} <= {"published", "tombstoned"}, versions
        published = [version for version, state in versions if state == "published"]
        assert [version for _, _, version in steps if version is not None] == published


def list_pids() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def read_arguments(pid: int) -> list[str]:
    """Return the command line of a process, or [] if it has exited."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return []


def list_descendants(pid: int) -> set[int]:
    parents: dict[int, int] = {}
    for child in list_pids():
        try:
            parents[child] = int(Path(f"/proc/{child}/stat").read_text().rsplit(")", 1)[1].split()[1])
        except OSError:
            continue  # the process has exited
    tree = {pid}
    while children := {child for child, parent in parents.items() if parent in tree} - tree:
        tree |= children
    return tree - {pid}


class RunProcess(StoredRun):
    """An `instar train` process that can be started, killed and resumed."""

    def __init__(self, folder: Path, config: dict[str, Any]) -> None:
        super().__init__(Path(config["dir"]), config["trainer"]["steps"])
        self.folder = folder
        self.config = config
        self.config_path = folder / "run.yaml"
        self.config_path.write_text(yaml.safe_dump(config))
        self.roles: tuple[str, ...] = ROLES
        self.python = sys.executable
        """The interpreter that starts the run. May be `RoleServer.program`."""
        self.process: subprocess.Popen[bytes] | None = None
        self.output = folder / "output.txt"

    def start(self, *, resume: bool = False, **env: str) -> subprocess.Popen[bytes]:
        command = [self.python, "-m", "instar.cli.main", "train", str(self.config_path), "--json"]
        with self.output.open("ab") as output:
            self.process = subprocess.Popen(
                [*command, *(["--resume"] if resume else [])],
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **env},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        return self.process

    def wait(self, timeout_seconds: float = 120) -> int:
        """Wait for the run to exit and return its exit code."""
        assert self.process is not None
        return self.process.wait(timeout_seconds)

    def finish(self, timeout_seconds: float = 120) -> None:
        """Wait for the run to exit, and check that it succeeded."""
        code = self.wait(timeout_seconds)
        assert code == 0, f"exit code {code}\n{self.collect_logs()}"

    def kill(self) -> None:
        """Kill the supervisor with SIGKILL."""
        assert self.process is not None
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.supervisor_pid, signal.SIGKILL)
        self.process.wait()

    @property
    def supervisor_pid(self) -> int:
        assert self.process is not None
        for pid in list_pids():
            arguments = read_arguments(pid)
            if str(self.config_path) in arguments and not is_program(arguments):
                return pid
        return self.process.pid

    def collect_logs(self) -> str:
        """Return the end of the run's output and of every role's log."""
        parts = [self.output.read_text(errors="replace")[-4000:]]
        for log_path in sorted((self.run_dir / "logs").glob("*.log")):
            parts.append(f"--- {log_path.name}\n{log_path.read_text(errors='replace')[-1500:]}")
        return "\n".join(parts)

    def list_processes(self) -> dict[int, str]:
        """Return the roles of the run's live processes by pid, according to the process table."""
        return {pid: role for pid in list_pids() if (role := self.find_role(pid)) is not None}

    def find_role(self, pid: int) -> str | None:
        """Return the name of the role that the process runs, or None if it is not a live role of this run."""
        arguments = read_arguments(pid)
        if "instar.cluster.role" not in arguments or str(self.run_dir) not in arguments:
            return None
        if is_program(arguments) or not is_alive(pid):
            return None
        return arguments[arguments.index("instar.cluster.role") + 1]

    def kill_role(self, role: str) -> bool:
        """Kill the role with SIGKILL. Return False if it is not running."""
        for pid, name in self.list_processes().items():
            if name == role:
                os.kill(pid, signal.SIGKILL)
                return True
        return False

    def kill_tree(self) -> None:
        """Kill the run and all its processes with SIGKILL."""
        assert self.process is not None
        supervisor = self.supervisor_pid
        for pid in (supervisor, *list_descendants(supervisor), *self.list_processes()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()

    def is_ready(self) -> bool:
        """True if every role is running and reports that it has finished loading."""
        try:
            endpoints = self.query("SELECT pid, doing FROM endpoints")
        except sqlite3.OperationalError:
            return False
        loaded = [pid for pid, doing in endpoints if not doing.startswith(("loading", "starting"))]
        return set(map(self.find_role, loaded)) >= set(self.roles)

    @property
    def exit_code(self) -> int | None:
        """The exit code of the run, or None if it has not exited."""
        assert self.process is not None
        return self.process.poll()

    def has_exited(self) -> bool:
        return self.process is not None and self.process.poll() is not None

    def wait_until(self, condition: Callable[[], bool], timeout_seconds: float = 240) -> bool:
        """Wait until the condition holds. Return False if the run exits first.

        Raises AssertionError if the timeout expires.
        """
        assert self.process is not None
        deadline = time.monotonic() + timeout_seconds
        while not condition():
            if self.process.poll() is not None:
                return False
            assert time.monotonic() < deadline, (
                f"condition not met within {timeout_seconds:g} s\n{self.collect_logs()}"
            )
            time.sleep(0.02)
        return True

    def assert_no_orphans(self, timeout_seconds: float = 5.0) -> None:
        """Wait for the run's role processes to exit, and check that they do so in time."""
        deadline = time.monotonic() + timeout_seconds
        while orphans := self.list_processes():
            assert time.monotonic() < deadline, f"still running without a supervisor: {orphans}"
            time.sleep(0.05)

    def assert_consistent(self) -> None:
        """Also check the replies that the agent received, and the summary that the run printed."""
        super().assert_consistent()
        self.assert_replies_recorded()
        summary = json.loads(self.output.read_text().splitlines()[-1])
        assert summary["steps"] == self.steps, f"the run reported {summary['steps']} of {self.steps} steps"

    def assert_replies_recorded(self) -> None:
        """Check that every reply that the agent received in full is in the store."""
        assert self.read_acknowledged_ids(), "the agent received no replies"
        lost_ids = self.find_lost_ids()
        assert not lost_ids, f"acknowledged but not recorded: {lost_ids}"

    def read_acknowledged_ids(self) -> set[str]:
        """Return the ids of the replies that the agent received in full."""
        ledger = self.folder / "ledger.txt"
        return set(ledger.read_text().splitlines()) if ledger.exists() else set()

    def find_lost_ids(self) -> list[str]:
        """Return the ids of acknowledged replies that are not in the store."""
        stored = {row[0] for row in self.query("SELECT request_id FROM calls WHERE status = 'ok'")}
        return sorted(self.read_acknowledged_ids() - stored)
