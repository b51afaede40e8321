from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter

from instar.config import TasksConfig
from instar.errors import ConfigError
from instar.rollout.tasks import TaskSet, load_tasks

MODULE = "tests.unit.rollout.test_tasks"


def load(**fields: Any) -> TaskSet:
    return load_tasks(TypeAdapter[TasksConfig](TasksConfig).validate_python(fields))


def make_tasks(count: int) -> list[dict[str, int]]:
    return [{"n": number} for number in range(count)]


def make_duplicate_ids() -> list[dict[str, str]]:
    return [{"task_id": "a"}, {"task_id": "a"}]


def make_strings() -> list[str]:
    return ["question"]


def test_jsonl_tasks_are_loaded_with_ids(tmp_path: Path) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_text('{"id": 7, "q": "a"}\n\n{"id": 8, "q": "b"}\n')
    assert [task.task_id for task in load(type="jsonl", path=path).tasks] == ["line-1", "line-3"]
    assert [task.task_id for task in load(type="jsonl", path=path, id_field="id").tasks] == ["7", "8"]
    assert load(type="jsonl", path=path)[1].data == {"id": 8, "q": "b"}
    assert len(load(type="jsonl", path=path, limit=1)) == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"id": 1}\n{invalid}\n', r"tasks\.jsonl, line 2: the line is not valid JSON"),
        ('{"id": 1}\n[1]\n', r"tasks\.jsonl, line 2: a task must be a JSON object"),
        ('{"id": 1}\n{"x": 1}\n', r"tasks\.jsonl, line 2: the task has no field 'id'"),
        ('{"id": 1}\n{"id": 1}\n', r"two tasks .* have the id '1'"),
        ("", r"the jsonl task set is empty"),
    ],
)
def test_invalid_jsonl_is_rejected(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        load(type="jsonl", path=path, id_field="id")


def test_missing_jsonl_file_raises(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*missing\.jsonl: No such file"):
        load(type="jsonl", path=tmp_path / "missing.jsonl")


def test_python_tasks_are_created_from_dicts() -> None:
    tasks = load(type="python", function=f"{MODULE}:make_tasks", args={"count": 3})
    assert [(task.task_id, task.data) for task in tasks.tasks][2] == ("2", {"n": 2})
    with pytest.raises(ConfigError, match=r"two tasks .* have the id 'a'"):
        load(type="python", function=f"{MODULE}:make_duplicate_ids")
    with pytest.raises(ConfigError, match=r"item 0 must be a dict, not str"):
        load(type="python", function=f"{MODULE}:make_strings")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_reasoning_gym_scores_its_own_answers() -> None:
    tasks = load(type="reasoning_gym", dataset="basic_arithmetic", size=5, seed=1)
    assert len(tasks) == 5
    assert tasks.scorer is not None
    for task in tasks.tasks:
        assert tasks.scorer(task, task.data["answer"]) == 1.0
        assert tasks.scorer(task, f"I think so. Answer: {task.data['answer']}") == 1.0
        assert tasks.scorer(task, "no idea") < 1.0
    with pytest.raises(ConfigError, match=r"tasks: .*unknown_dataset"):
        load(type="reasoning_gym", dataset="unknown_dataset")
