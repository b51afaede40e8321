"""Tests that `tools/audit.py` fails only on known vulnerabilities, and lists packages it cannot audit."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
from collections.abc import Generator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.unit.tools.test_licences import write_package_metadata

TOOLS = Path(__file__).parents[3] / "tools"
UNREACHABLE = "http://127.0.0.1:9"


class IndexHandler(BaseHTTPRequestHandler):
    """A PyPI index with project pages but without version pages, and an OSV service at `/osv`."""

    projects: dict[str, Any]

    def do_GET(self) -> None:
        page = self.projects.get(self.path)
        self.send_response(404 if page is None else 200)
        self.end_headers()
        self.wfile.write(json.dumps(page).encode())

    def do_POST(self) -> None:
        """Respond to a query as OSV does."""
        query = json.loads(self.rfile.read(int(self.headers["content-length"])))
        affected = [{"package": {"name": "old", "ecosystem": "PyPI"}, "ranges": []}]
        is_vulnerable = query["package"]["name"] == "old"
        response = {"vulns": [{"id": "GHSA-1", "affected": affected}]} if is_vulnerable else {}
        self.send_response(200 if self.path == "/osv" else 404)
        self.end_headers()
        self.wfile.write(json.dumps(response).encode())

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def index() -> Generator[str]:
    def make_page(version: str, *ids: str) -> Any:
        return {"info": {"version": version}, "vulnerabilities": [{"id": identifier} for identifier in ids]}

    IndexHandler.projects = {
        "/pypi/safe/json": make_page("1.0"),
        "/pypi/old/json": make_page("2.0"),
        "/pypi/bad/json": make_page("1.0", "PYSEC-2026-1"),
    }
    with ThreadingHTTPServer(("127.0.0.1", 0), IndexHandler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.fixture
def tool(tmp_path: Path) -> Path:
    """A copy of the tool with its own cache and allow-list."""
    shutil.copytree(TOOLS, tmp_path / "copy" / "tools")
    return tmp_path / "copy" / "tools" / "audit.py"


@pytest.fixture
def packages(tmp_path: Path) -> Path:
    folder = tmp_path / "packages"
    folder.mkdir()
    return folder


def run_audit(tool: Path, packages: Path, index: str, osv: str = UNREACHABLE) -> tuple[int, str]:
    options = ["--path", str(packages), "--index", index, "--osv", osv]
    completed = subprocess.run(
        [sys.executable, str(tool), *options], capture_output=True, text=True, check=False
    )
    return completed.returncode, completed.stdout + completed.stderr


def test_audit_without_a_reachable_service_lists_all_packages_and_passes(tool: Path, packages: Path) -> None:
    write_package_metadata(packages, "safe")
    code, output = run_audit(tool, packages, UNREACHABLE)
    assert code == 0
    assert "pip-audit was not run" in output
    assert "NOT AUDITED: 1 of 1 packages: safe 1.0" in output


def test_audit_by_project_pages_cannot_audit_outdated_packages(
    tool: Path, packages: Path, index: str
) -> None:
    write_package_metadata(packages, "safe")
    write_package_metadata(packages, "old")
    code, output = run_audit(tool, packages, index)
    assert code == 0
    assert "packages audited using their project pages: 1" in output
    assert "NOT AUDITED: 1 of 2 packages: old 1.0" in output


def test_audit_of_vulnerable_package_fails_until_it_is_allowed(
    tool: Path, packages: Path, index: str
) -> None:
    write_package_metadata(packages, "bad")
    code, output = run_audit(tool, packages, index)
    assert code == 1
    assert "bad 1.0 has the known vulnerability PYSEC-2026-1" in output
    with tool.with_name("audit_allow.txt").open("a") as file:
        file.write("bad PYSEC-2026-1 -- not reachable from our code\n")
    assert run_audit(tool, packages, index)[0] == 0


def test_audit_uses_its_cache_until_packages_change(tool: Path, packages: Path, index: str) -> None:
    write_package_metadata(packages, "safe")
    assert run_audit(tool, packages, index)[0] == 0
    IndexHandler.projects["/pypi/safe/json"]["vulnerabilities"] = [{"id": "PYSEC-2026-2"}]
    assert run_audit(tool, packages, index)[0] == 0
    write_package_metadata(packages, "old")
    assert run_audit(tool, packages, index)[0] == 1


def test_audit_with_reachable_osv_finds_vulnerability_in_older_version(
    tool: Path, packages: Path, index: str
) -> None:
    pytest.importorskip("pip_audit")
    write_package_metadata(packages, "safe")
    write_package_metadata(packages, "old")
    code, output = run_audit(tool, packages, index, f"{index}/osv")
    assert code == 1, output
    assert "packages audited by pip-audit with osv: 2" in output
    assert "old 1.0 has the known vulnerability GHSA-1" in output
    assert "NOT AUDITED" not in output
