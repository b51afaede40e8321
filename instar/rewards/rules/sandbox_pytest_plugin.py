"""A pytest plugin that reports test results from a sandbox, in the format of ``sandbox_runner.py``. If the
file ``channel`` exists, the answer runs in a separate sandbox, and the tests import a proxy for it."""

from __future__ import annotations

import ast
import json
import os
import sys
import unittest
from contextlib import suppress
from pathlib import Path
from typing import Any

_KEY = Path("key").read_text(encoding="utf-8")
Path("key").unlink()
_REPORT_FD = os.dup(1)
_exit_code = [1]
_test_ids: set[str] = set()
_passed_ids: set[str] = set()
_unittest_ids: set[str] = set()
"""The ids of tests in TestCases. For these, pytest does not report the file in which they were skipped."""


def pytest_collection_finish(session: Any) -> None:
    for item in session.items:
        _test_ids.add(item.nodeid)
        case = getattr(item, "cls", None)
        if case is not None and issubclass(case, unittest.TestCase):
            _unittest_ids.add(item.nodeid)


def pytest_runtest_logreport(report: Any) -> None:
    if report.skipped and _is_skipped_by_test(report):
        _test_ids.discard(report.nodeid)
    elif report.when == "call" and report.passed:
        _passed_ids.add(report.nodeid)
    elif report.failed:
        _passed_ids.discard(report.nodeid)


def _is_skipped_by_test(report: Any) -> bool:
    """True if the test file, not the answer, skipped the test or expected it to fail."""
    if hasattr(report, "wasxfail"):
        return bool({"xfail", "__unittest_expecting_failure__"} & set(report.keywords))
    if report.nodeid in _unittest_ids:
        return bool({"skip", "skipif", "__unittest_skip__"} & set(report.keywords))
    return Path(report.longrepr[0]).name == Path(report.location[0]).name


def pytest_sessionfinish(session: Any, exitstatus: int) -> None:
    _exit_code[0] = int(exitstatus)


def pytest_unconfigure(config: Any) -> None:
    counts = {"passed": len(_passed_ids & _test_ids), "total": len(_test_ids)}
    if _answer is not None:
        counts["lost"] = _answer.peer.is_lost
    sys.stdout.flush()
    os.write(_REPORT_FD, f"\n{_KEY} {json.dumps(counts)}\n".encode())
    os._exit(_exit_code[0])  # a normal exit would wait for threads that the answer started


def _connect_to_answer() -> Any:
    """Connect to the answer and rewrite the tests, or return None if the answer runs in this process."""
    if not Path("channel").exists():
        return None
    from instar.rewards.rules.sandbox_client import Answer, rewrite_call_statements

    descriptor, answer_file, tests_file = json.loads(Path("channel").read_text(encoding="utf-8"))
    tests = Path(tests_file)
    with suppress(SyntaxError):  # pytest reports it
        tree = rewrite_call_statements(ast.parse(tests.read_text(encoding="utf-8")))
        tests.write_text(ast.unparse(tree), encoding="utf-8")
    return Answer(descriptor, Path(answer_file).stem, tests.stem)


_answer = _connect_to_answer()
