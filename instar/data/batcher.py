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
- ``held_out``, ``greedy``, ``no_tokens``: the live session can never be trained on (see `live`).

Groups whose samples are all stale are claimed without a step. So are groups that the rollout dropped, with
the rollout's reason. If `data` lists exported data, its groups make up part of each step and are claimed
once per epoch; they are never stale. If it lists live traffic, each completed live session is a group of one.
It is never stale: the trainer recomputes the logprobs of old sessions. A batch depends only on the store's
rows, the estimator's state and, for the age of live sessions, the time.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence, Sized
from dataclasses import replace

import numpy as np

from instar.config import RunConfig
from instar.config.data import LIVE, ROLLOUT
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
from instar.data.corrections import load_feedback
from instar.data.group_loader import GroupLoader, LoadedGroup, LoadedSession
from instar.data.linearize import with_advantage
from instar.data.live import LiveLoader
from instar.data.mixture import DataMixture
from instar.data.replay import ReplayLoader
from instar.data.report import report_batch, report_groups, report_outputs
from instar.data.resampled import ResampledLoader
from instar.data.staleness import Staleness
from instar.data.step_batch import StepBatch
from instar.data.supervised import SupervisedBatch
from instar.store.base import Store
from instar.types import UNTRAINABLE, Channel, Claim, GroupStatus, Sample

POLL_INTERVAL_SECONDS = 0.05
LIVE_POLL_INTERVAL_SECONDS = 0.5
MAX_LIVE_AGE_SECONDS = 86400.0
"""The logprobs of live sessions that ended earlier are recomputed."""


