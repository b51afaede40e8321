"""The trainer: takes batches from the store, improves the policy, publishes it.

A step is *claimed* (its samples with their rewards and advantages are frozen in the store), then
*submitted* to the backend, then *saved* (a checkpoint holds its update), then *committed* (its version
is published). Whatever moment the process dies at, `recover` finds the last saved state, gives back
what was claimed after it, and goes on. It does the same when a service has lost the session.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from instar.backends.base import Backend
from instar.config import AdamConfig, RunConfig
from instar.data.batcher import Batcher, StepBatch
from instar.data.corrections import CorrectionBatch, compute_correction_loss, load_corrections
from instar.data.off_policy import compute_importance
from instar.data.report import report_session_ages
from instar.errors import BackendError, BackendLost
from instar.reference.penalty import ReferencePenalty
from instar.store.base import Store
from instar.sync.base import Sync
from instar.trainer.checkpoint import (
    TrainerState,
    checkpoint_path,
    discard_checkpoints_after,
    find_outdated,
    load_checkpoint,
    prune_folder,
    save_checkpoint,
)
from instar.trainer.monitor import Monitor, read_steps
from instar.trainer.off_policy import apply_off_policy
from instar.trainer.publishing import ListEngines, PolicyPublisher
from instar.trainer.update import apply_update, scale_loss
from instar.types import Artifact, Json, Policy, StepState

EPOCH = 0
"""Groups and lessons are gone through once."""
MAX_LOST_SESSIONS = 5
"""Times in a row, no step between, that a lost session is begun again."""
RENEW_AFTER = 2 / 3
"""Of the time that a published sampler is kept, after which it is exported again."""


@dataclass
class TrainingTimer:
    """Time spent training, counted on across restarts."""

    previous_seconds: float = 0.0
    started_at: float = field(default_factory=time.monotonic)

    @property
    def seconds(self) -> float:
        return self.previous_seconds + time.monotonic() - self.started_at


class Trainer:
    def __init__(
        self,
        config: RunConfig,
        run_id: str,
        policy_id: str,
        *,
        store: Store,
        backend: Backend,
        batcher: Batcher,
        sync: Sync,
        engines: ListEngines,
        monitor: Monitor,
        penalty: ReferencePenalty | None = None,
        log: Callable[[str], None] = print,
    ) -> None:
        self.config = config
        self.run_id = run_id
        self.policy_id = policy_id
        self.store = store
        self.backend = backend
        self.batcher = batcher
        self.sync = sync
        self.publisher = PolicyPublisher(sync, engines, log)
        self.monitor = monitor
        self.penalty = penalty
        self.log = log
        self.doing = "starting"
        self.step = 0
        """Last step whose update is in the weights."""
        self.saved_step = 0
        self.saved_version = 0
        """The version of the last saved step: what a recovery falls back to."""
        self.lost_sessions = 0
        """How often in a row the backend has lost its session."""
        self.renewal_time: float | None = None
        """When the head's artifact has to be made anew; None: it does not expire."""
        self.timer = TrainingTimer()
        self.stop_event = asyncio.Event()
        self.is_rollout_finished = False
        """Whether no more groups are coming."""

    # --- the run ---------------------------------------------------------------------------------

    async def run(self) -> None:
        """Train until the steps or the time are used up, the data has run out, or `stop` was called."""
        while True:
            try:
                await self.recover()
                self.timer.started_at = time.monotonic()
                await self._train()
            except BackendLost as error:
                self._restart_after_loss(error)
            else:
                self.doing = "finished"
                return

    async def _train(self) -> None:
        while not self._is_done():
            if not await self._run_step():
                break
        if self.step > self.saved_step:
            await self._save_and_commit(self.step)

    def _restart_after_loss(self, error: BackendLost) -> None:
        self.lost_sessions += 1
        if self.lost_sessions > MAX_LOST_SESSIONS:
            raise error
        self.log(f"the training session was lost, going back to the last saved state: {error}")
        self.batcher.reset()
        self.step = self.saved_step = self.saved_version = 0

    async def _run_step(self) -> bool:
        """Wait for a batch and train on it. False: the data has run out."""
        await self._renew_head()
        self.doing = f"waiting for the data of step {self.step + 1}"
        head = await self.store.head(self.policy_id)
        waited = time.monotonic()
        was_finished = self.is_rollout_finished
        waiting = self.batcher.next_batch(
            step=self.step + 1,
            epoch=EPOCH,
            version=head.version,
            step_by_version=await self.store.steps_of_versions(self.policy_id),
            stop=self.stop_event,
            is_finished=lambda: self.is_rollout_finished,
            timeout=self._batch_timeout(),
        )
        batch = await self.publisher.sync_while_waiting(head, waiting)
        if batch is None:
            return not was_finished  # if it has finished since, its last groups may be there by now
        await self.train_step(batch, waited=time.monotonic() - waited)
        self.lost_sessions = 0
        return True

    def stop(self) -> None:
        """Finish the step under way, checkpoint, and return from `run`."""
        self.stop_event.set()

    def _batch_timeout(self) -> float | None:
        """How long to wait for data: no longer than the run's time, or the published sampler's, allows."""
        limit = self.config.trainer.seconds
        left = [] if limit is None else [limit - self.timer.seconds]
        if self.renewal_time is not None:
            left.append(self.renewal_time - time.time())
        return max(0.0, min(left)) if left else None

    def _is_done(self) -> bool:
        limit = self.config.trainer.seconds
        return (
            self.stop_event.is_set()
            or self.step >= self.config.trainer.steps
            or (limit is not None and self.timer.seconds >= limit)
        )

    # --- one step --------------------------------------------------------------------------------

    async def train_step(self, batch: StepBatch, *, waited: float = 0.0) -> None:
        step = self.step + 1
        began = time.monotonic()
        lessons = await load_corrections(self.store, self.run_id, self.config.trainer, step, EPOCH)
        await self.store.drop(batch.drops)
        await self.store.claim_step(self.run_id, step, [*batch.claims, *lessons.claims])
        await self.store.advance_step(self.run_id, step, StepState.SUBMITTED)
        metrics: Json = {
            **batch.report,
            **report_session_ages(batch.session_starts, time.time()),
            "wait_seconds": waited,
        }
        if batch.samples or lessons.samples:
            metrics |= await self._update_weights(batch, lessons, step)
        else:
            self.log(f"step {step}: no group had any signal, so there was nothing to learn from")
        self.step = step
        metrics["train_seconds"] = metrics["step_seconds"] = time.monotonic() - began
        metrics["elapsed"] = self.timer.seconds
        # With the step's row, so that a crash before `record` does not lose them.
        await self.store.advance_step(self.run_id, step, StepState.SUBMITTED, metrics=metrics)
        if step % self.config.trainer.checkpoint_every == 0 or self._is_done():
            version = await self._save_and_commit(step)
        else:
            version = await self._publish(step)
            await self.store.advance_step(self.run_id, step, StepState.SUBMITTED, version=version)
        metrics |= {
            "version": version,
            "step_seconds": time.monotonic() - began,
            "elapsed": self.timer.seconds,
            **self.publisher.report,
        }
        self.monitor.record("train", step, metrics)

    async def _update_weights(self, batch: StepBatch, lessons: CorrectionBatch, step: int) -> Json:
        """Move the weights; returns what there is to report of it."""
        self.doing = f"step {step}: {len(batch.samples)} samples"
        metrics: Json = {}
        if batch.samples:
            batch, metrics = await self._reweight(batch, step)
        if not batch.samples and not lessons.samples:
            return metrics
        plan = self.config.trainer
        loss = scale_loss(plan.loss, batch.divisor)
        result = await apply_update(
            self.backend, batch.samples, loss, lessons.samples, self._scheduled_adam(step)
        )
        if result.samples is not None:
            if plan.off_policy.proximal == "behavior":
                metrics |= compute_importance(batch.samples, result.samples.logprobs)
            metrics |= {**result.samples.metrics, "loss": result.samples.loss}
        if result.corrections is not None:
            loss = compute_correction_loss(lessons.samples, result.corrections.logprobs)
            metrics |= {"lessons": len(lessons.samples), "lesson_loss": loss}
        return {**metrics, **result.optimizer.metrics, "grad_norm": result.optimizer.grad_norm}

    async def _reweight(self, batch: StepBatch, step: int) -> tuple[StepBatch, Json]:
        """With all that belongs into the advantages, and what there is to report of that."""
        batch, metrics = await apply_off_policy(batch, self.backend, self.config.trainer.off_policy)
        if not batch.samples:
            self.log(f"step {step}: every token is beyond trainer.off_policy.drop_above, so none was learned")
        elif self.penalty is not None:
            samples, told = await self.penalty.apply(batch.samples, batch.scales)
            batch = replace(batch, samples=samples)
            metrics |= told
        return batch, metrics

    def _scheduled_adam(self, step: int) -> AdamConfig:
        """The optimizer's settings for this step: warm-up and schedule are in its learning rate."""
        plan = self.config.trainer
        share = min(1.0, step / (plan.warmup_steps + 1))
        if plan.schedule == "linear":
            used = (step - 1) / plan.steps
            if plan.seconds is not None:
                used = max(used, self.timer.seconds / plan.seconds)
            share *= max(0.05, 1.0 - used)
        return plan.adam.model_copy(update={"lr": plan.adam.lr * share})

    async def _save_and_commit(self, step: int) -> int:
        self.doing = f"step {step}: saving"
        state = TrainerState(step=step, seconds=self.timer.seconds, baseline=self.batcher.baseline_state())
        path = await save_checkpoint(self.config.run_dir, self.backend, state)
        # This one row makes the checkpoint count, for the steps before it too.
        await self.store.advance_step(self.run_id, step, StepState.SAVED, state_path=str(path))
        self.saved_step = step
        version = await self._commit()
        if self.sync.live:
            await self._publish_files(version)
        return version

    async def _publish_files(self, version: int) -> None:
        """Files of a version that the engines were given without: for engines that start while the trainer is
        busy or away, and for what comes after the run."""
        artifact = await self.backend.publish(self._policy_path(version))
        await self.store.publish(Policy(self.policy_id, version, artifact))

    async def _commit(self) -> int:
        """Publish the last saved step, unless it is, and commit all up to it."""
        rows = [row for row in await self.store.steps(self.run_id) if row.step <= self.saved_step]
        newest = rows[-1]
        version = newest.version if newest.version is not None else await self._publish(newest.step)
        for row in rows:
            if row.state is not StepState.COMMITTED:
                of_row = version if row is newest else None
                await self.store.advance_step(self.run_id, row.step, StepState.COMMITTED, version=of_row)
        self.saved_version = version
        folder = self.config.run_dir / "checkpoints"
        keep = frozenset({checkpoint_path(self.config.run_dir, self.saved_step)})
        for old in find_outdated(folder, self.config.trainer.keep_checkpoints, keep):
            await self._discard_checkpoint(old)
        prune_folder(folder, self.config.trainer.keep_checkpoints, keep)
        return version

    async def _discard_checkpoint(self, checkpoint: Path) -> None:
        try:
            await self.backend.discard_state(checkpoint / "backend")
        except BackendError as error:
            self.log(f"what {checkpoint.name} takes at the service could not be freed: {error}")

    async def _publish(self, step: int) -> int:
        self.doing = f"step {step}: publishing"
        version = await self.store.reserve_version(self.policy_id, self.run_id, step)
        folder = self._policy_path(version)
        await self._publish_head(version)
        # A recovery makes the last saved version the head again, so its weights stay.
        keep = frozenset({self._policy_path(self.saved_version)})
        prune_folder(folder.parent, self.config.trainer.keep_checkpoints, keep)
        return version

    async def _publish_head(self, version: int) -> None:
        """The current weights, under this version."""
        if self.sync.live:
            artifact = Artifact("live")
        else:
            artifact = await self.backend.publish(self._policy_path(version))
        policy = Policy(self.policy_id, version, artifact)
        await self.store.publish(policy)
        self._schedule_renewal(policy)
        await self.publisher.push(policy)

    def _schedule_renewal(self, head: Policy) -> None:
        expires, now = head.artifact.expires_at, time.time()
        self.renewal_time = None if expires is None else now + RENEW_AFTER * max(0.0, expires - now)

    async def _renew_head(self) -> bool:
        """Make the head's artifact anew when it is about to expire. The weights are still those it was made
        of: every step ends with a version."""
        if self.renewal_time is None or time.time() < self.renewal_time:
            return False
        head = await self.store.head(self.policy_id)
        self.log(f"exporting version {head.version} again: its sampler expires")
        await self._publish_head(head.version)
        return True

    def _policy_path(self, version: int) -> Path:
        return self.config.run_dir / "policies" / f"v{version:06d}"

    # --- after a crash ---------------------------------------------------------------------------

    async def recover(self) -> None:
        """Back to the last saved state; later claims are released, abandoned versions tombstoned."""
        self.doing = "recovering"
        rows = await self.store.steps(self.run_id)
        saved = [
            row for row in rows if row.state_path and row.state in (StepState.SAVED, StepState.COMMITTED)
        ]
        if saved:
            state = await load_checkpoint(checkpoint_path(self.config.run_dir, saved[-1].step), self.backend)
            self.step = self.saved_step = state.step
            self.timer = TrainingTimer(previous_seconds=state.seconds)
            self.batcher.load_baseline(state.baseline)
            self.log(f"resuming after step {state.step}")
        else:
            await self.backend.start()
        discard_checkpoints_after(self.config.run_dir, self.saved_step)
        await self._tombstone_abandoned_versions()
        released = await self.store.release_steps(self.run_id, after=self.saved_step)
        if released:
            self.log(f"released the claims of {len(released)} unsaved step(s): {released}")
        if saved:
            await self._restore_published_version()
            await self._commit()
            await self._record_missing_metrics()
        head = await self.store.head(self.policy_id)
        if head.artifact.kind == "live":
            await self._publish_files(head.version)
            head = await self.store.head(self.policy_id)
        self._schedule_renewal(head)
        if not await self._renew_head():
            # The base model too: an engine may hold a version that has just been given up.
            await self.publisher.push(head)

    async def _tombstone_abandoned_versions(self) -> None:
        """Before their steps are released, so that a crash in between finds them again."""
        for version, _ in await self.store.reserved_versions(self.policy_id):
            await self.store.tombstone(self.policy_id, version, "its publisher died before it was written")
        for policy, step in await self.store.published(self.policy_id):
            if step > self.saved_step:
                await self.store.tombstone(self.policy_id, policy.version, "its step was not saved")

    async def _restore_published_version(self) -> None:
        """A saved step whose version was published before its row could say so."""
        rows = {row.step: row for row in await self.store.steps(self.run_id)}
        for policy, step in await self.store.published(self.policy_id):
            if step == self.saved_step and rows[step].version is None:
                await self.store.advance_step(self.run_id, step, rows[step].state, version=policy.version)

    async def _record_missing_metrics(self) -> None:
        """Metrics of steps that were saved before they could be recorded."""
        there = {record["step"] for record in read_steps(self.config.run_dir)}
        for row in await self.store.steps(self.run_id):
            if row.step not in there and row.metrics:
                self.monitor.record("train", row.step, {**row.metrics, "version": row.version})
