"""Check which backends can run in an environment, and explain how to install the missing ones.

``python -m instar.backends.packages`` prints the result for its own environment as JSON. Instar runs it with
the interpreter in `backend.python`. No SDK is imported.
"""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from instar.clouds.base import SERVICES, find_installed_version
from instar.config import BackendConfig, PluginConfig
from instar.errors import ConfigError

INTERPRETER_TIMEOUT_SECONDS = 120.0


@dataclass(frozen=True, slots=True)
class PackageRequirement:
    package: str
    pip_arguments: str
    """The arguments for ``pip install``."""
    version_specifier: str = ""
    conflicts_with: str | None = None
    """A package that cannot be installed in the same environment."""
    prefers_own_environment: bool = False
    """True if the package has so many dependencies that a separate environment is recommended."""


CONFLICTS = {"tinker": "mindlab-toolkit", "mint": "tinker"}
"""The package that each backend conflicts with. MinT requires an older version of tinker than Instar does."""
REQUIREMENTS: dict[str, PackageRequirement] = {
    "local": PackageRequirement("torch", "'instar[local]'"),
    **{
        name: PackageRequirement(service.package, f"'instar[{service.name}]'", "", CONFLICTS.get(name))
        for name, service in SERVICES.items()
    },
    "verl": PackageRequirement("verl", "'instar[local,verl]'", ">=0.9.1,<0.10", prefers_own_environment=True),
}


@dataclass(frozen=True, slots=True)
class PackageStatus:
    version: str | None
    problem: str | None
    """Why the backend cannot run in the environment, or None if it can."""


def inspect_packages(python: str | None = None) -> dict[str, PackageStatus]:
    """Inspect the package of each built-in backend in the environment of ``python``, or in the current one
    if it is None. Raises ConfigError if ``python`` cannot be run, times out or fails."""
    if python is None:
        return {name: inspect_package(name, requirement) for name, requirement in REQUIREMENTS.items()}
    command = [python, "-m", "instar.backends.packages"]
    try:
        completed = subprocess.run(
            command, capture_output=True, text=True, timeout=INTERPRETER_TIMEOUT_SECONDS
        )
    except OSError as error:
        raise ConfigError(f"backend.python: cannot run {python!r}: {error.strerror}") from error
    except subprocess.TimeoutExpired as error:
        raise ConfigError(
            f"backend.python: {python!r} did not list its packages within {INTERPRETER_TIMEOUT_SECONDS:.0f} s"
        ) from error
    if completed.returncode != 0:
        last_line = (completed.stderr.strip().splitlines() or ["no output"])[-1]
        if "No module named" in last_line:
            raise ConfigError(
                f"backend.python: Instar is not installed in {python!r} ({last_line}); "
                f"run {python} -m pip install instar"
            )
        raise ConfigError(f"backend.python: {python!r} failed to list its packages: {last_line}")
    packages: dict[str, Any] = json.loads(completed.stdout)
    return {name: PackageStatus(**package) for name, package in packages.items()}


def check_installed(section: BackendConfig) -> None:
    """Raise ConfigError with install advice if a built-in backend's package is missing or unsupported."""
    if isinstance(section, PluginConfig) or section.type not in REQUIREMENTS:
        return
    package = inspect_packages(section.python)[section.type]
    if package.problem is not None:
        prefix = f"backend.python: in {section.python}: " if section.python else "backend.type: "
        raise ConfigError(prefix + package.problem)


# --- the current environment ---


def inspect_package(name: str, requirement: PackageRequirement) -> PackageStatus:
    version = find_installed_version(requirement.package)
    if version is None:
        problem = f"{name} needs {requirement.package}{requirement.version_specifier}, which is not installed"
        return PackageStatus(None, f"{problem}; {_format_install_advice(requirement)}")
    for needed in _iterate_required_versions(name, requirement):
        actual = find_installed_version(needed.name)
        if actual is None or not needed.specifier.contains(actual, prereleases=True):
            state = "it is not installed" if actual is None else f"{actual} is installed"
            problem = f"{name} needs {needed.name}{needed.specifier}, but {state}"
            return PackageStatus(version, f"{problem}; {_format_install_advice(requirement)}")
    return PackageStatus(version, None)


def _iterate_required_versions(name: str, requirement: PackageRequirement) -> Iterator[Any]:
    """Yield the requirements of `REQUIREMENTS`, of Instar's extra and, for MinT, of its own package."""
    from packaging.requirements import Requirement

    yield Requirement(requirement.package + requirement.version_specifier)
    # A checkout that is only on the path has no metadata, so its requirements are unknown.
    requirements = importlib.metadata.requires("instar") if find_installed_version("instar") else None
    for needed in map(Requirement, requirements or []):
        is_in_extra = needed.marker is not None and needed.marker.evaluate({"extra": name})
        if is_in_extra and needed.name == requirement.package:
            yield needed
    if name == "mint":
        for needed in map(Requirement, importlib.metadata.requires(requirement.package) or []):
            if needed.name == "tinker":
                yield needed


def _format_install_advice(requirement: PackageRequirement) -> str:
    other = requirement.conflicts_with
    version = find_installed_version(other) if other else None
    conflict = f" ({requirement.package} conflicts with the installed {other} {version})" if version else ""
    if not conflict and not requirement.prefers_own_environment:
        return f"run {sys.executable} -m pip install {requirement.pip_arguments}"
    folder = f"{requirement.package}-env"
    return (
        f"run python -m venv {folder} && {folder}/bin/pip install {requirement.pip_arguments}, and set "
        f"backend.python: {folder}/bin/python{conflict}"
    )


if __name__ == "__main__":
    sys.stdout.write(json.dumps({name: asdict(package) for name, package in inspect_packages().items()}))
