"""Config section for the times at which a run trains on live traffic."""

from __future__ import annotations

import re
import zoneinfo
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator

from instar.config.base import NonNegativeFloat, PositiveInt, Section, UnitInterval

WEEKDAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
_DAYS = r"(?P<days>[a-z]{3}(?:-[a-z]{3})?(?:,[a-z]{3}(?:-[a-z]{3})?)*)"
_HOURS = re.compile(rf"(?:{_DAYS}\s+)?(?P<start>\d\d?:\d\d)\s*-\s*(?P<end>\d\d?:\d\d)")
_MINUTES_PER_DAY = 24 * 60


@dataclass(frozen=True, slots=True)
class HourRange:
    """A part of the day. It ends on the next day if ``end`` is not after ``start``."""

    days: frozenset[int]
    """The weekdays on which the range starts; 0 is Monday."""
    start: int
    """Minutes after midnight."""
    end: int

    @classmethod
    def parse(cls, text: str) -> HourRange:
        """Parse a range such as `mon-fri 22:00-06:00`. Raises ValueError if it is invalid."""
        match = _HOURS.fullmatch(text.strip().lower())
        if match is None:
            raise ValueError(
                f"{text!r} is not a range of hours; write it as '22:00-06:00' or 'mon-fri 22:00-06:00'"
            )
        start, end = _parse_minutes(match["start"], text), _parse_minutes(match["end"], text)
        if start in (end, _MINUTES_PER_DAY):
            raise ValueError(f"{text!r} is empty; for a complete day, write '00:00-24:00'")
        return cls(_parse_days(match["days"] or "mon-sun", text), start, end)


def _parse_minutes(clock_time: str, text: str) -> int:
    hour, minute = map(int, clock_time.split(":"))
    if minute > 59 or hour * 60 + minute > _MINUTES_PER_DAY:
        raise ValueError(f"{text!r}: {clock_time} is not a time of day between 00:00 and 24:00")
    return hour * 60 + minute


def _parse_days(days: str, text: str) -> frozenset[int]:
    numbers: set[int] = set()
    for part in days.split(","):
        names = part.split("-")
        for name in names:
            if name not in WEEKDAYS:
                raise ValueError(f"{text!r}: unknown weekday {name!r}; use {', '.join(WEEKDAYS)}")
        first, last = WEEKDAYS.index(names[0]), WEEKDAYS.index(names[-1])
        numbers.update((first + offset) % 7 for offset in range((last - first) % 7 + 1))
    return frozenset(numbers)


def _check_hours(hours: list[str]) -> list[str]:
    for text in hours:
        HourRange.parse(text)
    return hours


def _check_time_zone(name: str | None) -> str | None:
    if name is not None:
        try:
            zoneinfo.ZoneInfo(name)
        except (zoneinfo.ZoneInfoNotFoundError, ValueError, OSError) as error:
            raise ValueError(f"{name!r} is not a known time zone, such as 'Europe/Berlin'") from error
    return name


def _make_absolute(path: Path | None) -> Path | None:
    # Commands that show the state of the run are started in other folders.
    return None if path is None else path.expanduser().absolute()


class WindowConfig(Section):
    """The times at which the run trains, resamples, judges and evaluates. All conditions must hold. By
    default, it may do so at any time when no agent is waiting for a reply."""

    hours: Annotated[list[str], AfterValidator(_check_hours)] = []
    """Times of day, such as `22:00-06:00`, optionally with the weekdays on which they start: `fri
    22:00-06:00`, `mon-fri 12:00-13:00`, `sat,sun 00:00-24:00`. Default: at any time."""
    time_zone: Annotated[str | None, AfterValidator(_check_time_zone)] = None
    """Time zone of `hours` and of calendar events without one, such as `Europe/Berlin`. Default: the time
    zone of this machine."""
    idle: NonNegativeFloat | None = 2.0
    """Seconds without a live request that must pass first. When a request arrives, training pauses, and later
    continues where it stopped. The trainer also has a lower CPU priority. null: training never waits
    for requests, for example in a service that always has some in flight."""
    max_load: UnitInterval | None = None
    """Share of the CPU, and of a GPU, that the processes of other programs may use. Default: no limit."""
    calendar: Annotated[Path | None, AfterValidator(_make_absolute)] = None
    """Path of an ICS file. Nothing is trained during its events, except those that are cancelled or shown as
    free. The file is read again when it changes. Requires `pip install 'instar[calendar]'`."""
    daily_budget: PositiveInt | None = None
    """Tokens per day of the time zone that steps send to a training service, counted in every pass over a
    sample. Sampling is not counted. No step starts on a day on which earlier steps reached this number, so
    that one step may exceed it."""
