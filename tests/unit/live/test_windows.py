"""Tests the decision whether live learning is allowed at a time."""

from __future__ import annotations

from datetime import datetime
from typing import Any
from zoneinfo import ZoneInfo

import pytest

from instar.config import WindowConfig
from instar.live.windows import Conditions, OpenedWindow, TrainingWindows

BERLIN = "Europe/Berlin"
QUIET = Conditions()


def make_windows(**settings: Any) -> TrainingWindows:
    return TrainingWindows(WindowConfig.model_validate({"time_zone": BERLIN, **settings}))


def at(text: str, fold: int = 0) -> float:
    return datetime.fromisoformat(text).replace(tzinfo=ZoneInfo(BERLIN), fold=fold).timestamp()


def test_windows_without_settings_are_always_open() -> None:
    state = make_windows().decide(at("2026-11-19 15:00"), QUIET)
    assert state.is_open
    assert state.until is None


@pytest.mark.parametrize(
    ("now", "is_open", "until"),
    [
        ("2026-11-19 21:59:59", False, "2026-11-19 22:00"),
        ("2026-11-19 22:00", True, "2026-11-20 06:00"),
        ("2026-11-20 00:00", True, "2026-11-20 06:00"),
        ("2026-11-20 05:59:59", True, "2026-11-20 06:00"),
        ("2026-11-20 06:00", False, "2026-11-20 22:00"),
    ],
)
def test_hours_over_midnight_open_and_close_exactly(now: str, is_open: bool, until: str) -> None:
    state = make_windows(hours=["22:00-06:00"]).decide(at(now), QUIET)
    assert (state.is_open, state.until) == (is_open, at(until))


def test_weekday_hours_belong_to_the_day_on_which_they_start() -> None:
    windows = make_windows(hours=["fri 22:00-06:00"])
    assert windows.decide(at("2026-11-21 05:00"), QUIET).is_open, "Saturday morning belongs to Friday"
    assert not windows.decide(at("2026-11-20 05:00"), QUIET).is_open
    assert windows.decide(at("2026-11-21 06:00"), QUIET).until == at("2026-11-27 22:00")


def test_adjacent_hours_are_one_window() -> None:
    windows = make_windows(hours=["sat,sun 00:00-24:00", "mon-fri 20:00-24:00"])
    assert windows.decide(at("2026-11-20 20:00"), QUIET).until == at("2026-11-23 00:00")


def test_hours_of_every_day_never_close() -> None:
    assert (
        make_windows(hours=["00:00-12:00", "12:00-24:00"]).decide(at("2026-11-19 11:00"), QUIET).until is None
    )


def test_night_with_a_skipped_hour_is_an_hour_shorter() -> None:
    windows = make_windows(hours=["22:00-06:00"])
    opens, closes = at("2026-03-28 22:00"), at("2026-03-29 06:00")
    assert closes - opens == 7 * 3600
    assert windows.decide(opens, QUIET).until == closes
    assert windows.decide(closes - 1, QUIET).is_open


def test_night_with_a_repeated_hour_is_an_hour_longer() -> None:
    windows = make_windows(hours=["22:00-06:00"])
    opens, closes = at("2026-10-24 22:00"), at("2026-10-25 06:00")
    assert closes - opens == 9 * 3600
    assert windows.decide(opens, QUIET).until == closes
    assert windows.decide(at("2026-10-25 02:30", fold=1), QUIET).is_open


def test_hours_that_are_skipped_do_not_open_on_that_day() -> None:
    windows = make_windows(hours=["02:15-02:45"])
    assert windows.decide(at("2026-03-28 12:00"), QUIET).until == at("2026-03-29 03:15"), "02:15 is 03:15"
    assert make_windows(hours=["02:00-03:00"]).decide(at("2026-03-28 12:00"), QUIET).until == at(
        "2026-03-30 02:00"
    )


