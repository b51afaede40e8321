"""Tests the busy times that are read from ICS files."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from zoneinfo import ZoneInfo

import pytest

from instar.live.calendar_file import CalendarError, CalendarFile

BERLIN = ZoneInfo("Europe/Berlin")


def write_calendar(path: Path, *events: str) -> Path:
    lines = ["BEGIN:VCALENDAR", "VERSION:2.0", "PRODID:-//test//EN"]
    for number, event in enumerate(events):
        uid = [] if "UID:" in event else [f"UID:{number}"]
        lines += ["BEGIN:VEVENT", *uid, *event.split("\n"), "END:VEVENT"]
    path.write_bytes("\r\n".join([*lines, "END:VCALENDAR", ""]).encode())
    return path


def at(text: str) -> float:
    return datetime.fromisoformat(text).replace(tzinfo=BERLIN).timestamp()


def find(path: Path, start: str, end: str) -> list[str]:
    events = CalendarFile(path, BERLIN).find_events(at(start), at(end))
    return [
        " to ".join(datetime.fromtimestamp(moment, BERLIN).strftime("%m-%d %H:%M") for moment in event)
        for event in events
    ]


def test_recurring_event_keeps_its_local_time_when_the_clocks_change(tmp_path: Path) -> None:
    path = write_calendar(
        tmp_path / "a.ics",
        "DTSTART;TZID=Europe/Berlin:20261020T090000\nDTEND;TZID=Europe/Berlin:20261020T100000\n"
        "RRULE:FREQ=DAILY;COUNT=8\nEXDATE;TZID=Europe/Berlin:20261026T090000",
    )
    assert find(path, "2026-10-24 12:00", "2026-10-30 00:00") == [
        "10-25 09:00 to 10-25 10:00",
        "10-27 09:00 to 10-27 10:00",
    ]


def test_moved_and_cancelled_occurrences_replace_the_original_ones(tmp_path: Path) -> None:
    rule = "UID:a\nDTSTART:20261102T080000Z\nDTEND:20261102T090000Z\nRRULE:FREQ=DAILY;COUNT=3"
    moved = "UID:a\nRECURRENCE-ID:20261103T080000Z\nDTSTART:20261103T130000Z\nDTEND:20261103T133000Z"
    cancelled = (
        "UID:a\nRECURRENCE-ID:20261104T080000Z\nDTSTART:20261104T080000Z\n"
        "DTEND:20261104T090000Z\nSTATUS:CANCELLED"
    )
    path = write_calendar(tmp_path / "a.ics", rule, moved, cancelled)
    assert find(path, "2026-11-01 00:00", "2026-11-08 00:00") == [
        "11-02 09:00 to 11-02 10:00",
        "11-03 14:00 to 11-03 14:30",
    ]


def test_event_of_a_day_lasts_from_midnight_to_midnight_in_the_time_zone(tmp_path: Path) -> None:
    path = write_calendar(tmp_path / "a.ics", "DTSTART;VALUE=DATE:20261025")
    assert find(path, "2026-10-20 00:00", "2026-10-30 00:00") == ["10-25 00:00 to 10-26 00:00"]
    ((start, end),) = CalendarFile(path, BERLIN).find_events(at("2026-10-20"), at("2026-10-30"))
    assert end - start == 25 * 3600


def test_event_without_a_time_zone_is_in_that_of_the_window(tmp_path: Path) -> None:
    path = write_calendar(tmp_path / "a.ics", "DTSTART:20261102T100000\nDURATION:PT30M")
    assert find(path, "2026-11-01 00:00", "2026-11-08 00:00") == ["11-02 10:00 to 11-02 10:30"]


def test_free_and_cancelled_events_are_not_busy(tmp_path: Path) -> None:
    times = "DTSTART:20261102T100000Z\nDTEND:20261102T110000Z"
    path = write_calendar(
        tmp_path / "a.ics",
        f"{times}\nTRANSP:TRANSPARENT",
        f"{times}\nSTATUS:CANCELLED",
        f"{times}\nTRANSP:OPAQUE",
    )
    assert len(find(path, "2026-11-01 00:00", "2026-11-08 00:00")) == 1


def test_changed_calendar_is_read_again(tmp_path: Path) -> None:
    path = write_calendar(tmp_path / "a.ics", "DTSTART:20261102T100000Z\nDTEND:20261102T110000Z")
    calendar = CalendarFile(path, BERLIN)
    week = at("2026-11-01 00:00"), at("2026-11-08 00:00")
    assert len(calendar.find_events(*week)) == 1
    write_calendar(path)
    assert not calendar.find_events(*week)


@pytest.mark.parametrize("content", [b"hello", b"\xff\xfe\x00"])
def test_invalid_calendar_raises_an_error_with_its_path(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "a.ics"
    with pytest.raises(CalendarError, match=r"a\.ics cannot be read"):
        find(path, "2026-11-01", "2026-11-02")
    path.write_bytes(content)
    with pytest.raises(CalendarError, match=r"a\.ics"):
        find(path, "2026-11-01", "2026-11-02")
