"""Tasks from the Berkeley Function-Calling Leaderboard (BFCL), with data and checker from `bfcl-eval`.

The package pins an old version of numpy and requires thirty vendor SDKs. The data and the checker need
neither, so the package is installed without its dependencies.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import lru_cache
from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import msgspec

from instar.config import BfclTasksConfig
from instar.rewards.base import Transcript
from instar.rollout.tasks import TaskSet, find_package_folder, import_package, read_json_lines
from instar.types import Json, Task

INSTALL_COMMAND = "pip install --no-deps bfcl-eval"
MODEL_NAME = "instar"
JSON_TYPES = {"dict": "object", "float": "number", "tuple": "array", "any": "string"}
"""Maps the dataset's type names that are not JSON types to JSON types."""


def bfcl_tasks(config: BfclTasksConfig) -> TaskSet:
    """Return tasks with `messages` and `tools` in the chat API's format, and fields for the checker."""
    folder = find_package_folder("bfcl_eval", "bfcl", INSTALL_COMMAND) / "data"
    file_name = f"BFCL_v4_{config.category}.json"
    answer_records = read_json_lines(folder / "possible_answer" / file_name)
    answers = {record["id"]: record["ground_truth"] for _, record in answer_records}
    records = read_json_lines(folder / file_name, start=config.start, limit=config.limit)
    return TaskSet([_make_task(record, answers[record["id"]], config.category) for _, record in records])


def score(task: Json, transcript: Transcript) -> float:
    """Return 1 if BFCL's checker accepts the tool calls of the last reply, else 0."""
    final = transcript.final
    tool_calls = final.get("tool_calls", []) if final else []
    try:
        calls = [{call["name"]: msgspec.json.decode(call["arguments"])} for call in tool_calls]
    except msgspec.DecodeError:
        return 0.0
    if not all(isinstance(arguments, dict) for call in calls for arguments in call.values()):
        return 0.0
    return float(check_calls(task, calls))


def check_calls(task: Json, calls: list[Json]) -> bool:
    """Return True if the calls solve the task. Each call maps a tool's name to the arguments."""
    check, language = _load_checker()
    result = check(task["functions"], calls, task["ground_truth"], language, task["category"], MODEL_NAME)
    return bool(result["valid"])


def _make_task(record: Json, ground_truth: list[Json], category: str) -> Task:
    functions: list[Json] = record["function"]
    data = {
        "messages": record["question"][0],
        "tools": [_convert_tool(function) for function in functions],
        "functions": functions,
        "ground_truth": ground_truth,
        "category": category,
    }
    return Task(record["id"], data)


def _convert_tool(function: Json) -> Json:
    definition = {
        # Tool names must not contain dots; the checker expects underscores instead.
        "name": function["name"].replace(".", "_"),
        "description": function["description"],
        "parameters": _convert_schema(function["parameters"]),
    }
    return {"type": "function", "function": definition}


def _convert_schema(value: Any) -> Any:
    match value:
        case dict():
            source = cast(Json, value)
            schema = {key: _convert_schema(inner) for key, inner in source.items()}
            # The value of a property called `type` is a schema, not a string.
            if isinstance(type_name := source.get("type"), str):
                schema["type"] = JSON_TYPES.get(type_name, type_name)
            return schema
        case list():
            return [_convert_schema(inner) for inner in cast(list[Any], value)]
        case _:
            return value


@lru_cache(1)
def _load_checker() -> tuple[Callable[..., Json], Any]:
    """Return the package's checker and its enum value for Python."""
    # The checker imports the SDKs of all vendors to read a single flag, which is True if the tool names of a
    # model contain underscores instead of dots. A stub replaces the module with the flag during the import.
    import_package("bfcl_eval", "bfcl", INSTALL_COMMAND)
    name = "bfcl_eval.constants.model_config"
    stub = ModuleType(name)
    vars(stub)["MODEL_CONFIG_MAPPING"] = {MODEL_NAME: SimpleNamespace(underscore_to_dot=True)}
    previous = sys.modules.get(name)
    sys.modules[name] = stub
    try:
        checker = import_module("bfcl_eval.eval_checker.ast_eval.ast_checker")
    finally:
        if previous is None:
            del sys.modules[name]
        else:
            sys.modules[name] = previous
    return checker.ast_checker, import_module("bfcl_eval.constants.enums").Language.PYTHON
