"""From finished groups to the batch of a training step.

A step consumes ``groups_per_step`` finished groups, lowest index first. Their samples are trained, or
dropped with the step for a reason: all rewards of the group are equal and there is no reference to learn
from (``zero_signal``), the session has no reward (``no_reward``, ``failed``) or no trainable token
(``no_tokens``), the sample is too old (``stale``; under `trainer.stale: mask`, all its tokens are) or longer
than the model's context, as exported data may be (``too_long``), the session was run again (``superseded``),
or was tagged to be left out (``untrainable``). A session that ends after its group was consumed is dropped
with the step that did (``late``). Outside of steps are dropped: groups too old as a whole (``stale``), and
groups the rollout gave up. The same rows in the store make the same batch.

Where `data` names exported data, its groups have a share of the places of a step. They are of other policies,
so that staleness does not apply to them; each is claimed once per epoch.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
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
from instar.data.group_loader import ENDED_STATUSES, GroupLoader, LoadedGroup, LoadedSession
from instar.data.linearize import with_advantage
from instar.data.mixture import DataMixture
from instar.data.report import report_batch, report_outputs
from instar.data.staleness import Staleness
from instar.store.base import Store
from instar.types import (
    UNTRAINABLE,
    Channel,
    Claim,
    ClaimOutcome,
    Floats,
    Group,
    GroupStatus,
    Json,
    Sample,
    Session,
)

POLL = 0.05


@dataclass(frozen=True, slots=True)
class StepBatch:
    samples: list[Sample]
    """With their normalised advantages."""
    scales: list[Floats]
    """Per sample, what an advantage of 1 on each token comes to in this step."""
    divisor: float
    """What sums over all tokens of the step are divided by; 1 where each session has its own."""
    claims: list[Claim]
    """Of every group that the step consumes: samples trained, and those dropped with it."""
    drops: list[Claim]
    """Dropped outside of the step, or with an earlier one."""
    session_starts: list[float]
    """Per sample of the run's own, when its session did."""
    report: Json


