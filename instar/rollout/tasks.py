"""Task sets from JSON lines or from a Python function. The built-in task sets are in `tasksets/`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import cast

from instar import registry
from instar.config import JsonlTasksConfig, PythonTasksConfig, TasksConfig
from instar.errors import ConfigError
from instar.rollout.tasksets.jsonl import read_json_lines
from instar.types import Json, Task

TextScorer = Callable[[Task, str], float]
"""Returns the score of a session's final text."""


@dataclass(frozen=True, slots=True)
class TaskSet:
    tasks: Sequence[Task]
    scorer: TextScorer | None = None
    """The task set's own scorer, if it has one."""

    def __len__(self) -> int:
        return len(self.tasks)

    def __getitem__(self, index: int) -> Task:
        return self.tasks[index]


def load_tasks(config: TasksConfig) -> TaskSet:
    """Load or generate the tasks and return them. Raises ConfigError for no tasks or a repeated id."""
    taskset: TaskSet = registry.resolve_section("tasks", config)(config)
    if not taskset.tasks:
        raise ConfigError(f"tasks ({config.type}): the task set is empty")
    task_ids: set[str] = set()
    for task in taskset.tasks:
        if task.task_id in task_ids:
            raise ConfigError(f"tasks ({config.type}): two tasks have the id {task.task_id!r}")
        task_ids.add(task.task_id)
    return taskset


def jsonl_tasks(config: JsonlTasksConfig) -> TaskSet:
    lines = islice(read_json_lines(config.path), config.limit)
    return TaskSet([_jsonl_task(config, number, record) for number, record in lines])


def _jsonl_task(config: JsonlTasksConfig, number: int, record: Json) -> Task:
    if config.id_field is None:
        return Task(f"line-{number}", record)
    if config.id_field not in record:
        raise ConfigError(f"{config.path}, line {number}: no field {config.id_field!r} (tasks.id_field)")
    return Task(str(record[config.id_field]), record)


def python_tasks(config: PythonTasksConfig) -> TaskSet:
    """Return one task per dict of the function. A task's id is the field ``task_id``, or else its index."""
    result: object = registry.load_object(config.function)(**config.args)
    if not isinstance(result, Iterable):
        raise ConfigError(
            f"tasks.function: {config.function} returned {type(result).__name__}, not an iterable"
        )
    tasks: list[Task] = []
    for number, data in enumerate(cast(Iterable[object], result)):
        if not isinstance(data, dict):
            raise ConfigError(
                f"tasks.function: item {number} of {config.function} is {type(data).__name__}, not a dict"
            )
        record = cast(Json, data)
        tasks.append(Task(str(record.get("task_id", number)), record))
    return TaskSet(tasks)
