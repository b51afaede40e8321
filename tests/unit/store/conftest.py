from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.postgres import PostgresTestServer


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresTestServer]:
    server = PostgresTestServer()
    yield server
    server.remove()
