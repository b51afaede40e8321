"""The files of a run: its checkpoints with the time and samples that they took, and their held-out scores.

Each run has a folder ``<task>/<contender>-<seed>`` with `checkpoints.jsonl`, which exists only if the run has
finished, `settings.json`, `commit` (the project's git commit), `unused_share` (see `Curve`), `scores.json`,
the adapters and the logs. The curves are drawn from these small files alone, so results can be kept without
the adapters.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gateway_parts.processes import MeasurementError

Json = dict[str, Any]
CURVE_FRACTIONS = (0.06, 0.12, 0.2, 0.3, 0.5, 0.75)
"""The checkpoints between start and end that are evaluated, as fractions of the run's time. They are dense at
the start, because the time to a score is compared."""


@dataclass(frozen=True)
class Checkpoint:
    step: int
    seconds: float
    samples: int
    """The number of finished episodes that the contender used so far, including those without signal."""
    tokens: int
    """The number of sampled tokens in these episodes."""
    adapter: str
    """The path of the PEFT adapter, relative to the run's folder."""


@dataclass(frozen=True)
class Score:
    score: float
    items: int
    """The number of held-out tasks."""


class RunFolder:
    def __init__(self, path: Path) -> None:
        self.path = path
        self._checkpoints_path = path / "checkpoints.jsonl"
        self._scores_path = path / "scores.json"
        self._settings_path = path / "settings.json"
        self._unused_share_path = path / "unused_share"

    @property
    def is_finished(self) -> bool:
        return self._checkpoints_path.is_file()

    def prepare(self, settings: Json) -> None:
        """Create the folder with the run's settings and the commit, and remove the files of an interrupted
        run."""
        shutil.rmtree(self.path, ignore_errors=True)
        self.path.mkdir(parents=True)
        self._settings_path.write_text(json.dumps(settings))
        command = ["git", "rev-parse", "HEAD"]
        with (self.path / "commit").open("w") as output:
            subprocess.run(command, cwd=Path(__file__).parent, stdout=output, stderr=subprocess.DEVNULL)

    def check_settings(self, settings: Json) -> None:
        """Raise MeasurementError if the run was started with other settings."""
        differences = list_differences(json.loads(self._settings_path.read_text()), settings)
        if differences:
            raise MeasurementError(
                f"{self.path} has a run with other settings ({', '.join(differences)}); remove the folder or "
                "choose a different --out"
            )

    def save_checkpoints(self, checkpoints: list[Checkpoint], unused_share: float) -> None:
        self._unused_share_path.write_text(f"{unused_share}\n")
        lines = [json.dumps(asdict(checkpoint)) + "\n" for checkpoint in checkpoints]
        _write_atomically(self._checkpoints_path, "".join(lines))

    def read_checkpoints(self) -> list[Checkpoint]:
        return read_checkpoints(self._checkpoints_path) if self.is_finished else []

    def read_unused_share(self) -> float:
        return float(self._unused_share_path.read_text())

    def read_scores(self) -> dict[int, Score]:
        """Return the scores by step. Step 0 is the untrained model."""
        if not self._scores_path.is_file():
            return {}
        return {
            int(step): Score(**score) for step, score in json.loads(self._scores_path.read_text()).items()
        }

    def save_score(self, step: int, score: Score) -> None:
        self.path.mkdir(parents=True, exist_ok=True)
        scores = {**self.read_scores(), step: score}
        _write_atomically(
            self._scores_path, json.dumps({step: asdict(scores[step]) for step in sorted(scores)})
        )

    def remove_other_adapters(self, steps: set[int]) -> None:
        """Remove the adapters of all checkpoints except those of ``steps``, because they take gigabytes."""
        for checkpoint in self.read_checkpoints():
            if checkpoint.step not in steps:
                shutil.rmtree(self.path / checkpoint.adapter, ignore_errors=True)


def read_checkpoints(path: Path) -> list[Checkpoint]:
    return [Checkpoint(**json.loads(line)) for line in path.read_text().splitlines()]


def find_last_within(checkpoints: list[Checkpoint], samples: int) -> Checkpoint | None:
    """Return the last checkpoint that used at most this many samples, or None if there is none."""
    return next((c for c in reversed(checkpoints) if c.samples <= samples), None)


def select_steps(checkpoints: list[Checkpoint], compared_samples: Iterable[int]) -> set[int]:
    """Return the steps to evaluate: the last one, those at ``compared_samples``, and those that show the
    curve's shape."""
    if not checkpoints:
        return set()
    final = checkpoints[-1]
    selected = [find_last_within(checkpoints, samples) for samples in compared_samples]
    for fraction in CURVE_FRACTIONS:
        selected += [c for c in checkpoints if c.seconds <= fraction * final.seconds][-1:]
    return {final.step, *(checkpoint.step for checkpoint in selected if checkpoint is not None)}


def list_differences(first: Any, second: Any, path: str = "") -> list[str]:
    """Return the paths at which two JSON values differ, with both values."""
    if isinstance(first, dict) and isinstance(second, dict):
        return [
            difference
            for name in sorted(first.keys() | second.keys())
            for difference in list_differences(first.get(name), second.get(name), f"{path}.{name}")
        ]
    return [] if first == second else [f"{path.removeprefix('.')}: {first!r} → {second!r}"]


def _write_atomically(path: Path, text: str) -> None:
    partial = path.with_suffix(".partial")
    partial.write_text(text)
    partial.replace(path)
