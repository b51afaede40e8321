"""Leases: only the holder of the latest lease of a role may write as that role."""

from __future__ import annotations

from collections.abc import Callable

from instar.errors import LeaseLost
from instar.store.database import Database


def take_lease(db: Database, run_id: str, name: str) -> int:
    """Take and return the next lease of a role. Holders of earlier leases can no longer write."""
    row = db.execute(
        "INSERT INTO leases (run_id, name, lease) VALUES (?, ?, 1) "
        "ON CONFLICT (run_id, name) DO UPDATE SET lease = leases.lease + 1 RETURNING lease",
        (run_id, name),
    ).fetchone()
    return int(row["lease"])


def make_lease_check(run_id: str, name: str, lease: int) -> Callable[[Database], None]:
    """Return a check to run first in each transaction. The check raises LeaseLost if a later lease was taken,
    and locks the lease until the transaction ends."""

    def check(db: Database) -> None:
        row = db.execute(
            f"SELECT lease FROM leases WHERE run_id = ? AND name = ?{db.for_update}", (run_id, name)
        ).fetchone()
        if row is None or row["lease"] != lease:
            raise LeaseLost(f"Another process has taken over the {name} of run {run_id!r}.")

    return check
