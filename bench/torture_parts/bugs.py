"""Bugs planted to show that the simulation finds them.

Each one replaces a class of the run with a subclass that breaks one guarantee.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from instar.gateway.base import EndedSession, FailSession
from instar.gateway.pipeline.record import Recorder
from instar.gateway.session_service import SessionService
from instar.gateway.session_states import SessionState
from instar.gateway.submissions import SubmissionService, SubmittedCall
from instar.rollout.runner import RolloutRunner
from instar.store.database import Database
from instar.trainer.checkpoint import (
    TrainerState,
    checkpoint_path,
    policy_path,
    prune_folder,
    save_checkpoint,
)
from instar.trainer.loop import Trainer
from instar.types import (
    Call,
    Group,
    GroupStatus,
    PolicyState,
    Reward,
    Score,
    SessionStatus,
    StepState,
)
from tests.torture.broken_trainer import LatestStateTrainer
from torture_parts.roles import Components
from torture_parts.simulated_store import SimulatedStore

T = TypeVar("T")


@dataclass(frozen=True)
class PlantedBug:
    name: str
    components: Components


# --- training, versions and leases --------------------------------------------------------------


class StoreWithoutRelease(SimulatedStore):
    """Recovery keeps the claims of steps that were not saved."""

    async def release_steps(self, policy_id: str, after: int, *, include_saved: bool = False) -> list[int]:
        return []


class StoreWithoutTombstones(SimulatedStore):
    """Recovery leaves the versions of unsaved steps published."""

    async def tombstone(self, policy_id: str, version: int, reason: str) -> None:
        return


class TrainerWithEarlyCheckpointRow(Trainer):
    """The store refers to the checkpoint before it is written."""

    async def _save_and_commit(self, step: int, step_state: StepState = StepState.SAVED) -> int:
        path = checkpoint_path(self.config.run_dir, step)
        await self.store.advance_step(self.run_id, step, step_state, state_path=str(path))
        state = TrainerState(step=step, seconds=0.0)
        await save_checkpoint(self.config.run_dir, self.backend, state)
        self.saved_step = step
        return await self._commit()


class TrainerWithoutLoad(Trainer):
    """Recovery continues with the initial weights."""

    async def recover(self) -> None:
        await super().recover()
        await self.backend.start()
        self.backend.weights = []  # pyright: ignore[reportAttributeAccessIssue] - SimulatedBackend.weights


class TrainerWithPrunedHead(Trainer):
    """Removes the files of the last saved version, although recovery may make it the head again."""

    async def _publish(self, step: int) -> int:
        version = await super()._publish(step)
        prune_folder(policy_path(self.folder, version).parent, 1, frozenset())
        return version


class StoreWithoutLease(SimulatedStore):
    """A replaced process can continue to write."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._check_lease = _check_nothing


def _check_nothing(db: Database) -> None:
    return


class StoreWithReusedVersions(SimulatedStore):
    """The numbers of abandoned versions are reused."""

    async def reserve_version(self, policy_id: str, run_id: str, step: int, **_lineage: Any) -> int:
        def work(db: Database) -> int:
            sql = "SELECT MAX(version) AS newest FROM policies WHERE state = ?"
            row = db.execute(sql, (PolicyState.PUBLISHED.value,)).fetchone()
            version = (row["newest"] or 0) + 1
            db.execute(
                "INSERT OR REPLACE INTO policies (policy_id, version, run_id, step, state, updated_at) "
                "VALUES (?, ?, ?, ?, ?, 0)",
                (policy_id, version, run_id, step, PolicyState.RESERVED.value),
            )
            return version

        return await self.write(_rename_write("reserve_version", work))


def _rename_write(name: str, work: Callable[[Database], T]) -> Callable[[Database], T]:
    """Name the write after the query that it replaces, so that the same invariants are checked."""
    work.__code__ = work.__code__.replace(co_name=name)
    return work


# --- calls and sessions -------------------------------------------------------------------------


