"""An engine that wraps another engine and records its tokens as the ground truth for later comparisons."""

from __future__ import annotations

from array import array
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, cast

from instar.engines.base import Engine, EngineInfo, EngineStatus
from instar.types import Policy, PolicyRef, SamplingParams, TokenChunk

EmissionKey = tuple[int, bytes]


def make_emission_key(prompt_ids: Sequence[int], params: SamplingParams) -> EmissionKey:
    assert params.seed is not None
    return params.seed, array("i", prompt_ids).tobytes()


@dataclass
class Emission:
    """One reply as the engine emitted it."""

    prompt: list[int]
    params: SamplingParams
    loaded_version: int
    """The newest version that was completely loaded when the request arrived."""
    is_settled: bool
    """True if no newer version was being loaded when the request arrived."""
    ids: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    versions: list[int] = field(default_factory=list[int])
    newest_versions: list[int] = field(default_factory=list[int])
    """For each token, the newest version whose load had begun when the token was emitted."""
    is_finished: bool = False


class RecordingEngine(Engine):
    """Records an engine's replies, keyed by prompt and seed. No two requests may have the same key."""

    def __init__(self, engine: Engine) -> None:
        self.inner = engine
        self.emissions: dict[EmissionKey, Emission] = {}
        self.loading_version = self.loaded_version = 0

    @property
    def info(self) -> EngineInfo:
        return self.inner.info

    async def generate(
        self, prompt_ids: Sequence[int], params: SamplingParams, policy: PolicyRef | None = None
    ) -> AsyncIterator[TokenChunk]:
        key = make_emission_key(prompt_ids, params)
        assert key not in self.emissions
        emission = Emission(
            list(prompt_ids), params, self.loaded_version, self.loaded_version == self.loading_version
        )
        self.emissions[key] = emission
        async with aclosing(cast(Any, self.inner.generate(prompt_ids, params, policy))) as chunks:
            async for chunk in chunks:
                emission.ids += chunk.token_ids
                emission.logprobs += chunk.logprobs
                emission.versions += chunk.versions
                emission.newest_versions += [self.loading_version] * len(chunk.token_ids)
                emission.is_finished = chunk.finish_reason is not None
                yield chunk

    async def load(self, policy: Policy) -> None:
        self.loading_version = policy.version
        await self.inner.load(policy)
        self.loaded_version = policy.version

    async def status(self) -> EngineStatus:
        return await self.inner.status()

    async def close(self) -> None:
        await self.inner.close()
