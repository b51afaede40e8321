"""A training run from its start to its end."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from typing import Any

from instar.backends.factory import check_run
from instar.cluster.data import import_data, pin_data
from instar.cluster.layout import RunFolder
from instar.cluster.live_run import LiveRun, start_teacher
from instar.cluster.phases import finish_scoring, run_phases
from instar.cluster.preflight import check_same_backend, check_teacher, check_trainable
from instar.cluster.serving import serve_run
from instar.config import RunConfig
from instar.errors import InstarError
from instar.store.base import Run


async def train(
    config: RunConfig,
    *,
    resume: bool = False,
    on_started: Callable[[LiveRun], Any] | None = None,
    log: Callable[[str], None] = print,
) -> LiveRun:
    """Train until the run is finished and return it. ``on_started`` is called when engines and gateway
    answer.

    Raises the first error if the run fails. On Ctrl-C the run drains, saves a checkpoint and returns with
    ``stopped_by_user`` set.
    """
    check_trainable(config)
    config, notes = check_run(config, os.environ)
    for note in notes:
        log(note)
    check_teacher(config)
    if resume:
        check_same_backend(config)
    folder = RunFolder(config.run_dir.resolve())
    previous_data = folder.read_config().data if resume and folder.config_file.is_file() else ()
    config = await pin_data(config, previous_data)
    async with serve_run(config, resume=resume, live=False, log=log) as run:
        if on_started is not None:
            on_started(run)
        try:
            await import_data(run.store, run.config, log)
            await start_teacher(run)
            stop = _handle_interrupts(run)
            await run_phases(run, stop)
            await finish_scoring(run, stop)
            run.stopped_by_user = stop.is_set()
        except Exception as error:  # any error ends the run, and must be recorded in the store
            await record_failure(run, error)
            if isinstance(error, OSError):  # a failure of the machine, not a bug: shown without a traceback
                raise InstarError(str(error)) from error
            raise
        await _finish(run, "stopped" if run.stopped_by_user else "finished")
        return run


def _handle_interrupts(run: LiveRun) -> asyncio.Event:
    """Return an event that the first Ctrl-C sets to make the run drain and save. The second kills the run."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def interrupt() -> None:
        if stop.is_set():
            for role in run.cluster.roles:
                run.cluster.kill(role)
            os._exit(130)
        run.cluster.log("stopping: the current step is finished and saved first (Ctrl-C again stops at once)")
        stop.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, interrupt)
    return stop


async def record_failure(run: LiveRun, error: Exception) -> None:
    """Write the failure to the store. If writing fails too, only log that; the first error is reported."""
    try:
        await _finish(run, "failed", str(error) or type(error).__name__)
    except (InstarError, OSError) as store_error:
        run.cluster.log(f"the failure of the run could not be recorded: {store_error}")


async def _finish(run: LiveRun, status: str, reason: str | None = None) -> None:
    row = await run.store.run(run.run_id)
    assert row is not None
    await run.store.put_run(Run(row.run_id, row.policy_id, row.config, status, reason, row.created_at))
