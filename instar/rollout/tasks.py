"""Task sets from JSON lines or from a Python function, and helpers for the built-in sets in `tasksets/`."""

from __future__ import annotations

import gzip
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any, cast

import msgspec

from instar import registry
from instar.config import JsonlTasksConfig, PythonTasksConfig, TasksConfig
from instar.errors import ConfigError
from instar.types import Json, Task

TextScorer = Callable[[Task, str], float]
"""Called with a task and the final text of a session. Returns the score."""
INSTALL_COMMAND = "pip install 'instar[tasks]'"


@dataclass(frozen=True, slots=True)
class TaskSet:
    tasks: Sequence[Task]
    scorer: TextScorer | None = None

    def __len__(self) -> int:
        return len(self.tasks)

    def __getitem__(self, index: int) -> Task:
        return self.tasks[index]


def load_tasks(config: TasksConfig) -> TaskSet:
    """Load or generate the configured tasks. Raises ConfigError if there are none or an id is repeated."""
    taskset: TaskSet = registry.resolve_section("tasks", config)(config)
    if not taskset.tasks:
        raise ConfigError(f"tasks: the {config.type} task set is empty; check its settings")
    for task_id, count in Counter(task.task_id for task in taskset.tasks).items():
        if count > 1:
            raise ConfigError(
                f"tasks: two tasks in the {config.type} task set have the id {task_id!r}; use unique ids"
            )
    return taskset


def jsonl_tasks(config: JsonlTasksConfig) -> TaskSet:
    tasks: list[Task] = []
    for number, record in read_json_lines(config.path, limit=config.limit):
        if config.id_field is None:
            tasks.append(Task(f"line-{number}", record))
        elif config.id_field in record:
            tasks.append(Task(str(record[config.id_field]), record))
        else:
            raise ConfigError(
                f"tasks.id_field: {config.path}, line {number}: the task has no field {config.id_field!r}"
            )
    return TaskSet(tasks)


def python_tasks(config: PythonTasksConfig) -> TaskSet:
    """Return one task for each dict that the function returns, with its ``task_id`` or index as the id."""
    result: object = registry.load_object(config.function)(**config.args)
    if not isinstance(result, Iterable):
        raise ConfigError(
            f"tasks.function: {config.function} must return an iterable of dicts, not {type(result).__name__}"
        )
    tasks: list[Task] = []
    for number, data in enumerate(cast(Iterable[object], result)):
        if not isinstance(data, dict):
            raise ConfigError(
                f"tasks.function: {config.function}: item {number} must be a dict, not {type(data).__name__}"
            )
        record = cast(Json, data)
        tasks.append(Task(str(record.get("task_id", number)), record))
    return TaskSet(tasks)


def read_json_lines(path: Path, *, start: int = 0, limit: int | None = None) -> Iterator[tuple[int, Json]]:
    """Yield up to ``limit`` objects from a file with one JSON object per line, after skipping ``start``
    objects. Each object comes with its line number, starting at 1. A file named `*.gz` is decompressed."""
    stop = None if limit is None else start + limit
    open_file = gzip.open if path.suffix == ".gz" else open
    try:
        with open_file(path, "rb") as file:
            lines = ((number, line) for number, line in enumerate(file, start=1) if line.strip())
            for number, line in islice(lines, start, stop):
                yield number, _parse_object(line, f"{path}, line {number}")
    except (OSError, EOFError, zlib.error) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise ConfigError(f"tasks: cannot read {path}: {reason}") from error


def _parse_object(line: bytes, location: str) -> Json:
    try:
        data = msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{location}: the line is not valid JSON: {error}") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{location}: a task must be a JSON object, not {type(data).__name__}")
    return cast(Json, data)


def to_json(record: Json) -> Json:
    """Return the record with values such as dates or sets converted to JSON types."""
    return msgspec.json.decode(msgspec.json.encode(record, enc_hook=str))


def import_package(module: str, task_type: str, install: str = INSTALL_COMMAND) -> Any:
    """Import a module. Raises ConfigError with the command ``install`` if a package is missing."""
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        raise _make_missing_package_error(error.name or module, task_type, install) from error


def find_package_folder(module: str, task_type: str, install: str = INSTALL_COMMAND) -> Path:
    """Return the folder of a package without importing it. Raises ConfigError if the package is missing."""
    spec = find_spec(module)
    if spec is None or not spec.submodule_search_locations:
        raise _make_missing_package_error(module, task_type, install)
    return Path(spec.submodule_search_locations[0])


def _make_missing_package_error(module: str, task_type: str, install: str) -> ConfigError:
    return ConfigError(f"tasks.type: {task_type} requires the package {module}; install it with: {install}")
