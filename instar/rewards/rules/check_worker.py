"""A worker process that checks answers. It runs as a script whose arguments are the name of a check and the
check's arguments as JSON. It sandboxes itself if the machine supports it, because some libraries evaluate the
answer. It writes ``ready`` or the ``missing`` package, then one line of JSON for each line that it reads."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from instar.rewards.sandbox import seccomp
from instar.rewards.sandbox.landlock import DEVICES, MIN_ABI, get_landlock_abi
from instar.rewards.sandbox.launcher import PR_SET_NO_NEW_PRIVS, apply_landlock, apply_seccomp, prctl

SYSTEM_PATHS = ("/lib", "/lib64", "/usr/lib", "/usr/share/zoneinfo", "/etc/ld.so.cache", "/etc/localtime")
MAX_MEMORY_BYTES = 4 * 2**30
MAX_TEXT_CHARS = 500
"""The maximum length of a string in a result. Libraries may quote their entire input."""

Check = Callable[[dict[str, Any]], dict[str, Any]]


def create_math_check() -> Check:
    import logging

    from math_verify import LatexExtractionConfig, parse, verify

    logging.getLogger("math_verify").setLevel(logging.CRITICAL)

    def check(request: dict[str, Any]) -> dict[str, Any]:
        answer = parse(request["answer"], parsing_timeout=0)
        if not answer:
            return {"ok": False, "reason": "there is no mathematical answer in the final text"}
        for text in request["expected"]:
            is_bare = not any(delimiter in text for delimiter in ("$", "\\boxed", "\\(", "\\["))
            as_latex = parse(f"${text}$", [LatexExtractionConfig()], parsing_timeout=0) if is_bare else []
            expected = as_latex or parse(text, parsing_timeout=0)
            if not expected:
                return {"error": f"math-verify cannot parse the expected answer {text!r:.100}"}
            if verify(expected, answer, timeout_seconds=0):
                return {"ok": True, "answer": str(answer[-1])}
        return {"ok": False, "answer": str(answer[-1])}

    return check


def _reject_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(dict(pairs)) < len(pairs):  # JSON parsers differ in which of the values they keep
        duplicate, _ = Counter(key for key, _ in pairs).most_common(1)[0]
        raise ValueError(f"duplicate key {duplicate!r}")
    return dict(pairs)


def _reject_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not allowed in JSON")


def create_json_schema_check() -> Check:
    import jsonschema
    from jsonschema.validators import validator_for

    def check(request: dict[str, Any]) -> dict[str, Any]:
        schema = request["schema"]
        validator = validator_for(schema, default=jsonschema.Draft202012Validator)
        try:
            validator.check_schema(schema)
        except jsonschema.SchemaError as error:
            return {"error": f"the expected schema is not a valid JSON schema: {error.message}"}
        try:
            value = json.loads(
                request["answer"], object_pairs_hook=_reject_duplicates, parse_constant=_reject_constant
            )
        except ValueError as error:
            return {"ok": False, "reason": f"the answer is not valid JSON: {error}"}
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
            return {"error": f"{request['pattern']!r:.200} is not a valid regular expression: {error}"}
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


def sandbox_self() -> None:
    """Permanently stop this process from writing files, starting processes, opening sockets and sending
    signals. It can still read Python's files and system libraries, and use open file descriptors."""
    paths = [*SYSTEM_PATHS, sys.prefix, sys.base_prefix, *sys.path]
    readable = sorted({str(Path(path).resolve()) for path in paths if path and Path(path).exists()})
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    apply_landlock(get_landlock_abi(), readable, [], list(DEVICES), allow_execute=False)
    apply_seccomp(
        seccomp.build_filter((), shares_host_processes=True, allow_signals=False, deny_new_processes=True)
    )


def main() -> None:
    output = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # libraries may print

    def write(**message: Any) -> None:
        output.write(json.dumps(message) + "\n")
        output.flush()

    try:
        check = CHECKS[sys.argv[1]](**json.loads(sys.argv[2]))
    except ModuleNotFoundError as error:
        write(missing=error.name)
        return
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    if sandboxed := get_landlock_abi() >= MIN_ABI and seccomp.is_supported():
        sandbox_self()
    write(ready=True, sandboxed=sandboxed)
    for line in sys.stdin:
        request = json.loads(line)
        # At either limit, a signal ends this process. The limit on CPU time does not depend on how busy the
        # machine is; the other one stops a hanging check if the parent process has died.
        signal.setitimer(signal.ITIMER_PROF, request["cpu_seconds"])
        signal.setitimer(signal.ITIMER_REAL, request["wall_seconds"] + 5)
        try:
            result = check(request)
        except Exception as error:  # noqa: BLE001 - libraries raise anything for unparseable answers
            result = {"ok": False, "reason": f"{type(error).__name__}: {error}"}
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        for key, value in result.items():
            result[key] = value[:MAX_TEXT_CHARS] if isinstance(value, str) else value
        write(**result)


if __name__ == "__main__":
    main()
