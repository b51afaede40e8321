"""The most recently consumed groups. Sessions of these groups that end later are late and are dropped."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, replace

from instar.data.claims import ClaimBuilder
from instar.data.group_loader import ENDED_STATUSES, LoadedGroup
from instar.store.base import Store
from instar.types import Claim


@dataclass(frozen=True, slots=True)
class ConsumedGroup:
    step: int | None
    """The step that consumed the group; None if the group was dropped outside of steps."""
    session_ids: set[str]
    """The sessions that have claims."""


class ConsumedGroups:
    def __init__(self, store: Store, run_id: str, limit: int) -> None:
        """Create an empty record. ``limit`` is the number of groups that are remembered."""
        self._store = store
        self._run_id = run_id
        self._limit = limit
        self._groups: OrderedDict[str, ConsumedGroup] | None = None

    def reset(self) -> None:
        """Forget the groups; they are read from the store again."""
        self._groups = None

    def add(self, group: LoadedGroup, step: int | None) -> None:
        assert self._groups is not None, "late sessions are dropped before a group is consumed"
        self._groups[group.group.group_id] = ConsumedGroup(step, group.session_ids)
        while len(self._groups) > self._limit:
            self._groups.popitem(last=False)

    async def drop_late_sessions(self, epoch: int) -> list[Claim]:
        """Return claims that drop the sessions that ended after their group was consumed. Each claim carries
        the group's step, so that releasing the step also releases the claim and the group can be claimed
        again."""
        groups = self._groups = await self._load(epoch) if self._groups is None else self._groups
        builder = ClaimBuilder(self._run_id, epoch)
        drops: list[Claim] = []
        sessions = await self._store.sessions_by_group(list(groups))
        for group_id, consumed in groups.items():
            for session in sessions[group_id]:
                if session.status in ENDED_STATUSES and session.session_id not in consumed.session_ids:
                    consumed.session_ids.add(session.session_id)
                    drops.append(replace(builder.drop_session(session, "late"), step=consumed.step))
        return drops

    async def _load(self, epoch: int) -> OrderedDict[str, ConsumedGroup]:
        groups: OrderedDict[str, ConsumedGroup] = OrderedDict()
        for claim in await self._store.recent_claims(self._run_id, epoch, self._limit):
            assert claim.group_id is not None
            consumed = groups.setdefault(claim.group_id, ConsumedGroup(claim.step, set()))
            consumed.session_ids.add(claim.session_id)
        return groups
