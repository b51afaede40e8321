"""Execute a training run: check the config, train, evaluate, and wait for the remaining scores."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar, cast

from instar.async_utils import gather_or_cancel
from instar.backends.factory import check_run
from instar.cluster.context import HEARTBEAT_INTERVAL_SECONDS
from instar.cluster.data import import_data, pin_data
from instar.cluster.interrupts import CLEANUP_TIMEOUT_SECONDS
from instar.cluster.layout import RunFolder, engine_names
from instar.cluster.live_run import (
    REWARDS,
    LiveRun,
    serve_run,
    start_gate,
    start_rollout,
    start_teacher,
    start_trainer,
)
from instar.cluster.tasks import cancel_tasks
from instar.config import (
    CloudConfig,
    CloudEngineConfig,
    CloudSection,
    DataConfig,
    EngineReferenceConfig,
    GroupsConfig,
    RunConfig,
    UpstreamEngineConfig,
)
from instar.errors import ConfigError, InstarError
from instar.live.learning_window import check_window
from instar.rewards.runner import IDLE_STATUS
from instar.store.base import Run
from instar.trainer.monitor import read_metrics
from instar.types import Json

T = TypeVar("T")

SCORING_TIMEOUT_SECONDS = 120.0
"""How long a finished run waits for scores that no step needs."""


async def train(
    config: RunConfig,
    *,
    resume: bool = False,
    on_started: Callable[[LiveRun], Any] | None = None,
    log: Callable[[str], None] = print,
) -> LiveRun:
    """Train until the run is finished, and return the run. ``on_started`` is called when the engines and the
    gateway respond. Raises the first error if the run fails, and KeyboardInterrupt if Ctrl-C is pressed
    during startup. On Ctrl-C after that, the run finishes its step, saves a checkpoint and returns with
    ``is_stopped_by_user`` set."""
    config = add_default_groups(config)
    _check_trainable(config)
    config, notes = check_run(config, os.environ)
    for note in notes:
        log(note)
    _check_live(config)
    _check_teacher(config)
    folder = RunFolder(config.run_dir.resolve())
    previous_data: Sequence[DataConfig] = ()
    if resume and folder.config_file.is_file():
        previous = folder.read_config()
        _check_same_backend(config, previous)
        if previous.trains_on_live and not config.trains_on_live:
            raise ConfigError(
                "data: this run has trained on 'live', so its weights may be those of a candidate that "
                "nobody promoted, and without 'live' they would be served; keep 'live', or start a new run"
            )
        for change in describe_changes(previous.trainer.model_dump(), config.trainer.model_dump(), "trainer"):
            log(f"this run continues with another setting: {change}")
        previous_data = previous.data
    config = await pin_data(config, previous_data)
    async with serve_run(config, resume=resume, live=config.trains_on_live, log=log) as run:
        if on_started is not None:
            on_started(run)
        try:
            await import_data(run.store, run.config, log)
            await start_teacher(run)
            stop = _install_stop_handler(run)
            await run_phases(run, stop)
            await wait_for_scoring(run, stop)
            run.is_stopped_by_user = stop.is_set()
        except Exception as error:  # any error makes the run fail, and is recorded in the store
            await record_failure(run, error)
            if isinstance(error, OSError):  # a problem with the machine, so a traceback would not help
                raise InstarError(str(error)) from error
            raise
        except asyncio.CancelledError:  # Ctrl-C before the first phase
            await _record_status(run, "stopped")
            raise
        await _record_status(run, "stopped" if run.is_stopped_by_user else "finished")
        return run


def add_default_groups(config: RunConfig) -> RunConfig:
    """Return a training run's config. With live data but no rollout, the run accepts groups from outside."""
    if config.rollout is None and config.groups is None and config.has_rollout_data:
        return config.model_copy(update={"groups": GroupsConfig()})
    return config


def _check_trainable(config: RunConfig) -> None:
    if config.rollout is None and config.eval is not None:
        raise ConfigError("rollout: this section is missing; `eval` needs its agent")
    if not engine_names(config):
        raise ConfigError(
            "engine.type: the model of an upstream cannot be trained; use a different engine, such as local"
        )