def test_decision_depends_only_on_the_time_when_the_clock_jumps() -> None:
    windows = make_windows(hours=["22:00-06:00"])
    times = [
        "2026-11-19 23:00",
        "2026-11-19 12:00",
        "2026-11-19 23:00",
        "2027-01-01 23:00",
        "2025-01-01 12:00",
    ]
    assert [windows.decide(at(now), QUIET).is_open for now in times] == [True, False, True, True, False]


def test_event_in_the_calendar_closes_the_hours_until_it_ends() -> None:
    event = (at("2026-11-19 23:00"), at("2026-11-20 01:00"))
    config = WindowConfig(hours=["22:00-06:00"], time_zone=BERLIN)
    windows = TrainingWindows(config, lambda start, end: [event])
    assert windows.decide(at("2026-11-19 22:30"), QUIET).until == event[0]
    during = windows.decide(at("2026-11-19 23:30"), QUIET)
    assert (during.is_open, during.until) == (False, event[1])
    assert "calendar" in during.reason


def test_event_that_outlasts_the_hours_opens_with_the_next_hours() -> None:
    event = (at("2026-11-19 23:00"), at("2026-11-20 12:00"))
    windows = TrainingWindows(WindowConfig(hours=["22:00-06:00"], time_zone=BERLIN), lambda s, e: [event])
    assert windows.decide(at("2026-11-19 23:30"), QUIET).until == at("2026-11-20 22:00")


def test_request_closes_the_window_until_the_idle_time_has_passed() -> None:
    windows, now = make_windows(idle=60), at("2026-11-19 15:00")
    assert not windows.decide(now, Conditions(is_answering=True, quiet_seconds=0)).is_open
    recent = windows.decide(now, Conditions(quiet_seconds=20))
    assert (recent.is_open, recent.until) == (False, now + 40)
    assert windows.decide(now, Conditions(quiet_seconds=60)).is_open
    busy = Conditions(is_answering=True, quiet_seconds=0)
    assert make_windows(idle=None).decide(now, busy).is_open


def test_opened_window_overrides_hours_and_load_but_not_requests() -> None:
    now = at("2026-11-19 12:00")
    windows = make_windows(hours=["22:00-06:00"], max_load=0.5)
    opened = OpenedWindow(now, now + 1800)
    state = windows.decide(now + 60, Conditions(opened=opened, load=1.0))
    assert (state.is_open, state.until) == (True, now + 1800)
    assert not windows.decide(now + 60, Conditions(opened=opened, is_answering=True)).is_open
    assert not windows.decide(now + 1800, Conditions(opened=opened)).is_open
    assert not windows.decide(now - 3600, Conditions(opened=opened)).is_open, "the clock was set back"


def test_load_of_other_programs_closes_the_window() -> None:
    windows, now = make_windows(max_load=0.25), at("2026-11-19 12:00")
    assert [windows.decide(now, Conditions(load=load)).is_open for load in (None, 0.3, 0.25)] == [
        False,
        False,
        True,
    ]


def test_used_budget_closes_the_window_until_midnight() -> None:
    windows, now = make_windows(daily_budget=1000), at("2026-10-25 12:00")
    assert windows.decide(now, Conditions(tokens_today=999)).is_open
    state = windows.decide(now, Conditions(tokens_today=1000))
    assert (state.is_open, state.until) == (False, at("2026-10-26 00:00"))


@pytest.mark.parametrize(
    "hours", ["22-6", "24:00-06:00", "25:00-06:00", "10:00-10:00", "xyz 10:00-11:00", "10:60-11:00"]
)
def test_invalid_hours_are_rejected_with_their_value(hours: str) -> None:
    with pytest.raises(ValueError, match=hours.split()[0]):
        WindowConfig(hours=[hours])


def test_unknown_time_zone_is_rejected() -> None:
    for name in ("Europe/Nowhere", "../etc/passwd", ""):
        with pytest.raises(ValueError, match="time zone"):
            WindowConfig(time_zone=name)
