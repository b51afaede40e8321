"""Builds the batch of a training step from finished groups.

A step consumes ``groups_per_step`` finished groups, lowest index first. Each sample is either trained, or
dropped with the step for one of these reasons: all rewards of the group are equal and there is no reference
to learn from (``zero_signal``), the session has no reward (``no_reward``, ``failed``) or no trainable token
(``no_tokens``), the sample is too old (``stale``; with `trainer.stale: mask`, all its tokens are too old) or
longer than the model's context, as exported data may be (``too_long``), the session was run again
(``superseded``), or the session was tagged as untrainable (``untrainable``). A session that ends after its
group was consumed is dropped with the step that consumed the group (``late``). Two kinds of groups are
dropped outside of steps: groups whose samples are all too old (``stale``), and groups that the rollout
abandoned. The same rows in the store always make the same batch.

If `data` lists exported data, its groups take a share of each step. Other policies sampled these groups, so
staleness does not apply to them; each group is claimed once per epoch.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
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
from instar.data.claims import ClaimBuilder
from instar.data.consumed import ConsumedGroups
from instar.data.group_loader import GroupLoader, LoadedGroup, LoadedSession
from instar.data.linearize import with_advantage
from instar.data.mixture import DataMixture
from instar.data.report import report_batch, report_groups, report_outputs
from instar.data.staleness import Staleness
from instar.store.base import Store
from instar.types import UNTRAINABLE, Channel, Claim, Floats, GroupStatus, Json, Sample

POLL_SECONDS = 0.05


@dataclass(frozen=True, slots=True)
class StepBatch:
    samples: list[Sample]
    """The samples to train, with normalized advantages."""
    scales: list[Floats]
    """For each sample, the value of an advantage of 1 on each token after this step's scaling."""
    divisor: float
    """The divisor of sums over all tokens of the step; 1 if each session has its own divisor."""
    claims: list[Claim]
    """Claims of every group that the step consumes, both for trained samples and for dropped ones."""
    drops: list[Claim]
    """Claims that drop samples outside of this step, or with an earlier step."""
    session_starts: list[float]
    """For each live sample, the time at which its session started."""
    is_full: bool
    """True if the batch has as many live groups as a step waits for. When exported data is used up, its share
    stays empty."""
    report: Json


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
        self._consumed = ConsumedGroups(store, run_id, limit)

    def baseline_state(self) -> Json:
        """Return the state of the running baseline, for the checkpoint."""
        return self.estimator.to_json()

    def load_baseline(self, state: Json) -> None:
        self.estimator.load_json(state)

    def reset(self) -> None:
        """Forget which groups were consumed. Called after steps were released in the store."""
        self._loaded = {}
        self._consumed.reset()
        self.mixture.reset()
        self.load_baseline({})

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

        ``step_by_version`` is the argument of `Staleness`. If ``is_finished`` returns True, no more groups
        will arrive, and the remaining groups make the batch. Return None if no group is left, ``stop`` was
        set, or ``timeout`` seconds have passed.
        """
        staleness = Staleness(version, step_by_version)
        deadline = None if timeout is None else time.monotonic() + timeout
        drops = await self._drop_outside_of_steps(epoch)
        while True:
            # Called before the store is read, so that everything that was finished by then is in the store.
            is_last = is_finished is not None and is_finished()
            fresh, stale = await self._load_ready(step, epoch, staleness)
            drops += stale
            if self._has_live_groups(step, fresh) or (is_last and fresh):
                groups = [*fresh, *await self._load_exported(step)]
                if groups or self.mixture.has_live_data:
                    return await self._assemble(groups, drops, step, epoch, staleness)
            if drops:
                # Written immediately, because the rollout waits for the capacity that the drops free.
                await self.store.drop_samples(drops)
                drops = []
            is_late = deadline is not None and time.monotonic() >= deadline
            if is_last or is_late or (stop is not None and stop.is_set()):
                return None
            await asyncio.sleep(POLL_SECONDS)

    async def preview(
        self, step: int, epoch: int, version: int, step_by_version: Mapping[int, int] | None = None
    ) -> StepBatch:
        """Return the batch that ``step`` would get now, with fewer groups if not enough are finished. Nothing
        is written, and the batcher cannot be used afterwards."""
        staleness = Staleness(version, step_by_version)
        drops = await self._drop_outside_of_steps(epoch)
        fresh, stale = await self._load_ready(step, epoch, staleness)
        groups = [*fresh, *await self._load_exported(step)]
        return await self._assemble(groups, [*drops, *stale], step, epoch, staleness)

    # --- loading groups ----------------------------------------------------------------------------

    def _has_live_groups(self, step: int, live: Sequence[LoadedGroup]) -> bool:
        return len(live) >= self.mixture.count_live_groups(step)

    async def _load_exported(self, step: int) -> list[LoadedGroup]:
        picked = await self.mixture.pick_groups(step)
        loaded = await self.loader.load([exported.group for exported in picked])
        return [replace(group, epoch=exported.epoch) for group, exported in zip(loaded, picked, strict=True)]

    async def _load_ready(
        self, step: int, epoch: int, staleness: Staleness
    ) -> tuple[list[LoadedGroup], list[Claim]]:
        """Return the first finished groups that no step has consumed, as many as the step takes, and claims
        that drop the preceding groups that are too old."""
        needed = self.mixture.count_live_groups(step)
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
                if samples and not any(self._without_stale_tokens(sample, staleness) for sample in samples):
                    drops += builder.drop_group(loaded, "stale")
                    self._consumed.add(loaded, None)
                else:
                    fresh.append(loaded)
        return fresh, drops

    async def _drop_outside_of_steps(self, epoch: int) -> list[Claim]:
        """Return claims that drop late sessions, and groups that the rollout closed as dropped."""
        drops = await self._consumed.drop_late_sessions(epoch)
        builder = ClaimBuilder(self.run_id, epoch)
        groups = await self.store.groups(
            self.run_id, Channel.TRAIN, GroupStatus.DROPPED, unclaimed_in_epoch=epoch
        )
        for loaded in await self.loader.load(groups):
            drops += builder.drop_group(loaded, loaded.group.reason or "group_dropped")
            self._consumed.add(loaded, None)
        return drops

    # --- building the batch ------------------------------------------------------------------------

    async def _assemble(
        self, groups: Sequence[LoadedGroup], drops: list[Claim], step: int, epoch: int, staleness: Staleness
    ) -> StepBatch:
        # Tags are read now, because a tag may have been added after its group was loaded.
        groups = await self.loader.exclude_untrainable(groups)
        samples: list[Sample] = []
        claims: list[Claim] = []
        zero_signal = 0
        for group in groups:
            builder = ClaimBuilder(self.run_id, epoch, staleness)
            if group.epoch is not None:
                builder = ClaimBuilder(self.run_id, group.epoch)
            advantages = self._estimate_advantages(group.sessions)
            for session in group.untrainable:
                claims += builder.drop_loaded(session, UNTRAINABLE, None)
            if group.sessions and (self._uses_reference or _has_any_signal(group.sessions, advantages)):
                selected, selected_claims = self._select_samples(group, advantages, builder)
                samples += selected
                claims += selected_claims
            else:
                zero_signal += any(advantage is not None for advantage in advantages)
                claims += builder.drop_group(group, "zero_signal", advantages)
            if group.epoch is None:
                self._consumed.add(group, step)
        claims = [replace(claim, step=step) for claim in claims]
        # If the trainer recomputes logprobs, its importance weights include the sampling distribution.
        should_reweight = self.config.trainer.off_policy.proximal == "behavior"
        mode = self.config.trainer.advantage.normalize
        live = [group for group in groups if group.epoch is None]
        starts = {
            session.session.session_id: session.session.created_at
            for group in live
            for session in group.sessions
        }
        live_samples = [sample for sample in samples if sample.session_id in starts]
        unmasked = {sample.sample_key: sample.trained_tokens for group in live for sample in group.samples}
        masked = sum(unmasked[sample.sample_key] - sample.trained_tokens for sample in live_samples)
        reweighted = [reweight_truncated_sampling(s) for s in samples] if should_reweight else samples
        return StepBatch(
            samples=normalize(reweighted, mode),
            scales=compute_token_scales(samples, mode, should_reweight=should_reweight),
            divisor=compute_divisor(samples, mode),
            claims=claims,
            drops=drops,
            session_starts=[starts[sample.session_id] for sample in live_samples],
            is_full=self._has_live_groups(step, live) and bool(groups or self.mixture.has_live_data),
            report=report_groups(groups)
            | report_batch(samples, live_samples, [*claims, *drops], staleness)
            | {"stale_masked_tokens": masked}
            | report_outputs([[session.samples for session in group.sessions] for group in live])
            | {"zero_signal": zero_signal},
        )

    def _estimate_advantages(self, sessions: Sequence[LoadedSession]) -> Advantages:
        """Return the advantages of a group's sessions. The advantage of a session without a reward is 0 if
        single calls were rewarded, or if rewards have no weight."""
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
        """Return the samples of a group to train on, and claims for everything in the group."""
        samples: list[Sample] = []
        claims: list[Claim] = []
        for session, advantage in zip(group.sessions, advantages, strict=True):
            if advantage is None or not session.samples:
                claims += builder.drop_loaded(session, "no_reward", advantage)
                continue
            for sample in session.samples:
                fresh = self._without_stale_tokens(sample, builder.staleness)
                if fresh is None:
                    claims.append(builder.drop_sample(session, sample, advantage, "stale"))
                elif len(fresh) > self.config.model.max_context:
                    # Exported data may come from a model with a longer context.
                    claims.append(builder.drop_sample(session, fresh, advantage, "too_long"))
                else:
                    claims.append(builder.train(session, fresh, advantage))
                    samples.append(with_advantage(fresh, advantage, session.call_rewards))
        claims += builder.drop_superseded(group)
        return samples, claims

    def _without_stale_tokens(self, sample: Sample, staleness: Staleness | None) -> Sample | None:
        """Return the sample without tokens that are too old, or None if it must be dropped. Exported data has
        no staleness and is returned unchanged."""
        limit = self.config.max_staleness
        if staleness is None or staleness.of_sample(sample) <= limit:
            return sample
        if self.config.trainer.stale == "drop":
            return None
        is_fresh = staleness.of_tokens(sample.versions) <= limit
        masked = replace(sample, mask=np.where(is_fresh, sample.mask, np.float32(0)))
        return masked if masked.trained_tokens else None


def _has_any_signal(sessions: Sequence[LoadedSession], advantages: Advantages) -> bool:
    return has_signal(advantages) or any(
        value != 0 for session in sessions for value in session.call_rewards.values()
    )
