"""GSM8K: grade school math problems. A task has a `question`, a worked `answer` that ends in a line such as
`#### 72`, and `final`, the number in that line."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from instar.config import Gsm8kTasksConfig
from instar.errors import ConfigError
from instar.rollout.tasks import TaskSet, read_json_lines
from instar.rollout.tasksets.word_problems import NUMBER, make_problems, parse_number
from instar.types import Json, Task

ANSWER_MARKER = "####"


def gsm8k_tasks(config: Gsm8kTasksConfig) -> TaskSet:
    return TaskSet(list(islice(_iterate_tasks(config), config.limit)), score)


def score(task: Task, text: str) -> float:
    """Return 1 if the final number in the text equals the task's final number, else 0."""
    number = find_final_number(text)
    return float(number is not None and abs(number - float(task.data["final"])) < 1e-6)


def find_final_number(text: str) -> float | None:
    """Return the first number after the last `####`, or else the last number in the text, if any."""
    before, marker, after = text.rpartition(ANSWER_MARKER)
    if marker and (match := NUMBER.search(after)):
        return parse_number(match[0])
    numbers = NUMBER.findall(before or after)
    return parse_number(numbers[-1]) if numbers else None


def _iterate_tasks(config: Gsm8kTasksConfig) -> Iterator[Task]:
    if config.synthetic is not None:
        settings = config.synthetic
        for index, problem in enumerate(make_problems(settings.split, settings.size, settings.seed)):
            yield Task(f"{settings.split}-{index}", _add_final(problem, f"synthetic problem {index}"))
    elif config.path is not None:
        for number, record in read_json_lines(config.path):
            yield Task(f"line-{number}", _add_final(record, f"{config.path}, line {number}"))


def _add_final(record: Json, location: str) -> Json:
    answer = record.get("answer")
    if not isinstance(answer, str) or not isinstance(record.get("question"), str):
        raise ConfigError(f"{location}: 'question' and 'answer' must both be strings")
    _, marker, after = answer.rpartition(ANSWER_MARKER)
    if not marker or not NUMBER.fullmatch(final := after.strip()):
        raise ConfigError(
            f"{location}: the answer must end in '{ANSWER_MARKER}' and a number, for example '#### 72'"
        )
    return {**record, "final": final.replace(",", "")}
