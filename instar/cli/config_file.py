"""Read a run's YAML file into a RunConfig. A relative path in the file is relative to the file's folder, and
one in ``--set`` is relative to the working directory."""

from __future__ import annotations

import os
import sys
import typing
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import Any, cast

import yaml
from pydantic import BaseModel, ValidationError

from instar.cli.config_errors import explain, find_section_classes
from instar.cluster.layout import RunFolder
from instar.config import RunConfig
from instar.config.data import DATASET_PREFIX, LIVE, ROLLOUT
from instar.config.model import RUN_PREFIX
from instar.errors import ConfigError
from instar.types import Json

DEMO_FILE = Path(__file__).parent.parent / "demo" / "run.yaml"


class InvalidConfigError(ConfigError):
    """Lists all errors in a run's settings, one per line."""

    def __init__(self, origin: str, errors: Sequence[str]) -> None:
        self.errors = list(errors)
        count = f"{len(errors)} error{'s' * (len(errors) > 1)}"
        super().__init__("\n  ".join([f"{origin}: {count}", *errors]))


def load_config(path: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Return the validated settings of a YAML file, with the overrides applied. Make functions in the file's
    folder and the working directory importable, because settings may refer to them."""
    data = _read_yaml(path)
    folder = path.resolve().parent
    _make_paths_absolute(RunConfig, data, folder)
    _make_other_paths_absolute(data, folder)
    _make_importable(str(folder))
    return validate(apply_overrides(data, overrides), str(path))


def load_run_config(folder: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Return the settings of an existing run, with the overrides applied. Make functions in the working
    directory, and in the folders from which the run imported them, importable."""
    run = RunFolder(folder)
    data = run.read_config().model_dump(mode="json")
    run_paths = run.python_path_file.read_text(encoding="utf-8") if run.python_path_file.is_file() else ""
    _make_importable(*filter(None, run_paths.split(os.pathsep)))
    return validate(apply_overrides(data, overrides), str(folder / "config.json"))


def validate(data: Json, origin: str) -> RunConfig:
    try:
        return RunConfig.model_validate(data)
    except ValidationError as error:
        raise InvalidConfigError(origin, explain(error, data)) from error


def apply_overrides(data: Json, overrides: Sequence[str]) -> Json:
    for override in overrides:
        _apply_override(data, override)
    return data


def _apply_override(data: Json, override: str) -> None:
    """Apply an override of the form ``a.b.c=value`` to the settings. The value is YAML."""
    path, equals, text = override.partition("=")
    if path.endswith("api_key"):
        override = f"{path}=…"  # the messages below may be logged
    if not equals or not all(path.split(".")):
        raise ConfigError(f"--set {override}: must have the form PATH=VALUE, e.g. trainer.steps=5")
    try:
        value = yaml.load(text, _Loader)
    except (yaml.YAMLError, ConfigError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"--set {override}: the value is not valid YAML: {reason}") from error
    *parents, last = path.split(".")
    for parent in parents:
        child: Any = {} if data.get(parent) is None else data[parent]
        if not isinstance(child, dict):
            raise ConfigError(f"--set {override}: {parent} is not a mapping; set {parent} as a whole")
        data[parent] = data = child
    data[last] = value


class _Loader(yaml.SafeLoader):
    """A YAML loader that rejects duplicate keys. Other loaders silently keep only the last value."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = key_node.value
            if key in seen and key_node.tag != "tag:yaml.org,2002:merge":
                raise ConfigError(f"line {key_node.start_mark.line + 1}: duplicate key {key!r}")
            seen.add(key)
        return super().construct_mapping(node, deep)


def _read_yaml(path: Path) -> Json:
    if not path.exists():
        raise ConfigError(f"{path}: the file does not exist")
    try:
        data: Any = yaml.load(path.read_text(encoding="utf-8"), _Loader)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"Cannot read {path}: {error}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from error
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    if data is None:
        return {}
    if not isinstance(data, dict):
        names = {list: "a list", str: "text", int: "a number", float: "a number"}
        raise ConfigError(f"{path}: expected a mapping of sections, not {names.get(type(data), repr(data))}")
    return cast(Json, data)


def _make_paths_absolute(section: type[BaseModel], data: Any, folder: Path) -> None:
    if not isinstance(data, dict):
        return
    values = cast(Json, data)
    for name, field in section.model_fields.items():
        value = values.get(name)
        if value is not None and Path in (field.annotation, *typing.get_args(field.annotation)):
            values[name] = _make_absolute(value, folder)
        for inner in find_section_classes(field.annotation):
            for item in cast(list[Any], value) if isinstance(value, list) else [value]:
                _make_paths_absolute(inner, item, folder)


def _make_absolute(value: Any, folder: Path) -> Any:
    if isinstance(value, list):
        return [_make_absolute(item, folder) for item in cast(list[Any], value)]
    return str(folder / Path(value).expanduser()) if isinstance(value, str) else value


def _make_other_paths_absolute(data: Json, folder: Path) -> None:
    """Make paths absolute in settings that are not typed as paths: a model (`./folder`), an adapter, an
    interpreter (`./env/bin/python`) and exported data. Also set the default working directory of a command
    agent."""
    if "data" in data:
        data["data"] = _make_source_absolute(data["data"], folder)
    match data:
        case {"rollout": {"agent": {"type": "command"} as agent}} if agent.get("cwd") is None:
            agent["cwd"] = str(folder)
        case _:
            pass
    match data:
        case {"model": {"name": str() as name}} if name.startswith("."):
            data["model"]["name"] = str((folder / name).resolve())
        case _:
            pass
    match data:
        case {"model": {"adapter": str() as adapter}}:
            data["model"]["adapter"] = _make_adapter_absolute(adapter, folder)
        case _:
            pass
    for section in ("backend", "engine"):
        match data.get(section):
            case {"python": str() as python} if "/" in python:
                # Symlinks are not resolved: Python finds its virtual environment through the link's path.
                data[section]["python"] = str(folder / Path(python).expanduser())
            case _:
                pass


def _make_adapter_absolute(adapter: str, folder: Path) -> str:
    prefix = RUN_PREFIX if adapter.startswith(RUN_PREFIX) else ""
    path = adapter.removeprefix(prefix)
    is_run_name = bool(prefix) and "/" not in path
    if not path or is_run_name or "://" in path:
        return adapter
    return f"{prefix}{folder / Path(path).expanduser()}"


def _make_source_absolute(source: Any, folder: Path) -> Any:
    match source:
        case list():
            return [_make_source_absolute(item, folder) for item in cast(list[Any], source)]
        case {"source": str() as path}:
            return {**cast(Json, source), "source": _make_source_absolute(path, folder)}
        case str() if source not in (ROLLOUT, LIVE) and not source.startswith(DATASET_PREFIX):
            return str(folder / Path(source).expanduser())
        case _:
            return source


def _make_importable(*paths: str) -> None:
    """Let this process and the run's processes import from the paths and the working directory."""
    folders = [*paths, str(Path.cwd())]
    for path in reversed(folders):
        if path not in sys.path:
            sys.path.insert(0, path)
    existing = [part for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part]
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys([*folders, *existing]))
