"""Evaluates policy versions on held-out questions and the sanity set, with an engine in this process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from statistics import fmean

from instar.config import LocalEngineConfig, ModelConfig
from instar.engines.local.engine import LocalEngine
from instar.live.sampling import ReplySampler
from instar.live.sanity import MAX_TOKENS
from instar.live.sets import SanitySet
from instar.models import resolve_model
from instar.record.base import Renderer
from instar.types import Artifact, Policy, SamplingParams
from live_parts.users import PREFERENCES

MAX_REPLY_TOKENS = 32
CONCURRENCY = 32
THREADS = 1
POLICY_ID = "bench"


class Evaluator:
    def __init__(self, model: ModelConfig) -> None:
        self._model = model
        self._renderer = Renderer.load(resolve_model(model.name), model)
        self._slots = asyncio.Semaphore(CONCURRENCY)

    async def evaluate(self, agent: str, artifact: Artifact, questions: Sequence[str]) -> list[bool]:
        """Return for each question whether the reply satisfies the agent's user. Replies are sampled with the
        users' settings, and the seed of a question is always the same."""
        async with self._load(artifact) as engine:
            return await asyncio.gather(
                *(self._ask(engine, agent, question, seed) for seed, question in enumerate(questions))
            )

    async def evaluate_sanity(self, artifact: Artifact, limit: int | None) -> float:
        """Return the share of the sanity set's items, or of the first ``limit``, that the version passes."""
        policy = Policy(POLICY_ID, 1, artifact)
        async with self._load(artifact) as engine:
            items = SanitySet(ReplySampler(engine, self._renderer, MAX_TOKENS))
            keys = (await items.list_keys([]))[:limit]

            async def score(key: str) -> float:
                async with self._slots:
                    return await items.score(key, policy) or 0.0

            return fmean(await asyncio.gather(*map(score, keys)))

    @asynccontextmanager
    async def _load(self, artifact: Artifact) -> AsyncGenerator[LocalEngine]:
        kv_tokens = max(CONCURRENCY * 192, self._model.context_length)
        section = LocalEngineConfig(max_batch=CONCURRENCY, kv_tokens=kv_tokens, threads=THREADS)
        engine = LocalEngine(self._model, section)
        try:
            await engine.load(Policy(POLICY_ID, 1, artifact))
            yield engine
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