class Batcher:
    def __init__(self, store: Store, run_id: str, config: RunConfig) -> None:
        self.store = store
        self.run_id = run_id
        self.config = config
        self.policy_id = config.policy_id
        self.estimator = AdvantageEstimator(config.trainer.advantage, config.gateway.reward_range)
        self.loader = GroupLoader(store, config)
        self.live_loader = LiveLoader(store, config)
        self.resampled_loader = ResampledLoader(store, config)
        self.mixture = DataMixture(store, run_id, config)
        self.replay = ReplayLoader(store, config)
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
        self.replay.reset()
        self.live_loader.reset()
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

        Rollout groups are claimed in ``epoch``, exported groups in `LoadedGroup.epoch`. See `Staleness` for
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
            fresh, new_drops = await self._load_fresh(step, epoch, staleness)
            drops += new_drops
            supervised = await self._load_feedback(step, epoch) if self.config.trains_on_live else None
            drops += supervised.drops if supervised else []
            if self._has_enough(step, fresh, supervised) or (is_last and fresh):
                groups = [*fresh, *await self._load_exported(step)]
                if groups or self.mixture.has_own_data:
                    return await self._assemble(groups, drops, step, epoch, staleness, supervised)
            if drops:
                # Store the claims now, because the rollout is waiting to replace the dropped groups.
                await self.store.drop_samples(drops)
                drops = []
            has_timed_out = deadline is not None and time.monotonic() >= deadline
            if is_last or has_timed_out or (stop is not None and stop.is_set()):
                return None
            await asyncio.sleep(
                LIVE_POLL_INTERVAL_SECONDS if self.config.trains_on_live else POLL_INTERVAL_SECONDS
            )

    async def preview(
        self, step: int, epoch: int, version: int, step_by_version: Mapping[int, int] | None = None
    ) -> StepBatch:
        """Return the batch that ``step`` would get now, even if too few groups are finished. The store is not
        changed, but this batcher treats the groups as consumed, so do not use it afterwards."""
        staleness = Staleness(version, step_by_version)
        drops = await self._build_late_and_rollout_drops(epoch)
        fresh, new_drops = await self._load_fresh(step, epoch, staleness)
        supervised = await self._load_feedback(step, epoch)
        drops += [*new_drops, *supervised.drops]
        groups = [*fresh, *await self._load_exported(step)]
        return await self._assemble(groups, drops, step, epoch, staleness, supervised)

    def _has_enough(self, step: int, own_groups: Sized, supervised: SupervisedBatch | None) -> bool:
        """Return True if the groups that are not exported are as many as the step needs. If the run trains on
        live traffic, each correction and preference counts as a group, and the maximum number of either is
        enough for a step."""
        count, limits = len(own_groups), self.config.trainer
        if self.config.trains_on_live and supervised is not None:
            count += supervised.count
            if len(supervised.corrections) == limits.corrections.per_step:
                return True
            if len(supervised.pairs) == limits.preferences.per_step:
                return True
        return count >= self.mixture.count_own_groups_in_step(step)

    async def _load_feedback(self, step: int, epoch: int) -> SupervisedBatch:
        return await load_feedback(self.store, self.config, step, epoch)

    async def _load_fresh(
        self, step: int, epoch: int, staleness: Staleness
    ) -> tuple[list[LoadedGroup], list[Claim]]:
        """Return finished rollout groups and live sessions for the step, and drops for those that cannot be
        trained on."""
        fresh, drops = await self._load_ready(step, epoch, staleness)
        live_count = self.mixture.count_groups_in_step(step, LIVE)
        resampled = await self.resampled_loader.load_ready(epoch, live_count)
        # Half of the groups are live sessions, unless there are too few of them.
        ready, excluded = await self.live_loader.load_ready(
            epoch, live_count - min(len(resampled), live_count // 2)
        )
        ready += resampled[: live_count - len(ready)]
        builder = ClaimBuilder(self.run_id, epoch, staleness, self.policy_id)
        for group in excluded:
            drops += builder.build_group_drops(group, group.group.reason or "no_tokens")
        return [*fresh, *ready], drops

    async def _load_exported(self, step: int) -> list[LoadedGroup]:
        picked = await self.mixture.pick_groups(step)
        loaded = await self.loader.load([group for group, _ in picked])
        return [replace(group, epoch=epoch) for group, (_, epoch) in zip(loaded, picked, strict=True)]

    async def _load_ready(
        self, step: int, epoch: int, staleness: Staleness
    ) -> tuple[list[LoadedGroup], list[Claim]]:
        """Return unclaimed finished groups, lowest index first and at most as many as the step needs. Also
        return drops for groups that were skipped because all their samples are too stale."""
        needed = self.mixture.count_groups_in_step(step, ROLLOUT)
        groups = await self.store.groups(
            self.run_id, Channel.TRAIN, GroupStatus.READY, unclaimed_in_epoch=epoch
        )
        self._loaded = {
            group.group_id: self._loaded[group.group_id] for group in groups if group.group_id in self._loaded
        }
        builder = ClaimBuilder(self.run_id, epoch, staleness, self.policy_id)
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
        builder = ClaimBuilder(self.run_id, epoch, policy_id=self.policy_id)
        groups = await self.store.groups(
            self.run_id, Channel.TRAIN, GroupStatus.DROPPED, unclaimed_in_epoch=epoch
        )
        for loaded in await self.loader.load(groups):
            drops += builder.build_group_drops(loaded, loaded.group.reason or "group_dropped")
            self._consumed.add(loaded, None)
        return drops

    async def _assemble(
        self,
        groups: Sequence[LoadedGroup],
        drops: list[Claim],
        step: int,
        epoch: int,
        staleness: Staleness,
        supervised: SupervisedBatch | None,
    ) -> StepBatch:
        if supervised is None:
            supervised = await self._load_feedback(step, epoch)
            drops = [*drops, *supervised.drops]
        live_count = sum(group.is_from_live for group in groups) + supervised.count
        supervised = supervised.merge(await self.replay.load(step, live_count))
        # Read the tags now, because a user may have added one after the group was loaded.
        groups = await self.loader.exclude_untrainable(groups)
        samples, claims, zero_signal_groups = self._claim_groups(groups, step, epoch, staleness)
        recomputed = self._select_recomputed(groups, samples, staleness)
        mode = self.config.trainer.advantage.normalize
        own_groups = [group for group in groups if group.epoch is None]
        start_by_session = {
            session.session.session_id: session.session.created_at
            for group in own_groups
            for session in group.sessions
        }
        own_samples = [sample for sample in samples if sample.session_id in start_by_session]
        unmasked = {
            sample.sample_key: sample.trained_tokens for group in own_groups for sample in group.samples
        }
        masked_tokens = sum(unmasked[sample.sample_key] - sample.trained_tokens for sample in own_samples)
        # The importance weights of recomputed logprobs already include this reweighting.
        reweighted = [s if s.sample_key in recomputed else reweight_truncated_sampling(s) for s in samples]
        return StepBatch(
            samples=normalize(reweighted, mode),
            scales=compute_token_scales(samples, mode, recomputed=recomputed),
            divisor=compute_divisor(samples, mode),
            claims=claims,
            drops=drops,
            recomputed=recomputed,
            session_starts=[start_by_session[sample.session_id] for sample in own_samples],
            is_full=self._has_enough(step, own_groups, supervised)
            and bool(groups or self.mixture.has_own_data),
            report=report_groups(groups)
            | report_batch(samples, own_samples, [*claims, *drops], staleness)
            | {"stale_masked_tokens": masked_tokens}
            | report_outputs([[session.samples for session in group.sessions] for group in own_groups])
            | {"zero_signal": zero_signal_groups},
            supervised=supervised,
        )

    def _claim_groups(
        self, groups: Sequence[LoadedGroup], step: int, epoch: int, staleness: Staleness
    ) -> tuple[list[Sample], list[Claim], int]:
        """Return the samples to train on, claims for everything in the groups, and the number of groups
        without a signal."""
        samples: list[Sample] = []
        claims: list[Claim] = []
        zero_signal_groups = 0
        for group in groups:
            builder = ClaimBuilder(self.run_id, epoch, staleness, self.policy_id)
            if group.epoch is not None:
                builder = ClaimBuilder(self.run_id, group.epoch, policy_id=self.policy_id)
            group, advantages = self._estimate(group)
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
            if group.epoch is None and not group.is_from_live:
                self._consumed.add(group, step)
        return samples, [replace(claim, step=step) for claim in claims], zero_signal_groups

    def _select_recomputed(
        self, groups: Sequence[LoadedGroup], samples: Sequence[Sample], staleness: Staleness
    ) -> frozenset[str]:
        """Return the keys of the samples whose logprobs the trainer must recompute: all samples if the run is
        configured so, and otherwise those from live sessions that are too stale or too old."""
        if self.config.trainer.off_policy.proximal == "recompute":
            return frozenset(sample.sample_key for sample in samples)
        oldest = time.time() - MAX_LIVE_AGE_SECONDS
        live_sessions = [
            loaded.session for group in groups if group.is_from_live for loaded in group.sessions
        ]
        is_old = {session.session_id: (session.ended_at or 0.0) < oldest for session in live_sessions}
        return frozenset(
            sample.sample_key
            for sample in samples
            if sample.session_id in is_old
            and (is_old[sample.session_id] or staleness.of_sample(sample) > self.config.max_staleness)
        )

    def _estimate(self, group: LoadedGroup) -> tuple[LoadedGroup, Advantages]:
        """Return the group's advantages, and the group with what the rewards of its calls add to them."""
        if not group.is_live or not group.sessions:
            return group, self._estimate_advantages(group.sessions, group.other_rewards)
        (loaded,) = group.sessions
        advantage, call_rewards = self.estimator.estimate_live(
            loaded.session, group.kind, loaded.reward, loaded.call_rewards
        )
        return replace(group, sessions=[replace(loaded, call_rewards=call_rewards)]), [advantage]

    def _estimate_advantages(
        self, sessions: Sequence[LoadedSession], other_rewards: Sequence[float]
    ) -> Advantages:
        """Return the advantages of a group's sessions, relative to their and to other rewards. A session
        without a reward gets advantage 0 if its calls have rewards, or if the run learns only from a
        reference and the session did not fail."""
        ignores_rewards = self._uses_reference and self.config.trainer.advantage.weight == 0
        estimated = self.estimator([*(session.reward for session in sessions), *other_rewards])
        estimated = estimated[: len(sessions)]
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
                fresh = sample if group.is_from_live else self._mask_stale_tokens(sample, builder.staleness)
                if fresh is None:
                    claims.append(builder.build_sample_drop(session, sample, advantage, "stale"))
                elif len(fresh) > self.config.model.context_length:
                    # Exported data may come from a model with a longer context.
                    claims.append(builder.build_sample_drop(session, fresh, advantage, "too_long"))
                else:
                    trained = with_advantage(fresh, advantage, session.call_rewards)
                    if group.is_live:  # its calls may have rewards that the session's advantage lacks
                        advantage = float(trained.advantages[trained.mask > 0].mean())
                    claims.append(builder.build_trained_claim(session, fresh, advantage))
                    samples.append(trained)
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
