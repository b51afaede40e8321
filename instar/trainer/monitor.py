"""Write and read a run's metrics: JSON lines in metrics.jsonl, and optionally TensorBoard files."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import orjson

from instar.config.run import make_folder_name
from instar.types import Json, Step


class Monitor:
    """Writes a run's metrics. A step that is trained again after a crash is recorded again; `read_steps`
    returns its last record. If ``tensorboard`` is None, TensorBoard is used if it is installed. If ``agent``
    is set, the records are those of the agent's policy and have its name."""

    def __init__(self, run_dir: Path, *, tensorboard: bool | None = False, agent: str | None = None) -> None:
        run_dir.mkdir(parents=True, exist_ok=True)
        self._run_dir = run_dir
        self._agent = agent
        self._file = (run_dir / "metrics.jsonl").open("a", encoding="utf-8")
        if tensorboard is None:
            tensorboard = all(find_spec(package) is not None for package in ("torch", "tensorboard"))
        self._tensorboard: Any = None
        if tensorboard:
            from torch.utils.tensorboard.writer import SummaryWriter

            folder = run_dir / "tensorboard"
            if agent is not None:
                folder /= make_folder_name(agent)
            self._tensorboard = SummaryWriter(str(folder))

    def record(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
        # orjson writes NaN as null, while json.dumps would write NaN, which is not valid JSON.
        label = {} if self._agent is None else {"agent": self._agent}
        line = orjson.dumps({"kind": kind, **label, "step": step, "time": time.time(), **values})
        self._file.write(line.decode() + "\n")
        self._file.flush()
        if self._tensorboard is not None:
            for name, value in _flatten_numbers(kind, values):
                self._tensorboard.add_scalar(name, value, step)
            self._tensorboard.flush()

    def record_missing(self, steps: Sequence[Step]) -> None:
        """Record the stored metrics of steps that a crash kept from being recorded."""
        records = read_steps(self._run_dir)
        recorded = {record["step"] for record in records if record.get("agent") == self._agent}
        for row in steps:
            if row.step not in recorded and row.metrics:
                self.record("train", row.step, {**row.metrics, "version": row.version})

    def close(self) -> None:
        self._file.close()
        if self._tensorboard is not None:
            self._tensorboard.close()


def _flatten_numbers(prefix: str, values: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield the path and value of each number in nested values, such as the bins of a histogram."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flatten_numbers(f"{prefix}/{name}", cast(Mapping[str, Any], value))
        elif isinstance(value, int | float):
            yield f"{prefix}/{name}", value


class MetricsReader:
    """Reads only the records that were written since the last read."""

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / "metrics.jsonl"
        self._offset = 0

    def read_new(self) -> list[Json]:
        """Return the new records in order. Skip incomplete lines, which a crash may leave behind."""
        if not self._path.is_file():
            return []
        with self._path.open("rb") as file:
            file.seek(self._offset)
            content = file.read()
        # The last line may still be incomplete. It is read again next time.
        lines = content[: content.rfind(b"\n") + 1]
        self._offset += len(lines)
        records: list[Json] = []
        for line in filter(None, lines.decode("utf-8").split("\n")):
            with contextlib.suppress(json.JSONDecodeError):
                records.append(json.loads(line))
        return records


def read_metrics(run_dir: Path) -> list[Json]:
    """Return all records in order. Skip incomplete lines, also a last line without a newline."""
    return MetricsReader(run_dir).read_new()


def read_warnings(run_dir: Path) -> list[str]:
    """Return the distinct warnings of the run, oldest first."""
    records = [record for record in read_metrics(run_dir) if record["kind"] == "warning"]
    prefixes = [f"{record['agent']}: " if "agent" in record else "" for record in records]
    return list(dict.fromkeys(p + record["text"] for p, record in zip(prefixes, records, strict=True)))


def read_steps(run_dir: Path) -> list[Json]:
    """Return the last record of each training step, ordered by agent and step."""
    records = [record for record in read_metrics(run_dir) if record["kind"] == "train"]
    latest = {(record.get("agent", ""), record["step"]): record for record in records}
    return [latest[key] for key in sorted(latest)]
