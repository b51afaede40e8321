"""Tests for rules, and for sandbox helpers that can be tested without a sandbox."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from instar.config import ExactRewardConfig, RunConfig, rules
from instar.errors import ConfigError, ScoreError
from instar.rewards.factory import create_scorers
from instar.rewards.rules.answers import (
    extract_answer,
    find_last_number,
    hash_settings,
    parse_number,
)
from instar.rewards.rules.sandbox_rules import RUNNER_SCRIPT
from instar.rewards.rules.worker_pool import CheckWorkerPool
from instar.rewards.sandbox import bubblewrap
from instar.types import Task
from tests.unit.rewards.rules import make_transcript, score_text, start_scorer

EXACT_CASES: list[tuple[dict[str, Any], Any, str, float]] = [
    ({}, "yes", " yes\n", 1.0),
    ({}, "yes", "Yes", 0.0),
    ({"strip": False}, "yes", "yes ", 0.0),
    ({"ignore_case": True}, "Straße", "STRASSE", 1.0),
    ({"ignore_whitespace": True}, "a b", "a\n  b", 1.0),
    ({"part": "last_line"}, "42", "thinking...\n42\n\n", 1.0),
    ({"part": "last_number"}, "42", "first 7, then 42.", 1.0),
    ({"part": "last_number"}, 42, "first 42, then 7 apples", 0.0),
    ({"part": "last_number"}, "-5", "so x = −5", 1.0),
    ({"part": "last_number"}, "−5", "so x = -5", 1.0),
    ({"part": "last_block"}, "x = 1", "so:\n```python\nx = 1\n```\ndone", 1.0),
    ({"after": "Answer:"}, "b", "Answer: a. No! Answer: b", 1.0),
    ({"after": "Answer:"}, "b", "b", 0.0),
    ({"expected_after": "####"}, "2 + 2 is\n#### 4", "4", 1.0),
    ({}, ["NY", "New York"], "New York", 1.0),
]


@pytest.mark.parametrize(("settings", "expected", "text", "value"), EXACT_CASES)
async def test_exact_rule_compares_normalized_text(
    settings: dict[str, Any], expected: Any, text: str, value: float
) -> None:
    async with start_scorer(type="exact", **settings) as scorer:
        assert (await score_text(scorer, {"answer": expected}, text)).value == value


NUMERIC_CASES: list[tuple[dict[str, Any], Any, str, float]] = [
    ({}, "1,234.5", "It is $1234.50.", 1.0),
    ({}, 0.75, "that makes 3/4", 1.0),
    ({}, "-3", "so x = -3", 1.0),
    ({}, -5, "so x = −5", 1.0),
    ({}, 5, "so x = −5", 0.0),
    ({}, "−5", "-5", 1.0),
    ({}, 5, "10-5", 1.0),
    ({}, 5, "10−5", 1.0),
    ({}, 0.001, "1e−3", 1.0),
    ({}, 0.001, "1e-3", 1.0),
    ({}, 3, "3.1", 0.0),
    ({"tolerance": 0.2}, 3, "3.1", 1.0),
    ({"relative": 0.01}, 1000, "1009", 1.0),
    ({"expected_after": "####"}, "9 - 2\n#### 18", "18", 1.0),
    ({}, 3, "no idea", 0.0),
    ({"after": "####"}, 3, "3 it is", 0.0),
]


@pytest.mark.parametrize(("settings", "expected", "text", "value"), NUMERIC_CASES)
async def test_numeric_rule_compares_within_tolerance(
    settings: dict[str, Any], expected: Any, text: str, value: float
) -> None:
    async with start_scorer(type="numeric", **settings) as scorer:
        assert (await score_text(scorer, {"answer": expected}, text)).value == value


def test_answer_is_extracted_from_text() -> None:
    assert find_last_number("the 3rd of 1,000,000.25") == "1,000,000.25"
    assert find_last_number("none") is None
    assert parse_number("1/0") is None
    assert parse_number("−1/2") == -0.5
    assert extract_answer("```\nopen to the end", part="last_block") == "open to the end"
    assert extract_answer("", part="last_line") is None


async def test_expected_field_may_be_nested_and_missing_field_raises() -> None:
    async with start_scorer(type="exact", expected="meta.answer") as scorer:
        assert (await score_text(scorer, {"meta": {"answer": "a"}}, "a")).value == 1.0
        with pytest.raises(ScoreError, match=r"no field 'meta.answer'; its fields are: question"):
            await scorer.score(Task("t", {"question": "?"}), make_transcript("a"))
        assert await scorer.score(Task("", {}), make_transcript("a")) == []


def test_rule_version_depends_on_settings_but_not_on_name() -> None:
    plain = ExactRewardConfig(type="exact")
    assert hash_settings(plain) == hash_settings(plain.model_copy(update={"name": "other"}))
    assert hash_settings(plain) != hash_settings(plain.model_copy(update={"ignore_case": True}))


MATH_CASES = [
    ("-5", "It is \u22125", 1.0),
    ("72", "The answer is 72.", 1.0),
    (r"\frac{1}{2}", r"so \boxed{0.5}", 1.0),
    ("1/2", r"$\frac{2}{4}$", 1.0),
    (r"\{1, 2\}", r"$\{2,1\}$", 1.0),
    ("72", "71", 0.0),
    ("72", "I do not know", 0.0),
]


async def test_math_rule_compares_by_value_and_times_out() -> None:
    async with start_scorer(type="math", seconds=1.0) as scorer:
        for expected, text, value in MATH_CASES:
            assert (await score_text(scorer, {"answer": expected}, text)).value == value, text
        hard = await score_text(scorer, {"answer": "5"}, "$9^{9^{9^{9}}}$")
        assert (hard.value, hard.detail["reason"]) == (0.0, "the check took more than 1 s of CPU time")
        assert (await score_text(scorer, {"answer": "72"}, "72")).value == 1.0


async def test_worker_that_gets_no_cpu_time_does_not_fail_a_correct_answer() -> None:
    async with start_scorer(type="math", seconds=2.0) as scorer:
        (worker,) = scorer.workers.idle_workers
        worker.send_signal(signal.SIGSTOP)
        reward = asyncio.create_task(score_text(scorer, {"answer": "72"}, "72"))
        await asyncio.sleep(2.5)  # longer than the limit, of which the stopped worker uses nothing
        worker.send_signal(signal.SIGCONT)
        assert (await reward).value == 1.0


async def test_check_that_waits_without_cpu_time_is_stopped() -> None:
    async with start_scorer(type="math", seconds=0.05) as scorer:
        scorer.workers.min_wall_seconds = 0.5
        (worker,) = scorer.workers.idle_workers
        worker.send_signal(signal.SIGSTOP)
        reward = await score_text(scorer, {"answer": "72"}, "72")
        assert (reward.value, reward.detail["reason"]) == (0.0, "the check took longer than 0.5 s")


async def test_json_schema_rule_validates_answers() -> None:
    schema = {"type": "object", "required": ["a"], "properties": {"a": {"type": "integer"}}}
    async with start_scorer(type="json_schema", against=schema) as scorer:
        assert (await score_text(scorer, {}, 'Here:\n```json\n{"a": 1}\n```')).value == 1.0
        assert (await score_text(scorer, {}, '{"a": 1}')).value == 1.0
        wrong = await score_text(scorer, {}, '{"a": "1"}')
        assert (wrong.value, wrong.detail["reason"]) == (0.0, "$.a: '1' is not of type 'integer'")
        assert "not valid JSON" in (await score_text(scorer, {}, "{")).detail["reason"]
        assert (await score_text(scorer, {}, "[" * 100_000)).value == 0.0
    async with start_scorer(type="json_schema") as scorer:
        assert (await score_text(scorer, {"schema": {"const": 3}}, "3")).value == 1.0
        with pytest.raises(ScoreError, match="not a valid JSON schema"):
            await scorer.score(Task("t", {"schema": {"type": "unknown"}}), make_transcript("3"))


async def test_json_schema_rule_truncates_long_reasons() -> None:
    async with start_scorer(type="json_schema", against={"type": "object"}) as scorer:
        wrong = await score_text(scorer, {}, f'"{"x" * 200_000}"')
        assert (wrong.value, len(wrong.detail["reason"])) == (0.0, 500)
        assert (await score_text(scorer, {}, "{}")).value == 1.0
    async with start_scorer(type="json_schema") as scorer:
        with pytest.raises(ScoreError, match="not a valid JSON schema"):
            await scorer.score(Task("t", {"schema": {"type": "x" * 200_000}}), make_transcript("3"))


async def test_regex_rule_times_out_on_catastrophic_patterns() -> None:
    async with start_scorer(type="regex", pattern="(a+)+$", seconds=1.0) as scorer:
        assert (await score_text(scorer, {}, "aaa")).value == 1.0
        rewards = await asyncio.gather(*(score_text(scorer, {}, "a" * 40 + "b") for _ in range(3)))
        assert {(r.value, r.detail["reason"]) for r in rewards} == {
            (0.0, "the check took more than 1 s of CPU time")
        }
        assert (await score_text(scorer, {}, "aaa")).value == 1.0
    async with start_scorer(type="regex", how="fullmatch", ignore_case=True) as scorer:
        assert (await score_text(scorer, {"pattern": "[a-c]+"}, "ABC")).value == 1.0
        assert (await score_text(scorer, {"pattern": "[a-c]+"}, "ABCD")).value == 0.0
    with pytest.raises(ConfigError, match=r"reward\.pattern"):
        create_scorers(RunConfig.model_validate({"reward": {"type": "regex", "pattern": "("}}))


async def test_worker_pool_replaces_a_dead_worker() -> None:
    workers = CheckWorkerPool("regex")
    await workers.start()
    workers.idle_workers[0].kill()
    request = {"pattern": "a", "how": "search", "ignore_case": False, "answer": "a"}
    assert await workers.run_check(5.0, **request) == {"ok": True}
    await workers.close()


ADD = "def add(a, b): return a + b\ndef test_add(): pass"
WRONG = ADD.replace("a + b", "a - b")
SKIPS = "import unittest\ndef add(a, b): raise unittest.SkipTest"
PLAIN = "def test_add(): assert add(1, 1) == 2"
CASE = """import unittest
class Adding(unittest.TestCase):
    def test_one(self):
        with self.subTest("one"):
            self.assertEqual(add(1, 0), 1)
    def test_two(self): self.assertEqual(add(1, 1), 2)
    @unittest.skip("not yet")
    def test_three(self): raise ValueError
    @unittest.expectedFailure
    def test_four(self): self.assertEqual(1, 3)
