"""Tasks from reasoning-gym: a single dataset, or several mixed by weight."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

from instar.config import ReasoningGymTasksConfig
from instar.config.tasks import ReasoningGymPart
from instar.errors import ConfigError
from instar.rewards.base import WorkerTextScorer
from instar.rollout.tasks import TaskSet, import_package, to_json
from instar.types import Json, Task


def reasoning_gym_tasks(config: ReasoningGymTasksConfig) -> TaskSet:
    """Return the tasks. The answer in a reply is the text after the last ``Answer:``, or the whole text."""
    parts = config.parts or [ReasoningGymPart(dataset=config.dataset or "", args=config.args)]
    order = interleave_by_weight([part.weight for part in parts], config.size)
    sizes = [max(1, order.count(index)) for index in range(len(parts))]
    datasets = [_create_dataset(part, size, config.seed) for part, size in zip(parts, sizes, strict=True)]
    names = [part.dataset for part in parts]
    if len({*names}) < len(names):  # a dataset may be listed twice with different settings
        names = [f"{index}-{name}" for index, name in enumerate(names)]
    origins: dict[str, tuple[int, int]] = {}  # the part and the index in its dataset, by task id
    tasks: list[Task] = []
    indices = [count() for _ in parts]
    for part_index in order:
        index = next(indices[part_index])
        task = Task(f"{names[part_index]}-{index}", to_json(datasets[part_index][index]))
        origins[task.task_id] = (part_index, index)
        tasks.append(task)
    sized_parts = zip(parts, sizes, strict=True)
    check_parts = [{"dataset": part.dataset, "size": size, "args": part.args} for part, size in sized_parts]
    check_args = {"parts": check_parts, "seed": config.seed}
    return TaskSet(tasks, ReasoningGymScorer(config.sandbox, check_args, datasets, origins))


@dataclass(eq=False, repr=False)
class ReasoningGymScorer(WorkerTextScorer):
    """A scorer that calls the verifier of the task's dataset."""

    check_name = "reasoning_gym"
    requires_sandbox: bool
    check_args: Json
    datasets: Sequence[Any]
    origins: Mapping[str, tuple[int, int]]

    def build_request(self, task: Task, text: str) -> Json:
        part, index = self.origins[task.task_id]
        return {"part": part, "index": index, "answer": text.rsplit("Answer:", 1)[-1].strip()}

    def __call__(self, task: Task, text: str) -> float:
        request = self.build_request(task, text)
        dataset = self.datasets[request["part"]]
        return float(dataset.score_answer(request["answer"], entry=dataset[request["index"]]))


def interleave_by_weight(weights: Sequence[float], size: int) -> list[int]:
    """Return ``size`` indices of ``weights`` such that every prefix is nearly proportional to the weights."""
    total = sum(weights)
    counts = [0] * len(weights)
    order: list[int] = []
    for length in range(1, size + 1):
        index = max(range(len(weights)), key=lambda i: weights[i] / total * length - counts[i])
        counts[index] += 1
        order.append(index)
    return order


def _create_dataset(part: ReasoningGymPart, size: int, seed: int) -> Any:
    gym = import_package("reasoning_gym", "reasoning_gym", "pip install reasoning-gym")
    try:
        return gym.create_dataset(part.dataset, size=size, seed=seed, **part.args)
    except (ValueError, TypeError, AssertionError) as error:
        raise ConfigError(f"tasks: reasoning-gym cannot create {part.dataset!r}: {error}") from error
