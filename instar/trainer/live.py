"""Train the policies of several agents on their live sessions, in turns.

Every learning agent has a policy of its own, with steps, claims, checkpoints and versions of its own. They
share one backend, which holds the state of one policy at a time. Before another policy is loaded, the steps
of the loaded one are saved, so a policy that is not loaded can always continue from its last checkpoint.

No version is pushed to the engines: the gateway loads the versions that serve an agent.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

from instar.backends.base import Backend
from instar.config import RunConfig
from instar.data.batcher import StepBatch
from instar.errors import BackendLost, InstarError, StoreError
from instar.trainer import lineage
from instar.trainer.checkpoint import BACKEND_FOLDER, find_damage
from instar.trainer.loop import Trainer
from instar.trainer.renewal import SamplerRenewals
from instar.types import SINGLE_EPOCH, Json, Policy

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.5
"""How often the store is checked for sessions and rejected versions while all policies wait."""

Work = Callable[[], Awaitable[None]]


class LineageTrainer(Trainer):
    """Trains the policy of one agent. Its versions are candidates, which no engine serves before they are
    promoted."""

    waiting_since = 0.0
    """When the policy's last step ended, on the clock of `time.monotonic`."""

    @property
    def name(self) -> str:
        assert self.agent_id is not None, "the config must list one learning agent"
        return self.agent_id

    async def recover(self) -> None:
        self.reset()
        await super().recover()
        self.timer.started_at = self.waiting_since = time.monotonic()
        self._announce_wait()

    def _announce_wait(self) -> None:
        self.activity = f"waiting for data for step {self.step + 1}"

    async def load_state(self) -> bool:
        """Load the last checkpoint into the backend, which has the state of another policy. Return False if
        the checkpoint is damaged or missing."""
        path = lineage.get_checkpoint_path(self.config, self.policy_id, self.saved_step)
        if (damage := await asyncio.to_thread(find_damage, path)) is not None:
            logger.warning("the checkpoint %s is damaged or missing: %s", path, damage)
            return False
        await self.backend.load_state(path / BACKEND_FOLDER)
        return True

    async def find_work(self) -> Work | None:
        """Return the next step, or None if the policy has too little data for one. The step trains on a batch
        or, if the version of the weights was rejected or replaced, it loads the serving version."""
        self._announce_wait()
        if replacement := await lineage.find_replacement(self.store, self.policy_id, self.version):
            return partial(self._follow, *replacement)
        batch = await self.batcher.next_batch(
            step=self.step + 1,
            epoch=SINGLE_EPOCH,
            version=self.version,
            step_by_version=await self.store.steps_by_version(self.policy_id),
            timeout=0.0,
        )
        return None if batch is None else partial(self._train, batch)

    async def _train(self, batch: StepBatch) -> None:
        await self.train_step(batch, wait_seconds=time.monotonic() - self.waiting_since)
        self.waiting_since = time.monotonic()
        await self.check_alarms()

    async def _update_weights(self, batch: StepBatch, step: int) -> Json:
        previous = self.backend.sent_tokens
        metrics = await super()._update_weights(batch, step)
        sent = self.backend.sent_tokens - previous
        return metrics | ({"sent_tokens": sent} if sent else {})

    async def _follow(self, head: Policy, step: int) -> None:
        text = f"version {self.version} was not promoted; training continues from version {head.version}"
        await self.restore_step(step, "lineage", text, head)

    async def _deliver(self, policy: Policy) -> None:
        pass  # the gateway loads a version when it serves requests

    async def _push_head(self) -> None:
        pass


