"""The invariants that must hold after every transaction of a simulated run, and at its end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

from instar.config import RunConfig
from instar.store.policies import get_latest_policy
from instar.store.sqlite_database import SqliteDatabase
from instar.store.steps import get_claims, get_steps
from instar.trainer.monitor import read_steps
from instar.types import Claim, ClaimOutcome, GroupStatus, Policy, SessionStatus, StepState
from torture_parts.fakes import Weights, read_weights
from torture_parts.roles import RUN, Acknowledgement

COMPLETED_OR_FAILED = (SessionStatus.COMPLETED.value, SessionStatus.FAILED.value)


class Invariants:
    def __init__(self, database: SqliteDatabase, config: RunConfig, report: Callable[[str], None]) -> None:
        self._db = database
        self._config = config
        self._report = report
        self._acknowledged: list[Acknowledgement] = []
        self._artifacts: dict[int, Weights] = {}
        """The weights of each version when it was first published."""
        self._newest_version = 0
        self._checks: dict[str, Callable[[], None]] = {
            "reserve_version": self._check_versions,
            "publish": self._check_head,
            "tombstone": self._check_head,
            "release_steps": self._check_head,
            "advance_step": self._check_head,
            "claim_step": self._check_claims,
            "close_group": self._check_groups,
        }

    def acknowledge(self, acknowledgement: Acknowledgement) -> None:
        """Check now, and again at the end of the run, that the acknowledged call or session end is stored."""
        self._acknowledged.append(acknowledgement)
        self._check_acknowledged(acknowledgement)

    def on_commit(self, query_name: str) -> None:
        if (check := self._checks.get(query_name)) is not None:
            check()

    def check_end(self) -> None:
        """Check the invariants of a complete run."""
        for acknowledgement in self._acknowledged:
            self._check_acknowledged(acknowledgement)
        self._check_duplicates()
        self._check_head()
        self._check_claims()
        self._check_groups()
        self._check_steps()
        self._check_all_claimed()

    def read_final_weights(self) -> Weights | None:
        return self._read_artifact(get_latest_policy(self._db, RUN))

    # --- calls and sessions ------------------------------------------------------------------------

    def _check_acknowledged(self, acknowledgement: Acknowledgement) -> None:
        if acknowledgement.call_id is not None:
            sql = "SELECT client_key FROM calls WHERE session_id = ? AND call_id = ?"
            row = self._db.execute(sql, (acknowledgement.session_id, acknowledgement.call_id)).fetchone()
            if row is None or row["client_key"] != acknowledgement.client_key:
                self._report("an acknowledged call is not in the store")
            return
        row = self._db.execute(
            "SELECT status FROM sessions WHERE session_id = ?", (acknowledgement.session_id,)
        ).fetchone()
        if row is None or row["status"] == SessionStatus.OPEN.value:
            self._report("the acknowledged end of a session is not in the store")

    def _check_duplicates(self) -> None:
        for table, columns in (("calls", "session_id, client_key"), ("rewards", "session_id, scorer")):
            sql = f"SELECT COUNT(*) AS n FROM {table} GROUP BY {columns} HAVING COUNT(*) > 1"
            if self._db.execute(sql).fetchone() is not None:
                self._report(f"a row in {table} is stored twice")

    # --- groups and claims -------------------------------------------------------------------------

    def _check_groups(self) -> None:
        """Every slot of a closed group has a completed or failed session. In a ready group, the last
        completed session of each slot has a reward."""
        rows = self._db.execute(
            "SELECT g.group_id, g.size, g.status, COUNT(DISTINCT s.slot) AS slots FROM groups g LEFT JOIN "
            "sessions s ON s.group_id = g.group_id AND s.status IN (?, ?) WHERE g.status != ? "
            "GROUP BY g.group_id",
            (*COMPLETED_OR_FAILED, GroupStatus.OPEN.value),
        )
        for row in rows.fetchall():
            if row["slots"] < row["size"]:
                self._report(f"a group is {row['status']}, but a slot has no completed or failed session")
        row = self._db.execute(
            "SELECT 1 FROM sessions s JOIN groups g ON g.group_id = s.group_id WHERE g.status = ? AND "
            "s.status = ? AND NOT EXISTS (SELECT 1 FROM rewards r WHERE r.session_id = s.session_id) AND "
            "NOT EXISTS (SELECT 1 FROM sessions t WHERE t.group_id = s.group_id AND t.slot = s.slot AND "
            "t.status = s.status AND t.attempt > s.attempt)",
            (GroupStatus.READY.value, SessionStatus.COMPLETED.value),
        ).fetchone()
        if row is not None:
            self._report("a group is ready, but one of its sessions has no reward")

    def _check_claims(self) -> None:
        for claim in get_claims(self._db, RUN):
            if claim.outcome is ClaimOutcome.TRAINED:
                self._check_trained(claim)
            elif not claim.reason:
                self._report("a sample was dropped without a reason")

    def _check_trained(self, claim: Claim) -> None:
        session = self._db.execute(
            "SELECT s.*, g.status AS group_status, (SELECT MAX(t.attempt) FROM sessions t WHERE "
            "t.group_id = s.group_id AND t.slot = s.slot AND t.status IN (?, ?) AND t.ended_at <= "
            "s.ended_at) AS last_attempt, (SELECT r.value FROM rewards r WHERE r.session_id = s.session_id "
            "ORDER BY r.seq DESC LIMIT 1) AS last_reward "
            "FROM sessions s JOIN groups g ON g.group_id = s.group_id WHERE s.session_id = ?",
            (*COMPLETED_OR_FAILED, claim.session_id),
        ).fetchone()
        if session is None:
            return self._report("a trained session is not in a group")
        if session["status"] != SessionStatus.COMPLETED.value:
            self._report(f"a session with status {session['status']} was trained")
        if session["group_status"] != GroupStatus.READY.value:
            self._report(f"a session in a group with status {session['group_status']} was trained")
        if session["attempt"] < session["last_attempt"]:
            self._report("a session was trained although a later attempt in its slot had ended first")
        prefix = f"{session['group_id']}/{session['slot']}/"
        if claim.group_id != session["group_id"] or not claim.sample_key.startswith(prefix):
            self._report("a sample was claimed for a different group or slot than its session's")
        if claim.reward != session["last_reward"]:
            self._report("a sample was trained with a different reward than its session's")

    def _check_all_claimed(self) -> None:
        """Every group has been claimed, either to be trained or to be dropped."""
        claimed = {claim.group_id for claim in get_claims(self._db, RUN)}
        for row in self._db.execute("SELECT group_id, status FROM groups ORDER BY idx").fetchall():
            if row["group_id"] not in claimed:
                self._report(f"a group with status {row['status']} was never claimed")

    # --- versions and steps ------------------------------------------------------------------------

    def _check_versions(self) -> None:
        newest = self._db.execute("SELECT MAX(version) AS version FROM policies").fetchone()["version"] or 0
        if newest <= self._newest_version:
            self._report("a version number was used twice")
        self._newest_version = newest

    def _read_artifact(self, policy: Policy) -> Weights | None:
        if policy.artifact.kind == "base":
            return []
        try:
            return read_weights(Path(policy.artifact.path))
        except FileNotFoundError:
            self._report("the files of the published version do not exist")
            return None

    def _check_head(self) -> None:
        """The head's weights contain every sample of the steps up to its own exactly once, and do not change
        after they are published."""
        head = get_latest_policy(self._db, RUN)
        weights = self._read_artifact(head)
        if weights is None:
            return
        if self._artifacts.setdefault(head.version, weights) != weights:
            self._report("the weights of a published version changed")
        row = self._db.execute("SELECT step FROM policies WHERE version = ?", (head.version,)).fetchone()
        step = row["step"] if row else 0
        expected: dict[int, list[str]] = {}
        for claim in get_claims(self._db, RUN):
            if claim.outcome is ClaimOutcome.TRAINED and claim.step is not None and claim.step <= step:
                expected.setdefault(claim.step, []).append(claim.sample_key)
        trained = [[sample.partition(" ")[0] for sample in samples] for samples in weights]
        counts = Counter(key for samples in trained for key in samples)
        if any(count > 1 for count in counts.values()):
            self._report("a sample is in the weights twice")
        elif [sorted(keys) for keys in trained] != [sorted(expected[number]) for number in sorted(expected)]:
            self._report("the published weights do not contain exactly the samples of their steps")

    def _check_steps(self) -> None:
        steps = get_steps(self._db, RUN)
        if [step.step for step in steps] != list(range(1, self._config.trainer.steps + 1)):
            self._report("a step is missing at the end of the run")
        if any(step.state is not StepState.COMMITTED for step in steps):
            self._report("a step is not committed at the end of the run")
        if steps and get_latest_policy(self._db, RUN).version != steps[-1].version:
            self._report("the head is not the version of the last step")
        if {record["step"] for record in read_steps(self._config.run_dir)} != {step.step for step in steps}:
            self._report("the metrics of a step are missing")
