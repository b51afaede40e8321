"""The progress of a long measurement, saved so that `--full` can continue after an interruption."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

CACHE = Path(__file__).resolve().parents[2] / ".cache" / "bench"


class StateFile:
    """The results of a measurement's parts, by name. Without ``keep``, nothing is read or written."""

    def __init__(self, path: Path, *, keep: bool) -> None:
        self._path = path
        self._keep = keep
        self.parts: dict[str, Any] = {}
        if keep and path.is_file():
            self.parts = json.loads(path.read_text())

    def save(self, name: str, part: Any) -> None:
        self.parts[name] = part
        if self._keep:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            temporary_path = self._path.with_suffix(".partial")
            temporary_path.write_text(json.dumps(self.parts))
            temporary_path.replace(self._path)

    def remove(self) -> None:
        """Delete the file, so that the next measurement starts over."""
        if self._keep:
            self._path.unlink(missing_ok=True)
