"""Find unused code in ``instar/`` with vulture.

Names that appear in a string (registry entries, module paths in YAML files) count as used, and so do names
that match a pattern in ``tools/dead_code_allow.txt``, which has one pattern per line, with a reason. Exits
with 1 if any other name is unused.
"""

from __future__ import annotations

import ast
import fnmatch
import re
import sys
from pathlib import Path

from vulture import Vulture

ROOT = Path(__file__).resolve().parent.parent
ALLOW_LIST = ROOT / "tools" / "dead_code_allow.txt"
SOURCES = ("instar", "bench", "tools", "recipes", "tests")
DECORATORS = ["@app.*", "@*_validator*", "@functools.*", "@pytest.*"]


def find_words_in_strings() -> set[str]:
    """Return all words in the strings of Python files and in YAML and TOML files."""
    words: set[str] = set()
    for path in (path for folder in SOURCES for path in (ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                words.update(re.findall(r"\w+", node.value))
    for path in [*ROOT.glob("*/*.yaml"), *ROOT.glob("instar/*/*.yaml"), ROOT / "pyproject.toml"]:
        words.update(re.findall(r"\w+", path.read_text()))
    return words


def read_allowed() -> list[str]:
    """Return the patterns in the allow-list, without their reasons."""
    rows = [line for line in ALLOW_LIST.read_text().splitlines() if line.strip() and not line.startswith("#")]
    return [row.partition(" -- ")[0].strip() for row in rows]


def main() -> None:
    vulture = Vulture(ignore_decorators=DECORATORS)
    vulture.scavenge([str(ROOT / folder) for folder in SOURCES])
    words, allowed = find_words_in_strings(), read_allowed()
    unused: list[str] = []
    for item in vulture.get_unused_code(min_confidence=60):
        path = Path(item.filename).resolve().relative_to(ROOT).as_posix()
        key = f"{path}:{item.name}"
        is_allowed = item.name in words or any(fnmatch.fnmatch(key, pattern) for pattern in allowed)
        if path.startswith("instar/") and not is_allowed:
            unused.append(f"{path}:{item.first_lineno}: unused {item.typ} {item.name}")
    print("\n".join([*unused, f"unused names: {len(unused)}"]))
    sys.exit(bool(unused))


if __name__ == "__main__":
    main()
