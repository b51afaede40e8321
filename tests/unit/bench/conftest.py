"""The fixture of the tests for bench/learning.py."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Generator
from pathlib import Path
from types import ModuleType

import pytest

BENCH = Path(__file__).parents[3] / "bench"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Generator[ModuleType]:
    """The module bench/learning.py, imported with its folder on the path."""
    monkeypatch.syspath_prepend(str(BENCH))
    yield importlib.import_module("learning")
    folders = {path.name for path in BENCH.glob("*_parts")}
    for name in [name for name in sys.modules if name.split(".")[0] in {"learning", *folders}]:
        del sys.modules[name]
