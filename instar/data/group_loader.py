"""Groups as a batch is made of them: the final session of every slot, with its samples and its reward."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass, field, replace

from instar.config import RunConfig
from instar.data.combine import RewardCombiner
from instar.data.linearize import linearize
from instar.store.base import Store
from instar.types import UNTRAINABLE, Call, Group, Reward, Sample, Score, Session, SessionStatus

ENDED_STATUSES = (SessionStatus.COMPLETED, SessionStatus.FAILED)


@dataclass(frozen=True, slots=True)
class LoadedSession:
    """A slot's final session, ready to be trained on."""

    session: Session
    samples: list[Sample]
    reward: float | None
    call_rewards: dict[str, float]
    """What single calls were rewarded with, weighted."""

    @property
    def is_failed(self) -> bool:
        return self.session.status is SessionStatus.FAILED


@dataclass(frozen=True, slots=True)
class LoadedGroup:
    group: Group
    sessions: list[LoadedSession]
    superseded: list[Session]
    untrainable: list[LoadedSession] = field(default_factory=list[LoadedSession])
    """Those that are not to be trained on."""
    epoch: int | None = None
    """Of exported data: how often it was gone through before. None: the run's own."""

    @property
    def samples(self) -> list[Sample]:
        return [sample for entry in self.sessions for sample in entry.samples]

    @property
    def session_ids(self) -> set[str]:
        sessions = [*(entry.session for entry in (*self.sessions, *self.untrainable)), *self.superseded]
        return {session.session_id for session in sessions}

    def exclude(self, tagged: Set[str]) -> LoadedGroup:
        """With those sessions set apart."""
        kept = [entry for entry in self.sessions if entry.session.session_id not in tagged]
        apart = [entry for entry in self.sessions if entry.session.session_id in tagged]
        return replace(self, sessions=kept, untrainable=apart)


class GroupLoader:
    def __init__(self, store: Store, config: RunConfig) -> None:
        self.store = store
        self.config = config
        self.combine = RewardCombiner(config)

    async def load(self, groups: Sequence[Group]) -> list[LoadedGroup]:
        in_groups = await self.store.sessions_in([group.group_id for group in groups])
        ended = [[s for s in in_groups[group.group_id] if s.status in ENDED_STATUSES] for group in groups]
        final = [select_final_sessions(sessions) for sessions in ended]
        entries = await self._entries([session for sessions in final for session in sessions])
        loaded: list[LoadedGroup] = []
        for group, those, chosen in zip(groups, ended, final, strict=True):
            kept = {session.session_id for session in chosen}
            superseded = [session for session in those if session.session_id not in kept]
            loaded.append(LoadedGroup(group, [entries[s.session_id] for s in chosen], superseded))
        return loaded

    async def exclude_untrainable(self, groups: Sequence[LoadedGroup]) -> list[LoadedGroup]:
        """Asked for as a batch is made, for a tag may come after a group was loaded."""
        tags = await self.store.tags(
            [entry.session.session_id for found in groups for entry in found.sessions]
        )
        tagged = {each for each, given in tags.items() if any(tag.name == UNTRAINABLE for tag in given)}
        return [found.exclude(tagged) for found in groups] if tagged else list(groups)

    async def _entries(self, sessions: Sequence[Session]) -> dict[str, LoadedSession]:
        ids = [session.session_id for session in sessions]
        rewards, scores = await self.store.rewards_of(ids), await self.store.scores(ids)
        calls = await self.store.calls_of(ids)
        return {
            each: self._entry(session, rewards[each], scores[each], calls[each])
            for each, session in zip(ids, sessions, strict=True)
        }

    def _entry(
        self, session: Session, rewards: Sequence[Reward], scores: Sequence[Score], calls: Sequence[Call]
    ) -> LoadedSession:
        reward = self.combine(rewards, scores)
        if reward is None and session.status is SessionStatus.FAILED and self.config.rollout:
            reward = self.config.rollout.failed_reward
        weight = self.config.trainer.advantage.weight
        per_call = {
            call_id: weight * value for call_id, value in self.combine.combine_calls(rewards, scores).items()
        }
        scored = self.config.trainer.loss.name != "cross_entropy"
        return LoadedSession(session, linearize(session, calls, requires_logprobs=scored), reward, per_call)


def select_final_sessions(ended: Sequence[Session]) -> list[Session]:
    """The last attempt at each slot."""
    final: dict[int, Session] = {}
    for session in ended:
        held = final.get(session.slot)
        if held is None or session.attempt >= held.attempt:
            final[session.slot] = session
    return [final[slot] for slot in sorted(final)]
