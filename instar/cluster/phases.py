"""The phases of a training run: first evaluation, training, last evaluation, and the remaining scores."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress

from instar.cluster.context import HEARTBEAT_SECONDS
from instar.cluster.live_run import REWARDS, LiveRun, run_together, start_rollout, start_trainer
from instar.cluster.tasks import cancel_tasks
from instar.errors import InstarError
from instar.rewards.runner import IDLE_STATUS
from instar.trainer.monitor import read_metrics

SCORING_SECONDS = 120.0
"""Maximum time in seconds that a finished run waits for scores that nothing depends on."""


async def run_phases(run: LiveRun, stop: asyncio.Event) -> None:
    plan = run.config.eval
    if plan and plan.at_start and await _is_untrained(run) and not _is_evaluated(run, "before"):
        run.phase = "evaluating before"
        await evaluate(run, "before", stop)
    if not stop.is_set():
        run.phase = "training"
        await run_training(run, stop)
    if plan and plan.at_end and not stop.is_set():
        run.phase = "evaluating after"
        await evaluate(run, "after", stop)


async def run_training(run: LiveRun, stop: asyncio.Event) -> None:
    """Train until the trainer exits by itself, then stop the rollout if it is still running."""
    cluster = run.cluster
    starts = [start_trainer(run)]
    if run.config.trains_live:
        starts.append(start_rollout(run))
    await run_together(*starts)
    exited = asyncio.create_task(run.control.wait_for_exit("trainer"))
    try:
        if await _is_interrupted(run, exited, stop):
            cluster.signal("trainer")
        if (code := await exited) != 0:
            raise InstarError(
                f"trainer: ended with exit code {code} while stopping; its last steps may not be saved\n"
                f"(log: {cluster.roles['trainer'].log})\n{await cluster.tail('trainer')}"
            )
    finally:
        run.control.retire("trainer")
        run.control.retire("rollout")
        await cluster.stop("rollout")


async def evaluate(run: LiveRun, label: str, stop: asyncio.Event) -> None:
    await start_rollout(run, f"--evaluate={label}")
    exited = asyncio.create_task(run.control.wait_for_exit("rollout"))
    if await _is_interrupted(run, exited, stop):
        await run.cluster.stop("rollout")
    await exited
    run.control.retire("rollout")


async def _is_interrupted(run: LiveRun, exited: asyncio.Task[int], stop: asyncio.Event) -> bool:
    """Return True if ``stop`` was set before the role exited. In that case all held roles are released."""
    stopped = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({exited, stopped}, return_when=asyncio.FIRST_COMPLETED)
    except asyncio.CancelledError:
        await cancel_tasks([exited])
        raise
    finally:
        await cancel_tasks([stopped])
    if exited.done():
        return False
    run.control.release_all()
    return True


async def finish_scoring(run: LiveRun, stop: asyncio.Event) -> None:
    """Wait for a limited time until the remaining sessions are scored."""
    if REWARDS not in run.cluster.roles or stop.is_set():
        return
    deadline = time.monotonic() + SCORING_SECONDS
    # After this pause, the state that the rewards role announced is newer than the end of the last session.
    await _pause(3 * HEARTBEAT_SECONDS, stop)
    while time.monotonic() < deadline and not stop.is_set():
        run.cluster.raise_failure()
        states = [e.doing for e in await run.store.endpoints(run.run_id) if e.role == REWARDS]
        if not states or states[0].startswith(IDLE_STATUS) or run.cluster.roles[REWARDS].exit_code.done():
            return
        await _pause(HEARTBEAT_SECONDS, stop)
    run.cluster.log("some sessions have no score yet; --resume continues with them")


async def _pause(seconds: float, stop: asyncio.Event) -> None:
    with suppress(TimeoutError):
        await asyncio.wait_for(stop.wait(), seconds)


async def _is_untrained(run: LiveRun) -> bool:
    return (await run.store.progress(run.run_id)).head_version == 0


def _is_evaluated(run: LiveRun, label: str) -> bool:
    """Return True if a resumed run has already completed this evaluation in every mode."""
    assert run.config.eval is not None
    modes = {
        record["mode"]
        for record in read_metrics(run.folder.path)
        if record["kind"] == "eval" and record["label"] == label
    }
    return modes >= set(run.config.eval.modes)
