"""Packages that a task set needs and Instar does not."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from instar.errors import ConfigError

EXTRA = "pip install 'instar[tasks]'"


def import_package(module: str, tasks: str, install: str = EXTRA) -> Any:
    """The module, or a ConfigError that says how to come by it."""
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        raise ConfigError(_missing(error.name or module, tasks, install)) from error


def find_package_folder(module: str, tasks: str, install: str = EXTRA) -> Path:
    """Where a package lies, without running any of it."""
    spec = find_spec(module)
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError(_missing(module, tasks, install))
    return Path(spec.submodule_search_locations[0])


def _missing(module: str, tasks: str, install: str) -> str:
    return f"tasks.type: {tasks} needs the package {module}, which is not installed: {install}"
