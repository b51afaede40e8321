"""Selects the exported groups that a step trains on in addition to the run's own groups."""

from __future__ import annotations

from instar.config import DataConfig, RunConfig
from instar.config.data import LIVE, ROLLOUT, group_id_prefix
from instar.store.base import Store
from instar.types import Channel, Group, GroupStatus

ExportedGroup = tuple[Group, int]
"""A group and the epoch in which it is claimed. The epoch is the number of earlier passes over the data."""


class DataMixture:
    """Picks groups from the sources of exported data. Each source contributes its share of a step's groups,
    in order and for the configured number of epochs. A step contains a group at most once."""

    def __init__(self, store: Store, run_id: str, config: RunConfig) -> None:
        self.store = store
        self.run_id = run_id
        self.config = config
        self._first_epoch: dict[str, int] = {}
        """The first epoch that may have unclaimed groups, by source label."""

    @property
    def has_own_data(self) -> bool:
        """True if the run trains on sessions that it samples itself, in rollouts or live traffic."""
        return any(not source.is_exported for source in self.config.data)

    def reset(self) -> None:
        self._first_epoch = {}

    def count_groups_in_step(self, step: int, source: str) -> int:
        return self.config.count_groups(step, source) - self.config.count_groups(step - 1, source)

    def count_own_groups_in_step(self, step: int) -> int:
        """Return the number of the step's groups that are not exported data."""
        return self.count_groups_in_step(step, ROLLOUT) + self.count_groups_in_step(step, LIVE)

    async def pick_groups(self, step: int) -> list[ExportedGroup]:
        """Return unclaimed exported groups for a step. An exhausted source contributes fewer groups."""
        before, after = (self.config.count_groups_by_source(count) for count in (step - 1, step))
        picked: list[ExportedGroup] = []
        for section, start, end in zip(self.config.data, before, after, strict=True):
            if section.is_exported:
                picked += await self._pick_from_source(section, end - start)
        return picked

    async def _pick_from_source(self, section: DataConfig, count: int) -> list[ExportedGroup]:
        label = section.label
        if not await self._read_groups(label):
            return []
        picked: list[ExportedGroup] = []
        epoch = self._first_epoch.get(label, 0)
        max_epochs = section.epochs or (None if self.has_own_data else 1)
        while len(picked) < count and (max_epochs is None or epoch < max_epochs):
            picked_ids = {group.group_id for group, _ in picked}
            remaining = await self._read_groups(label, unclaimed_in_epoch=epoch)
            fresh = [group for group in remaining if group.group_id not in picked_ids]
            if picked and not fresh:
                break  # all groups of the source are in this step
            picked += [(group, epoch) for group in fresh[: count - len(picked)]]
            if not remaining:
                self._first_epoch[label] = epoch + 1
            epoch += 1
        return picked

    async def _read_groups(self, label: str, *, unclaimed_in_epoch: int | None = None) -> list[Group]:
        groups = await self.store.groups(
            self.run_id,
            Channel.DATA,
            GroupStatus.READY,
            unclaimed_in_epoch=unclaimed_in_epoch,
            unclaimed_by=self.config.policy_id,
        )
        prefix = group_id_prefix(self.run_id, label)
        return [group for group in groups if group.group_id.startswith(prefix)]
