"""Measure code style: sizes, docstring fragments, vague names, wide constructors, broad excepts, prints,
patched classes, and the number of files that a chat call executes (``hops``).

    python tools/style.py [--json] [--list] [PATH ...]

Without PATH, measures ``instar/`` and ``tests/`` and fails if a limit is exceeded. With PATH, only reports on
those files. ``--list`` prints each finding. Exceptions are listed in ``tools/style_allow.txt``, one per line
with a reason.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hops import count_hops

ROOT = Path(__file__).resolve().parent.parent
ALLOW_LIST = ROOT / "tools" / "style_allow.txt"
MAX_EXCEPTIONS = 10

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
MAX_CONSTRUCTOR_PARAMETERS = 7
FRAGMENT = re.compile(r"(Of|What|Whether|Whose|Whatever|As|Its|Theirs)\b")
VAGUE_NAMES = {"found", "given", "asked", "told", "wanted", "said", "there", "whole", "once"}

LIMITS = {
    # To add more lines, raise this limit and give the reason in the commit message.
    "lines": 72_600,
    "files_over_400": 0,
    "functions_over_60": 0,
    "fragments": 0,
    "odd_names": 60,
    "wide_constructors": 0,
    "broad_excepts": 0,
    "prints": 0,
    "monkeypatches": 0,
    "hops": 35,
}


@dataclass(frozen=True, slots=True)
class Finding:
    metric: str
    location: str
    detail: str

    @property
    def key(self) -> str:
        """The finding without its line number, as it is written in the allow-list."""
        return f"{self.metric} {self.location.rsplit(':', 1)[0]} {self.detail}"


def measure_source(path: Path) -> Iterator[Finding]:
    """Yield the findings in a source file."""
    name = path.relative_to(ROOT).as_posix()
    text = path.read_text()
    lines = text.splitlines()
    if len(lines) > MAX_FILE_LINES:
        yield Finding("files_over_400", f"{name}:1", f"{len(lines)} lines")
    tree = ast.parse(text)
    for node in ast.walk(tree):
        location = f"{name}:{getattr(node, 'lineno', 1)}"
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                if (size := (node.end_lineno or node.lineno) - node.lineno + 1) > MAX_FUNCTION_LINES:
                    yield Finding("functions_over_60", location, f"{node.name} ({size} lines)")
                if node.name == "__init__" and _count_parameters(node) > MAX_CONSTRUCTOR_PARAMETERS:
                    yield Finding("wide_constructors", location, f"{_count_parameters(node)} parameters")
            case ast.Name(id=identifier, ctx=ast.Store()) if identifier in VAGUE_NAMES:
                yield Finding("odd_names", location, identifier)
            case ast.Expr(value=ast.Constant(value=str() as docstring)) if FRAGMENT.match(docstring.strip()):
                yield Finding("fragments", location, docstring.strip().splitlines()[0][:90])
            case ast.ExceptHandler() if _is_broad(node) and not _is_explained(node, lines):
                yield Finding("broad_excepts", location, "no comment explains which errors are tolerated")
            case ast.Call(func=ast.Name(id="print")) if not name.startswith(("instar/cli/", "instar/demo/")):
                yield Finding("prints", location, "print outside the CLI")
            case _:
                pass


def _count_parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    arguments = function.args
    return len(arguments.posonlyargs) + len(arguments.args) + len(arguments.kwonlyargs) - 1


def _is_broad(handler: ast.ExceptHandler) -> bool:
    return handler.type is None or getattr(handler.type, "id", "") in ("Exception", "BaseException")


def _is_explained(handler: ast.ExceptHandler, lines: list[str]) -> bool:
    """True if the handler's line or an adjacent line has a comment other than ``noqa``."""
    nearby = lines[handler.lineno - 2 : handler.lineno + 1]
    return any(re.search(r"#\s*(?!noqa: \w+\s*$)\S", line) for line in nearby)


def measure_test(path: Path) -> Iterator[Finding]:
    """Yield the places in a test file that replace an attribute of Instar's code."""
    name = path.relative_to(ROOT).as_posix()
    tree = ast.parse(path.read_text())
    instar_names = _find_instar_imports(tree)
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Attribute(attr="setattr"), args=[target, *_]) if (
                _get_root_name(target) in instar_names
            ):
                yield Finding("monkeypatches", f"{name}:{node.lineno}", ast.unparse(target))
            case ast.Call(func=ast.Attribute(attr="setattr"), args=[ast.Constant(value=str() as target), *_]):
                if target.startswith("instar."):
                    yield Finding("monkeypatches", f"{name}:{node.lineno}", target)
            case _:
                pass


def _find_instar_imports(tree: ast.Module) -> set[str]:
    """Return the names under which the module imports parts of Instar."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "instar":
            names |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            names |= {
                alias.asname or "instar" for alias in node.names if alias.name.split(".")[0] == "instar"
            }
    return names


def _get_root_name(node: ast.expr) -> str:
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def read_allow_list() -> dict[str, str]:
    """Return the allowed findings, each with its reason. Exit with an error if there are too many."""
    if not ALLOW_LIST.exists():
        return {}
    rows = [line for line in ALLOW_LIST.read_text().splitlines() if line.strip() and not line.startswith("#")]
    allowed = dict(row.split(" -- ", 1) for row in rows)
    if len(allowed) > MAX_EXCEPTIONS:
        sys.exit(f"{ALLOW_LIST.name} has {len(allowed)} exceptions; at most {MAX_EXCEPTIONS} are allowed")
    return allowed


def list_python_files(paths: list[Path]) -> Iterator[Path]:
    for path in paths:
        yield from sorted(path.rglob("*.py")) if path.is_dir() else [path]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("paths", nargs="*", type=Path, metavar="PATH")
    parser.add_argument("--json", action="store_true", help="print the metrics as a JSON object")
    parser.add_argument("--list", action="store_true", help="print each finding")
    arguments = parser.parse_args()
    paths = [path.resolve() for path in arguments.paths] or [ROOT / "instar", ROOT / "tests"]
    allowed = read_allow_list()
    metrics = dict.fromkeys(LIMITS, 0)
    findings: list[Finding] = []
    for path in list_python_files(paths):
        if path.is_relative_to(ROOT / "tests"):
            findings += measure_test(path)
        else:
            findings += measure_source(path)
            metrics["lines"] += len(path.read_text().splitlines())
    if not arguments.paths:
        metrics["hops"] = count_hops()
    findings = [finding for finding in findings if finding.key not in allowed]
    for finding in findings:
        metrics[finding.metric] += 1
    failures = [metric for metric, limit in LIMITS.items() if metrics[metric] > limit]
    if arguments.list or (failures and not arguments.paths and not arguments.json):
        for finding in findings:
            print(f"{finding.location}: {finding.metric}: {finding.detail}")
    if arguments.json:
        print(json.dumps(metrics))
    else:
        for metric, value in metrics.items():
            print(f"{metric:20} {value:>7,}   limit {LIMITS[metric]:,}")
    if failures and not arguments.paths:
        sys.exit(f"Style limits exceeded: {', '.join(failures)}")


if __name__ == "__main__":
    main()