"""
BROKEN_CASE = CASE + "    @classmethod\n    def tearDownClass(cls): raise ValueError"
NO_TEST = "import math\ndef check(): assert add(1, 1) == 2\nif __name__ == '__main__': check()"
COUNT_CASES = [
    (PLAIN, ADD, (1, 1)),
    (PLAIN, WRONG, (0, 1)),
    (f"async {PLAIN}", ADD, (1, 1)),
    (f"async {PLAIN}", WRONG, (0, 1)),
    (f"{PLAIN}; yield", ADD, (0, 1)),
    (CASE, ADD, (2, 2)),
    (CASE, WRONG, (1, 2)),
    (CASE, SKIPS, (0, 2)),
    (BROKEN_CASE, ADD, (0, 4)),
    ("def check(): assert add(1, 1) == 2\ncheck()", WRONG, (0, 1)),
    ("for n in range(3): assert add(n, n) == 2 * n", ADD, (1, 1)),
    (NO_TEST, ADD, (0, 0)),
]


@pytest.mark.parametrize(("tests", "code", "expected"), COUNT_CASES)
def test_sandbox_runner_counts_only_tests_that_ran(
    tests: str, code: str, expected: tuple[int, int], tmp_path: Path
) -> None:
    """Run the sandbox's test runner directly; these answers are harmless."""
    for name, text in {"answer.py": code, "tests.json": json.dumps([tests]), "key": "KEY"}.items():
        (tmp_path / name).write_text(text)
    command = [sys.executable, "-B", str(RUNNER_SCRIPT), "answer.py"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True, timeout=60)
    report = json.loads(result.stdout.rpartition("\nKEY ")[2])
    assert (report["passed"], report["total"]) == expected, result.stderr


def test_custom_command_as_runner_requires_isolate_false() -> None:
    with pytest.raises(ValidationError, match=r"isolate: must be false with the custom command \['sh'\]"):
        rules.TestsRewardConfig(type="tests", runner=["sh"])
    assert rules.TestsRewardConfig(type="tests", runner=["sh"], isolate=False).runner == ["sh"]


def test_bubblewrap_ignores_files_before_the_root_is_switched() -> None:
    """This process sees the machine's files, as bubblewrap does before it changes the root."""
    assert bubblewrap._measure_files([os.getpid()]) == (0, 0)  # pyright: ignore[reportPrivateUsage]
