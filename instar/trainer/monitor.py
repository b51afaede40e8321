"""Metrics of a run: one JSON object per line in metrics.jsonl, and TensorBoard by choice."""

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
    """Appends records. A record of a step that is trained again after a crash stands beside the
    first one; readers take the last of each step (`read_steps`). ``tensorboard`` None means where it is
    installed."""

    def __init__(self, run_dir: Path, *, tensorboard: bool | None = False) -> None:
        run_dir.mkdir(parents=True, exist_ok=True)
        self._file = (run_dir / "metrics.jsonl").open("a", encoding="utf-8")
        wanted = _has_board() if tensorboard is None else tensorboard
        self._board = _board(run_dir / "tensorboard") if wanted else None

    def record(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
        # A figure that is not a number is null in JSON.
        record = orjson.dumps({"kind": kind, "step": step, "time": time.time(), **values})
        self._file.write(record.decode() + "\n")
        self._file.flush()
        if self._board is not None:
            for name, value in _numbers(kind, values):
                self._board.add_scalar(name, value, step)
            self._board.flush()

    def close(self) -> None:
        self._file.close()
        if self._board is not None:
            self._board.close()


def _numbers(prefix: str, values: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Every number, under its path: those of a histogram one by one."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _numbers(f"{prefix}/{name}", cast(Mapping[str, Any], value))
        elif isinstance(value, int | float):
            yield f"{prefix}/{name}", value


def _has_board() -> bool:
    return all(find_spec(package) is not None for package in ("torch", "tensorboard"))


def _board(folder: Path) -> Any:
    from torch.utils.tensorboard.writer import SummaryWriter

    return SummaryWriter(str(folder))


def read_metrics(run_dir: Path) -> Iterator[Json]:
    """Every record, in order. A last line cut short by a crash is passed over."""
    path = run_dir / "metrics.jsonl"
    if not path.is_file():
        return
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            yield json.loads(line)
        except json.JSONDecodeError:
            continue


def read_warnings(run_dir: Path) -> list[str]:
    """What the run did otherwise than its settings say, each once."""
    told = (record["text"] for record in read_metrics(run_dir) if record["kind"] == "warning")
    return list(dict.fromkeys(told))


def read_steps(run_dir: Path) -> list[Json]:
    """The last record of each training step, by step."""
    latest = {record["step"]: record for record in read_metrics(run_dir) if record["kind"] == "train"}
    return [latest[step] for step in sorted(latest)]
