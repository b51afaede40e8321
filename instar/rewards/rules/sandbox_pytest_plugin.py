"""A pytest plugin that reports from inside the sandbox, in the same format as ``sandbox_runner.py``."""

from __future__ import annotations

import json
import os
import unittest
from pathlib import Path
from typing import Any

_KEY = Path("key").read_text(encoding="utf-8")
Path("key").unlink()
_REPORT = os.dup(1)
_total: set[str] = set()
_passed: set[str] = set()
_cases: set[str] = set()
"""TestCase tests. For these, pytest does not report where they were skipped."""


def pytest_collection_finish(session: Any) -> None:
    for item in session.items:
        _total.add(item.nodeid)
        case = getattr(item, "cls", None)
        if case is not None and issubclass(case, unittest.TestCase):
            _cases.add(item.nodeid)


def pytest_runtest_logreport(report: Any) -> None:
    if report.skipped and _is_skipped_by_test(report):
        _total.discard(report.nodeid)
    elif report.when == "call" and report.passed:
        _passed.add(report.nodeid)
    elif report.failed:
        _passed.discard(report.nodeid)


def _is_skipped_by_test(report: Any) -> bool:
    """Return True if the test's own file, not the answer, skips the test or expects it to fail."""
    if hasattr(report, "wasxfail"):
        return bool({"xfail", "__unittest_expecting_failure__"} & set(report.keywords))
    if report.nodeid in _cases:
        return bool({"skip", "skipif", "__unittest_skip__"} & set(report.keywords))
    return Path(report.longrepr[0]).name == Path(report.location[0]).name


def pytest_unconfigure(config: Any) -> None:
    counts = {"passed": len(_passed & _total), "total": len(_total)}
    os.write(_REPORT, f"\n{_KEY} {json.dumps(counts)}\n".encode())