class LiveTrainer:
    """Trains policies in turns, each for one step if it has enough data. A policy that fails is reported with
    the name of its agent, and the others continue."""

    def __init__(
        self,
        config: RunConfig,
        backend: Backend,
        lineages: Sequence[LineageTrainer],
        *,
        may_run: Callable[[], Awaitable[bool]] | None = None,
    ) -> None:
        """``may_run`` returns False while no step may begin."""
        self._may_run = may_run
        self._config = config
        self._backend = backend
        self._lineages = lineages
        self._renewals = SamplerRenewals(config, lineages[0].store, backend)
        self._loaded: LineageTrainer | None = None
        """The policy whose state the backend has, or None if it has that of none."""
        self._failures: dict[str, InstarError] = {}
        """The errors of the policies that failed, by agent."""
        for member in lineages:
            member.stop_event = lineages[0].stop_event

    def stop(self) -> None:
        """Make `run` finish the current step, save a checkpoint and return."""
        self._lineages[0].stop()

    @property
    def activity(self) -> str:
        shown = {m.name: "finished" if m.is_done() else m.activity for m in self._lineages}
        shown |= {name: f"failed: {error}" for name, error in self._failures.items()}
        return "; ".join(f"{name}: {activity}" for name, activity in shown.items())

    async def run(self) -> None:
        """Train until no policy has steps left, or `stop` is called. If policies failed, raise the error of
        the first one, after the others have finished."""
        while True:
            try:
                await self._start()
                while members := self._list_active():
                    await self._renew_samplers()
                    if not any([await self._attempt(member, self._take_turn) for member in members]):
                        await self._pause()
                if self._loaded is not None:
                    await self._attempt(self._loaded, LineageTrainer.save_unsaved_steps)
                break
            except BackendLost as error:
                self._loaded = None
                for member in self._lineages:
                    member.reset_after_lost_session(error)
        if self._failures:
            name, error = next(iter(self._failures.items()))
            raise InstarError(f"training the policy of the agent {name!r} failed: {error}") from error

    async def _start(self) -> None:
        await lineage.load_shared_initial_weights(self._config, self._backend)
        for member in self._lineages:
            await self._attempt(member, self._recover)

    def _list_active(self) -> list[LineageTrainer]:
        return [m for m in self._lineages if m.name not in self._failures and not m.is_done()]

    async def _attempt(
        self, member: LineageTrainer, action: Callable[[LineageTrainer], Awaitable[bool | None]]
    ) -> bool:
        """Run the action and return its result. If it fails because of the policy, and not of the store or
        the backend as a whole, record the failure and return True."""
        try:
            return bool(await action(member))
        except (StoreError, BackendLost):
            raise
        except InstarError as error:
            logger.error("training the policy of the agent %r failed: %s", member.name, error)
            member.monitor.record("warning", member.step, {"alarm": "failed", "text": str(error)})
            self._failures[member.name] = error
            self._loaded = None
            return True

    async def _recover(self, member: LineageTrainer) -> None:
        self._loaded = None
        await member.recover()
        self._loaded = member

    async def _take_turn(self, member: LineageTrainer) -> bool:
        """Run the policy's next step. Return False if it has none, or may not begin it now."""
        if member.is_done():  # `stop` was called since the turn of an earlier policy
            return False
        if self._may_run is not None and not await self._may_run():
            return False
        work = await member.find_work()
        if work is None:
            return False
        if self._loaded is not member:
            await self._unload()
            if not await member.load_state():
                await self._recover(member)  # the work belongs to steps that are repeated
                return True
            self._loaded = member
        await work()
        return True

    async def _unload(self) -> None:
        """Save the steps of the loaded policy, before the backend loads another state."""
        if self._loaded is not None:
            await self._attempt(self._loaded, LineageTrainer.save_unsaved_steps)
        self._loaded = None

    async def _renew_samplers(self) -> None:
        """Export versions again whose samplers expire soon, also while no step may begin, and those of
        policies that failed."""
        for member in self._lineages:
            for row in await self._renewals.list_due(member.policy_id):
                await self._unload()
                try:
                    await self._renewals.renew(row)
                except (StoreError, BackendLost):
                    raise
                except InstarError as error:
                    text = f"version {row.policy.version} cannot be exported again: {error}"
                    logger.warning("%s: %s", member.name, text)
                    member.monitor.record("warning", member.step, {"alarm": "renewal", "text": text})

    async def _pause(self) -> None:
        try:
            async with asyncio.timeout(POLL_SECONDS):
                await self._lineages[0].stop_event.wait()
        except TimeoutError:
            pass
