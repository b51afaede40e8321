"""Imports packages that only some task sets need."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from instar.errors import ConfigError

EXTRA = "pip install 'instar[tasks]'"


def import_package(module: str, tasks: str, install: str = EXTRA) -> Any:
    """Return the module, or raise ConfigError with the command that installs it."""
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        raise ConfigError(_missing_message(error.name or module, tasks, install)) from error


def find_package_folder(module: str, tasks: str, install: str = EXTRA) -> Path:
    """Return the folder of a package without importing it."""
    spec = find_spec(module)
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError(_missing_message(module, tasks, install))
    return Path(spec.submodule_search_locations[0])


def _missing_message(module: str, tasks: str, install: str) -> str:
    return f"tasks.type: {tasks} needs the package {module}, which is not installed: {install}"
