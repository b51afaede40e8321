"""Train the policy on batches from the store, and publish it.

A step is first *claimed* (the store freezes its samples with their rewards and advantages), then *submitted*
to the backend, then *saved* (a checkpoint contains its update), and then *committed* (its version is
published). Steps between two checkpoints publish their versions before they are saved. After a crash at any
point, or if a training service loses the session, `recover` loads the last saved state and releases the
claims of later steps.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import KW_ONLY, dataclass
from pathlib import Path

import msgspec

from instar.backends.base import Backend
from instar.config import RunConfig
from instar.data.batcher import Batcher, StepBatch
from instar.data.report import report_session_ages
from instar.errors import BackendLost, InstarError
from instar.reference.penalty import ReferencePenalty
from instar.store.base import Store
from instar.trainer import lineage
from instar.trainer.alarms import AlarmDetector
from instar.trainer.checkpoint import (
    BACKEND_FOLDER,
    MAX_REWINDS,
    RewindState,
    TrainerState,
    TrainingTimer,
    checkpoint_path,
    is_pruned,
    load_initial_weights,
    load_newest_intact,
    policy_path,
    remove_checkpoints_after,
    remove_outdated_checkpoints,
    save_checkpoint,
)
from instar.trainer.monitor import Monitor
from instar.trainer.publishing import PolicyPublisher, compute_renewal_time
from instar.trainer.update import (
    KlLimiter,
    StepSamples,
    apply_updates,
    report_update,
    reweight,
    scale_loss,
    schedule_adam,
    weigh_supervised,
)
from instar.types import SINGLE_EPOCH, Artifact, Json, Policy, StepState

logger = logging.getLogger(__name__)

SAVED_STATES = (StepState.SAVED, StepState.COMMITTED)
MAX_LOST_SESSIONS = 5
"""The run fails if the backend loses more training sessions than this without a trained step in between."""


@dataclass(eq=False, repr=False)
class Trainer:
    config: RunConfig
    _: KW_ONLY
    store: Store
    backend: Backend
    publisher: PolicyPublisher
    monitor: Monitor
    penalty: ReferencePenalty | None = None

    def __post_init__(self) -> None:
        self.run_id, self.policy_id = self.config.name, self.config.policy_id
        self.folder = self.config.get_policy_dir(self.policy_id)
        self.agent_id = next(iter(self.config.trained_agents), None)
        """The agent whose live sessions the policy is trained on, or None in a run on other data."""
        self.batcher = Batcher(self.store, self.run_id, self.config)
        self.alarms = AlarmDetector(self.config.run_dir, self.agent_id)
        self.rewind = RewindState()
        self.kl_limiter = KlLimiter.from_config(self.config)
        self.activity = "starting"
        self.step = 0
        """The last step whose update is in the weights."""
        self.saved_step = 0
        self.version = 0
        """The policy version of the weights."""
        self.saved_version = 0
        """The version of the last saved step, which `recover` restores."""
        self.lost_sessions = 0
        self.timer = TrainingTimer()
        self.stop_event = asyncio.Event()
        self.is_rollout_finished = False
        """True if no more rollout groups will arrive. Never true if the run trains on live traffic."""

    # --- running -----------------------------------------------------------------------------------

    async def run(self) -> None:
        """Train until the step or time limit is reached, no data is left, or `stop` is called."""
        while True:
            try:
                await self.recover()
                self.timer.started_at = time.monotonic()
                while not self.is_done() and await self._run_step():
                    pass
                await self.save_unsaved_steps()
                await self.publisher.push_last()
                self.activity = "finished"
                return
            except BackendLost as error:
                self.reset_after_lost_session(error)

    def reset_after_lost_session(self, error: BackendLost) -> None:
        self.lost_sessions += 1
        if self.lost_sessions > MAX_LOST_SESSIONS:
            raise error
        logger.warning("the training session was lost; loading the last saved state: %s", error)
        self.reset()

    def reset(self) -> None:
        """Return to the state of a new trainer, before another call of `recover`."""
        self.batcher.reset()
        self.step = self.saved_step = self.saved_version = self.version = 0
        self.rewind, self.kl_limiter = RewindState(), KlLimiter.from_config(self.config)

    async def _run_step(self) -> bool:
        """Renew the head if it expires soon, wait for a batch, and train on it unless the wait times out.
        Return False if no data is left."""
        await self._renew_head()
        self.activity = f"waiting for data for step {self.step + 1}"
        head = await self.store.latest_policy(self.policy_id)
        wait_started = time.monotonic()
        was_finished = self.is_rollout_finished
        next_batch = self.batcher.next_batch(
            step=self.step + 1,
            epoch=SINGLE_EPOCH,
            version=self.version,
            step_by_version=await self.store.steps_by_version(self.policy_id),
            stop=self.stop_event,
            is_finished=lambda: self.is_rollout_finished,
            timeout=self._batch_timeout(),
        )
        batch = await self.publisher.sync_while_waiting(head, next_batch)
        if batch is None:
            return not was_finished  # the last groups may have arrived during the wait
        await self.train_step(batch, wait_seconds=time.monotonic() - wait_started)
        await self.check_alarms()
        return True

    def stop(self) -> None:
        """Make `run` finish the current step, save a checkpoint and return."""
        self.stop_event.set()

    def _batch_timeout(self) -> float | None:
        """Return the seconds until the time limit or the next renewal, or None if there is neither."""
        limit = self.config.trainer.seconds
        limits = [] if limit is None else [limit - self.timer.seconds]
        if self.publisher.renewal_time is not None:
            limits.append(self.publisher.renewal_time - time.time())
        return max(0.0, min(limits)) if limits else None

    def is_done(self) -> bool:
        settings = self.config.trainer
        is_over = settings.seconds is not None and self.timer.seconds >= settings.seconds
        return self.stop_event.is_set() or self.step >= settings.steps or is_over

    # --- one step --------------------------------------------------------------------------------

    async def train_step(self, batch: StepBatch, *, wait_seconds: float = 0.0) -> None:
        step, started = self.step + 1, time.monotonic()
        await self.store.drop_samples(batch.drops)
        claims = [*batch.claims, *batch.supervised.claims]
        forgotten = await self.store.claim_step(self.policy_id, step, claims, run_id=self.run_id)
        batch = batch.without(forgotten)
        await self.store.advance_step(self.policy_id, step, StepState.SUBMITTED)
        metrics: Json = {
            **batch.report,
            **report_session_ages(batch.session_starts, time.time()),
            "wait_seconds": wait_seconds,
        }
        if batch.samples or not batch.supervised.is_empty:
            metrics |= await self._update_weights(batch, step)
        else:
            logger.info("step %s: no samples to train on; the weights are unchanged", step)
        self.step = step
        metrics["train_seconds"] = metrics["step_seconds"] = time.monotonic() - started
        metrics["elapsed"] = self.timer.seconds
        # The step's row stores the metrics, so that a crash before `record` does not lose them.
        await self.store.advance_step(self.policy_id, step, StepState.SUBMITTED, metrics=metrics)
        if step % self.config.trainer.checkpoint_every == 0 or self.is_done():
            version = await self._save_and_commit(step)
        else:
            version = await self._publish(step)
            await self.store.advance_step(self.policy_id, step, StepState.SUBMITTED, version=version)
        metrics |= {
            "version": version,
            "step_seconds": time.monotonic() - started,
            "elapsed": self.timer.seconds,
            **self.publisher.report,
        }
        self.monitor.record("train", step, metrics)
        self.lost_sessions = 0

    async def _update_weights(self, batch: StepBatch, step: int) -> Json:
        """Update the weights, unless no samples remain. Return the metrics."""
        self.activity = f"step {step}: training on {len(batch.samples) + batch.supervised.count} samples"
        metrics: Json = {}
        settings = self.config.trainer
        if batch.samples:
            batch, metrics = await reweight(batch, self.backend, self.penalty, settings.off_policy)
            if not batch.samples:
                logger.info("step %s: trainer.off_policy.drop_above dropped the tokens of all samples", step)
        supervised, supervised_metrics = await weigh_supervised(batch.supervised, self.backend, settings)
        if not batch.samples and not supervised:
            return metrics
        samples = StepSamples(batch.samples, supervised, batch.supervised.replies)
        loss = scale_loss(settings.loss, batch.divisor)
        adam = schedule_adam(settings, step, self.timer.seconds, self.rewind.lr_scale)
        result, updates = await apply_updates(
            self.backend, samples, loss, adam, settings.update_count, self.kl_limiter
        )
        return {**metrics, **supervised_metrics, **report_update(batch, result, settings), **updates}

    async def save_unsaved_steps(self) -> None:
        if self.step > self.saved_step:
            await self._save_and_commit(self.step)

    async def _save_and_commit(self, step: int, step_state: StepState = StepState.SAVED) -> int:
        self.activity = f"step {step}: saving"
        if self.config.trainer.on_collapse == "rewind":
            self.rewind = self.rewind.update(step, self.alarms.recent_reward)
        baseline, limiter = self.batcher.estimator.to_json(), self.kl_limiter
        kl_state = (limiter.lr_scale, limiter.base_weight)
        state = TrainerState(step, self.timer.seconds, baseline, self.rewind, *kl_state)
        path = await save_checkpoint(self.folder, self.backend, state)
        # This row makes the checkpoint valid, for this step and all earlier unsaved steps.
        await self.store.advance_step(self.policy_id, step, step_state, state_path=str(path))
        self.saved_step = step
        version = await self._commit()
        if self.publisher.sync.is_live:
            # A live push writes no files. Engines that start while the trainer is busy or stopped need them.
            await self._record_policy(version, is_live=False)
        return version

    async def _commit(self) -> int:
        """Commit all steps up to the last saved one, and remove old checkpoints. Return the version of the
        saved step, which is published first if necessary."""
        rows = await self.store.steps_to_commit(self.policy_id, self.saved_step)
        newest = rows[-1]
        version = newest.version if newest.version is not None else await self._publish(newest.step)
        for row in rows:
            if row.state is not StepState.COMMITTED:
                await self.store.advance_step(
                    self.policy_id,
                    row.step,
                    StepState.COMMITTED,
                    version=version if row is newest else None,
                )
        self.saved_version = self.version = version
        keep_count = self.config.trainer.keep_checkpoints
        kept = await lineage.list_kept_versions(self.store, self.policy_id, keep_count)
        kept_steps = [self.saved_step, self.rewind.best_step, *(row.step for row in kept)]
        await remove_outdated_checkpoints(self.folder, self.backend, keep_count, kept_steps)
        return version

    async def _publish(self, step: int) -> int:
        self.activity = f"step {step}: publishing"
        version = await self.store.reserve_version(
            self.policy_id,
            self.run_id,
            step,
            parent=self.version,
            is_candidate=self.config.trains_on_live,
        )
        policy = await self._record_policy(version, self.publisher.sync.is_live)
        self.version = version
        await self._deliver(policy)
        await lineage.remove_outdated_artifacts(self.store, self.config, self.policy_id, self.saved_version)
        return version

    async def _deliver(self, policy: Policy) -> None:
        """Bring a new version to the engines."""
        await self.publisher.push_if_due(policy)

    async def _record_policy(self, version: int, is_live: bool) -> Policy:
        """Publish a version in the store. Write its weights to disk first, unless ``is_live``."""
        path = policy_path(self.folder, version)
        artifact = Artifact("live") if is_live else await self.backend.publish(path)
        policy = Policy(self.policy_id, version, artifact)
        await self.store.publish(policy)
        return policy

    async def _renew_head(self) -> bool:
        """Export the head's artifact again if one that engines use expires soon, and return True if it was
        exported. The weights are still those of the head, because every step publishes a version."""
        if self.publisher.renewal_time is None or time.time() < self.publisher.renewal_time:
            return False
        head = await self.store.latest_policy(self.policy_id)
        logger.info("exporting version %s again before its sampler expires", head.version)
        await self.publisher.push(await self._record_policy(head.version, self.publisher.sync.is_live))
        return True

    # --- alarms ------------------------------------------------------------------------------------

    async def check_alarms(self) -> None:
        for alarm in self.alarms.check():
            logger.warning("step %s: %s", self.step, alarm.text)
            self.monitor.record("warning", self.step, {"alarm": alarm.name, "text": alarm.text})
            if alarm.is_collapse and self.config.trainer.on_collapse == "stop":
                raise InstarError(f"trainer.on_collapse stopped the run after step {self.step}: {alarm.text}")
            if alarm.is_collapse and self.config.trainer.on_collapse == "rewind":
                await self._rewind()

    async def _rewind(self) -> None:
        """Restore the best checkpoint in a step of its own, which trains on no samples."""
        best = self.rewind.best_step
        if not best or self.rewind.count >= MAX_REWINDS or self.is_done():
            return
        self.rewind = msgspec.structs.replace(self.rewind, count=self.rewind.count + 1)
        text = f"restored step {best}; the learning rate is scaled by {self.rewind.lr_scale:g}"
        self.publisher.require_push()
        await self.restore_step(best, "rewind", text)

    async def restore_step(self, saved_step: int, alarm: str, text: str, head: Policy | None = None) -> None:
        """Load the checkpoint of an earlier step, in a step of its own. The step publishes a new version,
        unless its weights are those of ``head``."""
        step, started = self.step + 1, time.monotonic()
        await self.store.claim_step(self.policy_id, step, [], run_id=self.run_id)
        await self.store.advance_step(self.policy_id, step, StepState.SUBMITTED)
        if head is None:
            await self.backend.load_state(checkpoint_path(self.folder, saved_step) / BACKEND_FOLDER)
        else:
            await lineage.load_version(self.config, self.backend, head, saved_step)
        version, self.step = None if head is None else head.version, step
        self.monitor.record("warning", step, {"alarm": alarm, "text": f"step {step}: {text}"})
        metrics: Json = {"rewound_to": saved_step, "wait_seconds": 0.0, "elapsed": self.timer.seconds}
        metrics["train_seconds"] = time.monotonic() - started
        await self.store.advance_step(
            self.policy_id, step, StepState.SUBMITTED, metrics=metrics, version=version
        )
        metrics |= {"version": await self._save_and_commit(step)}
        self.monitor.record("train", step, {**metrics, "step_seconds": time.monotonic() - started})

    # --- recovery ----------------------------------------------------------------------------------

    async def recover(self) -> None:
        """Load the newest intact checkpoint, or the initial weights if none was saved. Release the
        claims of later steps, tombstone their versions, and push the head to the engines. Raises InstarError
        if no saved checkpoint is intact."""
        self.activity = "recovering"
        self.publisher.require_push()
        rows = await self.store.steps(self.policy_id)
        saved_steps = [row.step for row in rows if row.state_path and row.state in SAVED_STATES]
        damaged = frozenset[Path]()
        if saved_steps:
            state, damaged = await load_newest_intact(self.folder, self.backend, saved_steps)
            self.saved_step = state.step
            self.timer = TrainingTimer(previous_seconds=state.seconds)
            self.batcher.estimator.load_json(state.baseline)
            self.rewind = state.rewind
            self.kl_limiter.restore(state.kl_lr_scale, state.base_kl_weight)
        elif self.config.trains_on_live:
            await lineage.load_shared_initial_weights(self.config, self.backend)
        else:
            await load_initial_weights(self.config, self.backend)
        self.step = await lineage.load_serving_version(
            self.store, self.config, self.backend, self.policy_id, self.saved_step
        )
        earlier = [row.version for row in rows if row.step < self.step and row.version is not None]
        self.version = earlier[-1] if earlier else 0
        await lineage.tombstone_abandoned_versions(self.store, self.policy_id, self.step)
        await self._push_head()
        released = await self.store.release_steps(self.policy_id, self.step, include_saved=bool(damaged))
        if released:
            logger.info("released the claims of %s step(s): %s", len(released), released)
        remove_checkpoints_after(self.folder, self.step, damaged)
        if self.step > self.saved_step:
            await self._save_and_commit(self.step, StepState.COMMITTED)
        elif saved_steps:
            await lineage.restore_published_version(self.store, self.policy_id, self.saved_step)
            await self._commit()
        self.monitor.record_missing(await self.store.steps(self.policy_id))

    async def _push_head(self) -> None:
        """Push the head before its step is committed, because the rollout continues then. Without the head's
        weights, do nothing: the saved step is not published yet, and `_commit` publishes and pushes it."""
        head = await self.store.latest_policy(self.policy_id)
        published = await self.store.published_policies(self.policy_id)
        if self.saved_step and self.saved_step not in [step for _, step in published]:
            return
        # The files of the head may have been pruned if newer checkpoints were damaged.
        if head.artifact.kind == "live" or is_pruned(head.artifact):
            head = await self._record_policy(head.version, is_live=False)
        self.publisher.renewal_time = compute_renewal_time(head.artifact)
        if not await self._renew_head():
            # Even version 0 is pushed, because an engine may serve a version that is now tombstoned.
            await self.publisher.push(head)
