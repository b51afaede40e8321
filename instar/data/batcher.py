"""Builds the batch of a training step from finished groups.

A step consumes ``groups_per_step`` finished groups, lowest index first. Each sample of these groups is either
used for training or dropped for one of the following reasons:

- ``zero_signal``: the group has no nonzero advantage or call reward, and the run does not use a reference.
- ``no_reward``, ``failed``, ``no_tokens``: the session has no reward, failed, or has no trainable token.
- ``no_sessions``: the group has no completed or failed session.
- ``stale``: the sample is too stale. With `trainer.stale: mask`, all of its trained tokens are too stale.
- ``too_long``: the sample is longer than the model's context. This only happens with exported data.
- ``superseded``, ``untrainable``: the session was run again, or is tagged as untrainable.
- ``late``: the session ended after a step had consumed its group. Its claim belongs to that step.

Groups whose samples are all stale are claimed without a step. So are groups that the rollout dropped, with
the rollout's reason. If `data` lists exported data, its groups make up part of each step and are claimed
once per epoch; they are never stale. A batch depends only on the store's rows and the estimator's state.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, replace

import numpy as np

from instar.config import RunConfig
from instar.data.advantages import (
    AdvantageEstimator,
    Advantages,
    compute_divisor,
    compute_token_scales,
    has_signal,
    normalize,
    reweight_truncated_sampling,
)
from instar.data.claims import ClaimBuilder, ConsumedGroups
from instar.data.group_loader import GroupLoader, LoadedGroup, LoadedSession
from instar.data.linearize import with_advantage
from instar.data.mixture import DataMixture
from instar.data.report import report_batch, report_groups, report_outputs
from instar.data.staleness import Staleness
from instar.store.base import Store
from instar.types import UNTRAINABLE, Channel, Claim, Floats, GroupStatus, Json, Sample

POLL_INTERVAL_SECONDS = 0.05


@dataclass(frozen=True, slots=True)
class StepBatch:
    samples: list[Sample]
    """The samples to train on, with normalized advantages."""
    scales: list[Floats]
    """For each sample, the scale of every token's advantage (see `compute_token_scales`)."""
    divisor: float
    """The divisor of the step's per-token terms (see `compute_divisor`)."""
    claims: list[Claim]
    """Claims for all samples in the step's groups, trained or dropped."""
    drops: list[Claim]
    """Drops without a step and, for late sessions, drops in an earlier step."""
    session_starts: list[float]
    """For each live sample, the Unix time at which its session started."""
    is_full: bool
    """True if the batch has all its live groups or, in a run without live data, at least one group."""
    report: Json

    def without(self, session_ids: Set[str]) -> StepBatch:
        """Return the batch without the samples of these sessions. The advantages, which are relative to the
        rewards of all sessions, and the divisor do not change."""
        if not session_ids:
            return self
        kept = [
            (s, scale)
            for s, scale in zip(self.samples, self.scales, strict=True)
            if s.session_id not in session_ids
        ]
        return replace(self, samples=[sample for sample, _ in kept], scales=[scale for _, scale in kept])


