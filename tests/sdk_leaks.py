"""tinker's SDK leaves connections to the garbage collector, which warns of each, and warnings are errors.

A test module that drives it has ``pytestmark = LEAKS`` and holds `collected` around its server.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Generator
from contextlib import contextmanager

import pytest

IGNORE_SDK_LEAKS = pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")


@contextmanager
def collect_sdk_leaks() -> Generator[None]:
    """What the SDK left behind goes here, and not in another module's test."""
    try:
        yield
    finally:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)
            gc.collect()
