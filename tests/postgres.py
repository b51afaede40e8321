"""A PostgreSQL server for tests and benchmarks."""

from __future__ import annotations

import os
import pwd
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import psycopg
import pytest

PASSWORD = "postgres test password"
"""The password of the user `instar`, required for TCP connections but not for socket connections."""


def find_server_binaries() -> Path:
    """Return the `bin` folder of the PostgreSQL on PATH, or of the newest one in /usr/lib/postgresql.

    Skips the test if no server is installed.
    """
    folders = sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda folder: int(folder.parent.name))
    if (postgres := shutil.which("postgres")) is not None:
        folders.append(Path(postgres).resolve().parent)
    for folder in reversed(folders):
        if (folder / "initdb").exists() and (folder / "postgres").exists():
            return folder
    pytest.skip("no PostgreSQL server is installed (Debian: postgresql)")


class PostgresTestServer:
    """A PostgreSQL server, started by the constructor.

    ``fsync`` is for benchmarks: without it, a machine crash loses rows, but a server crash does not. The
    server listens on ``host`` and accepts connections from the same network. Its files are written to
    ``folder``, which must be empty; the default is a new temporary folder.
    """

    def __init__(self, *, fsync: bool = False, host: str = "127.0.0.1", folder: Path | None = None) -> None:
        self.bin = find_server_binaries()
        self.folder = folder or Path(tempfile.mkdtemp(prefix="instar-pg-", dir="/tmp"))
        self._user = _find_server_user()
        self.port = _find_free_port()
        self._fsync = fsync
        self._host = host
        self._process: subprocess.Popen[bytes] | None = None
        password_file = self.folder / "password"
        password_file.write_text(PASSWORD)
        if self._user is not None:
            for path in (self.folder, password_file):
                shutil.chown(path, self._user, pwd.getpwnam(self._user).pw_gid)
        self._run(
            "initdb", "--pgdata", str(self.folder / "data"), "--username=instar", f"--pwfile={password_file}",
            "--auth-local=trust", "--auth-host=scram-sha-256", "--encoding=UTF8", "--locale=C", "--no-sync",
            "--no-instructions",
        )  # fmt: skip
        with (self.folder / "data" / "pg_hba.conf").open("a") as rules:
            rules.write("host all all samenet scram-sha-256\n")
        self.start()

    @property
    def socket_url(self) -> str:
        return f"postgresql://instar@/postgres?host={self.folder}&port={self.port}"

    @property
    def tcp_url(self) -> str:
        """The URL for TCP connections, without the password that they require."""
        return f"postgresql://instar@{self._host}:{self.port}/postgres"

    def make_schema_name(self) -> str:
        """Return an unused schema name."""
        return f"test_{secrets.token_hex(6)}"

    def delete_rows(self, schema: str) -> None:
        """Delete all rows of the store in a schema. This is much faster than creating a new store."""
        tables = self.query("SELECT tablename FROM pg_tables WHERE schemaname = %s", schema)
        statements = "; ".join(f"DELETE FROM {name}" for (name,) in tables if name != "instar_store")
        self.query(f"SET session_replication_role = replica; {statements}", schema=schema)

    def query(self, sql: str, *values: object, schema: str = "public") -> list[tuple[Any, ...]]:
        with psycopg.connect(self.socket_url, autocommit=True) as connection:
            connection.execute("SELECT set_config('search_path', %s, false)", (schema,))
            cursor = connection.execute(sql.encode(), values or None)
            return cursor.fetchall() if cursor.description else []

    def start(self, timeout: float = 30.0) -> None:
        settings = {
            "listen_addresses": self._host,
            "port": self.port,
            "unix_socket_directories": self.folder,
            "shared_buffers": "16MB",
            "max_connections": 100,
            "fsync": "on" if self._fsync else "off",
            "full_page_writes": "on" if self._fsync else "off",
            "deadlock_timeout": "100ms",  # Tests with deadlocks would wait for the default of one second.
            "logging_collector": "off",
        }
        arguments = [part for name, value in settings.items() for part in ("-c", f"{name}={value}")]
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [str(self.bin / "postgres"), "-D", str(self.folder / "data"), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                **self._process_options(),
            )
        deadline = time.monotonic() + timeout
        while True:
            try:
                psycopg.connect(self.socket_url).close()
                return
            except psycopg.OperationalError:
                log_text = (self.folder / "log").read_text(errors="replace")
                assert self._process.poll() is None, log_text
                assert time.monotonic() < deadline, log_text
                time.sleep(0.02)

    def stop(self, stop_signal: signal.Signals = signal.SIGINT) -> None:
        """Stop the server: cleanly with SIGINT, or as in a crash with SIGQUIT."""
        if self._process is not None:
            self._process.send_signal(stop_signal)
            self._process.wait(30)
            self._process = None

    def has_exited(self) -> bool:
        return self._process is not None and self._process.poll() is not None

    def remove(self) -> None:
        self.stop(signal.SIGQUIT)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _run(self, program: str, *arguments: str) -> None:
        result = subprocess.run(
            [str(self.bin / program), *arguments],
            capture_output=True,
            text=True,
            timeout=60,
            **self._process_options(),
        )
        assert result.returncode == 0, result.stderr

    def _process_options(self) -> dict[str, Any]:
        if self._user is None:
            return {"cwd": self.folder}
        entry = pwd.getpwnam(self._user)
        return {"user": entry.pw_uid, "group": entry.pw_gid, "extra_groups": [], "cwd": self.folder}


def _find_server_user() -> str | None:
    """Return the user to run the server as, or None for the current user. PostgreSQL does not run as root."""
    if os.getuid() != 0:
        return None
    users = {entry.pw_name for entry in pwd.getpwall()}
    return "postgres" if "postgres" in users else "nobody"


def _find_free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
