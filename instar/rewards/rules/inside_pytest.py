"""A pytest plugin that reports, inside the sandbox, in one line that begins with a key (see inside.py)."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

_KEY = Path("key").read_text(encoding="utf-8")
Path("key").unlink()
_REPORT = os.dup(1)
_found = {"passed": 0, "total": 0}


def pytest_collection_finish(session: Any) -> None:
    _found["total"] = len(session.items)


def pytest_runtest_logreport(report: Any) -> None:
    if report.when == "call":
        _found["passed"] += report.passed
    elif report.when == "teardown" and report.failed:
        _found["passed"] -= 1


def pytest_unconfigure(config: Any) -> None:
    os.write(_REPORT, f"\n{_KEY} {json.dumps(_found)}\n".encode())
