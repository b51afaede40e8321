"""Selects the earlier replies that a step with live data trains on again.

There are two sources: live sessions whose advantage was positive, and a fixed reference set of replies that
are not from live traffic. Both are trained with the cross-entropy loss, without importance weights: they are
examples of what the policy should keep doing, whichever version sampled them. Sessions with a negative
advantage are never replayed, because the gradient of a negative weight on replies that the policy no longer
samples is not bounded.

A live session is replayed only if a version that was trained on it is the serving one or an ancestor of it.
So rejected data, and data that no one has accepted yet, is not reinforced.

Replay number n of a live session is claimed in epoch n, and pass number n over the reference set in epoch n.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from instar.config import RunConfig
from instar.config.data import group_id_prefix
from instar.data.advantages import normalize
from instar.data.combine import RewardCombiner
from instar.data.linearize import linearize, with_advantage
from instar.data.live import linearize_live
from instar.data.supervised import SupervisedBatch
from instar.store.base import Store
from instar.types import (
    SINGLE_EPOCH,
    Channel,
    Claim,
    ClaimOutcome,
    Group,
    GroupStatus,
    Sample,
    Session,
    SessionStatus,
)


@dataclass(frozen=True, slots=True)
class _Example:
    """A live session, or a group of the reference set."""

    session_id: str
    group_id: str | None
    epoch: int
    """The epoch in which it is claimed."""
    samples: list[Sample]

    def build_claims(self, run_id: str, step: int) -> list[Claim]:
        """Return a claim for each sample. An example without samples gets a drop, so that it is not loaded
        again in this epoch."""
        claim = Claim(
            run_id=run_id,
            epoch=self.epoch,
            sample_key=f"{self.group_id or self.session_id}/0",
            session_id=self.session_id,
            group_id=self.group_id,
            outcome=ClaimOutcome.TRAINED,
            step=step,
        )
        if not self.samples:
            return [replace(claim, outcome=ClaimOutcome.DROPPED, reason="no_tokens")]
        return [replace(claim, sample_key=s.sample_key, session_id=s.session_id) for s in self.samples]


class ReplayLoader:
    def __init__(self, store: Store, config: RunConfig) -> None:
        self._store = store
        self._config = config
        self._combiner = RewardCombiner(config)
        self._reference_epoch = 0
        """The first epoch that may have unclaimed groups of the reference set."""

    def reset(self) -> None:
        self._reference_epoch = 0

    async def load(self, step: int, count: int) -> SupervisedBatch:
        """Return the replayed samples of a step with ``count`` live sessions, corrections and preferences."""
        section = self._config.live.replay
        if not count or not section.share or not self._config.trains_on_live:
            return SupervisedBatch()
        ratio = section.share / (1 - section.share)
        needed = max(1, round(count * ratio))
        # Half come from each source. Steps that replay an odd number alternate.
        live_count = needed if self._config.reference_label is None else (needed + step % 2) // 2
        live = await self._load_live(live_count)
        examples = [*live, *await self._load_reference(needed - len(live))]
        replayed = [sample for example in examples for sample in example.samples]
        mode = self._config.trainer.advantage.normalize
        # The weight of all replayed samples together has the configured ratio to that of the others.
        scale = ratio * count / max(1, len(replayed)) if mode == "none" else ratio
        samples = [replace(s, advantages=s.advantages * np.float32(scale)) for s in replayed]
        claims = [claim for example in examples for claim in example.build_claims(self._config.name, step)]
        return SupervisedBatch(replayed=normalize(samples, mode), claims=claims)

    # --- live sessions -----------------------------------------------------------------------------

    async def _load_live(self, count: int) -> list[_Example]:
        """Return ``count`` live sessions, or fewer, those that were replayed least first."""
        section = self._config.live.replay
        examples: list[_Example] = []
        for agent_id in self._config.trained_agents:
            steps = await self._list_accepted_steps(self._config.get_policy_id(agent_id))
            for epoch in range(SINGLE_EPOCH + 1, SINGLE_EPOCH + 1 + section.max_repeats):
                if len(examples) >= count or not steps:
                    break
                sessions = await self._store.replayable_sessions(
                    self._config.name,
                    [agent_id],
                    epoch,
                    steps=steps,
                    min_advantage=section.min_advantage,
                    limit=count,
                )
                picked_ids = {example.session_id for example in examples}
                for session in [s for s in sessions if s.session_id not in picked_ids]:
                    if len(examples) < count:
                        samples = await self._load_session(session)
                        examples.append(_Example(session.session_id, None, epoch, samples))
        return examples

    async def _list_accepted_steps(self, policy_id: str) -> list[int]:
        """Return the steps of the serving version and its ancestors."""
        rows = {row.policy.version: row for row in await self._store.policy_versions(policy_id)}
        version: int | None = (await self._store.latest_policy(policy_id)).version
        steps: list[int] = []
        while version is not None and version in rows:
            steps.append(rows[version].step)
            version = rows[version].parent
        return steps

    async def _load_session(self, session: Session) -> list[Sample]:
        """Return the samples of a live session. Of the calls that have a reward, only those with the highest
        one are trained."""
        ids = [session.session_id]
        calls = await self._store.calls(session.session_id)
        rewards, scores = await self._store.rewards_by_session(ids), await self._store.scores(ids)
        call_rewards = self._combiner.combine_calls(rewards[ids[0]], scores[ids[0]])
        worse = {key for key, value in call_rewards.items() if value < max(call_rewards.values())}
        kept = [replace(call, trainable=False) if call.call_id in worse else call for call in calls]
        return self._to_examples(linearize_live(session, kept, requires_logprobs=False))

    # --- the reference set -------------------------------------------------------------------------

    async def _load_reference(self, count: int) -> list[_Example]:
        """Return up to ``count`` groups of the reference set, those of the current pass first. A step
        contains a group at most once."""
        examples: list[_Example] = []
        size = len(await self._read_groups(None)) if count > 0 else 0
        epoch = self._reference_epoch
        while len(examples) < min(count, size):
            unclaimed = await self._read_groups(epoch)
            picked_ids = {example.group_id for example in examples}
            for group in [group for group in unclaimed if group.group_id not in picked_ids]:
                if len(examples) < count:
                    examples.append(_Example("", group.group_id, epoch, await self._load_group(group)))
            if not unclaimed:
                self._reference_epoch = epoch + 1
            epoch += 1
        return examples

    async def _read_groups(self, unclaimed_in_epoch: int | None) -> list[Group]:
        label = self._config.reference_label
        if label is None:
            return []
        prefix = group_id_prefix(self._config.name, label)
        groups = await self._store.groups(
            self._config.name,
            Channel.DATA,
            GroupStatus.READY,
            unclaimed_in_epoch=unclaimed_in_epoch,
            unclaimed_by=self._config.policy_id,
        )
        return [group for group in groups if group.group_id.startswith(prefix)]

    async def _load_group(self, group: Group) -> list[Sample]:
        sessions = await self._store.group_sessions([group], self._config.agent_id)
        samples: list[Sample] = []
        for session in sessions[group.group_id]:
            rewards = await self._store.rewards_by_session([session.session_id])
            reward = self._combiner(rewards[session.session_id])
            if session.status is SessionStatus.COMPLETED and (reward is None or reward > 0):
                calls = await self._store.calls(session.session_id)
                samples += linearize(session, calls, requires_logprobs=False)
        return self._to_examples(samples)

    def _to_examples(self, samples: Sequence[Sample]) -> list[Sample]:
        limit = self._config.model.context_length
        return [with_advantage(sample, 1.0) for sample in samples if len(sample) <= limit]