def _check_live(config: RunConfig) -> None:
    if not config.trains_on_live:
        return
    if isinstance(config.backend, CloudSection) and (steps := config.trainer.checkpoint_every) > 1:
        raise ConfigError(
            f"trainer.checkpoint_every: must be 1 with data 'live' and backend.type {config.backend.type!r}, "
            f"got {steps}, because a version is exported again from the checkpoint of its step before its "
            "sampler expires; remove this setting"
        )
    check_window(config)
    if getattr(config.backend, "lora", True) is None:
        raise ConfigError(
            "backend.lora: null trains all weights, of which an engine serves one version at a time. With "
            "data 'live', each agent has versions of its own, and candidates are compared with the serving "
            "version; use adapters"
        )


def _check_teacher(config: RunConfig) -> None:
    section = config.trainer.reference
    if not isinstance(section, EngineReferenceConfig) or section.weight == 0:
        return
    if isinstance(section.engine, UpstreamEngineConfig):
        raise ConfigError(
            "trainer.reference.engine.type: an upstream does not return prompt logprobs; if the provider's "
            "completions API does, set trainer.reference.type to completions"
        )
    if isinstance(section.engine, CloudEngineConfig) and not isinstance(config.backend, CloudConfig):
        raise ConfigError(
            "trainer.reference.engine.type: cloud requires a training service as the backend, but "
            f"backend.type is {config.backend.type!r}; set trainer.reference.engine.type to local"
        )


def _check_same_backend(config: RunConfig, previous: RunConfig) -> None:
    """Raise ConfigError if the resumed run was trained by a different backend, because backends cannot load
    each other's state. `auto` may have resolved to a different backend before."""
    if previous.backend.type != config.backend.type:
        raise ConfigError(
            f"backend.type: this run was trained by {previous.backend.type}, but the setting now resolves to "
            f"{config.backend.type}; set backend.type to {previous.backend.type}, or start a new run under a "
            "different `name`"
        )


def describe_changes(previous: Mapping[str, Any], current: Mapping[str, Any], path: str) -> list[str]:
    """Return ``path: old → new`` for every setting that differs. A new version may have other defaults."""
    changes: list[str] = []
    for name, value in current.items():
        old_value, setting = previous.get(name), f"{path}.{name}"
        if isinstance(old_value, dict) and isinstance(value, dict):
            changes += describe_changes(cast(Json, old_value), cast(Json, value), setting)
        elif old_value != value:
            changes.append(f"{setting}: {old_value} → {value}")
    return changes


async def run_phases(run: LiveRun, stop: asyncio.Event) -> None:
    settings = run.config.eval
    should_evaluate = settings is not None and settings.at_start and not _is_evaluated(run, "before")
    if should_evaluate and (await run.store.progress(run.run_id)).head_version == 0:
        run.phase = "initial evaluation"
        await evaluate(run, "before", stop)
    if not stop.is_set():
        run.phase = "training"
        await run_training(run, stop)
    if settings and settings.at_end and not stop.is_set():
        run.phase = "final evaluation"
        await evaluate(run, "after", stop)


async def run_training(run: LiveRun, stop: asyncio.Event) -> None:
    """Train until the trainer exits or ``stop`` is set, then stop the trainer and the rollout."""
    cluster = run.cluster
    starts = [start_trainer(run)]
    if run.config.has_gate:
        starts.append(start_gate(run))
    if run.config.accepts_groups:
        cluster.log(f"this run has no rollout; it trains on groups from POST {run.gateway_url}/groups")
    elif run.config.trains_on_groups:
        starts.append(start_rollout(run))
    try:
        if await _run_until(stop, run, gather_or_cancel(starts)) is None:
            return
        code = await _run_until(stop, run, run.control.wait_for_exit("trainer"))
        if code is None:
            code = await _stop_training(run)
        if code != 0:
            raise InstarError(
                f"the trainer exited with code {code} while it was stopping, so its last steps may not be "
                f"saved\n(log: {cluster.roles['trainer'].log})\n{await cluster.tail('trainer')}"
            )
    finally:
        run.control.retire("trainer")
        run.control.retire("rollout")
        run.control.retire("gate")
        await asyncio.gather(*map(cluster.stop, ("rollout", "gate", "trainer")))


