"""Loads the groups of a batch: the final session of every slot, with its samples and reward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

from instar.config import RunConfig
from instar.data.combine import RewardCombiner
from instar.data.linearize import linearize
from instar.store.base import Store
from instar.types import UNTRAINABLE, Channel, Group, Sample, Session, SessionStatus

FINISHED_STATUSES = (SessionStatus.COMPLETED, SessionStatus.FAILED)
"""Only sessions with these statuses are loaded. An abandoned session did not finish."""


@dataclass(frozen=True, slots=True)
class LoadedSession:
    session: Session
    samples: list[Sample]
    reward: float | None
    """The combined reward, or `failed_reward` if the session failed without a reward."""
    call_rewards: dict[str, float]
    """The combined reward of each call, by call id, already multiplied by `trainer.advantage.weight`."""

    @property
    def is_failed(self) -> bool:
        return self.session.status is SessionStatus.FAILED


@dataclass(frozen=True, slots=True)
class LoadedGroup:
    group: Group
    sessions: list[LoadedSession]
    superseded: list[Session]
    """Finished sessions that were replaced by a later attempt in the same slot."""
    untrainable: list[LoadedSession] = field(default_factory=list[LoadedSession])
    """The final sessions that are tagged as untrainable."""
    epoch: int | None = None
    """The epoch in which an exported group is claimed, or None for groups that this run sampled."""
    kind: str = ""
    """The kind of a live session's task, whose earlier rewards are its baseline."""

    other_rewards: list[float] = field(default_factory=list[float])
    """Rewards of replies that are compared with the sessions, but not trained."""

    @property
    def is_live(self) -> bool:
        return self.group.channel is Channel.LIVE

    @property
    def is_from_live(self) -> bool:
        """True for live sessions and for further replies to their prompts, which are never stale."""
        return self.group.channel in (Channel.LIVE, Channel.RESAMPLED)

    @property
    def samples(self) -> list[Sample]:
        return [sample for session in self.sessions for sample in session.samples]

    @property
    def session_ids(self) -> set[str]:
        final_sessions = [loaded.session for loaded in (*self.sessions, *self.untrainable)]
        return {session.session_id for session in (*final_sessions, *self.superseded)}


class GroupLoader:
    def __init__(self, store: Store, config: RunConfig) -> None:
        self.store = store
        self.config = config
        self.combiner = RewardCombiner(config)

    async def load(self, groups: Sequence[Group]) -> list[LoadedGroup]:
        sessions = await self.store.group_sessions(groups, self.config.agent_id)
        finished_by_group = [
            [session for session in sessions[group.group_id] if session.status in FINISHED_STATUSES]
            for group in groups
        ]
        final_by_group = [select_final_sessions(finished) for finished in finished_by_group]
        loaded = await self._load_sessions([session for final in final_by_group for session in final])
        result: list[LoadedGroup] = []
        for group, finished, final in zip(groups, finished_by_group, final_by_group, strict=True):
            final_ids = {session.session_id for session in final}
            superseded = [session for session in finished if session.session_id not in final_ids]
            result.append(LoadedGroup(group, [loaded[s.session_id] for s in final], superseded))
        return result

    async def exclude_untrainable(self, groups: Sequence[LoadedGroup]) -> list[LoadedGroup]:
        """Return the groups with the sessions that are tagged as untrainable moved to ``untrainable``."""
        ids = [loaded.session.session_id for group in groups for loaded in group.sessions]
        tags = chain.from_iterable((await self.store.tags(ids)).values())
        untrainable = {tag.session_id for tag in tags if tag.name == UNTRAINABLE}
        return [
            replace(
                group,
                sessions=[s for s in group.sessions if s.session.session_id not in untrainable],
                untrainable=[s for s in group.sessions if s.session.session_id in untrainable],
            )
            for group in groups
        ]

    async def _load_sessions(self, sessions: Sequence[Session]) -> dict[str, LoadedSession]:
        ids = [session.session_id for session in sessions]
        rewards, scores = await self.store.rewards_by_session(ids), await self.store.scores(ids)
        calls = await self.store.calls_by_session(ids)
        weight = self.config.trainer.advantage.weight
        requires_logprobs = self.config.trainer.loss.name != "cross_entropy"
        loaded: dict[str, LoadedSession] = {}
        for session in sessions:
            key = session.session_id
            reward = self.combiner(rewards[key], scores[key])
            if reward is None and session.status is SessionStatus.FAILED:
                reward = self.config.group_settings.failed_reward
            call_rewards = self.combiner.combine_calls(rewards[key], scores[key])
            loaded[key] = LoadedSession(
                session,
                samples=linearize(session, calls[key], requires_logprobs=requires_logprobs),
                reward=reward,
                call_rewards={call_id: weight * value for call_id, value in call_rewards.items()},
            )
        return loaded


def select_final_sessions(finished: Sequence[Session]) -> list[Session]:
    """Return the last attempt of each slot, ordered by slot. Of sessions with equal attempts, return a
    completed one if possible: a rollout that was replaced but still runs may add failed ones."""
    final: dict[int, Session] = {}
    for session in sorted(finished, key=lambda s: (s.attempt, s.status is SessionStatus.COMPLETED)):
        final[session.slot] = session
    return [final[slot] for slot in sorted(final)]
