"""Runs the tests of an answer inside the sandbox, and reports in one line that begins with a key.

The key is gone before the answer's code runs, so that a printed line is no report.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
import types
from pathlib import Path
from typing import Any


def main(file: str) -> None:
    key = _take("key")
    tests: list[str] = json.loads(_take("tests.json"))
    report = os.dup(1)
    names = _load(file)
    passed = total = 0
    for number, test in enumerate(tests):
        done, of = _run(test, f"test {number + 1}", names)
        passed += done
        total += of
    sys.stdout.flush()
    os.write(report, f"\n{key} {json.dumps({'passed': passed, 'total': total})}\n".encode())
    os._exit(0)


def _take(name: str) -> str:
    path = Path(name)
    text = path.read_text(encoding="utf-8")
    path.unlink()
    return text


def _load(file: str) -> dict[str, Any] | None:
    """The answer's names; None where it does not even run."""
    module = types.ModuleType(Path(file).stem)
    sys.modules[module.__name__] = module
    source = Path(file).read_text(encoding="utf-8")
    return (
        module.__dict__ if _survives(lambda: exec(compile(source, file, "exec"), module.__dict__)) else None
    )


def _run(test: str, name: str, names: dict[str, Any] | None) -> tuple[int, int]:
    """How many passed, of how many: the functions ``test_*`` that the text defines, or itself."""
    if names is None:
        return 0, 1
    scope = {**names, "__name__": "tests"}
    if not _survives(lambda: exec(compile(test, name, "exec"), scope)):
        return 0, 1
    functions = [
        scope[word]
        for word in scope
        if word.startswith("test") and word not in names and callable(scope[word])
    ]
    if not functions:
        return 1, 1
    return sum(_survives(function) for function in functions), len(functions)


def _survives(step: Any) -> bool:
    try:
        step()
    except BaseException:  # noqa: BLE001 - an answer that raises SystemExit has failed, too
        traceback.print_exc(limit=-1)
        return False
    return True


if __name__ == "__main__":
    main(sys.argv[1])
