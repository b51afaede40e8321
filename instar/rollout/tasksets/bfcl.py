"""The Berkeley function-calling sets, from the data and with the checker of the package `bfcl-eval`.

The package pins an older numpy than Instar needs, and wants thirty vendors' SDKs; its data and its checker
need neither, so it is installed without what it requires.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import lru_cache
from importlib import import_module
from itertools import islice
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import msgspec

from instar.config import BfclTasksConfig
from instar.rewards.base import Transcript
from instar.rollout.tasks import TaskSet
from instar.rollout.tasksets.jsonl import read_json_lines
from instar.rollout.tasksets.optional_packages import find_package_folder, import_package
from instar.types import Json, Task

INSTALL = "pip install --no-deps bfcl-eval"
US = "instar"
JSON_TYPES = {"dict": "object", "float": "number", "tuple": "array", "any": "string"}
"""The sets write some types as Python does."""


def bfcl_tasks(config: BfclTasksConfig) -> TaskSet:
    """A task has `messages`, `tools` as the chat API takes them, and what the checker needs."""
    folder = find_package_folder("bfcl_eval", "bfcl", INSTALL) / "data"
    file = f"BFCL_v4_{config.category}.json"
    answers = {
        record["id"]: record["ground_truth"]
        for _, record in read_json_lines(folder / "possible_answer" / file)
    }
    until = None if config.limit is None else config.start + config.limit
    chosen = islice(read_json_lines(folder / file), config.start, until)
    return TaskSet([_task(record, answers[record["id"]], config.category) for _, record in chosen])


def score(task: Json, transcript: Transcript) -> float:
    """1 if the calls of the last reply are what the checker expects, else 0."""
    final = transcript.final
    made = final.get("tool_calls", []) if final else []
    try:
        calls = [{call["name"]: msgspec.json.decode(call["arguments"])} for call in made]
    except msgspec.DecodeError:
        return 0.0
    if not all(isinstance(arguments, dict) for call in calls for arguments in call.values()):
        return 0.0
    return float(check_calls(task, calls))


def check_calls(task: Json, calls: list[Json]) -> bool:
    """Whether these, each a tool's name with its arguments, are what the task asks for."""
    check, python = _checker()
    verdict = check(task["functions"], calls, task["ground_truth"], python, task["category"], US)
    return bool(verdict["valid"])


def _task(record: Json, ground_truth: list[Json], category: str) -> Task:
    functions: list[Json] = record["function"]
    return Task(
        record["id"],
        {
            "messages": record["question"][0],
            "tools": [_tool(function) for function in functions],
            "functions": functions,
            "ground_truth": ground_truth,
            "category": category,
        },
    )


def _tool(function: Json) -> Json:
    """A dot is not allowed in a tool's name; the checker knows that they become underscores."""
    described = {
        "name": function["name"].replace(".", "_"),
        "description": function["description"],
        "parameters": _schema(function["parameters"]),
    }
    return {"type": "function", "function": described}


def _schema(value: Any) -> Any:
    match value:
        case dict():
            given = cast(Json, value)
            made = {key: _schema(inner) for key, inner in given.items()}
            # A property may itself be called `type`; then it is no word but a schema.
            if isinstance(kind := given.get("type"), str):
                made["type"] = JSON_TYPES.get(kind, kind)
            return made
        case list():
            return [_schema(inner) for inner in cast(list[Any], value)]
        case _:
            return value


@lru_cache(1)
def _checker() -> tuple[Callable[..., Json], Any]:
    """The package's checker, and its word for Python.

    It imports every vendor's SDK for one flag: whether a model's tool names have underscores for dots. That
    module is stood in for while the checker is imported.
    """
    import_package("bfcl_eval", "bfcl", INSTALL)
    name = "bfcl_eval.constants.model_config"
    stand_in = ModuleType(name)
    vars(stand_in)["MODEL_CONFIG_MAPPING"] = {US: SimpleNamespace(underscore_to_dot=True)}
    absent = sys.modules.get(name)
    sys.modules[name] = stand_in
    try:
        checker = import_module("bfcl_eval.eval_checker.ast_eval.ast_checker")
    finally:
        if absent is None:
            del sys.modules[name]
        else:
            sys.modules[name] = absent
    return checker.ast_checker, import_module("bfcl_eval.constants.enums").Language.PYTHON
