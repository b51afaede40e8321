"""Who may write as a role of a run: the holder of its latest lease, and nobody who held an earlier one."""

from __future__ import annotations

from collections.abc import Callable

from instar.errors import LeaseLost
from instar.store.database import Database


def take_lease(db: Database, run_id: str, name: str) -> int:
    row = db.execute(
        "INSERT INTO leases (run_id, name, lease) VALUES (?, ?, 1) "
        "ON CONFLICT (run_id, name) DO UPDATE SET lease = leases.lease + 1 RETURNING lease",
        (run_id, name),
    ).fetchone()
    return int(row["lease"])


def make_lease_check(run_id: str, name: str, lease: int) -> Callable[[Database], None]:
    """What a transaction begins with that is to be under the lease: nobody takes another before it ends."""

    def check(db: Database) -> None:
        row = db.execute(
            f"SELECT lease FROM leases WHERE run_id = ? AND name = ?{db.for_update}", (run_id, name)
        ).fetchone()
        if row is None or row["lease"] != lease:
            raise LeaseLost(f"another process has taken over the {name} of run {run_id!r}")

    return check
