"""The trainer: takes batches from the store, improves the policy, publishes it.

A step is *claimed* (its samples with their rewards and advantages are frozen in the store), then
*submitted* to the backend, then *saved* (a checkpoint holds its update), then *committed* (its version
is published). Whatever moment the process dies at, `recover` finds the last saved state, gives back
what was claimed after it, and goes on.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

from instar.backends.base import Backend, ForwardBackward, OptimStep
from instar.config import AdamConfig, RunConfig
from instar.data.batcher import Batch, Batcher
from instar.engines.base import Engine
from instar.store.base import Store
from instar.sync.base import Sync
from instar.trainer.checkpoint import TrainerState, load_checkpoint, prune, save_checkpoint
from instar.trainer.monitor import Monitor
from instar.types import Json, Policy, Step, StepState

Engines = Callable[[], Awaitable[list[Engine]]]


@dataclass
class Clock:
    """Time spent training, counted on across restarts."""

    before: float = 0.0
    started: float = field(default_factory=time.monotonic)

    @property
    def seconds(self) -> float:
        return self.before + time.monotonic() - self.started


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
        engines: Engines,
        monitor: Monitor,
        log: Callable[[str], None] = print,
    ) -> None:
        self.config = config
        self.run_id = run_id
        self.policy_id = policy_id
        self.store = store
        self.backend = backend
        self.batcher = batcher
        self.sync = sync
        self.engines = engines
        self.monitor = monitor
        self.log = log
        self.doing = "starting"
        self.step = 0
        """Last step whose update is in the weights."""
        self.saved_step = 0
        self.clock = Clock()
        self.stopping = asyncio.Event()
        self.rollout_finished = False
        """Whether no more groups are coming."""

    # --- the run ---------------------------------------------------------------------------------

    async def run(self) -> None:
        """Train until the steps or the time are used up, the data has run out, or `stop` was called."""
        await self.recover()
        self.clock.started = time.monotonic()
        while not self._done():
            self.doing = f"waiting for the data of step {self.step + 1}"
            head = await self.store.head(self.policy_id)
            waited = time.monotonic()
            batch = await self.batcher.next_batch(
                step=self.step + 1,
                epoch=0,
                version=head.version,
                stop=self.stopping,
                finished=lambda: self.rollout_finished,
            )
            if batch is None:
                break
            await self.train_step(batch, waited=time.monotonic() - waited)
        if self.step > self.saved_step:
            await self._save_and_commit(self.step, {})
        self.doing = "finished"

    def stop(self) -> None:
        """Finish the step under way, checkpoint, and return from `run`."""
        self.stopping.set()

    def _done(self) -> bool:
        limit = self.config.trainer.seconds
        return (
            self.stopping.is_set()
            or self.step >= self.config.trainer.steps
            or (limit is not None and self.clock.seconds >= limit)
        )

    # --- one step --------------------------------------------------------------------------------

    async def train_step(self, batch: Batch, *, waited: float = 0.0) -> None:
        step = self.step + 1
        began = time.monotonic()
        await self.store.drop(batch.drops)
        await self.store.claim_step(self.run_id, step, batch.claims)
        await self.store.advance_step(self.run_id, step, StepState.SUBMITTED)
        metrics: Json = {**batch.report, "wait_seconds": waited}
        if batch.samples:
            self.doing = f"step {step}: {len(batch.samples)} samples"
            done, moved = await self._update(batch, step)
            metrics |= {**done.metrics, **moved.metrics, "loss": done.loss, "grad_norm": moved.grad_norm}
        else:
            self.log(f"step {step}: no group had any signal, so there was nothing to learn from")
        self.step = step
        metrics["train_seconds"] = time.monotonic() - began
        if step % self.config.trainer.checkpoint_every == 0 or self._done():
            version = await self._save_and_commit(step, metrics)
        else:
            version = await self._publish(step)
            await self.store.advance_step(
                self.run_id, step, StepState.SUBMITTED, version=version, metrics=metrics
            )
        metrics |= {
            "version": version,
            "step_seconds": time.monotonic() - began,
            "elapsed": self.clock.seconds,
        }
        self.monitor.record("train", step, metrics)

    async def _update(self, batch: Batch, step: int) -> tuple[ForwardBackward, OptimStep]:
        """Issue both calls before awaiting the first: a remote backend pipelines them."""
        forward = asyncio.ensure_future(
            self.backend.forward_backward(batch.samples, self.config.trainer.loss)
        )
        await asyncio.sleep(0)
        optim = asyncio.ensure_future(self.backend.optim_step(self._adam(step)))
        try:
            return await forward, await optim
        except BaseException:
            await asyncio.gather(forward, optim, return_exceptions=True)
            raise

    def _adam(self, step: int) -> AdamConfig:
        """The optimizer's settings for this step, warm-up included."""
        adam, warmup = self.config.trainer.adam, self.config.trainer.warmup_steps
        return adam.model_copy(update={"lr": adam.lr * min(1.0, step / (warmup + 1))})

    async def _save_and_commit(self, step: int, metrics: Json) -> int:
        self.doing = f"step {step}: saving"
        state = TrainerState(step=step, seconds=self.clock.seconds, baseline=self.batcher.baseline_state())
        path = await save_checkpoint(self.config.run_dir, self.backend, state)
        earlier = [s for s in await self.store.steps(self.run_id) if self.saved_step < s.step <= step]
        for row in earlier:
            await self.store.advance_step(
                self.run_id, row.step, StepState.SAVED, state_path=str(path) if row.step == step else None
            )
        self.saved_step = step
        return await self._commit(earlier, metrics)

    async def _commit(self, steps: list[Step], metrics: Json) -> int:
        """Publish the newest of these saved steps, unless it is, and commit them all."""
        newest = steps[-1]
        version = newest.version if newest.version is not None else await self._publish(newest.step)
        for row in steps:
            is_newest = row.step == newest.step
            await self.store.advance_step(
                self.run_id,
                row.step,
                StepState.COMMITTED,
                version=version if is_newest else None,
                metrics=metrics if is_newest and metrics else None,
            )
        prune(self.config.run_dir / "checkpoints", self.config.trainer.keep_checkpoints)
        return version

    async def _publish(self, step: int) -> int:
        self.doing = f"step {step}: publishing"
        version = await self.store.reserve_version(self.policy_id, self.run_id, step)
        folder = self.config.run_dir / "policies" / f"v{version:06d}"
        artifact = await self.backend.publish(folder)
        policy = Policy(self.policy_id, version, artifact)
        await self.store.publish(policy)
        await self._push(policy)
        prune(folder.parent, self.config.trainer.keep_checkpoints)
        return version

    async def _push(self, policy: Policy) -> None:
        """A failure leaves that engine on the version it reports; the agent goes on meanwhile."""
        for failure in await self.sync.push(policy, await self.engines()):
            if failure is not None:
                self.log(f"version {policy.version} did not reach an engine: {failure}")

    # --- after a crash ---------------------------------------------------------------------------

    async def recover(self) -> None:
        """Back to the last saved state; later claims are released, abandoned versions tombstoned."""
        self.doing = "recovering"
        rows = await self.store.steps(self.run_id)
        saved = [row for row in rows if row.state in (StepState.SAVED, StepState.COMMITTED)]
        with_state = [row for row in saved if row.state_path]
        if with_state:
            last = with_state[-1]
            state = await load_checkpoint(Path(last.state_path or ""), self.backend)
            self.step = self.saved_step = state.step
            self.clock = Clock(before=state.seconds)
            self.batcher.load_baseline(state.baseline)
            self.log(f"resuming after step {state.step}")
        released = await self.store.release_steps(self.run_id, after=self.step)
        if released:
            self.log(f"released the claims of {len(released)} unsaved step(s): {released}")
        await self._tombstone_abandoned(released)
        unfinished = [row for row in saved if row.state is StepState.SAVED]
        if unfinished:
            published = {step: policy for policy, step in await self.store.published(self.policy_id)}
            newest = unfinished[-1]
            if newest.version is None and newest.step in published:
                await self.store.advance_step(
                    self.run_id, newest.step, StepState.SAVED, version=published[newest.step].version
                )
                rows = await self.store.steps(self.run_id)
                unfinished = [row for row in rows if row.state is StepState.SAVED]
            await self._commit(unfinished, {})
        head = await self.store.head(self.policy_id)
        if head.version > 0:
            await self._push(head)

    async def _tombstone_abandoned(self, released: list[int]) -> None:
        for version, _ in await self.store.reserved_versions(self.policy_id):
            await self.store.tombstone(self.policy_id, version, "its publisher died before it was written")
        for policy, step in await self.store.published(self.policy_id):
            if step in released:
                await self.store.tombstone(self.policy_id, policy.version, "its step was not saved")