class Batcher:
    def __init__(self, store: Store, run_id: str, config: RunConfig) -> None:
        self.store = store
        self.run_id = run_id
        self.config = config
        self.estimator = AdvantageEstimator(config.trainer.advantage)
        self.loader = GroupLoader(store, config)
        self.mixture = DataMixture(store, run_id, config)
        self._uses_reference = config.trainer.reference.weight > 0
        self._loaded: dict[str, LoadedGroup] = {}
        # Sessions can be late by several steps.
        limit = 4 * (config.max_staleness + 1) * config.trainer.groups_per_step
        self._consumed = ConsumedGroups(store, run_id, config.agent_id, limit)

    def reset(self) -> None:
        """Forget all groups and the estimator's state. Must be called after steps are released."""
        self._loaded = {}
        self._consumed.reset()
        self.mixture.reset()
        self.estimator.load_json({})

    async def next_batch(
        self,
        step: int,
        epoch: int,
        version: int,
        *,
        step_by_version: Mapping[int, int] | None = None,
        stop: asyncio.Event | None = None,
        is_finished: Callable[[], bool] | None = None,
        timeout: float | None = None,
    ) -> StepBatch | None:
        """Wait for enough groups and return the batch of ``step``, which starts from ``version``.

        Live groups are claimed in ``epoch``, exported groups in `LoadedGroup.epoch`. See `Staleness` for
        ``step_by_version``. Once ``is_finished`` returns True, no more groups will arrive, and the batch
        consists of the remaining groups. Returns None if no groups are left, or if there are still too few
        when ``stop`` is set or after ``timeout`` seconds. Drops are stored while this method waits.
        """
        staleness = Staleness(version, step_by_version)
        deadline = None if timeout is None else time.monotonic() + timeout
        drops = await self._build_late_and_rollout_drops(epoch)
        while True:
            # Check this before reading the store, or a group that finishes in between would be missed.
            is_last = is_finished is not None and is_finished()
            fresh, stale_drops = await self._load_ready(step, epoch, staleness)
            drops += stale_drops
            if self._has_enough_live_groups(step, fresh) or (is_last and fresh):
                groups = [*fresh, *await self._load_exported(step)]
                if groups or self.mixture.has_live_data:
                    return await self._assemble(groups, drops, step, epoch, staleness)
            if drops:
                # Store the claims now, because the rollout is waiting to replace the dropped groups.
                await self.store.drop_samples(drops)
                drops = []
            has_timed_out = deadline is not None and time.monotonic() >= deadline
            if is_last or has_timed_out or (stop is not None and stop.is_set()):
                return None
            await asyncio.sleep(POLL_INTERVAL_SECONDS)

    async def preview(
        self, step: int, epoch: int, version: int, step_by_version: Mapping[int, int] | None = None
    ) -> StepBatch:
        """Return the batch that ``step`` would get now, even if too few groups are finished. The store is not
        changed, but this batcher treats the groups as consumed, so do not use it afterwards."""
        staleness = Staleness(version, step_by_version)
        drops = await self._build_late_and_rollout_drops(epoch)
        fresh, stale_drops = await self._load_ready(step, epoch, staleness)
        groups = [*fresh, *await self._load_exported(step)]
        return await self._assemble(groups, [*drops, *stale_drops], step, epoch, staleness)

    def _has_enough_live_groups(self, step: int, live: Sequence[LoadedGroup]) -> bool:
        return len(live) >= self.mixture.count_live_groups_in_step(step)

    async def _load_exported(self, step: int) -> list[LoadedGroup]:
        picked = await self.mixture.pick_groups(step)
        loaded = await self.loader.load([group for group, _ in picked])
        return [replace(group, epoch=epoch) for group, (_, epoch) in zip(loaded, picked, strict=True)]

    async def _load_ready(
        self, step: int, epoch: int, staleness: Staleness
    ) -> tuple[list[LoadedGroup], list[Claim]]:
        """Return unclaimed finished groups, lowest index first and at most as many as the step needs. Also
        return drops for groups that were skipped because all their samples are too stale."""
        needed = self.mixture.count_live_groups_in_step(step)
        groups = await self.store.groups(
            self.run_id, Channel.TRAIN, GroupStatus.READY, unclaimed_in_epoch=epoch
        )
        self._loaded = {
            group.group_id: self._loaded[group.group_id] for group in groups if group.group_id in self._loaded
        }
        builder = ClaimBuilder(self.run_id, epoch, staleness)
        fresh: list[LoadedGroup] = []
        drops: list[Claim] = []
        while groups and len(fresh) < needed:
            chunk, groups = groups[: needed - len(fresh)], groups[needed - len(fresh) :]
            missing = [group for group in chunk if group.group_id not in self._loaded]
            self._loaded |= {loaded.group.group_id: loaded for loaded in await self.loader.load(missing)}
            for loaded in (self._loaded[group.group_id] for group in chunk):
                samples = loaded.samples
                if samples and not any(self._mask_stale_tokens(sample, staleness) for sample in samples):
                    drops += builder.build_group_drops(loaded, "stale")
                    self._consumed.add(loaded, None)
                else:
                    fresh.append(loaded)
        return fresh, drops

    async def _build_late_and_rollout_drops(self, epoch: int) -> list[Claim]:
        """Return drops for late sessions and for groups that the rollout dropped."""
        drops = await self._consumed.build_late_drops(epoch)
        builder = ClaimBuilder(self.run_id, epoch)
        groups = await self.store.groups(
            self.run_id, Channel.TRAIN, GroupStatus.DROPPED, unclaimed_in_epoch=epoch
        )
        for loaded in await self.loader.load(groups):
            drops += builder.build_group_drops(loaded, loaded.group.reason or "group_dropped")
            self._consumed.add(loaded, None)
        return drops

    async def _assemble(
        self, groups: Sequence[LoadedGroup], drops: list[Claim], step: int, epoch: int, staleness: Staleness
    ) -> StepBatch:
        # Read the tags now, because a user may have added one after the group was loaded.
        groups = await self.loader.exclude_untrainable(groups)
        samples: list[Sample] = []
        claims: list[Claim] = []
        zero_signal_groups = 0
        for group in groups:
            builder = ClaimBuilder(self.run_id, epoch, staleness)
            if group.epoch is not None:
                builder = ClaimBuilder(self.run_id, group.epoch)
            advantages = self._estimate_advantages(group.sessions)
            for session in group.untrainable:
                claims += builder.build_loaded_session_drops(session, UNTRAINABLE, None)
            call_rewards = [value for session in group.sessions for value in session.call_rewards.values()]
            is_useful = self._uses_reference or has_signal(advantages) or any(call_rewards)
            if group.sessions and is_useful:
                selected, selected_claims = self._select_samples(group, advantages, builder)
                samples += selected
                claims += selected_claims
            else:
                zero_signal_groups += any(advantage is not None for advantage in advantages)
                claims += builder.build_group_drops(group, "zero_signal", advantages)
            if group.epoch is None:
                self._consumed.add(group, step)
        claims = [replace(claim, step=step) for claim in claims]
        # If the trainer recomputes logprobs, its importance weights already include this reweighting.
        reweight = self.config.trainer.off_policy.proximal == "behavior"
        mode = self.config.trainer.advantage.normalize
        live = [group for group in groups if group.epoch is None]
        start_by_session = {
            session.session.session_id: session.session.created_at
            for group in live
            for session in group.sessions
        }
        live_samples = [sample for sample in samples if sample.session_id in start_by_session]
        unmasked = {sample.sample_key: sample.trained_tokens for group in live for sample in group.samples}
        masked_tokens = sum(unmasked[sample.sample_key] - sample.trained_tokens for sample in live_samples)
        reweighted = [reweight_truncated_sampling(s) for s in samples] if reweight else samples
        return StepBatch(
            samples=normalize(reweighted, mode),
            scales=compute_token_scales(samples, mode, reweight=reweight),
            divisor=compute_divisor(samples, mode),
            claims=claims,
            drops=drops,
            session_starts=[start_by_session[sample.session_id] for sample in live_samples],
            is_full=self._has_enough_live_groups(step, live) and bool(groups or self.mixture.has_live_data),
            report=report_groups(groups)
            | report_batch(samples, live_samples, [*claims, *drops], staleness)
            | {"stale_masked_tokens": masked_tokens}
            | report_outputs([[session.samples for session in group.sessions] for group in live])
            | {"zero_signal": zero_signal_groups},
        )

    def _estimate_advantages(self, sessions: Sequence[LoadedSession]) -> Advantages:
        """Return the advantages of a group's sessions. A session without a reward gets advantage 0 if its
        calls have rewards, or if the run learns only from a reference and the session did not fail."""
        ignores_rewards = self._uses_reference and self.config.trainer.advantage.weight == 0
        estimated = self.estimator([session.reward for session in sessions])
        return [
            0.0
            if advantage is None and (session.call_rewards or (ignores_rewards and not session.is_failed))
            else advantage
            for session, advantage in zip(sessions, estimated, strict=True)
        ]

    def _select_samples(
        self, group: LoadedGroup, advantages: Advantages, builder: ClaimBuilder
    ) -> tuple[list[Sample], list[Claim]]:
        """Return the samples to train on, and claims for all sessions except the untrainable ones."""
        samples: list[Sample] = []
        claims: list[Claim] = []
        for session, advantage in zip(group.sessions, advantages, strict=True):
            if advantage is None or not session.samples:
                claims += builder.build_loaded_session_drops(session, "no_reward", advantage)
                continue
            for sample in session.samples:
                fresh = self._mask_stale_tokens(sample, builder.staleness)
                if fresh is None:
                    claims.append(builder.build_sample_drop(session, sample, advantage, "stale"))
                elif len(fresh) > self.config.model.max_context:
                    # Exported data may come from a model with a longer context.
                    claims.append(builder.build_sample_drop(session, fresh, advantage, "too_long"))
                else:
                    claims.append(builder.build_trained_claim(session, fresh, advantage))
                    samples.append(with_advantage(fresh, advantage, session.call_rewards))
        claims += builder.build_superseded_drops(group)
        return samples, claims

    def _mask_stale_tokens(self, sample: Sample, staleness: Staleness | None) -> Sample | None:
        """Return the sample with its stale tokens masked, or None if it must be dropped. Exported samples,
        for which ``staleness`` is None, are never stale."""
        limit = self.config.max_staleness
        if staleness is None or staleness.of_sample(sample) <= limit:
            return sample
        if self.config.trainer.stale == "drop":
            return None
        is_fresh = staleness.of_tokens(sample.versions) <= limit
        masked = replace(sample, mask=np.where(is_fresh, sample.mask, np.float32(0)))
        return masked if masked.trained_tokens else None
