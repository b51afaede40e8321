from __future__ import annotations

from typing import Any

from instar.curation import checks
from instar.curation.base import SessionSummary, Thresholds
from instar.types import Channel, Reward, RewardSource, Session

THRESHOLDS = Thresholds()


def make_summary(session_id: str, output: str = "", **fields: Any) -> SessionSummary:
    group, task = fields.pop("group", None), fields.pop("task", None)
    session = Session(session_id, "run", "a", "p", Channel.TRAIN, group_id=group, task_id=task)
    defaults: dict[str, Any] = {"tokens": 1, "version": 0, "reward": None}
    return SessionSummary(session, "", output or f"output of {session_id} only", **{**defaults, **fields})


def test_find_duplicates_reports_same_output_for_different_tasks() -> None:
    repeated_output = "the answer to the question in this task is twenty one"
    summaries = [
        make_summary("a", repeated_output, task="1"),
        make_summary("b", task="2"),
        make_summary("c", repeated_output, task="3"),
        make_summary("d", repeated_output, task="1"),
    ]
    (finding,) = checks.find_duplicates(summaries, THRESHOLDS)
    assert (finding.session_ids, finding.value) == (("c", "d"), "a")
    assert "3 outputs" in finding.reason
    assert checks.find_duplicates([summaries[0], summaries[3]], THRESHOLDS) == [], (
        "outputs for the same task may be equal"
    )


def test_group_checks_report_identical_outputs_and_rewards() -> None:
    summaries = [
        make_summary(f"a{n}", "yes" if n < 3 else f"no {n}", group="a", reward=1.0) for n in range(4)
    ]
    summaries += [make_summary(f"b{n}", group="b", reward=float(n)) for n in range(4)]
    (identical,) = checks.find_identical(summaries, THRESHOLDS)
    assert (identical.session_ids, identical.numbers) == (("a0", "a1", "a2"), {"share": 0.75})
    (zero_signal,) = checks.find_zero_signal(summaries, THRESHOLDS)
    assert zero_signal.session_ids == ("a0", "a1", "a2", "a3")
    assert zero_signal.numbers["reward"] == 1.0


def test_find_length_drift_reports_outputs_that_grow_over_versions() -> None:
    summaries = [
        make_summary(f"{v}.{n}", tokens=10 * (v + 1) + n, version=v, reward=n / 10)
        for v in range(4)
        for n in range(8)
    ]
    (finding,) = checks.find_length_drift(summaries, THRESHOLDS)
    assert set(finding.session_ids) == {f"3.{n}" for n in range(8)}
    assert (finding.numbers["before"], finding.numbers["after"]) == (13.5, 43.5)
    assert round(finding.numbers["correlation"], 3) == 1.0, "longer outputs have higher rewards"
    assert checks.find_length_drift(summaries[:16], THRESHOLDS) == [], "not yet twice as long"
    assert checks.find_length_drift(summaries[:4] + summaries[-4:], THRESHOLDS) == [], "too few sessions"


def test_repetition_checks_report_rewarded_and_drifting_outputs() -> None:
    repetitive_output = "so it is " * 20
    summaries = [
        make_summary("rewarded", repetitive_output, reward=1.0),
        make_summary("unrewarded", repetitive_output, reward=0.0),
        make_summary("fine", reward=1.0),
    ]
    (finding,) = checks.find_repetitive(summaries, THRESHOLDS)
    assert finding.session_ids == ("rewarded",)
    drifting = [
        make_summary(f"{v}.{n}", repetitive_output if v else "", version=v)
        for v in range(2)
        for n in range(8)
    ]
    (drift,) = checks.find_repetition_drift(drifting, THRESHOLDS)
    assert len(drift.session_ids) == 8


def test_find_disagreement_reports_rule_and_judge_that_differ() -> None:
    def make_judged_summary(rule: float, judge: float, session_id: str) -> SessionSummary:
        values = [(rule, RewardSource.RULE), (judge, RewardSource.JUDGE)]
        return make_summary(
            session_id, rewards=tuple(Reward(session_id, value, source) for value, source in values)
        )

    (finding,) = checks.find_disagreement(
        [
            make_judged_summary(1.0, 0.0, "disagreeing"),
            make_judged_summary(1.0, 0.9, "fine"),
            make_summary("unjudged"),
        ],
        THRESHOLDS,
    )
    assert (finding.session_ids, finding.value) == (("disagreeing",), "rule_higher")
    assert finding.reason == "the rule's reward is 1, the judge's reward is 0"
