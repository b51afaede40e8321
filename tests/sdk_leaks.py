"""Tinker's SDK leaves connections open until garbage collection, which warns; warnings are errors here.

A test module that uses it sets ``pytestmark = IGNORE_SDK_LEAKS`` and runs its server in `collect_sdk_leaks`.
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
    """Collect the SDK's leaked connections here, not in a test of another module."""
    try:
        yield
    finally:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)
            gc.collect()
