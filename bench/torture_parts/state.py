"""The file from which an interrupted campaign continues."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
SOURCES = (ROOT / "instar", ROOT / "bench" / "torture_parts", ROOT / "tests" / "torture")


class StateFile:
    """The results of a campaign so far, one JSON object per line. Without a path, they are not stored.

    Results from a different version of the source code are discarded.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self.rows: list[dict[str, Any]] = []
        if path is None:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = path.read_text().splitlines() if path.exists() else []
        header = json.dumps({"sources": hash_sources()})
        if lines[:1] == [header]:
            # The last line is incomplete if the campaign was killed while writing it.
            self.rows = [json.loads(line) for line in lines[1:] if line.endswith("}")]
        path.write_text("".join(f"{line}\n" for line in (header, *map(json.dumps, self.rows))))

    def append(self, row: dict[str, Any]) -> None:
        self.rows.append(row)
        if self._path is not None:
            with self._path.open("a") as file:
                file.write(json.dumps(row) + "\n")


def hash_sources() -> str:
    """Return a hash of the source code of the package, the simulation and the torture tests."""
    digest = hashlib.blake2b(digest_size=8)
    for folder in SOURCES:
        for path in sorted(folder.rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()
