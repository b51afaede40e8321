"""Which backends can run in an environment: what each needs installed, and what to type where it is missing.

``python -m instar.backends.packages`` says it of the environment it runs in, as JSON: so that an interpreter
named by `backend.python` is asked without importing any SDK.
"""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from instar.clouds.base import SERVICES
from instar.config import BackendConfig, PluginConfig
from instar.errors import ConfigError

TIMEOUT = 30.0
"""Seconds that another interpreter has to answer."""


@dataclass(frozen=True, slots=True)
class PackageRequirement:
    package: str
    """Its distribution on PyPI."""
    install: str
    """Arguments for pip."""
    conflicts_with: str | None = None
    """A package that it cannot share an environment with."""
    needs_own_environment: bool = False
    """Whether it is best kept in an environment of its own: it brings much along."""


CONFLICTS = {"tinker": "mindlab-toolkit", "mint": "tinker"}
"""MinT pins an older tinker than ours."""
REQUIREMENTS: dict[str, PackageRequirement] = {
    "local": PackageRequirement("torch", "'instar[local]'"),
    **{
        name: PackageRequirement(service.package, f"'instar[{service.extra}]'", CONFLICTS.get(name))
        for name, service in SERVICES.items()
    },
    "verl": PackageRequirement("verl", "'instar[local,verl]'", needs_own_environment=True),
}


@dataclass(frozen=True, slots=True)
class InstalledPackage:
    """A backend's package in one environment."""

    version: str | None
    problem: str | None
    """Why the backend cannot run there; None when it can."""


def inspect_packages() -> dict[str, InstalledPackage]:
    """Every built-in backend, in this environment."""
    return {name: inspect_package(name, needed) for name, needed in REQUIREMENTS.items()}


def inspect_packages_of(python: str | None) -> dict[str, InstalledPackage]:
    """The same of the environment of another interpreter. Raises ConfigError when it cannot be asked."""
    if python is None:
        return inspect_packages()
    command = [python, "-m", "instar.backends.packages"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT)
    except OSError as error:
        raise ConfigError(f"backend.python: given {python!r}; it cannot be run: {error.strerror}") from error
    except subprocess.TimeoutExpired as error:
        raise ConfigError(
            f"backend.python: given {python!r}; it did not answer within {TIMEOUT:.0f} s"
        ) from error
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        if "No module named" in last:
            raise ConfigError(
                f"backend.python: {python!r} has no Instar ({last}): {python} -m pip install instar"
            )
        raise ConfigError(f"backend.python: {python!r} cannot say what it has installed: {last}")
    told: dict[str, Any] = json.loads(done.stdout)
    return {name: InstalledPackage(**found) for name, found in told.items()}


def check_installed(section: BackendConfig) -> None:
    """Raises ConfigError, with what to type, when the backend's package is not where it will run."""
    if isinstance(section, PluginConfig) or section.type not in REQUIREMENTS:
        return
    found = inspect_packages_of(section.python)[section.type]
    if found.problem is not None:
        where = f"backend.python: in {section.python}: " if section.python else "backend.type: "
        raise ConfigError(where + found.problem)


# --- this environment -----------------------------------------------------------------------------


def version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def inspect_package(name: str, needed: PackageRequirement) -> InstalledPackage:
    """Whether a backend can run here."""
    found = version(needed.package)
    if found is None:
        said = f"{name} needs the package {needed.package}, which is not installed: {_advice(needed)}"
        return InstalledPackage(None, said)
    for wanted, by in _demands(name, needed):
        there = version(wanted.name)
        if there is None or not wanted.specifier.contains(there, prereleases=True):
            state = "not installed" if there is None else f"{there} is installed"
            said = f"{by} needs {wanted.name}{wanted.specifier}, and {state}: {_advice(needed)}"
            return InstalledPackage(found, said)
    return InstalledPackage(found, None)


def _demands(name: str, needed: PackageRequirement) -> Iterator[tuple[Any, str]]:
    """The versions that our own extra asks for and, for MinT, the tinker that it pins."""
    from packaging.requirements import Requirement

    # A checkout that is only on the path has no metadata, and asks for nothing.
    ours = importlib.metadata.requires("instar") if version("instar") else None
    for text in ours or []:
        wanted = Requirement(text)
        if wanted.marker is None or not wanted.marker.evaluate({"extra": name}):
            continue
        if wanted.name == needed.package:
            yield wanted, name
    if name == "mint":
        for text in importlib.metadata.requires(needed.package) or []:
            if (wanted := Requirement(text)).name == "tinker":
                yield wanted, name


def _advice(needed: PackageRequirement) -> str:
    """The command that makes it available, in an environment of its own where this one will not do."""
    other = needed.conflicts_with
    conflict = f" (not beside {other} {version(other)})" if other and version(other) else ""
    if not conflict and not needed.needs_own_environment:
        return f"{sys.executable} -m pip install {needed.install}"
    folder = f"{needed.package}-env"
    return (
        f"python -m venv {folder} && {folder}/bin/pip install {needed.install}; then name its interpreter, "
        f"backend.python: {folder}/bin/python{conflict}"
    )


if __name__ == "__main__":
    print(json.dumps({name: asdict(found) for name, found in inspect_packages().items()}))
