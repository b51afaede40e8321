from __future__ import annotations

from typing import Any

from instar.curation import checks
from instar.curation.base import CurationLimits, SessionSummary
from instar.types import Channel, Reward, RewardSource, Session

LIMITS = CurationLimits()


def seen(name: str, output: str = "", **fields: Any) -> SessionSummary:
    group, task = fields.pop("group", None), fields.pop("task", None)
    session = Session(name, "run", "a", "p", Channel.TRAIN, group_id=group, task_id=task)
    defaults: dict[str, Any] = {"tokens": 1, "version": 0, "reward": None}
    return SessionSummary(session, "", output or f"something of {name} alone", **{**defaults, **fields})


def test_the_same_answer_to_different_tasks_is_a_duplicate() -> None:
    same = "the answer to all of this is surely forty two"
    those = [
        seen("a", same, task="1"),
        seen("b", task="2"),
        seen("c", same, task="3"),
        seen("d", same, task="1"),
    ]
    (found,) = checks.find_duplicates(those, LIMITS)
    assert (found.session_ids, found.value) == (("c", "d"), "a")
    assert "3 outputs" in found.reason
    assert checks.find_duplicates([those[0], those[3]], LIMITS) == [], "one task may well have one answer"


def test_groups_that_say_the_same_or_are_worth_the_same() -> None:
    those = [seen(f"a{n}", "yes" if n < 3 else f"no {n}", group="a", reward=1.0) for n in range(4)]
    those += [seen(f"b{n}", group="b", reward=float(n)) for n in range(4)]
    (same,) = checks.find_identical(those, LIMITS)
    assert (same.session_ids, same.numbers) == (("a0", "a1", "a2"), {"share": 0.75})
    (flat,) = checks.find_zero_signal(those, LIMITS)
    assert flat.session_ids == ("a0", "a1", "a2", "a3")
    assert flat.numbers["reward"] == 1.0


def test_outputs_that_grow_with_the_versions() -> None:
    those = [
        seen(f"{v}.{n}", tokens=10 * (v + 1) + n, version=v, reward=n / 10)
        for v in range(4)
        for n in range(8)
    ]
    (found,) = checks.find_length_drift(those, LIMITS)
    assert set(found.session_ids) == {f"3.{n}" for n in range(8)}
    assert (found.numbers["before"], found.numbers["after"]) == (13.5, 43.5)
    assert round(found.numbers["correlation"], 3) == 1.0, "the longer, the better paid"
    assert checks.find_length_drift(those[:16], LIMITS) == [], "not yet twice as long"
    assert checks.find_length_drift(those[:4] + those[-4:], LIMITS) == [], "too few to tell"


def test_outputs_that_repeat_themselves_and_are_paid_for_it() -> None:
    loop = "so it is " * 20
    those = [seen("paid", loop, reward=1.0), seen("unpaid", loop, reward=0.0), seen("fine", reward=1.0)]
    (found,) = checks.find_repetitive(those, LIMITS)
    assert found.session_ids == ("paid",)
    later = [seen(f"{v}.{n}", loop if v else "", version=v) for v in range(2) for n in range(8)]
    (drift,) = checks.find_repetition_drift(later, LIMITS)
    assert len(drift.session_ids) == 8


def test_a_rule_and_a_judge_that_disagree() -> None:
    def by(rule: float, judge: float, name: str) -> SessionSummary:
        given = [(rule, RewardSource.RULE), (judge, RewardSource.JUDGE)]
        return seen(name, rewards=tuple(Reward(name, value, source) for value, source in given))

    (found,) = checks.find_disagreement(
        [by(1.0, 0.0, "fooled"), by(1.0, 0.9, "fine"), seen("unjudged")], LIMITS
    )
    assert (found.session_ids, found.value) == (("fooled",), "rule_higher")
    assert found.reason == "the rule gives 1, the judge 0"
