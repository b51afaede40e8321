"""Answers, for the roles of a run on this machine, whether it may train, resample, judge and evaluate now."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from zoneinfo import ZoneInfo

import msgspec

from instar.config import CloudSection, RunConfig, WindowConfig
from instar.errors import ConfigError
from instar.live.activity import ACTIVITY_FILE, ActivityReader
from instar.live.calendar_file import CalendarError, CalendarFile
from instar.live.load import LoadMonitor
from instar.live.windows import Conditions, OpenedWindow, TrainingWindows, WindowState
from instar.store.base import Store

logger = logging.getLogger(__name__)

OPENED_FILE = "learn_now.json"
REFRESH_SECONDS = 0.5
"""How often everything but the live requests is checked, which are checked every time."""
POLL_SECONDS = 0.02
BUDGET_REFRESH_SECONDS = 10.0


class LearningWindow:
    """The window of one run, for one process. Waiting never depends on the length of a sleep, so it ends
    correctly if the clock is changed or the machine was suspended.

    The methods that block may be called from any thread.
    """

    def __init__(
        self,
        config: RunConfig,
        store: Store | None = None,
        *,
        clock: Callable[[], float] = time.time,
        monotonic_clock: Callable[[], float] = time.monotonic,
    ) -> None:
        section = config.live.window
        self._section = section
        self._run_dir, self._policy_ids = config.run_dir, config.policy_ids
        self._store = store
        self._clock = clock
        self._windows = make_windows(section)
        self._activity = ActivityReader(self._run_dir / ACTIVITY_FILE, monotonic_clock)
        # The roles of a run are the children of its supervisor.
        self._load = None if section.max_load is None else LoadMonitor(os.getppid())
        self._tokens_today = 0
        self._budget_read_at = float("-inf")
        self._state = WindowState(is_open=False, reason="not checked yet")
        self._checked_at = float("-inf")
        self._lock = threading.Lock()
        self._released = threading.Event()

    def close(self) -> None:
        self.release()
        if self._load is not None:
            self._load.close()

    def may_run(self) -> bool:
        """Return True if work may be done now. This takes a few microseconds."""
        return self.read_state().is_open

    def describe(self, activity: str) -> str:
        """Return a role's activity, with the reason why it is paused, if it is."""
        state = self.read_state()
        return activity if state.is_open else f"{activity}; {state.describe()}"

    def read_state(self) -> WindowState:
        """Return whether work may be done now, why, and until when."""
        now = time.monotonic()
        if self._must_wait_for_requests() or not 0 <= now - self._checked_at < REFRESH_SECONDS:
            with self._lock:
                self._state = self._decide()
                # A live request is looked for every time, so its end must be, too.
                self._checked_at = float("-inf") if self._must_wait_for_requests() else now
        return self._state

    async def may_run_now(self) -> bool:
        """Return True if work may be done now, after counting the tokens of today if they are limited."""
        await self.refresh_budget()
        return self.may_run()

    async def may_start_step(self) -> bool:
        """Return True if a step may begin now, after counting the tokens of all earlier ones."""
        await self.refresh_budget(max_age=0.0)
        return self.may_run()

    # --- pausing a thread ---

    def pause(self) -> None:
        """Block while work may not be done. A backend calls this between layers, in its own thread."""
        while not self._released.is_set() and not self.may_run():
            self._released.wait(POLL_SECONDS)

    def release(self) -> None:
        """Never block in `pause` again, because the process stops."""
        self._released.set()

    # --- checking ---

    async def run(self) -> None:
        """Keep counting the tokens of today's steps, until cancelled."""
        while True:
            await self.refresh_budget()
            await asyncio.sleep(BUDGET_REFRESH_SECONDS)

    async def refresh_budget(self, max_age: float = BUDGET_REFRESH_SECONDS) -> None:
        """Count the tokens of today's steps, if they are limited."""
        if self._section.daily_budget is None or self._store is None:
            return
        if time.monotonic() - self._budget_read_at < max_age:
            return
        today = self._windows.start_of_day(self._clock())
        steps = [step for policy_id in self._policy_ids for step in await self._store.steps(policy_id)]
        counts = [step.metrics.get("sent_tokens", 0) for step in steps if step.updated_at >= today]
        self._tokens_today = sum(map(int, counts))
        self._budget_read_at = time.monotonic()
        self._checked_at = float("-inf")

    def _must_wait_for_requests(self) -> bool:
        if self._section.idle is None:
            return False
        is_answering, quiet_seconds = self._activity.read()
        return is_answering or quiet_seconds < self._section.idle

    def _decide(self) -> WindowState:
        is_answering, quiet_seconds = self._activity.read()
        conditions = Conditions(
            is_answering=is_answering,
            quiet_seconds=quiet_seconds,
            load=0.0 if self._load is None else self._load.load,
            tokens_today=self._tokens_today,
            opened=read_opened(self._run_dir),
        )
        try:
            return self._windows.decide(self._clock(), conditions)
        except CalendarError as error:
            # The file may be in the middle of an update, so wait until it can be read.
            return WindowState(is_open=False, reason=f"live.window.calendar: {error}")


def make_windows(section: WindowConfig) -> TrainingWindows:
    if section.calendar is None:
        return TrainingWindows(section)
    zone = None if section.time_zone is None else ZoneInfo(section.time_zone)
    return TrainingWindows(section, CalendarFile(section.calendar, zone).find_events)


def read_schedule(config: RunConfig) -> WindowState:
    """Return whether the window is open now, and until when, without regard to requests and load."""
    conditions = Conditions(opened=read_opened(config.run_dir))
    try:
        return make_windows(config.live.window).decide(time.time(), conditions)
    except CalendarError as error:
        return WindowState(is_open=False, reason=f"live.window.calendar: {error}")


def yields_to_requests(config: RunConfig) -> bool:
    """Return True if training pauses for live requests."""
    return config.trains_on_live and config.cluster.type == "local" and config.live.window.idle is not None


def check_window(config: RunConfig) -> None:
    """Raise ConfigError if a setting of `live.window` cannot be honoured."""
    section = config.live.window
    if section.daily_budget is not None and not isinstance(config.backend, CloudSection):
        raise ConfigError(
            f"live.window.daily_budget: got {section.daily_budget}, but the backend {config.backend.type!r} "
            "trains on machines of your own, which bill no tokens; remove this setting"
        )
    if config.cluster.type == "ray":
        for name in ("idle", "max_load"):
            # On Ray, the default of `idle` has no effect.
            if name in section.model_fields_set and (value := getattr(section, name)) is not None:
                raise ConfigError(
                    f"live.window.{name}: got {value:g}, but the processes of cluster.type 'ray' run on "
                    "several machines, whose requests and load the trainer does not see; set it to null"
                )
    try:
        make_windows(section).decide_schedule(time.time())
    except CalendarError as error:
        raise ConfigError(f"live.window.calendar: {error}") from error


def read_opened(run_dir: Path) -> OpenedWindow | None:
    """Return the window that a person opened, which may be over, or None."""
    try:
        return msgspec.json.decode((run_dir / OPENED_FILE).read_bytes(), type=OpenedWindow)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError) as error:
        logger.warning("%s cannot be read: %s", run_dir / OPENED_FILE, error)
        return None


def write_opened(run_dir: Path, window: OpenedWindow | None) -> None:
    """Open a window, whatever the hours and the calendar, or close it."""
    path = run_dir / OPENED_FILE
    if window is None:
        path.unlink(missing_ok=True)
        return
    scratch = path.with_suffix(".partial")
    scratch.write_bytes(msgspec.json.encode(window))
    scratch.replace(path)
