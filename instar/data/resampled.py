"""Loads the groups of further replies to the prompts of live calls (see `instar.live.resample`).

The original reply counts as a further member of its group for the advantages, if a rule or judge scored its
session. It is not trained in this group: if it can be trained on at all, its session is a group of its own.
"""

from __future__ import annotations

import time

from instar.config import RunConfig
from instar.data.combine import RewardCombiner
from instar.data.group_loader import LoadedGroup, LoadedSession
from instar.data.linearize import linearize
from instar.store.base import RESAMPLED_PREFIX, Store
from instar.types import UNTRAINABLE, Channel, Group, GroupStatus, RewardSource

MAX_WAIT_SECONDS = 600.0
"""How long a group waits for the rewards of its sessions."""
PEOPLE_AND_AGENTS = (RewardSource.HUMAN, RewardSource.AGENT, RewardSource.FALLBACK)
"""The sources of rewards that the new replies cannot have."""


class ResampledLoader:
    def __init__(self, store: Store, config: RunConfig) -> None:
        self._store = store
        self._config = config
        self._combiner = RewardCombiner(config)

    async def load_ready(self, epoch: int, count: int) -> list[LoadedGroup]:
        """Return up to ``count`` unclaimed groups whose sessions have rewards, oldest first. Groups that have
        waited too long for a reward are included. Those of untrainable live sessions are left out."""
        if not count or self._config.live.resample < 2:
            return []
        groups = await self._store.groups(
            self._config.name, Channel.RESAMPLED, GroupStatus.SCORING, unclaimed_in_epoch=epoch
        )
        ready: list[LoadedGroup] = []
        for group in sorted(groups, key=lambda group: group.created_at):
            if len(ready) == count:
                break
            original_id = group.group_id.removeprefix(RESAMPLED_PREFIX)
            if any(tag.name == UNTRAINABLE for tag in (await self._store.tags([original_id]))[original_id]):
                continue
            loaded = await self._load(group, original_id)
            is_scored = all(session.reward is not None for session in loaded.sessions)
            agents = {session.session.agent_id for session in loaded.sessions}
            has_waited = time.time() - group.created_at > MAX_WAIT_SECONDS
            if agents <= set(self._config.trained_agents) and (is_scored or has_waited):
                ready.append(loaded)
        return ready

    async def _load(self, group: Group, original_id: str) -> LoadedGroup:
        sessions = (await self._store.sessions_by_group([group.group_id]))[group.group_id]
        requires_logprobs = self._config.trainer.loss.name != "cross_entropy"
        ids = [session.session_id for session in sessions]
        rewards = await self._store.rewards_by_session([*ids, original_id])
        scores = await self._store.scores([*ids, original_id])
        calls = await self._store.calls_by_session(ids)
        loaded: list[LoadedSession] = []
        for session in sessions:
            key = session.session_id
            by_call = self._combiner.combine_calls(rewards[key], scores[key])
            reward = self._combiner(rewards[key], scores[key])
            # A session has one call, so a reward on the call is a reward on the session.
            reward = next(iter(by_call.values()), None) if reward is None else reward
            samples = linearize(session, calls[key], requires_logprobs=requires_logprobs)
            loaded.append(LoadedSession(session, samples, reward, {}))
        comparable = [r for r in rewards[original_id] if r.source not in PEOPLE_AND_AGENTS]
        original = self._combiner(comparable, scores[original_id])
        return LoadedGroup(group, loaded, [], other_rewards=[] if original is None else [original])
