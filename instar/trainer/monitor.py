"""Metrics of a run: one JSON object per line in metrics.jsonl, and optionally TensorBoard."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import orjson

from instar.types import Json


class Monitor:
    """Writes the metrics of a run. A step that is trained again after a crash has two records, and readers
    use the last one (`read_steps`). ``tensorboard=None`` writes TensorBoard files if TensorBoard is
    installed."""

    def __init__(self, run_dir: Path, *, tensorboard: bool | None = False) -> None:
        run_dir.mkdir(parents=True, exist_ok=True)
        self._file = (run_dir / "metrics.jsonl").open("a", encoding="utf-8")
        use_board = _has_tensorboard() if tensorboard is None else tensorboard
        self._board = _open_board(run_dir / "tensorboard") if use_board else None

    def record(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
        # orjson writes NaN as null; json.dumps would write an invalid NaN.
        record = orjson.dumps({"kind": kind, "step": step, "time": time.time(), **values})
        self._file.write(record.decode() + "\n")
        self._file.flush()
        if self._board is not None:
            for name, value in _flatten_numbers(kind, values):
                self._board.add_scalar(name, value, step)
            self._board.flush()

    def close(self) -> None:
        self._file.close()
        if self._board is not None:
            self._board.close()


def _flatten_numbers(prefix: str, values: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield every number in nested values with its path, such as each bin of a histogram."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flatten_numbers(f"{prefix}/{name}", cast(Mapping[str, Any], value))
        elif isinstance(value, int | float):
            yield f"{prefix}/{name}", value


def _has_tensorboard() -> bool:
    return all(find_spec(package) is not None for package in ("torch", "tensorboard"))


def _open_board(folder: Path) -> Any:
    from torch.utils.tensorboard.writer import SummaryWriter

    return SummaryWriter(str(folder))


def read_metrics(run_dir: Path) -> Iterator[Json]:
    """Yield every record in order, except a last line that a crash cut short."""
    path = run_dir / "metrics.jsonl"
    if not path.is_file():
        return
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            yield json.loads(line)
        except json.JSONDecodeError:
            continue


def read_warnings(run_dir: Path) -> list[str]:
    """Return the distinct warnings about settings that the run could not follow exactly."""
    warnings = (record["text"] for record in read_metrics(run_dir) if record["kind"] == "warning")
    return list(dict.fromkeys(warnings))


def read_steps(run_dir: Path) -> list[Json]:
    """Return the last record of each training step, ordered by step."""
    latest = {record["step"]: record for record in read_metrics(run_dir) if record["kind"] == "train"}
    return [latest[step] for step in sorted(latest)]
