"""Builds claims, which record that a step trained on a sample or why the sample was dropped.

A claim for a dropped sample is called a drop. The functions here only build claims; the caller stores them.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, replace

from instar.data.advantages import Advantages
from instar.data.group_loader import FINISHED_STATUSES, LoadedGroup, LoadedSession
from instar.data.staleness import Staleness
from instar.store.base import Store
from instar.types import Claim, ClaimOutcome, Group, Sample, Session


@dataclass(frozen=True, slots=True)
class ClaimBuilder:
    run_id: str
    epoch: int
    staleness: Staleness | None = None
    """None for exported data, whose claims have no staleness."""
    policy_id: str = ""
    """The policy of the claims, as in `Claim`."""

    def build_trained_claim(self, session: LoadedSession, sample: Sample, advantage: float | None) -> Claim:
        return Claim(
            run_id=self.run_id,
            epoch=self.epoch,
            sample_key=sample.sample_key,
            session_id=sample.session_id,
            group_id=sample.group_id,
            outcome=ClaimOutcome.TRAINED,
            reward=session.reward,
            advantage=advantage,
            staleness=None if self.staleness is None else self.staleness.of_sample(sample),
            policy_id=self.policy_id,
        )

    def build_sample_drop(
        self, session: LoadedSession, sample: Sample, advantage: float | None, reason: str
    ) -> Claim:
        claim = self.build_trained_claim(session, sample, advantage)
        return replace(claim, outcome=ClaimOutcome.DROPPED, reason=reason)

    def build_loaded_session_drops(
        self, session: LoadedSession, reason: str, advantage: float | None
    ) -> list[Claim]:
        """Return one drop per sample, or a single one if the session has no samples. The reasons
        ``zero_signal`` and ``no_reward`` are replaced by a more specific reason if there is one."""
        if reason in ("zero_signal", "no_reward") and session.reward is None:
            reason = "failed" if session.is_failed else "no_reward"
        if session.samples:
            return [self.build_sample_drop(session, sample, advantage, reason) for sample in session.samples]
        group_id, slot = session.session.group_id, session.session.slot
        key = f"{session.session.session_id}/0" if group_id is None else f"{group_id}/{slot}/0"
        claim = self.build_session_drop(session.session, "no_tokens" if reason == "no_reward" else reason)
        return [replace(claim, sample_key=key, reward=session.reward, advantage=advantage)]

    def build_session_drop(self, session: Session, reason: str) -> Claim:
        # The slot's sample keys belong to the session that was selected for the slot, so use the session id.
        return self._build_drop(f"{session.session_id}/0", session.session_id, session.group_id, reason)

    def build_group_drops(
        self, group: LoadedGroup, reason: str, advantages: Advantages | None = None
    ) -> list[Claim]:
        """Return drops for everything in a group except its untrainable sessions."""
        values = advantages or [None] * len(group.sessions)
        claims = [
            claim
            for session, advantage in zip(group.sessions, values, strict=True)
            for claim in self.build_loaded_session_drops(session, reason, advantage)
        ]
        claims += self.build_superseded_drops(group)
        if claims or group.untrainable:
            return claims
        # A group without sessions needs a claim, or every step would load it again.
        group_id = group.group.group_id
        return [self._build_drop(f"{group_id}/0", "", group_id, "no_sessions")]

    def build_superseded_drops(self, group: LoadedGroup) -> list[Claim]:
        return [self.build_session_drop(session, "superseded") for session in group.superseded]

    def _build_drop(self, sample_key: str, session_id: str, group_id: str | None, reason: str) -> Claim:
        claim = Claim(self.run_id, self.epoch, sample_key, session_id, group_id, ClaimOutcome.DROPPED)
        return replace(claim, reason=reason, policy_id=self.policy_id)


@dataclass(frozen=True, slots=True)
class ConsumedGroup:
    group: Group
    step: int | None
    """The step that consumed the group, or None if the group was dropped without a step."""
    session_ids: set[str]
    """The sessions that already have a claim."""


class ConsumedGroups:
    """The last ``limit`` consumed groups, used to find their late sessions."""

    def __init__(self, store: Store, run_id: str, agent_id: str, limit: int) -> None:
        self._store = store
        self._run_id = run_id
        self._agent_id = agent_id
        self._limit = limit
        self._groups: OrderedDict[str, ConsumedGroup] | None = None

    def reset(self) -> None:
        self._groups = None

    def add(self, group: LoadedGroup, step: int | None) -> None:
        assert self._groups is not None, "call build_late_drops before add"
        self._groups[group.group.group_id] = ConsumedGroup(group.group, step, group.session_ids)
        while len(self._groups) > self._limit:
            self._groups.popitem(last=False)

    async def build_late_drops(self, epoch: int) -> list[Claim]:
        """Return drops for sessions that ended after their group was consumed, once per session. They belong
        to the step that consumed the group, so they are released together with it."""
        if self._groups is None:
            self._groups = await self._read_groups(epoch)
        builder = ClaimBuilder(self._run_id, epoch)
        drops: list[Claim] = []
        groups = [consumed.group for consumed in self._groups.values()]
        sessions = await self._store.group_sessions(groups, self._agent_id)
        for group_id, consumed in self._groups.items():
            for session in sessions[group_id]:
                if session.status in FINISHED_STATUSES and session.session_id not in consumed.session_ids:
                    consumed.session_ids.add(session.session_id)
                    drops.append(replace(builder.build_session_drop(session, "late"), step=consumed.step))
        return drops

    async def _read_groups(self, epoch: int) -> OrderedDict[str, ConsumedGroup]:
        groups: OrderedDict[str, ConsumedGroup] = OrderedDict()
        for claim in await self._store.recent_claims(self._run_id, epoch, self._limit):
            assert claim.group_id is not None
            if claim.group_id not in groups:
                group = await self._store.group(claim.group_id)
                assert group is not None, "groups are never deleted"
                groups[claim.group_id] = ConsumedGroup(group, claim.step, set())
            groups[claim.group_id].session_ids.add(claim.session_id)
        return groups
