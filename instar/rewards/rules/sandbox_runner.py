"""Runs an answer's tests inside a sandbox, and reports the result in one line that starts with a secret key.
If a file descriptor is passed, the answer runs in a separate sandbox. Otherwise it runs in this process. It
cannot read the key file, which is deleted first, but could find the key in memory and forge a report."""

from __future__ import annotations

import ast
import asyncio
import inspect
import json
import os
import sys
import traceback
import types
import unittest
from collections.abc import Callable
from pathlib import Path
from typing import Any


def main(file: str, descriptor: str | None = None) -> None:
    key = _read_and_delete("key")
    tests: list[str] = json.loads(_read_and_delete("tests.json"))
    report_fd = os.dup(1)
    counts = {"passed": 0, "total": 0}
    answer: Any = None
    if descriptor is not None:
        from instar.rewards.rules.sandbox_client import Answer  # available only in this case

        answer = Answer(int(descriptor), Path(file).stem, "tests")
    names = _load_answer(file) if answer is None else answer.names
    for number, test in enumerate(tests, 1):
        passed, total = _run_test(test, f"test {number}", names, answer)
        counts["passed"] += passed
        counts["total"] += total
    if answer is not None:
        counts["lost"] = answer.peer.is_lost
    sys.stdout.flush()
    os.write(report_fd, f"\n{key} {json.dumps(counts)}\n".encode())
    os._exit(0)


def _read_and_delete(name: str) -> str:
    path = Path(name)
    text = path.read_text(encoding="utf-8")
    path.unlink()
    return text


def _load_answer(file: str) -> dict[str, Any] | None:
    module = types.ModuleType(Path(file).stem)
    sys.modules[module.__name__] = module
    source = Path(file).read_text(encoding="utf-8")
    return module.__dict__ if _try_call(_execute, source, file, module.__dict__) else None


def _execute(source: str | ast.Module, filename: str, scope: dict[str, Any]) -> None:
    # The code must not inherit the __future__ imports of this file.
    exec(compile(source, filename, "exec", dont_inherit=True), scope)


def _run_test(code: str, filename: str, names: dict[str, Any] | None, answer: Any) -> tuple[int, int]:
    """Return the number of passed tests and the total. The tests are the ``test*`` functions and TestCases
    that the code defines. Without any, the code itself is a test if it checks anything. Code that raises, or
    an answer that could not be loaded, counts as one failed test."""
    if names is None:
        return 0, 1
    source, visible = (code, names) if answer is None else answer.prepare_test(code)
    scope = {**visible, "__name__": "tests"}
    if not _try_call(_execute, source, filename, scope):
        return 0, 1
    defined: dict[str, Any] = {name: value for name, value in scope.items() if value is not visible.get(name)}
    counts = [
        _run_case(value)
        for value in defined.values()
        if isinstance(value, type) and issubclass(value, unittest.TestCase) and value.__module__ == "tests"
    ]
    counts += [
        (int(_try_call(_run_function, value)), 1)
        for name, value in defined.items()
        if name.startswith("test") and callable(value) and not isinstance(value, type)
    ]
    if not counts and any(_contains_check(statement) for statement in ast.parse(code).body):
        return 1, 1
    return sum(passed for passed, _ in counts), sum(total for _, total in counts)


def _run_function(function: Callable[[], Any]) -> None:
    returned = function()
    if inspect.iscoroutine(returned):
        asyncio.run(returned)
    elif inspect.isgenerator(returned) or inspect.isasyncgen(returned):
        raise TypeError("a test function must not be a generator")


def _contains_check(node: ast.AST) -> bool:
    """True if the node contains an assert, a raise or an expression statement outside of definitions."""
    match node:
        case ast.Assert() | ast.Raise():
            return True
        case ast.Expr():
            return not isinstance(node.value, ast.Constant)
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
            return False
        case ast.If() if "__name__" in ast.unparse(node.test):  # the module is not __main__
            return any(_contains_check(child) for child in node.orelse)
        case _:
            return any(_contains_check(child) for child in ast.iter_child_nodes(node))


class _Result(unittest.TestResult):
    passed = 0

    def addSuccess(self, test: unittest.TestCase) -> None:
        self.passed += 1


def _run_case(case: type[unittest.TestCase]) -> tuple[int, int]:
    """Return the number of passed tests and the total in a TestCase. Tests that a decorator skips or expects
    to fail do not count. A test that is skipped while it runs has failed: the answer may be the cause."""
    suite = unittest.defaultTestLoader.loadTestsFromTestCase(case)
    total = suite.countTestCases()
    result = _Result()
    if not _try_call(suite.run, result):
        return 0, total
    for _, trace in (*result.failures, *result.errors):
        sys.stderr.write(f"{trace}\n")
    skipped = [test for test, _ in result.skipped if not _has_skip_decorator(test)]
    failed: list[Any] = [
        *(test for test, _ in (*result.failures, *result.errors)),
        *result.unexpectedSuccesses,
        *skipped,
    ]
    if not all(isinstance(test, unittest.TestCase) for test in failed):  # setUpClass failed
        return 0, total
    # The attribute test_case of a failed subTest is the test that contains the subTest.
    return result.passed, result.passed + len({getattr(test, "test_case", test) for test in failed})


def _has_skip_decorator(test: unittest.TestCase) -> bool:
    method = getattr(test, getattr(test, "_testMethodName", ""), None)
    return any(getattr(owner, "__unittest_skip__", False) for owner in (test, method))


def _try_call(function: Callable[..., Any], *args: Any) -> bool:
    try:
        function(*args)
    except BaseException:  # noqa: BLE001 - an answer that raises SystemExit fails, too
        traceback.print_exc(limit=-1)
        return False
    return True


if __name__ == "__main__":
    main(*sys.argv[1:])
