"""Reads the busy times of an ICS file."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, date, datetime, time
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

from instar.errors import ConfigError, InstarError
from instar.live.windows import Interval

MAX_BYTES = 64 * 2**20
CACHE_SECONDS = 3600


class CalendarError(InstarError):
    """The calendar cannot be read."""


class CalendarFile:
    """The events of an ICS file that make its owner busy. Times without a time zone, and whole days, are
    those of ``zone``, or of this machine if it is None."""

    def __init__(self, path: Path, zone: ZoneInfo | None) -> None:
        self._path = path
        self._zone = zone
        self._signature: tuple[int, int] | None = None
        self._query: Any = None
        self._cached: tuple[float, float, list[Interval]] | None = None

    def find_events(self, start: float, end: float) -> Sequence[Interval]:
        """Return the busy intervals that overlap this time. Raises CalendarError if the file cannot be read,
        and ConfigError if the packages for it are missing."""
        self._read_if_changed()
        cached = self._cached
        if cached is None or not cached[0] <= start < end <= cached[1]:
            # A little more than requested, because the same time a second later is requested next.
            first, last = start - CACHE_SECONDS, end + CACHE_SECONDS
            try:
                cached = first, last, self._expand(first, last)
            except Exception as error:  # the packages raise many types of errors for invalid events
                raise CalendarError(f"{self._path} has an invalid event: {error}") from error
            self._cached = cached
        return [interval for interval in cached[2] if interval[1] > start and interval[0] < end]

    def _read_if_changed(self) -> None:
        try:
            status = self._path.stat()
            signature = status.st_mtime_ns, status.st_size
            if signature == self._signature:
                return
            if status.st_size > MAX_BYTES:
                raise CalendarError(f"{self._path} has {status.st_size} bytes; the limit is {MAX_BYTES}")
            content = self._path.read_bytes()
        except OSError as error:
            raise CalendarError(f"{self._path} cannot be read: {error.strerror}") from error
        self._signature = self._cached = None
        self._query = _parse(self._path, content)
        self._signature = signature

    def _expand(self, start: float, end: float) -> list[Interval]:
        first, last = datetime.fromtimestamp(start, UTC), datetime.fromtimestamp(end, UTC)
        return sorted(
            (self._to_seconds(event.start), self._to_seconds(event.end))
            for event in self._query.between(first, last)
            if _is_busy(event)
        )

    def _to_seconds(self, moment: date) -> float:
        if not isinstance(moment, datetime):
            moment = datetime.combine(moment, time())
        return (moment if moment.tzinfo else moment.replace(tzinfo=self._zone)).timestamp()


def _parse(path: Path, content: bytes) -> Any:
    try:
        import icalendar
        import recurring_ical_events
    except ImportError as error:
        raise ConfigError(
            f"live.window.calendar: reading {path} requires {error.name}; "
            "install it with: pip install 'instar[calendar]'"
        ) from error
    try:
        return recurring_ical_events.of(icalendar.Calendar.from_ical(content))
    except Exception as error:  # the packages raise many types of errors for invalid files
        raise CalendarError(f"{path} is not a valid ICS file: {error}") from error


def _is_busy(event: Any) -> bool:
    is_free = str(event.get("TRANSP", "OPAQUE")).upper() == "TRANSPARENT"
    return not is_free and str(event.get("STATUS", "")).upper() != "CANCELLED"
