"""The evaluator, which loads adapters into the local engine in fp32 and runs the held-out tasks greedily."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from pathlib import Path

from gateway_parts.processes import MeasurementError

from instar.config import LocalEngineConfig
from instar.engines.local.engine import LocalEngine
from instar.models import resolve_model
from instar.record.base import Renderer
from instar.rollout.tasks import load_tasks
from instar.types import Artifact, Policy, SamplingParams, Task
from learning_parts.episodes import EpisodeRunner, SampledTokens
from learning_parts.results import RunFolder, Score
from learning_parts.tasks import LearningTask

CONCURRENCY = 64


class Evaluator:
    """Evaluates adapters on the held-out tasks of one task. Use it as an async context manager."""

    def __init__(self, task: LearningTask) -> None:
        config = task.make_config()
        assert config.eval is not None
        self._task = task
        self._renderer = Renderer.load(resolve_model(config.model.name), config.model)
        self._taskset = load_tasks(config.eval.tasks)
        # The contenders train in different precisions, and fp32 favours none of them.
        self.model_config = config.model.model_copy(update={"dtype": "fp32"})
        self._engine = LocalEngine(self.model_config, LocalEngineConfig())
        self._episodes = EpisodeRunner(config, self._taskset, self._renderer, self._generate)
        self._slots = asyncio.Semaphore(CONCURRENCY)
        self._version = 0

    async def __aenter__(self) -> Evaluator:
        await self._episodes.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._episodes.close()
        await self._engine.close()

    async def evaluate(self, adapter: Path | None, items: int) -> Score:
        """Return the score in the first ``items`` held-out tasks. Without an adapter, use the base model."""
        self._version += 1
        artifact = Artifact("adapter", str(adapter)) if adapter else Artifact("base")
        await self._engine.load(Policy("bench", self._version, artifact))
        rewards = await asyncio.gather(*map(self._run, self._taskset.tasks[:items]))
        return Score(self._task.compute_score(rewards), len(rewards))

    async def _run(self, task: Task) -> float:
        async with self._slots:
            return (await self._episodes.run(task)).reward

    async def _generate(self, prompt_ids: list[int], max_tokens: int) -> SampledTokens:
        params = SamplingParams(
            max_tokens=max_tokens,
            temperature=0.0,
            stop_token_ids=self._renderer.stop_token_ids,
            logprobs=False,
        )
        chunks = self._engine.generate(prompt_ids, params)
        return SampledTokens([token_id async for chunk in chunks for token_id in chunk.token_ids])


def evaluate_run(
    task: LearningTask,
    folder: RunFolder,
    steps: Collection[int],
    items: int,
    label: str,
    log: Callable[[str], None],
) -> None:
    """Evaluate those of the checkpoints that have no score with ``items`` held-out tasks yet, and save the
    scores. Step 0 is the untrained model. The log shows ``label``. Raises MeasurementError if an adapter is
    missing."""
    scores = folder.read_scores()
    adapters: dict[int, Path | None] = {0: None}
    adapters |= {c.step: folder.path / c.adapter for c in folder.read_checkpoints()}
    missing = {
        step: adapters[step] for step in sorted(steps) if step not in scores or scores[step].items < items
    }
    for step, adapter in missing.items():
        if adapter is not None and not adapter.is_dir():
            raise MeasurementError(
                f"{label}: the adapter of step {step} is missing; remove the folder {folder.path} to repeat "
                "the run"
            )
    if missing:
        log(f"{label}: evaluating {len(missing)} checkpoints")
        asyncio.run(_evaluate_missing(task, folder, missing, items, log))


async def _evaluate_missing(
    task: LearningTask,
    folder: RunFolder,
    adapters: dict[int, Path | None],
    items: int,
    log: Callable[[str], None],
) -> None:
    async with Evaluator(task) as evaluator:
        for step, adapter in adapters.items():
            score = await evaluator.evaluate(adapter, items)
            folder.save_score(step, score)
            log(f"  step {step}: {score.score:.3f} on {score.items} held-out tasks")
