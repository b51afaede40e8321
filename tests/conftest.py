"""Setup for all tests."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from instar.cpu import disable_broken_amx
from instar.models import DEFAULT_MODEL, cache_dir, is_local, resolve_model

# Must run before any test uses torch. The processes that tests start inherit the settings.
disable_broken_amx(cache_dir())
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # Threads that spin are very slow on a busy machine.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell starts background jobs like this. Processes that tests interrupt would inherit it.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_sessionstart(session: pytest.Session) -> None:
    """In CI, prepare the default model before the timeout of a test includes the download."""
    is_worker = hasattr(session.config, "workerinput")
    if os.environ.get("CI") and not is_worker:
        resolve_model(DEFAULT_MODEL)


@pytest.fixture(scope="session")
def default_model() -> Path:
    """The folder of the default model. Tests that use it are skipped if it is not cached."""
    if not is_local(DEFAULT_MODEL):
        pytest.skip(f"{DEFAULT_MODEL} is not cached; `make demo` downloads it")
    return resolve_model(DEFAULT_MODEL)
