"""Warnings about the versions of a run's policies, for `instar versions ls` and `instar status`."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console
from rich.text import Text

from instar.config import RunConfig
from instar.store.base import Store


async def list_version_warnings(store: Store, config: RunConfig) -> list[str]:
    """Return a warning for each policy that serves an earlier version because live rewards fell. It is shown
    until another version is promoted."""
    warnings: list[str] = []
    for policy_id in config.policy_ids if config.trains_on_live else []:
        head = (await store.latest_policy(policy_id)).version
        for row in await store.policy_versions(policy_id):
            # A rollback by a person has no cause after the number.
            if row.policy.version == head and row.reason and ": " in row.reason:
                warnings.append(f"{row.policy.ref} serves after an automatic {row.reason}")
    return warnings


def print_warnings(warnings: Iterable[str], console: Console) -> None:
    for warning in warnings:
        console.print(Text(f"warning: {warning}", style="yellow"))