async def _stop_training(run: LiveRun) -> int:
    """Give the trainer `trainer.stop_timeout` seconds to finish its step, and stop the rollout at the same
    time so that it does not slow the trainer down. Return the trainer's exit code, or 0 if it was killed."""
    cluster, seconds = run.cluster, run.config.trainer.stop_timeout
    is_stopped, _ = await asyncio.gather(cluster.stop("trainer", seconds), cluster.stop("rollout"))
    if is_stopped:
        return cluster.roles["trainer"].exit_code.result()
    cluster.log(
        f"the trainer was killed, because it did not finish within {seconds:g} s (trainer.stop_timeout); a "
        "resumed run repeats the steps that were not saved"
    )
    return 0


async def evaluate(run: LiveRun, label: str, stop: asyncio.Event) -> None:
    async def run_rollout() -> int:
        await start_rollout(run, f"--evaluate={label}")
        return await run.control.wait_for_exit("rollout")

    if await _run_until(stop, run, run_rollout()) is None:
        await run.cluster.stop("rollout")
    run.control.retire("rollout")


async def _run_until(stop: asyncio.Event, run: LiveRun, coroutine: Coroutine[Any, Any, T]) -> T | None:
    """Return the coroutine's result. If ``stop`` is set first, release all held roles, cancel the coroutine
    and return None."""
    task, stopped = asyncio.create_task(coroutine), asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({task, stopped}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        run.control.release_all()
        return None
    finally:
        await cancel_tasks(task for task in (task, stopped) if not task.done())


async def wait_for_scoring(run: LiveRun, stop: asyncio.Event) -> None:
    """Wait until the rewards role, if any, has scored the remaining sessions or a timeout expires."""
    if REWARDS not in run.cluster.roles or stop.is_set():
        return
    deadline = time.monotonic() + SCORING_TIMEOUT_SECONDS
    # After this pause, the activity that the rewards role announced is newer than the last session's end.
    await _pause(3 * HEARTBEAT_INTERVAL_SECONDS, stop)
    while time.monotonic() < deadline and not stop.is_set():
        run.cluster.raise_failure()
        activities = [e.doing for e in await run.store.endpoints(run.run_id) if e.role == REWARDS]
        is_idle = not activities or activities[0].startswith(IDLE_STATUS)
        if is_idle or run.cluster.roles[REWARDS].exit_code.done():
            return
        await _pause(HEARTBEAT_INTERVAL_SECONDS, stop)
    run.cluster.log("some sessions may have no score yet; resume the run with --resume to score them")


async def _pause(seconds: float, stop: asyncio.Event) -> None:
    with suppress(TimeoutError):
        await asyncio.wait_for(stop.wait(), seconds)


def _is_evaluated(run: LiveRun, label: str) -> bool:
    """Return True if the resumed run has already completed this evaluation in every mode."""
    assert run.config.eval is not None
    modes = {
        record["mode"]
        for record in read_metrics(run.folder.path)
        if record["kind"] == "eval" and record["label"] == label
    }
    return modes >= set(run.config.eval.modes)


def _install_stop_handler(run: LiveRun) -> asyncio.Event:
    """Make the first Ctrl-C or SIGTERM set the returned event instead of cancelling the run."""
    stop = asyncio.Event()
    seconds = run.config.trainer.stop_timeout

    def handle_first_signal() -> None:
        run.cluster.log(
            f"stopping; the trainer has {seconds:g} s to finish and save the current step (press Ctrl-C "
            "again to stop immediately)"
        )
        stop.set()

    run.interrupts.on_first_signal = handle_first_signal
    run.interrupts.cleanup_seconds = seconds + CLEANUP_TIMEOUT_SECONDS
    return stop


async def record_failure(run: LiveRun, error: Exception) -> None:
    """Record the failure in the store. If that fails too, only log it; the caller raises the first error."""
    try:
        await _record_status(run, "failed", str(error) or type(error).__name__)
    except (InstarError, OSError) as store_error:
        run.cluster.log(f"cannot record in the store that the run failed: {store_error}")


async def _record_status(run: LiveRun, status: str, reason: str | None = None) -> None:
    row = await run.store.run(run.run_id)
    assert row is not None
    await run.store.put_run(Run(row.run_id, row.policy_id, row.config, status, reason, row.created_at))
