"""The PostgreSQL store passes the conformance suite, on a real server."""

from __future__ import annotations

import pytest

from instar.store.postgres import PostgresStore
from instar.store.postgres_server import Server
from tests.postgres import PostgresServer

from .conformance import OpenStore, StoreConformance


class TestPostgresStore(StoreConformance):
    @pytest.fixture
    def open_store(self, postgres: PostgresServer) -> OpenStore:
        server = Server(postgres.socket_url, postgres.new_schema(), timeout=30.0)
        return lambda: PostgresStore(server)
