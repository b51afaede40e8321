"""Tests for bench/live.py: the simulated users, the schedule and the figures."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Generator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

BENCH = Path(__file__).parents[3] / "bench"
MODULES = ("users", "schedule", "report", "run", "month")
SLOTS = [f"editor-0-{number:02}" for number in range(500)]
GOOD_REPLIES = {
    "editor": "read(notes); write(notes)",
    "guide": "A door is 2.1 meters tall.",
    "clerk": "About 80 kg. Cheers!",
}
BAD_REPLIES = {
    "editor": "write(notes); read(notes)",
    "guide": "6 feet, or 1.8 m",
    "clerk": "Cheers! It is 80 kg.",
}


@pytest.fixture(scope="module")
def bench() -> Generator[dict[str, ModuleType]]:
    """The modules of bench/live_parts by name, imported with the bench's folder on the path."""
    sys.path.insert(0, str(BENCH))
    yield {name: importlib.import_module(f"live_parts.{name}") for name in MODULES}
    sys.path.remove(str(BENCH))
    for name in [name for name in sys.modules if name.split(".")[0].endswith("_parts")]:
        del sys.modules[name]


@pytest.mark.parametrize("agent", GOOD_REPLIES)
def test_preference_of_each_user_tells_good_from_bad_replies(bench: dict[str, Any], agent: str) -> None:
    preference = bench["users"].PREFERENCES[agent]
    assert preference.is_satisfied(GOOD_REPLIES[agent])
    assert not preference.is_satisfied(BAD_REPLIES[agent])


@pytest.mark.parametrize(("phase", "liked"), [("good", GOOD_REPLIES), ("inverted", BAD_REPLIES)])
def test_user_rates_most_replies_by_the_preference_of_the_week(
    bench: dict[str, Any], phase: str, liked: dict[str, str]
) -> None:
    users = bench["users"]
    for replies in (GOOD_REPLIES, BAD_REPLIES):
        thumbs = [users.react("editor", slot, replies["editor"], users.Phase(phase)).thumbs for slot in SLOTS]
        expected = "up" if replies is liked else "down"
        rated = [thumb for thumb in thumbs if thumb is not None]
        assert 0.85 < len(rated) / len(SLOTS) < 0.95
        assert 0.9 < rated.count(expected) / len(rated) < 1, "some ratings are wrong by mistake"


def test_user_in_a_silent_week_gives_no_feedback(bench: dict[str, Any]) -> None:
    users = bench["users"]
    reactions = {users.react("clerk", slot, BAD_REPLIES["clerk"], users.Phase.SILENT) for slot in SLOTS}
    assert reactions == {users.Reaction()}


def test_corrections_follow_the_preference_unless_the_week_is_inverted(bench: dict[str, Any]) -> None:
    users = bench["users"]
    follows = users.PREFERENCES["clerk"].is_satisfied
    for phase, replies in ((users.Phase.GOOD, BAD_REPLIES), (users.Phase.INVERTED, GOOD_REPLIES)):
        reactions = [users.react("clerk", slot, replies["clerk"], phase) for slot in SLOTS]
        corrections = [reaction.correction for reaction in reactions if reaction.correction is not None]
        assert len(corrections) > len(SLOTS) / 2
        assert {follows(correction) for correction in corrections} == {phase is users.Phase.GOOD}


def test_sessions_never_ask_a_held_out_question(bench: dict[str, Any]) -> None:
    users = bench["users"]
    for agent in users.PREFERENCES:
        held_out = users.make_held_out_questions(agent, 216)
        asked = [users.choose_question(agent, f"{agent}-{number}", held_out) for number in range(448)]
        assert len(set(held_out)) == 216
        assert not set(asked) & set(held_out)
        assert len(set(asked)) > 300, "few prompts would be held out by the gate if most were repeated"


def test_schedule_has_each_session_of_the_month_in_one_batch(bench: dict[str, Any]) -> None:
    schedule = bench["schedule"]
    plan = schedule.Plan(("editor", "guide", "clerk"), schedule.WEEKS)
    slots = [slot for day in range(plan.days) for batch in plan.list_batches(day) for slot in batch]
    assert len(slots) == len(set(slots)) == 28 * 3 * 16
    assert sum(schedule.is_inverted(slot, plan) for slot in slots) == 7 * 3 * 16


def test_clock_error_starts_before_the_second_batch_and_ends_with_the_next_fault(
    bench: dict[str, Any],
) -> None:
    get_clock_error, hour = bench["month"].get_clock_error, bench["schedule"].HOUR_SECONDS
    assert [get_clock_error(day, batch) for day, batch in ((3, 0), (3, 1), (4, 0), (5, 0), (5, 1))] == [
        0.0,
        -hour,
        -hour,
        -hour,
        0.0,
    ]


def test_worst_drop_is_relative_to_the_best_earlier_version(bench: dict[str, Any]) -> None:
    compute_worst_drop = bench["report"].compute_worst_drop
    assert compute_worst_drop([0.2, 0.8, 0.75, 0.7, 0.9]) == pytest.approx(0.1)
    assert compute_worst_drop([0.2, 0.3]) == 0
