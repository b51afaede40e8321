"""Checks answers in a process of its own, which can be killed: a hard expression may take for ever. Some
libraries even evaluate it, so the process shuts itself in first, where the machine lets it.

Run as a script with the name of a check, and JSON of what that is made with. It says ``ready``, then answers
one line of JSON with another.
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

MEMORY = 4 * 2**30
SHOWN = 500
"""Most characters of a text in an answer: a library may quote all that it was given."""


def math_check() -> Callable[[dict[str, Any]], dict[str, Any]]:
    import logging

    from math_verify import LatexExtractionConfig, parse, verify

    logging.getLogger("math_verify").setLevel(logging.CRITICAL)

    def right(text: str) -> list[Any]:
        bare = "$" not in text and "\\boxed" not in text and "\\(" not in text and "\\[" not in text
        as_latex = parse(f"${text}$", [LatexExtractionConfig()], parsing_timeout=0) if bare else []
        return as_latex or parse(text, parsing_timeout=0)

    def check(asked: dict[str, Any]) -> dict[str, Any]:
        answer = parse(asked["answer"].replace("\u2212", "-"), parsing_timeout=0)  # the typographer's minus
        if not answer:
            return {"ok": False, "reason": "there is no mathematical answer in the final text"}
        for text in asked["expected"]:
            gold = right(text)
            if not gold:
                return {"error": f"the expected answer {text!r:.100} is nothing that math-verify understands"}
            if verify(gold, answer, timeout_seconds=0):
                return {"ok": True, "answer": str(answer[-1])}
        return {"ok": False, "answer": str(answer[-1])}

    return check


def json_schema_check() -> Callable[[dict[str, Any]], dict[str, Any]]:
    import jsonschema
    from jsonschema.validators import validator_for

    def check(asked: dict[str, Any]) -> dict[str, Any]:
        schema = asked["schema"]
        kind = validator_for(schema, default=jsonschema.Draft202012Validator)
        try:
            kind.check_schema(schema)
        except jsonschema.SchemaError as error:
            return {"error": f"that is no JSON schema: {error.message}"}
        try:
            value = json.loads(asked["answer"])
        except ValueError as error:
            return {"ok": False, "reason": f"the answer is not JSON: {error}"}
        except RecursionError:
            return {"ok": False, "reason": "the answer is nested too deeply"}
        for error in kind(schema).iter_errors(value):
            return {"ok": False, "reason": f"{error.json_path}: {error.message}"}
        return {"ok": True}

    return check


def regex_check() -> Callable[[dict[str, Any]], dict[str, Any]]:
    def check(asked: dict[str, Any]) -> dict[str, Any]:
        try:
            pattern = re.compile(asked["pattern"], re.IGNORECASE if asked["ignore_case"] else 0)
        except re.error as error:
            return {"error": f"{asked['pattern']!r:.200} is no regular expression: {error}"}
        found = getattr(pattern, asked["how"])(asked["answer"])
        return {"ok": found is not None}

    return check


def reasoning_gym_check(parts: list[dict[str, Any]], seed: int) -> Callable[[dict[str, Any]], dict[str, Any]]:
    import reasoning_gym

    datasets: list[Any] = [
        reasoning_gym.create_dataset(part["dataset"], size=part["size"], seed=seed, **part["args"])
        for part in parts
    ]

    def check(asked: dict[str, Any]) -> dict[str, Any]:
        dataset = datasets[asked["part"]]
        value = float(dataset.score_answer(asked["answer"], entry=dataset[asked["index"]]))
        return {"ok": value > 0, "value": value}

    return check


CHECKS: dict[str, Callable[..., Callable[[dict[str, Any]], dict[str, Any]]]] = {
    "math": math_check,
    "json_schema": json_schema_check,
    "regex": regex_check,
    "reasoning_gym": reasoning_gym_check,
}


def main() -> None:
    out = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what a library prints is no answer

    def say(**what: Any) -> None:
        print(json.dumps(what), file=out, flush=True)

    try:
        check = CHECKS[sys.argv[1]](**json.loads(sys.argv[2]))
    except ModuleNotFoundError as error:
        say(missing=error.name)
        return
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    if confined := can_sandbox_self():
        sandbox_self()
    say(ready=True, confined=confined)
    for line in sys.stdin:
        asked = json.loads(line)
        # Should whoever asked be gone, nobody else would end it.
        signal.setitimer(signal.ITIMER_REAL, asked["seconds"] + 5)
        try:
            answer = check(asked)
        except Exception as error:  # noqa: BLE001 - what a library raises on an answer it does not understand
            answer = {"ok": False, "reason": f"{type(error).__name__}: {error}"}
        signal.setitimer(signal.ITIMER_REAL, 0)
        shown = {name: word[:SHOWN] if isinstance(word, str) else word for name, word in answer.items()}
        say(**shown)


if __name__ == "__main__":
    main()