@dataclass(frozen=True, slots=True)
class ConsumedGroup:
    """A consumed group: by which step, if any, and its sessions that are accounted for."""

    step: int | None
    session_ids: set[str]


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
        self._consumed: OrderedDict[str, ConsumedGroup] | None = None
        """The groups consumed last: other sessions in them are late."""

    def baseline_state(self) -> Json:
        """For the checkpoint: what the running baseline has learned."""
        return self.estimator.to_json()

    def load_baseline(self, state: Json) -> None:
        self.estimator.load_json(state)

    def reset(self) -> None:
        """Forget what was consumed: steps have been released, and the store knows."""
        self._loaded = {}
        self._consumed = None
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
        """Wait for enough groups and return the batch of ``step``, which is trained into ``version``.
        ``steps``: as of `Staleness`. With ``finished`` saying that
        no more groups are coming, returns what is left. None: nothing is left, ``stop`` was set, or ``wait``
        seconds have passed."""
        staleness = Staleness(version, step_by_version)
        deadline = None if timeout is None else time.monotonic() + timeout
        drops = [*await self._drop_late_sessions(epoch), *await self._drop_abandoned_groups(epoch)]
        wanted = self.mixture.count_live_groups(step)
        while True:
            # Asked before looking: what was finished by then is in the store by now.
            is_last = is_finished is not None and is_finished()
            fresh, stale = await self._load_ready(wanted, epoch, staleness)
            drops += stale
            if len(fresh) >= wanted or (is_last and fresh):
                groups = [*fresh, *await self._load_exported(step)]
                if groups or self.mixture.has_live_data:
                    groups = await self.loader.exclude_untrainable(groups)
                    return self._assemble(groups, drops, step, epoch, staleness)
            if drops:
                # Written at once: the rollout waits for the room that they leave.
                await self.store.drop(drops)
                drops = []
            out_of_time = deadline is not None and time.monotonic() >= deadline
            if is_last or out_of_time or (stop is not None and stop.is_set()):
                return None
            await asyncio.sleep(POLL)

    async def preview(
        self, step: int, epoch: int, version: int, step_by_version: Mapping[int, int] | None = None
    ) -> StepBatch:
        """The batch that ``step`` would be given now, from fewer groups where not enough are finished.
        Nothing is written; the batcher is of no further use."""
        staleness = Staleness(version, step_by_version)
        drops = [*await self._drop_late_sessions(epoch), *await self._drop_abandoned_groups(epoch)]
        fresh, stale = await self._load_ready(self.mixture.count_live_groups(step), epoch, staleness)
        groups = await self.loader.exclude_untrainable([*fresh, *await self._load_exported(step)])
        return self._assemble(groups, [*drops, *stale], step, epoch, staleness)

    # --- what there is ---------------------------------------------------------------------------

    async def _load_exported(self, step: int) -> list[LoadedGroup]:
        """The groups of exported data that a step takes."""
        picked = await self.mixture.pick_groups(step)
        loaded = await self.loader.load([each.group for each in picked])
        return [replace(found, epoch=each.epoch) for found, each in zip(loaded, picked, strict=True)]

    async def _load_ready(
        self, wanted: int, epoch: int, staleness: Staleness
    ) -> tuple[list[LoadedGroup], list[Claim]]:
        """The first finished groups that nobody consumed yet, as many as are wanted, and the drops of those
        before them that are too old."""
        groups = await self.store.groups(
            self.run_id, Channel.TRAIN, GroupStatus.READY, unclaimed_in_epoch=epoch
        )
        self._loaded = {
            group.group_id: self._loaded[group.group_id] for group in groups if group.group_id in self._loaded
        }
        fresh: list[LoadedGroup] = []
        drops: list[Claim] = []
        while groups and len(fresh) < wanted:
            part, groups = groups[: wanted - len(fresh)], groups[wanted - len(fresh) :]
            missing = [group for group in part if group.group_id not in self._loaded]
            self._loaded |= {found.group.group_id: found for found in await self.loader.load(missing)}
            for found in (self._loaded[group.group_id] for group in part):
                samples = found.samples
                if samples and not any(self._without_stale_tokens(sample, staleness) for sample in samples):
                    drops += self._drop_group(found, epoch, "stale", staleness=staleness)
                    self._mark_consumed(found, None)
                else:
                    fresh.append(found)
        return fresh, drops

    async def _drop_abandoned_groups(self, epoch: int) -> list[Claim]:
        """Drops of groups that the rollout closed as dropped."""
        drops: list[Claim] = []
        groups = await self.store.groups(
            self.run_id, Channel.TRAIN, GroupStatus.DROPPED, unclaimed_in_epoch=epoch
        )
        for found in await self.loader.load(groups):
            drops += self._drop_group(found, epoch, found.group.reason or "group_dropped")
            self._mark_consumed(found, None)
        return drops

    async def _drop_late_sessions(self, epoch: int) -> list[Claim]:
        """Drops of sessions that ended after their group was consumed. Each carries the step that did: one
        left behind when the step is released would keep the group from being claimed again."""
        if self._consumed is None:
            self._consumed = OrderedDict()
            for claim in await self.store.settled_claims(self.run_id, epoch, self._max_consumed):
                assert claim.group_id is not None
                settled = self._consumed.setdefault(claim.group_id, ConsumedGroup(claim.step, set()))
                settled.session_ids.add(claim.session_id)
        drops: list[Claim] = []
        in_groups = await self.store.sessions_in(list(self._consumed))
        for group_id, settled in self._consumed.items():
            for session in in_groups[group_id]:
                if session.status in ENDED_STATUSES and session.session_id not in settled.session_ids:
                    settled.session_ids.add(session.session_id)
                    drops.append(replace(self._drop_session(session, epoch, "late"), step=settled.step))
        return drops

    def _mark_consumed(self, found: LoadedGroup, step: int | None) -> None:
        assert self._consumed is not None
        self._consumed[found.group.group_id] = ConsumedGroup(step, found.session_ids)

        while len(self._consumed) > self._max_consumed:
            self._consumed.popitem(last=False)

    @property
    def _max_consumed(self) -> int:
        """Groups that can still have stragglers: several steps' worth."""
        return 4 * (self.config.max_staleness + 1) * self.config.trainer.groups_per_step

    # --- what becomes of it ----------------------------------------------------------------------

    def _assemble(
        self, groups: Sequence[LoadedGroup], drops: list[Claim], step: int, epoch: int, staleness: Staleness
    ) -> StepBatch:
        samples: list[Sample] = []
        claims: list[Claim] = []
        zero_signal = 0
        for found in groups:
            advantages = self._estimate_advantages(found.sessions)
            once, at = (epoch, staleness) if found.epoch is None else (found.epoch, None)
            for entry in found.untrainable:
                claims += self._drop_entry(entry, once, UNTRAINABLE, None, at)
            if found.sessions and (self._uses_reference or _teaches(found.sessions, advantages)):
                trained, taken = self._select_samples(found, advantages, once, at)
                samples += trained
                claims += taken
            else:
                zero_signal += any(advantage is not None for advantage in advantages)
                claims += self._drop_group(found, once, "zero_signal", advantages, at)
            if found.epoch is None:
                self._mark_consumed(found, step)
        claims = [replace(claim, step=step) for claim in claims]
        # Where the trainer recomputes logprobs, it weighs the whole way from what was sampled from.
        correct = self.config.trainer.off_policy.proximal == "behavior"
        how = self.config.trainer.advantage.normalize
        live = [found for found in groups if found.epoch is None]
        began = {
            entry.session.session_id: entry.session.created_at for found in live for entry in found.sessions
        }
        own = [sample for sample in samples if sample.session_id in began]
        whole = {sample.sample_key: sample.trained_tokens for found in live for sample in found.samples}
        masked = sum(whole[sample.sample_key] - sample.trained_tokens for sample in own)
        report = report_batch(samples, own, claims, drops, staleness) | {"stale_masked_tokens": masked}
        report |= report_outputs([[entry.samples for entry in found.sessions] for found in live])
        return StepBatch(
            samples=normalize([reweight_truncated_sampling(s) for s in samples] if correct else samples, how),
            scales=compute_token_scales(samples, how, should_reweight=correct),
            divisor=compute_divisor(samples, how),
            claims=claims,
            drops=drops,
            session_starts=[began[sample.session_id] for sample in own],
            report=_group_report(groups, live) | report | {"zero_signal": zero_signal},
        )

    def _estimate_advantages(self, entries: Sequence[LoadedSession]) -> Advantages:
        """A session that only had single calls rewarded stands at 0 itself; and so does one that nobody
        scored, where rewards do not count."""
        unscored = self._uses_reference and self.config.trainer.advantage.weight == 0
        estimated = self.estimator([entry.reward for entry in entries])
        return [
            0.0
            if advantage is None and (entry.call_rewards or (unscored and not entry.is_failed))
            else advantage
            for entry, advantage in zip(entries, estimated, strict=True)
        ]

    def _select_samples(
        self, found: LoadedGroup, advantages: Advantages, epoch: int, staleness: Staleness | None
    ) -> tuple[list[Sample], list[Claim]]:
        """The samples of a group to train on, and a claim for everything in it."""
        samples: list[Sample] = []
        claims: list[Claim] = []
        for entry, advantage in zip(found.sessions, advantages, strict=True):
            if advantage is None or not entry.samples:
                claims += self._drop_entry(entry, epoch, "no_reward", advantage, staleness)
                continue
            for sample in entry.samples:
                fresh = self._without_stale_tokens(sample, staleness)
                claim = self._claim(entry, fresh or sample, epoch, advantage, staleness)
                if fresh is None or self._is_too_long(fresh):
                    reason = "stale" if fresh is None else "too_long"
                    claims.append(replace(claim, outcome=ClaimOutcome.DROPPED, reason=reason))
                    continue
                claims.append(claim)
                samples.append(with_advantage(fresh, advantage, entry.call_rewards))
        claims += [self._drop_session(session, epoch, "superseded") for session in found.superseded]
        return samples, claims

    def _without_stale_tokens(self, sample: Sample, staleness: Staleness | None) -> Sample | None:
        """Return the sample as it may be trained now, or None if it is too old. Exported data has no
        staleness and is returned as it is."""
        most = self.config.max_staleness
        if staleness is None or staleness.of_sample(sample) <= most:
            return sample
        if self.config.trainer.stale == "drop":
            return None
        left = replace(
            sample, mask=np.where(staleness.of_tokens(sample.versions) <= most, sample.mask, np.float32(0))
        )
        return left if left.trained_tokens else None

    def _is_too_long(self, sample: Sample) -> bool:
        """Of data that another model's context had room for."""
        return len(sample) > self.config.model.max_context

    def _drop_group(
        self,
        found: LoadedGroup,
        epoch: int,
        reason: str,
        advantages: Advantages | None = None,
        staleness: Staleness | None = None,
    ) -> list[Claim]:
        """Claims that drop all of a group."""
        claims: list[Claim] = []
        for entry, advantage in zip(found.sessions, advantages or [None] * len(found.sessions), strict=True):
            claims += self._drop_entry(entry, epoch, reason, advantage, staleness)
        claims += [self._drop_session(session, epoch, "superseded") for session in found.superseded]
        if found.untrainable:
            return claims
        # A group without sessions needs a claim too, or it would come up again and again.
        return claims or [self._drop_empty_group(found.group, epoch, "no_sessions")]

    def _drop_entry(
        self,
        entry: LoadedSession,
        epoch: int,
        reason: str,
        advantage: float | None,
        staleness: Staleness | None,
    ) -> list[Claim]:
        """One claim per sample, or one for the session when it has none."""
        if reason in ("zero_signal", "no_reward") and entry.reward is None:
            reason = "failed" if entry.is_failed else "no_reward"
        if not entry.samples:
            key = f"{entry.session.group_id}/{entry.session.slot}/0"
            claim = self._drop_session(entry.session, epoch, "no_tokens" if reason == "no_reward" else reason)
            return [replace(claim, sample_key=key, reward=entry.reward, advantage=advantage)]
        return [
            replace(
                self._claim(entry, sample, epoch, advantage, staleness),
                outcome=ClaimOutcome.DROPPED,
                reason=reason,
            )
            for sample in entry.samples
        ]

    def _claim(
        self,
        entry: LoadedSession,
        sample: Sample,
        epoch: int,
        advantage: float | None,
        staleness: Staleness | None,
    ) -> Claim:
        return Claim(
            run_id=self.run_id,
            epoch=epoch,
            sample_key=sample.sample_key,
            session_id=sample.session_id,
            group_id=sample.group_id,
            outcome=ClaimOutcome.TRAINED,
            reward=entry.reward,
            advantage=advantage,
            staleness=None if staleness is None else staleness.of_sample(sample),
        )

    def _drop_session(self, session: Session, epoch: int, reason: str) -> Claim:
        """Drop a whole session, under a key of its own: its slot's keys are another session's."""
        return Claim(
            run_id=self.run_id,
            epoch=epoch,
            sample_key=f"{session.session_id}/0",
            session_id=session.session_id,
            group_id=session.group_id,
            outcome=ClaimOutcome.DROPPED,
            reason=reason,
        )

    def _drop_empty_group(self, group: Group, epoch: int, reason: str) -> Claim:
        return Claim(
            run_id=self.run_id,
            epoch=epoch,
            sample_key=f"{group.group_id}/0",
            session_id="",
            group_id=group.group_id,
            outcome=ClaimOutcome.DROPPED,
            reason=reason,
        )


def _teaches(entries: Sequence[LoadedSession], advantages: Advantages) -> bool:
    return has_signal(advantages) or any(
        value != 0 for entry in entries for value in entry.call_rewards.values()
    )


def _group_report(groups: Sequence[LoadedGroup], live: Sequence[LoadedGroup]) -> Json:
    """What exported data was rewarded with is no news of the policy, and stands apart."""
    entries = [entry for found in live for entry in found.sessions]
    recorded = [entry for found in groups if found.epoch is not None for entry in found.sessions]
    apart = {"data_reward_mean": _mean_reward(recorded), "data_sessions": len(recorded)} if recorded else {}
    return {
        "reward_mean": _mean_reward(entries),
        "groups": len(groups),
        "sessions": len(entries),
        "failed": sum(entry.is_failed for entry in entries),
        **apart,
    }


def _mean_reward(entries: Sequence[LoadedSession]) -> float | None:
    rewards = [entry.reward for entry in entries if entry.reward is not None]
    return float(np.mean(rewards)) if rewards else None
