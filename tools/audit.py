"""Look up the installed packages in databases of known vulnerabilities.

    python tools/audit.py [--path FOLDER] [--index URL] [--osv URL]

Exits with 1 if a package has a known vulnerability that is not listed with a reason in
``tools/audit_allow.txt``.

pip-audit queries OSV or, if OSV is unreachable, the version pages on PyPI. It silently skips packages without
a version page, and some PyPI mirrors have no version pages. For these packages, this script reads the project
page, which lists the vulnerabilities of the latest version. Packages that could not be audited are named in
the output. Results are cached for a day in ``.cache/audit.json``.
"""

from __future__ import annotations

import argparse
import json
import os
import ssl
import subprocess
import sys
import sysconfig
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parent.parent
ALLOW_LIST = ROOT / "tools" / "audit_allow.txt"
CACHE = ROOT / ".cache" / "audit.json"
CACHE_MAX_AGE_SECONDS = 24 * 3600.0
TIMEOUT_SECONDS = 4.0
OWN_PACKAGE = "instar"
TLS = ssl.create_default_context()  # shared, because loading the certificates takes longer than a request
Vulnerabilities = dict[str, list[str]]
"""The ids of the known vulnerabilities by package. A package that was not found has no entry."""


def list_packages(folder: str) -> dict[str, str]:
    """Return the versions of the packages installed in the folder, except Instar, by name."""
    versions = {canonicalize_name(item.name): item.version for item in distributions(path=[folder])}
    versions.pop(canonicalize_name(OWN_PACKAGE), None)
    return versions


def fetch_json(url: str, body: Any = None) -> Any:
    """Return the decoded response, or None if the request fails."""
    data = None if body is None else json.dumps(body).encode()
    try:
        request = urllib.request.Request(url, data)
        with urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS, context=TLS) as response:
            return json.load(response)
    except (OSError, ValueError):
        return None


def find_service(packages: dict[str, str], index: str, osv: str) -> str | None:
    """Return the first pip-audit service that is reachable, or None."""
    name, version = next(iter(packages.items()))
    query = {"package": {"name": name, "ecosystem": "PyPI"}, "version": version}
    if fetch_json(osv, query) is not None:
        return "osv"
    return "pypi" if fetch_json(f"{index}/pypi/{name}/{version}/json") is not None else None


def run_pip_audit(service: str, folder: str, osv: str) -> Vulnerabilities:
    """Return the vulnerabilities that pip-audit reports.

    If pip-audit fails, print its error and return an empty dict, as if it had audited no packages.
    """
    options = ["--format", "json", "--progress-spinner", "off", "--timeout", "10", "--path", folder]
    command = [sys.executable, "-m", "pip_audit", "--vulnerability-service", service, *options]
    environment = {**os.environ, "PIP_AUDIT_OSV_URL": osv}
    run = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    try:
        dependencies = json.loads(run.stdout)["dependencies"]
    except ValueError:
        print(f"pip-audit failed: {run.stderr.strip()[-300:]}")
        return {}
    return {
        canonicalize_name(item["name"]): [vulnerability["id"] for vulnerability in item["vulns"]]
        for item in dependencies
        if "vulns" in item
    }


def look_up_projects(packages: dict[str, str], index: str) -> Vulnerabilities:
    """Return the vulnerabilities on the project pages of packages whose latest version is installed."""

    def look_up(name: str) -> list[str] | None:
        project = fetch_json(f"{index}/pypi/{name}/json")
        # A local version such as 2.0+cpu is a build of 2.0.
        if not project or Version(project["info"]["version"]) != Version(Version(packages[name]).public):
            return None
        entries = project.get("vulnerabilities", ())
        return [entry["id"] for entry in entries if not entry.get("withdrawn")]

    with ThreadPoolExecutor(16) as pool:
        ids_by_name = zip(packages, pool.map(look_up, packages), strict=True)
        return {name: ids for name, ids in ids_by_name if ids is not None}


def audit(packages: dict[str, str], folder: str, index: str, osv: str) -> tuple[Vulnerabilities, list[str]]:
    """Return the vulnerabilities, and lines that report how the packages were looked up."""
    service = find_service(packages, index, osv)
    by_version = run_pip_audit(service, folder, osv) if service else {}
    remaining = {name: version for name, version in packages.items() if name not in by_version}
    by_project = look_up_projects(remaining, index) if remaining else {}
    if service:
        lines = [f"packages audited by pip-audit with {service}: {len(by_version)}"]
    else:
        lines = [f"pip-audit was not run: neither {osv} nor the version pages at {index} are reachable"]
    if remaining:
        lines.append(f"packages audited using their project pages: {len(by_project)}")
    return by_version | by_project, lines


def read_allowed() -> set[tuple[str, str]]:
    """Return the accepted (package, vulnerability) pairs."""
    rows = [line for line in ALLOW_LIST.read_text().splitlines() if line.strip() and not line.startswith("#")]
    pairs = [row.partition(" -- ")[0].split() for row in rows]
    return {(name, identifier) for name, identifier in pairs}


def load_cached(key: dict[str, Any]) -> tuple[Vulnerabilities, list[str]] | None:
    """Return the cached result of `audit`, or None if there is none for this key or it is too old."""
    try:
        cached = json.loads(CACHE.read_text())
    except (OSError, ValueError):
        return None
    is_fresh = cached["key"] == key and 0 <= time.time() - cached["time"] < CACHE_MAX_AGE_SECONDS
    return (cached["vulnerabilities"], cached["lines"]) if is_fresh else None


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--path", default=sysconfig.get_path("purelib"), help="folder with the installed packages"
    )
    parser.add_argument("--index", default="https://pypi.org", help="URL of PyPI or a PyPI mirror")
    parser.add_argument("--osv", default="https://api.osv.dev/v1/query", help="URL of the OSV service")
    options = parser.parse_args()
    packages = list_packages(options.path)
    key = {"packages": packages, "index": options.index, "osv": options.osv}
    result = load_cached(key)
    if result is None:
        result = audit(packages, options.path, options.index, options.osv)
        if result[0]:  # empty if no service was reachable
            CACHE.parent.mkdir(exist_ok=True)
            CACHE.write_text(
                json.dumps(
                    {"key": key, "time": time.time(), "vulnerabilities": result[0], "lines": result[1]}
                )
            )
    vulnerabilities, lines = result
    unaudited = sorted(f"{name} {packages[name]}" for name in packages.keys() - vulnerabilities.keys())
    if unaudited:
        lines = [*lines, f"NOT AUDITED: {len(unaudited)} of {len(packages)} packages: {', '.join(unaudited)}"]
    allowed = read_allowed()
    problems = [
        f"{name} {packages[name]} has the known vulnerability {identifier}; update the package, or list "
        f"the vulnerability with a reason in {ALLOW_LIST.relative_to(ROOT)}"
        for name, identifiers in sorted(vulnerabilities.items())
        for identifier in identifiers
        if (name, identifier) not in allowed
    ]
    print("\n".join([*lines, *problems, f"known vulnerabilities: {len(problems)}"]))
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