class EarlyRecorder(Recorder):
    """A call is acknowledged before it is committed."""

    async def record(
        self, state: Any, graph: Any, meta: Any, placement: Any, replies: Any, **_: Any
    ) -> list[Call]:
        row = self._build_row(state, meta, placement, replies[0], None, None)
        task = asyncio.create_task(self._commit(state, graph, meta, placement, [row]))
        self._commits.add(task)
        return [row.call]


class SubmissionsWithoutKeys(SubmissionService):
    """A retry is recorded as a new call."""

    async def submit(self, state: SessionState, calls: Sequence[SubmittedCall]) -> list[str]:
        state.graph = None
        for call in calls:
            call.body.parent_id = None
        graph = await self._states.load_graph(state)
        graph.find_recorded = _find_nothing
        return await super().submit(state, calls)


def _find_nothing(key: bytes, client_key: str | None = None) -> list[str]:
    return []


class StoreWithRepeatedRewards(SimulatedStore):
    """Ending a session a second time stores its rewards a second time."""

    async def end_session(self, session_id: str, status: SessionStatus, *args: Any) -> bool:
        changed = await super().end_session(session_id, status, *args)
        rewards: Sequence[Reward] = args[1] if len(args) > 1 else ()
        if not changed and rewards:
            await self.add_rewards([replace(reward, reward_id=None) for reward in rewards])
        return changed


class SessionsWithEarlyEnd(SessionService):
    """The end of a session is acknowledged before it is stored."""

    async def end(self, session_id: str, caller: Any, body: Any) -> Any:
        task = asyncio.create_task(super().end(session_id, caller, body))
        self._pending = [*getattr(self, "_pending", []), task]
        status = SessionStatus.FAILED if isinstance(body, FailSession) else SessionStatus.COMPLETED
        return EndedSession(session_id, status, True)


# --- rollout and scoring ------------------------------------------------------------------------


class RunnerWithEarlyClose(RolloutRunner):
    """A group is closed as ready before its sessions have ended."""

    async def _run_group(self, group: Group, slots: Any, has_failed: bool) -> None:
        await self.store.close_group(group.group_id, GroupStatus.READY)
        await super()._run_group(group, slots, has_failed)


class RunnerWithoutResume(RolloutRunner):
    """Groups that an earlier process left open are not resumed."""

    async def _resume(self) -> None:
        return


class StoreWithSplitScores(SimulatedStore):
    """A score is written before its rewards."""

    async def record_scores(self, scores: Sequence[Score], rewards: Sequence[Reward]) -> bool:
        is_new = await super().record_scores(scores, [])
        if is_new:
            await self.add_rewards(rewards)
        return is_new


BUGS = (
    PlantedBug("recovery does not release unsaved steps", Components(store_class=StoreWithoutRelease)),
    PlantedBug("recovery does not tombstone versions", Components(store_class=StoreWithoutTombstones)),
    PlantedBug(
        "the checkpoint is recorded before it is written",
        Components(trainer_class=TrainerWithEarlyCheckpointRow),
    ),
    PlantedBug("recovery loads a state that was not recorded", Components(trainer_class=LatestStateTrainer)),
    PlantedBug("recovery does not load the checkpoint", Components(trainer_class=TrainerWithoutLoad)),
    PlantedBug("the files of the head are removed", Components(trainer_class=TrainerWithPrunedHead)),
    PlantedBug("a process writes without its lease", Components(store_class=StoreWithoutLease)),
    PlantedBug("a version number is used again", Components(store_class=StoreWithReusedVersions)),
    PlantedBug("a call is acknowledged before its commit", Components(recorder_class=EarlyRecorder)),
    PlantedBug(
        "a retry is recorded as another call", Components(submission_service_class=SubmissionsWithoutKeys)
    ),
    PlantedBug(
        "the end of a session stores its rewards twice", Components(store_class=StoreWithRepeatedRewards)
    ),
    PlantedBug(
        "an end is acknowledged before it is stored", Components(session_service_class=SessionsWithEarlyEnd)
    ),
    PlantedBug("a group is ready before its sessions end", Components(runner_class=RunnerWithEarlyClose)),
    PlantedBug("open groups are not resumed", Components(runner_class=RunnerWithoutResume)),
    PlantedBug("a score is written before its rewards", Components(store_class=StoreWithSplitScores)),
)
