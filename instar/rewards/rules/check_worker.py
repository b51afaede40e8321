"""A worker process that checks answers. It can be killed, because checking some expressions takes forever.
Some libraries even evaluate the answer, so the process sandboxes itself first if the machine supports that.

The process runs as a script with the name of a check and the check's arguments as JSON. It writes ``ready``,
then answers each line of JSON with one line of JSON.
"""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import sys
from collections.abc import Callable
from typing import Any

from instar.rewards.rules.self_sandbox import can_sandbox_self, sandbox_self

MAX_MEMORY = 4 * 2**30
MAX_TEXT_CHARS = 500
"""The maximum number of characters of a text in a result, because a library may quote all of its input."""

Check = Callable[[dict[str, Any]], dict[str, Any]]


def create_math_check() -> Check:
    import logging

    from math_verify import LatexExtractionConfig, parse, verify

    logging.getLogger("math_verify").setLevel(logging.CRITICAL)

    def parse_expected(text: str) -> list[Any]:
        is_bare = "$" not in text and "\\boxed" not in text and "\\(" not in text and "\\[" not in text
        as_latex = parse(f"${text}$", [LatexExtractionConfig()], parsing_timeout=0) if is_bare else []
        return as_latex or parse(text, parsing_timeout=0)

    def check(request: dict[str, Any]) -> dict[str, Any]:
        answer = parse(request["answer"].replace("\N{MINUS SIGN}", "-"), parsing_timeout=0)
        if not answer:
            return {"ok": False, "reason": "there is no mathematical answer in the final text"}
        for text in request["expected"]:
            expected = parse_expected(text)
            if not expected:
                return {"error": f"math-verify cannot parse the expected answer {text!r:.100}"}
            if verify(expected, answer, timeout_seconds=0):
                return {"ok": True, "answer": str(answer[-1])}
        return {"ok": False, "answer": str(answer[-1])}

    return check


def create_json_schema_check() -> Check:
    import jsonschema
    from jsonschema.validators import validator_for

    def check(request: dict[str, Any]) -> dict[str, Any]:
        schema = request["schema"]
        validator = validator_for(schema, default=jsonschema.Draft202012Validator)
        try:
            validator.check_schema(schema)
        except jsonschema.SchemaError as error:
            return {"error": f"the schema is not a JSON schema: {error.message}"}
        try:
            value = json.loads(request["answer"])
        except ValueError as error:
            return {"ok": False, "reason": f"the answer is not JSON: {error}"}
        except RecursionError:
            return {"ok": False, "reason": "the answer is nested too deeply"}
        for error in validator(schema).iter_errors(value):
            return {"ok": False, "reason": f"{error.json_path}: {error.message}"}
        return {"ok": True}

    return check


def create_regex_check() -> Check:
    def check(request: dict[str, Any]) -> dict[str, Any]:
        try:
            pattern = re.compile(request["pattern"], re.IGNORECASE if request["ignore_case"] else 0)
        except re.error as error:
            return {"error": f"{request['pattern']!r:.200} is not a regular expression: {error}"}
        return {"ok": getattr(pattern, request["how"])(request["answer"]) is not None}

    return check


def create_reasoning_gym_check(parts: list[dict[str, Any]], seed: int) -> Check:
    import reasoning_gym

    datasets: list[Any] = [
        reasoning_gym.create_dataset(part["dataset"], size=part["size"], seed=seed, **part["args"])
        for part in parts
    ]

    def check(request: dict[str, Any]) -> dict[str, Any]:
        dataset = datasets[request["part"]]
        value = float(dataset.score_answer(request["answer"], entry=dataset[request["index"]]))
        return {"ok": value > 0, "value": value}

    return check


CHECKS: dict[str, Callable[..., Check]] = {
    "math": create_math_check,
    "json_schema": create_json_schema_check,
    "regex": create_regex_check,
    "reasoning_gym": create_reasoning_gym_check,
}


def main() -> None:
    output = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # a library may print

    def write(**message: Any) -> None:
        output.write(json.dumps(message) + "\n")
        output.flush()

    try:
        check = CHECKS[sys.argv[1]](**json.loads(sys.argv[2]))
    except ModuleNotFoundError as error:
        write(missing=error.name)
        return
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY, MAX_MEMORY))
    if sandboxed := can_sandbox_self():
        sandbox_self()
    write(ready=True, sandboxed=sandboxed)
    for line in sys.stdin:
        request = json.loads(line)
        # If the parent process is gone, only this timer stops a check that hangs.
        signal.setitimer(signal.ITIMER_REAL, request["seconds"] + 5)
        try:
            result = check(request)
        except Exception as error:  # noqa: BLE001 - libraries raise anything for unparseable answers
            result = {"ok": False, "reason": f"{type(error).__name__}: {error}"}
        signal.setitimer(signal.ITIMER_REAL, 0)
        write(
            **{key: text[:MAX_TEXT_CHARS] if isinstance(text, str) else text for key, text in result.items()}
        )


if __name__ == "__main__":
    main()
