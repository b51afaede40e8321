"""GSM8K: school problems whose answers are explained and end in `#### 72`.

A task has the two public fields, `question` and `answer`, and `final`, the number behind the mark.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import islice

from instar.config import Gsm8kTasksConfig
from instar.errors import ConfigError
from instar.rollout.tasks import TaskSet
from instar.rollout.tasksets.jsonl import read_json_lines
from instar.rollout.tasksets.word_problems import make_problems
from instar.types import Json, Task

MARK = "####"
NUMBER = re.compile(r"-?\d+(?:,\d{3})+(?:\.\d+)?|-?\d+(?:\.\d+)?")


def gsm8k_tasks(config: Gsm8kTasksConfig) -> TaskSet:
    return TaskSet(list(islice(_tasks(config), config.limit)), score)


def score(task: Task, text: str) -> float:
    """1 if the text ends in the task's number, else 0."""
    given = final_number(text)
    return float(given is not None and abs(given - float(task.data["final"])) < 1e-6)


def final_number(text: str) -> float | None:
    """The first number behind the last `####`, or else the last number of the text."""
    before, mark, after = text.rpartition(MARK)
    if mark and (found := NUMBER.search(after)):
        return _value(found[0])
    numbers = NUMBER.findall(before or after)
    return _value(numbers[-1]) if numbers else None


def _tasks(config: Gsm8kTasksConfig) -> Iterator[Task]:
    if config.synthetic is not None:
        made = config.synthetic
        for place, problem in enumerate(make_problems(made.split, made.size, made.seed)):
            yield Task(f"{made.split}-{place}", _with_final(problem, f"synthetic problem {place}"))
    elif config.path is not None:
        for number, record in read_json_lines(config.path):
            yield Task(f"line-{number}", _with_final(record, f"{config.path}, line {number}"))


def _with_final(record: Json, where: str) -> Json:
    match record:
        case {"question": str(), "answer": str() as answer}:
            pass
        case _:
            raise ConfigError(f"{where}: a GSM8K problem has the texts 'question' and 'answer'")
    if MARK not in answer or not NUMBER.fullmatch(final := answer.rpartition(MARK)[2].strip()):
        raise ConfigError(f"{where}: the answer does not end in '{MARK}' and a number")
    return {**record, "final": final.replace(",", "")}


def _value(number: str) -> float:
    return float(number.replace(",", ""))
