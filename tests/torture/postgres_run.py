"""A run with a PostgreSQL store that tests can start, kill and compare with another run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import psycopg

from tests.postgres import PASSWORD, PostgresTestServer
from tests.torture.run_process import ROOT, RunProcess

PASSWORD_VARIABLE = "TEST_STORE_PASSWORD"


class PostgresRun(RunProcess):
    """A run that reads the password of its PostgreSQL server from an environment variable."""

    def __init__(self, folder: Path, config: dict[str, Any], server: PostgresTestServer) -> None:
        config["store"] = {
            "type": "postgres",
            "url": server.tcp_url,
            "db_schema": server.make_schema_name(),
            "password_env": PASSWORD_VARIABLE,
        }
        super().__init__(folder, config)
        self.server = server

    def start(self, *, resume: bool = False, **env: str) -> subprocess.Popen[bytes]:
        return super().start(resume=resume, **{PASSWORD_VARIABLE: PASSWORD, **env})

    def query(self, sql: str, *values: object) -> list[Any]:
        """Return the rows, or [] if the table does not exist yet or the server is restarting."""
        try:
            schema = self.config["store"]["db_schema"]
            return self.server.query(sql.replace("?", "%s"), *values, schema=schema)
        except (psycopg.errors.UndefinedTable, psycopg.OperationalError):
            return []

    def run_command(self, *arguments: str) -> str:
        completed = subprocess.run(
            [sys.executable, "-m", "instar.cli.main", *arguments],
            cwd=ROOT,
            env={**os.environ, PASSWORD_VARIABLE: PASSWORD},
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert completed.returncode == 0, completed.stderr
        return completed.stdout
