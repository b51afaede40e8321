"""Decides whether live learning is allowed at a time: hours, calendar, idle time, load and budget.

Everything that can change is an argument, so the decision depends on neither the clock nor the machine. Only
times that are configured are known in advance; when an agent stops or the machine becomes idle is not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, time, timedelta
from zoneinfo import ZoneInfo

import msgspec

from instar.config.live_window import HourRange, WindowConfig

Interval = tuple[float, float]
"""The Unix times of a start and an end. The end is excluded."""
HORIZON_DAYS = 9
"""How far the next opening is searched. It is more than a week, so that weekly hours are found."""
CLOCK_TOLERANCE_SECONDS = 60.0
"""The clock may be set back by this much without closing a window that a person opened."""


class OpenedWindow(msgspec.Struct, frozen=True):
    """A window that a person opened for some time, whatever the hours, the calendar and the load."""

    start: float
    end: float

    def contains(self, now: float) -> bool:
        return self.start - CLOCK_TOLERANCE_SECONDS <= now < self.end


@dataclass(frozen=True, slots=True)
class Conditions:
    """The state of the machine at the time of a decision."""

    is_answering: bool = False
    """True if a live request is in progress."""
    quiet_seconds: float = float("inf")
    """Seconds since the last live request ended."""
    load: float | None = 0.0
    """Share of the CPU or GPU, whichever is higher, that other programs use; None if it is not known yet."""
    tokens_today: int = 0
    opened: OpenedWindow | None = None


class WindowState(msgspec.Struct, frozen=True, kw_only=True):
    is_open: bool = msgspec.field(name="open")
    reason: str
    until: float | None = None
    """When this changes next, as far as it is known in advance."""

    def describe(self) -> str:
        text = "allowed" if self.is_open else "paused"
        until = "" if self.until is None else f" until {format_moment(self.until)}"
        return f"{text}{until}: {self.reason}"


def format_moment(seconds: float) -> str:
    """Return a local time with the weekday."""
    return datetime.fromtimestamp(seconds).strftime("%a %H:%M")


def no_events(start: float, end: float) -> Sequence[Interval]:
    return ()


class TrainingWindows:
    """The configured windows. ``find_events`` returns the busy times that overlap an interval."""

    def __init__(
        self, config: WindowConfig, find_events: Callable[[float, float], Sequence[Interval]] = no_events
    ) -> None:
        self._config = config
        self._ranges = [HourRange.parse(text) for text in config.hours]
        self._zone = None if config.time_zone is None else ZoneInfo(config.time_zone)
        self._find_events = find_events

    def decide(self, now: float, conditions: Conditions) -> WindowState:
        opened = conditions.opened
        if opened is not None and opened.contains(now):
            state = WindowState(is_open=True, reason="opened by `instar learn now`", until=opened.end)
            return self._check_requests(now, conditions) or state
        scheduled = self.decide_schedule(now)
        if not scheduled.is_open:
            return scheduled
        return self._check_requests(now, conditions) or self._check_resources(now, conditions) or scheduled

    def decide_schedule(self, now: float) -> WindowState:
        """Decide only by the hours and the calendar. If both are open for longer than the horizon, or if
        they do not open within it, the time of the next change is not known."""
        start, end = now - 86400.0, now + HORIZON_DAYS * 86400.0
        hours = self._list_open_hours(start, end)
        events = self._find_events(now, end)
        in_hours, is_busy = _contains(hours, now), _contains(events, now)
        is_open = in_hours and not is_busy
        boundaries = sorted({moment for interval in (*hours, *events) for moment in interval if moment > now})
        changes = (
            m for m in boundaries if m < end and (_contains(hours, m) and not _contains(events, m)) != is_open
        )
        until = next(changes, None)
        if is_open:
            reason = "within live.window.hours" if self._ranges else "no live.window.hours are set"
        elif is_busy:
            reason = "the calendar has an event (live.window.calendar)"
        else:
            reason = f"outside live.window.hours ({', '.join(self._config.hours)})"
        return WindowState(is_open=is_open, reason=reason, until=until)

    def start_of_day(self, now: float, days: int = 0) -> float:
        """Return the Unix time at which the day of ``now``, or one ``days`` later, starts."""
        day = datetime.fromtimestamp(now, self._zone).date() + timedelta(days)
        return datetime.combine(day, time(), self._zone).timestamp()

    def _check_requests(self, now: float, conditions: Conditions) -> WindowState | None:
        idle = self._config.idle
        if idle is None:
            return None
        if conditions.is_answering:
            return WindowState(is_open=False, reason="a live request is in progress (live.window.idle)")
        if conditions.quiet_seconds < idle:
            reason = f"the last live request ended less than {idle:g} s ago (live.window.idle)"
            return WindowState(is_open=False, reason=reason, until=now + idle - conditions.quiet_seconds)
        return None

    def _check_resources(self, now: float, conditions: Conditions) -> WindowState | None:
        budget, max_load, load = self._config.daily_budget, self._config.max_load, conditions.load
        if budget is not None and conditions.tokens_today >= budget:
            reason = f"{conditions.tokens_today} of {budget} tokens are used today (live.window.daily_budget)"
            return WindowState(is_open=False, reason=reason, until=self.start_of_day(now, days=1))
        if max_load is None:
            return None
        if load is None:
            return WindowState(is_open=False, reason="the load is being measured (live.window.max_load)")
        if load > max_load:
            reason = f"other programs use {load:.0%} of the machine (live.window.max_load: {max_load:g})"
            return WindowState(is_open=False, reason=reason)
        return None

    def _list_open_hours(self, start: float, end: float) -> list[Interval]:
        """Return the open intervals that may overlap this time, in order and without overlaps."""
        if not self._ranges:
            return [(start, end + 86400.0)]
        # A range that started yesterday may still be open.
        day = datetime.fromtimestamp(start, self._zone).date() - timedelta(1)
        last_day = datetime.fromtimestamp(end, self._zone).date()
        intervals: list[Interval] = []
        while day <= last_day:
            midnight = datetime.combine(day, time(), self._zone)
            for hours in self._ranges:
                if day.weekday() in hours.days:
                    days_later = 0 if hours.end > hours.start else 1
                    # Arithmetic on times of day is local: an hour that is skipped or repeated when the clocks
                    # change makes an interval shorter or longer.
                    opens = (midnight + timedelta(minutes=hours.start)).timestamp()
                    closes = (midnight + timedelta(days_later, minutes=hours.end)).timestamp()
                    if closes > opens:
                        intervals.append((opens, closes))
            day += timedelta(1)
        return _merge(intervals)


def _contains(intervals: Sequence[Interval], moment: float) -> bool:
    return any(start <= moment < end for start, end in intervals)


def _merge(intervals: list[Interval]) -> list[Interval]:
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged
