from __future__ import annotations

from collections.abc import Generator

import pytest

from tests.unit.trainer.harness import capture_log


@pytest.fixture
def log() -> Generator[list[str]]:
    with capture_log() as messages:
        yield messages
