"""Tests what a role learns from the window of its run."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from instar.config import RunConfig
from instar.errors import ConfigError
from instar.live import learning_window
from instar.live.activity import (
    ACTIVITY_FILE,
    EXPIRY_SECONDS,
    ActivityReader,
    ActivityRecorder,
)
from instar.live.base import wait_until_allowed
from instar.live.learning_window import LearningWindow, check_window, read_opened, write_opened
from instar.live.load import CpuReading, compute_cpu_load, parse_gpu_load
from instar.live.windows import OpenedWindow
from instar.store.base import Run
from instar.store.sqlite import SqliteStore
from instar.types import StepState

NOON = 1_800_014_400.0  # 2027-01-15 12:00 UTC


def make_config(folder: Path, **window: Any) -> RunConfig:
    settings = {"time_zone": "UTC", **window}
    return RunConfig.model_validate({"name": "r", "dir": str(folder), "live": {"window": settings}})


def test_reader_reports_requests_and_the_time_since_the_last_one(tmp_path: Path) -> None:
    recorder = ActivityRecorder(tmp_path / "a")
    reader = ActivityReader(tmp_path / "a")
    with recorder.track_request():
        with recorder.track_request():
            assert reader.read() == (True, 0.0)
        assert reader.read() == (True, 0.0)
    is_answering, seconds = reader.read()
    assert not is_answering
    assert 0 <= seconds < 10
    later = ActivityReader(tmp_path / "a", lambda: time.monotonic() + 100)
    assert 100 <= later.read()[1] < 110


def test_reader_ignores_requests_of_a_gateway_that_was_killed(tmp_path: Path) -> None:
    recorder = ActivityRecorder(tmp_path / "a")
    with recorder.track_request():
        later = ActivityReader(tmp_path / "a", lambda: time.monotonic() + EXPIRY_SECONDS)
        assert not later.read()[0]
        restarted = ActivityReader(tmp_path / "a", lambda: time.monotonic() - 1000)
        assert restarted.read() == (False, 0.0), "the machine was restarted"
        ActivityRecorder(tmp_path / "a")  # the gateway that replaces it
        assert not ActivityReader(tmp_path / "a").read()[0]


def test_window_pauses_for_a_request_at_once(tmp_path: Path) -> None:
    recorder = ActivityRecorder(tmp_path / ACTIVITY_FILE)
    window = LearningWindow(make_config(tmp_path, idle=0))
    assert window.may_run()
    with recorder.track_request():
        assert not window.may_run()
        assert window.describe("step 3") == (
            "step 3; paused: a live request is in progress (live.window.idle)"
        )
    assert window.may_run()
    assert window.describe("step 3") == "step 3"


def test_window_follows_the_clock_when_it_is_changed(tmp_path: Path) -> None:
    now = [NOON]
    window = LearningWindow(make_config(tmp_path, hours=["12:00-13:00"]), clock=lambda: now[0])
    assert window.may_run()
    for change, is_open in ((3600, False), (-3600, True), (-86400, True), (43200, False)):
        now[0] += change
        time.sleep(learning_window.REFRESH_SECONDS)
        assert window.may_run() is is_open


def test_opened_window_survives_a_restart_and_ends(tmp_path: Path) -> None:
    config = make_config(tmp_path, hours=["22:00-06:00"])
    assert not LearningWindow(config, clock=lambda: NOON).may_run()
    write_opened(tmp_path, OpenedWindow(NOON, NOON + 600))
    assert read_opened(tmp_path) == OpenedWindow(NOON, NOON + 600)
    assert LearningWindow(config, clock=lambda: NOON + 599).may_run()
    assert not LearningWindow(config, clock=lambda: NOON + 600).may_run()
    write_opened(tmp_path, None)
    assert not LearningWindow(config, clock=lambda: NOON).may_run()


def test_damaged_file_of_an_opened_window_is_ignored(tmp_path: Path) -> None:
    (tmp_path / learning_window.OPENED_FILE).write_text("{")
    assert read_opened(tmp_path) is None


async def test_answer_changes_when_the_window_opens(tmp_path: Path) -> None:
    now = [NOON]
    window = LearningWindow(make_config(tmp_path, hours=["22:00-06:00"]), clock=lambda: now[0])
    assert not await window.may_run_now()
    waiting = asyncio.create_task(wait_until_allowed(window.may_run_now, poll_seconds=0.01))
    await asyncio.sleep(0.05)
    assert not waiting.done()
    now[0] += 10 * 3600
    await waiting


def test_paused_thread_continues_when_the_window_is_released(tmp_path: Path) -> None:
    window = LearningWindow(make_config(tmp_path, hours=["22:00-06:00"]), clock=lambda: NOON)
    thread = threading.Thread(target=window.pause)
    thread.start()
    thread.join(0.1)
    assert thread.is_alive()
    window.release()
    thread.join(10)
    assert not thread.is_alive()


def test_unreadable_calendar_pauses_training_but_is_an_error_at_start(tmp_path: Path) -> None:
    path = tmp_path / "a.ics"
    path.write_text("BEGIN:VCALENDAR\r\nVERSION:2.0\r\nPRODID:x\r\nEND:VCALENDAR\r\n")
    config = make_config(tmp_path, calendar=str(path))
    check_window(config)
    window = LearningWindow(config)
    assert window.may_run()
    path.unlink()
    with pytest.raises(ConfigError, match=r"live\.window\.calendar: .*a\.ics cannot be read"):
        check_window(config)
    time.sleep(learning_window.REFRESH_SECONDS)
    assert "a.ics cannot be read" in window.read_state().reason


async def test_budget_counts_the_tokens_of_todays_steps(tmp_path: Path) -> None:
    config = make_config(tmp_path, daily_budget=100)
    store = SqliteStore(tmp_path / "store.db")
    await store.put_run(Run("r", "r", {}))
    for step, tokens in ((1, 60), (2, 39)):
        await store.claim_step("r", step, [])
        await store.advance_step("r", step, StepState.SUBMITTED, metrics={"sent_tokens": tokens})
    window = LearningWindow(config, store)
    await window.refresh_budget()
    assert window.may_run()
    await store.advance_step("r", 2, StepState.SUBMITTED, metrics={"sent_tokens": 40})
    assert await window.may_run_now(), "the count may be some seconds old"
    assert not await window.may_start_step()
    assert "100 of 100 tokens" in window.read_state().reason
    tomorrow = LearningWindow(config, store, clock=lambda: time.time() + 86400)
    assert await tomorrow.may_run_now()
    await store.close()


def test_settings_that_cannot_be_honoured_are_errors(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"live\.window\.daily_budget: got 5, but the backend 'local'"):
        check_window(make_config(tmp_path, daily_budget=5))
    on_ray = {"cluster": {"type": "ray"}}
    check_window(RunConfig.model_validate(on_ray))
    with pytest.raises(ConfigError, match=r"live\.window\.idle: got 60"):
        check_window(RunConfig.model_validate({**on_ray, "live": {"window": {"idle": 60}}}))


def test_load_excludes_the_processes_of_the_run() -> None:
    before = CpuReading(50.0, 100.0, {1: 10.0, 2: 5.0})
    after = CpuReading(60.0, 118.0, {1: 14.0, 3: 4.0})
    assert compute_cpu_load(before, after, cores=2) == pytest.approx(0.5)
    output = """# gpu         pid   type     sm    mem    enc    dec    jpg    ofa    command
# Idx           #    C/G      %      %      %      %      %      %    name
    0       1234     C     60     20      -      -      -      -    python
    0         42     C     30     10      -      -      -      -    game
    1         42     C     10     10      -      -      -      -    game
    2          -     -      -      -      -      -      -      -    -
"""
    assert parse_gpu_load(output, {1234}) == pytest.approx(0.3)
    assert parse_gpu_load("", set()) == 0
