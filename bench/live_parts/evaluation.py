"""Evaluates policy versions on held-out questions, with an engine of the bench in this process."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from instar.config import LocalEngineConfig, ModelConfig
from instar.engines.local.engine import LocalEngine
from instar.models import resolve_model
from instar.record.base import Renderer
from instar.types import Artifact, Policy, SamplingParams
from live_parts.users import PREFERENCES

MAX_REPLY_TOKENS = 32
CONCURRENCY = 32


class Evaluator:
    """Samples replies with the users' sampling settings, and applies their rule."""

    def __init__(self, model: ModelConfig) -> None:
        self._model = model
        self._renderer = Renderer.load(resolve_model(model.name), model)
        self._slots = asyncio.Semaphore(CONCURRENCY)

    async def evaluate(self, agent: str, artifact: Artifact, questions: Sequence[str]) -> list[bool]:
        """Return for each question whether the reply satisfies the agent's user. The seed of a question is
        always the same."""
        engine = LocalEngine(
            self._model, LocalEngineConfig(max_batch=CONCURRENCY, kv_tokens=CONCURRENCY * 160, threads=1)
        )
        try:
            await engine.load(Policy("bench", 1, artifact))
            return await asyncio.gather(
                *(self._ask(engine, agent, question, seed) for seed, question in enumerate(questions))
            )
        finally:
            await engine.close()

    async def _ask(self, engine: LocalEngine, agent: str, question: str, seed: int) -> bool:
        preference = PREFERENCES[agent]
        prompt = self._renderer.render(preference.make_messages(question))
        params = SamplingParams(
            max_tokens=MAX_REPLY_TOKENS, seed=seed, stop_token_ids=self._renderer.stop_token_ids
        )
        async with self._slots:
            chunks = engine.generate(prompt, params)
            ids = [token_id async for chunk in chunks for token_id in chunk.token_ids]
        return preference.is_satisfied(str(self._renderer.parse(ids)["content"] or ""))
