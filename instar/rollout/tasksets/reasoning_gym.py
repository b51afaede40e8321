"""reasoning-gym: one of its datasets, or several mixed by weight."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from instar.config import ReasoningGymTasksConfig
from instar.config.tasks import ReasoningGymPart
from instar.errors import ConfigError
from instar.rewards.base import WorkerTextScorer
from instar.rollout.tasks import TaskSet
from instar.rollout.tasksets.optional_packages import import_package
from instar.types import Json, Task


def reasoning_gym_tasks(config: ReasoningGymTasksConfig) -> TaskSet:
    """The answer is taken from what follows the last ``Answer:`` of the text, or else is the text."""
    parts = config.parts or [ReasoningGymPart(dataset=config.dataset or "", args=config.args)]
    order = interleave_by_weight([part.weight for part in parts], config.size)
    sizes = [max(1, order.count(place)) for place in range(len(parts))]
    datasets = [_dataset(part, size, config.seed) for part, size in zip(parts, sizes, strict=True)]
    names = _names(parts)
    origins: dict[str, tuple[int, int]] = {}
    tasks: list[Task] = []
    made = [0] * len(parts)
    for place in order:
        task = Task(f"{names[place]}-{made[place]}", _plain(datasets[place][made[place]]))
        origins[task.task_id] = (place, made[place])
        tasks.append(task)
        made[place] += 1
    return TaskSet(tasks, ReasoningGymScorer(config, parts, sizes, datasets, origins))


class ReasoningGymScorer(WorkerTextScorer):
    """The dataset's own verifier."""

    check_name = "reasoning_gym"

    def __init__(
        self,
        config: ReasoningGymTasksConfig,
        parts: Sequence[ReasoningGymPart],
        sizes: Sequence[int],
        datasets: Sequence[Any],
        origins: Mapping[str, tuple[int, int]],
    ) -> None:
        self.requires_sandbox = config.sandbox
        described = [
            {"dataset": part.dataset, "size": size, "args": part.args}
            for part, size in zip(parts, sizes, strict=True)
        ]
        self.check_args = {"parts": described, "seed": config.seed}
        self._datasets = datasets
        self._origins = origins

    def build_request(self, task: Task, text: str) -> Json:
        part, index = self._origins[task.task_id]
        return {"part": part, "index": index, "answer": text.rsplit("Answer:", 1)[-1].strip()}

    def __call__(self, task: Task, text: str) -> float:
        asked = self.build_request(task, text)
        dataset = self._datasets[asked["part"]]
        return float(dataset.score_answer(asked["answer"], entry=dataset[asked["index"]]))


def interleave_by_weight(weights: Sequence[float], size: int) -> list[int]:
    """Places of the weights, such that every beginning of the list has them in proportion, as near as can
    be."""
    total = sum(weights)
    counts = [0] * len(weights)
    order: list[int] = []
    for length in range(1, size + 1):
        place = max(range(len(weights)), key=lambda at: weights[at] / total * length - counts[at])
        counts[place] += 1
        order.append(place)
    return order


def _dataset(part: ReasoningGymPart, size: int, seed: int) -> Any:
    gym = import_package("reasoning_gym", "reasoning_gym", "pip install reasoning-gym")
    try:
        return gym.create_dataset(part.dataset, size=size, seed=seed, **part.args)
    except (ValueError, TypeError, AssertionError) as error:
        raise ConfigError(f"tasks.dataset: reasoning-gym refuses {part.dataset!r}: {error}") from error


def _names(parts: Sequence[ReasoningGymPart]) -> list[str]:
    """A dataset may be there twice, with other settings."""
    names = [part.dataset for part in parts]
    return names if len({*names}) == len(names) else [f"{place}-{name}" for place, name in enumerate(names)]


def _plain(entry: Json) -> Json:
    """Metadata may hold dates, sets or dataclasses: what a task carries is JSON."""
    return msgspec.json.decode(msgspec.json.encode(entry, enc_hook=str))
