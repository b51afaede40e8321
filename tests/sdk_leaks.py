"""Ignore the warnings about connections that Tinker's SDK leaves open until they are garbage-collected.

A test module that uses the SDK sets ``pytestmark = IGNORE_SDK_LEAKS`` and runs its server inside
`collect_sdk_leaks`; otherwise the ResourceWarnings would fail its tests.
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
    """Collect the SDK's leaked connections on exit, so that they do not fail a test in another module."""
    try:
        yield
    finally:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)
            gc.collect()
