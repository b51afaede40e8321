"""Selects the live sessions that a step trains on, and explains why others are excluded.

A live session is trained on once it is complete and has a reward, if its agent's mode is ``learn``. It forms
a group of one. Calls that were sampled greedily are not trained on, because greedy sampling tries only one
reply and its probability under the sampled distribution is 1.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec

from instar.config import RunConfig
from instar.data.combine import RewardCombiner
from instar.data.group_loader import LoadedGroup, LoadedSession
from instar.data.linearize import linearize
from instar.live.base import is_held_out
from instar.store.base import Store
from instar.types import (
    UNTRAINABLE,
    Call,
    Channel,
    Group,
    GroupStatus,
    Reward,
    RewardSource,
    Sample,
    Score,
    Session,
    SessionStatus,
    Tag,
    Task,
)

EXCLUSIONS = {
    "observe": "its agent's mode is observe; set `agents.NAME.mode` to learn",
    "open": "the session is not complete",
    "failed": "the session failed",
    "abandoned": "the session was abandoned",
    "untrainable": "the session is tagged as untrainable",
    "no_reward": "it has no reward that counts",
    "fallback": "its only reward is the fallback of a scorer that failed",
    "held_out": "it is held out to evaluate candidates (live.gate)",
    "greedy": "it was sampled greedily, at temperature 0",
    "no_tokens": "none of its calls has exact tokens with logprobs",
}
"""The reasons to exclude a live session. The last three are final, so the session is claimed as dropped. With
any other reason it is not claimed, because it can still become trainable."""
KIND_LENGTH = 16


@dataclass(frozen=True, slots=True)
class LiveReward:
    session: float | None
    calls: dict[str, float]
    """The combined reward of each call, by call id."""


@dataclass(frozen=True, slots=True)
class LiveSession:
    session: Session
    exclusion: str | None
    """The key in `EXCLUSIONS`, or None if the session can be trained on."""


class LiveLoader:
    def __init__(self, store: Store, config: RunConfig) -> None:
        self._store = store
        self._config = config
        self._combiner = RewardCombiner(config)
        self._last_reward = 0
        self._candidates: list[Session] = []
        """The unclaimed sessions that have a reward."""
        self._loaded: dict[str, tuple[int, LoadedGroup]] = {}
        """Candidates that were loaded, by id, each with the number of rewards that it had then."""

    def reset(self) -> None:
        self._last_reward, self._candidates, self._loaded = 0, [], {}

    async def load_ready(self, epoch: int, count: int) -> tuple[list[LoadedGroup], list[LoadedGroup]]:
        """Return up to ``count`` sessions to train on, those that ended first, and the sessions before them
        that can never be trained on, with the reason as the reason of their group."""
        if not count:
            return [], []
        rewarded = await self._store.rewarded_live_sessions(
            self._config.name,
            self._config.learning_agents,
            epoch,
            after_reward=self._last_reward,
            session_ids=[session.session_id for session in self._candidates],
        )
        self._last_reward = rewarded.last_reward
        unfinished = (SessionStatus.OPEN, SessionStatus.COMPLETED)
        self._candidates = [session for session in rewarded.sessions if session.status in unfinished]
        completed = [session for session in self._candidates if session.status is SessionStatus.COMPLETED]
        completed.sort(key=lambda session: (session.ended_at or 0.0, session.session_id))
        ids = [session.session_id for session in completed]
        rewards, scores = await self._store.rewards_by_session(ids), await self._store.scores(ids)
        tags = await self._store.tags(ids)
        ready: list[LoadedGroup] = []
        excluded: list[LoadedGroup] = []
        for session in completed:
            if len(ready) == count:
                break
            key = session.session_id
            if self._find_temporary_exclusion(session, rewards[key], scores[key], tags[key]) is None:
                reward_count, group = self._loaded.get(key, (0, None))
                if group is None or reward_count != len(rewards[key]):
                    reward = self._combine(rewards[key], scores[key])
                    group = self._load(session, await self._store.calls(key), reward)
                self._loaded[key] = len(rewards[key]), group
                (ready if group.group.reason is None else excluded).append(group)
        self._loaded = {key: self._loaded[key] for key in ids if key in self._loaded}
        return ready, excluded

    async def describe(self, sessions: Sequence[Session]) -> list[LiveSession]:
        """Return for each live session whether and why it is excluded, regardless of its claims."""
        ids = [session.session_id for session in sessions]
        rewards, scores = await self._store.rewards_by_session(ids), await self._store.scores(ids)
        tags = await self._store.tags(ids)
        described: list[LiveSession] = []
        for session in sessions:
            key = session.session_id
            exclusion = self._find_temporary_exclusion(session, rewards[key], scores[key], tags[key])
            if exclusion is None:
                reward = self._combine(rewards[key], scores[key])
                exclusion = self._load(session, await self._store.calls(key), reward).group.reason
            described.append(LiveSession(session, exclusion))
        return described

    def _combine(self, rewards: Sequence[Reward], scores: Sequence[Score]) -> LiveReward:
        known = [reward for reward in rewards if reward.source is not RewardSource.FALLBACK]
        return LiveReward(self._combiner(known, scores), self._combiner.combine_calls(known, scores))

    def _find_temporary_exclusion(
        self, session: Session, rewards: Sequence[Reward], scores: Sequence[Score], tags: Sequence[Tag]
    ) -> str | None:
        if session.agent_id not in self._config.learning_agents:
            return "observe"
        if session.status is not SessionStatus.COMPLETED:
            return session.status.value
        if any(tag.name == UNTRAINABLE for tag in tags):
            return UNTRAINABLE
        if self._combine(rewards, scores) == LiveReward(None, {}):
            return "fallback" if any(r.source is RewardSource.FALLBACK for r in rewards) else "no_reward"
        return None

    def _load(self, session: Session, calls: Sequence[Call], reward: LiveReward) -> LoadedGroup:
        """Return the session as a group of one, which has a reason if the session cannot be trained on."""
        session = replace(session, group_id=None)
        requires_logprobs = self._config.trainer.loss.name != "cross_entropy"
        samples = linearize_live(session, calls, requires_logprobs=requires_logprobs)
        reason = None
        if is_session_held_out(self._config, calls):
            reason = "held_out"
        elif not samples:
            is_greedy = any(call.trainable and call.params.temperature == 0 for call in calls)
            reason = "greedy" if is_greedy else "no_tokens"
        key = session.session_id
        kind = compute_kind(session.metadata, calls)
        task = Task(session.task_id or kind, {})
        group = Group(key, session.run_id, Channel.LIVE, 0, 1, task, GroupStatus.READY, reason)
        loaded = LoadedSession(session, samples, reward.session, reward.calls)
        return LoadedGroup(group, [loaded], [], kind=kind)


def is_session_held_out(config: RunConfig, calls: Sequence[Call]) -> bool:
    """Return True if the run evaluates candidates on the live session, and so never trains on it."""
    return config.has_gate and bool(calls) and is_held_out(calls[0].messages)


def linearize_live(session: Session, calls: Sequence[Call], *, requires_logprobs: bool) -> list[Sample]:
    """Return the session's samples. Calls that were sampled greedily are not trained."""
    # A live session may carry the id of a group that it does not belong to; its sample keys must not.
    session = replace(session, group_id=None)
    sampled = [call if call.params.temperature > 0 else replace(call, trainable=False) for call in calls]
    return linearize(session, sampled, requires_logprobs=requires_logprobs)


def compute_kind(metadata: Mapping[str, object], calls: Sequence[Call]) -> str:
    """Return the kind of a live session's task: ``kind`` in its metadata, or a hash of the system prompt and
    the tools of its first call."""
    declared = metadata.get("kind")
    if isinstance(declared, str) and declared:
        return declared
    if not calls:
        return ""
    prompts = [message for message in calls[0].messages if message["role"] in ("system", "developer")]
    content = msgspec.json.encode([prompts, list(calls[0].tools)], order="deterministic")
    return hashlib.sha256(content).hexdigest()[:KIND_LENGTH]
