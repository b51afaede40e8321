"""An engine that samples at a training service: what every service's sampler shares.

A service returns whole replies: each comes as one chunk, stamped with the version it was begun under.
"""

from __future__ import annotations

import asyncio
import json
import math
from abc import abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np

from instar.clouds.errors import CloudError
from instar.config import CloudConfig, CloudEngineConfig, ModelConfig
from instar.engines.base import Engine, EngineInfo, EngineStatus, Prompt
from instar.engines.checks import check_request, check_score_request, to_ids
from instar.engines.stopping import StopRule
from instar.errors import EngineError, EngineUnavailable
from instar.models import load_tokenizer, resolve_tokenizer
from instar.types import FinishReason, Floats, Ids, Policy, SamplingParams, TokenChunk

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class CloudReply:
    """A reply as a service returned it."""

    token_ids: list[int]
    logprobs: list[float]
    """NaN where the service did not say."""
    finish_reason: FinishReason


@dataclass(frozen=True, slots=True)
class ServedPolicy:
    """A policy with the client that samples from it."""

    version: int
    path: str | None
    """At the service; None: the base model."""
    client: Any


class CloudEngine(Engine):
    """What a service's SDK does is in four methods, which raise CloudFailure."""

    def __init__(self, model: ModelConfig, section: CloudConfig, config: CloudEngineConfig) -> None:
        folder = resolve_tokenizer(model.name)
        self._tokenizer: Any = load_tokenizer(folder)
        self._eos = _eos_ids(folder, self._tokenizer)
        self.model = model
        self.section = section
        self._info = EngineInfo(
            kind=section.type,
            model=model.name,
            vocab_size=len(self._tokenizer),
            max_context=model.max_context,
            artifacts=("base", "remote"),
            streams=False,
            versions_per_token=False,
            scores=True,
        )
        self._slots = asyncio.Semaphore(config.max_in_flight)
        self._changing = asyncio.Lock()
        self._served: ServedPolicy | None = None
        self._wanted = (0, cast("str | None", None))
        """Version and path that `_served` is, or will be."""
        self._running = self._waiting = self._generated = self._prompted = 0
        self._closed = False

    # --- what a service provides -----------------------------------------------------------------

    @abstractmethod
    async def open_sampler(self, path: str | None) -> Any:
        """A client that samples from what was published at ``path``, or from the base model. Connects where
        there is no connection."""

    @abstractmethod
    async def sample(self, client: Any, prompt: Ids, params: SamplingParams) -> CloudReply:
        """One reply. ``params.stop`` and ``stop_token_ids`` spare tokens where the service heeds them; the
        reply is cut here all the same."""

    @abstractmethod
    async def score(self, client: Any, token_ids: Ids) -> Floats:
        """The logprob of every token given those before; NaN at index 0."""

    @abstractmethod
    async def disconnect(self) -> None:
        """Let go of the connection, if there is one. Does not raise."""

    # --- the engine ------------------------------------------------------------------------------

    @property
    def info(self) -> EngineInfo:
        return self._info

    @property
    def eos_ids(self) -> frozenset[int]:
        return self._eos

    def decode_token(self, token_id: int) -> str:
        return self._tokenizer.decode([token_id], skip_special_tokens=False)

    async def generate(self, prompt_ids: Prompt, params: SamplingParams) -> AsyncGenerator[TokenChunk, None]:
        prompt = to_ids(prompt_ids)
        check_request(self._info, prompt, params)
        async with self._slot():
            chunk = await self._reply(prompt, params)
            self._prompted += len(prompt)
            self._generated += len(chunk.token_ids)
            yield chunk

    async def logprobs(self, token_ids: Prompt) -> Floats:
        ids = to_ids(token_ids)
        check_score_request(self._info, ids)
        if len(ids) < 2:
            return np.full(len(ids), np.nan, np.float32)
        async with self._slot():
            return await self._try(lambda served: self.score(served.client, ids))

    @asynccontextmanager
    async def _slot(self) -> AsyncGenerator[None]:
        """One of the requests that may be at the service at once."""
        self._waiting += 1
        try:
            await self._slots.acquire()
        finally:
            self._waiting -= 1
        self._running += 1
        try:
            yield
        except CloudError as failure:
            raise failure.to_engine_error() from None
        finally:
            self._running -= 1
            self._slots.release()

    async def _reply(self, prompt: Ids, params: SamplingParams) -> TokenChunk:
        room = self._info.max_context - len(prompt)

        async def ask(served: ServedPolicy) -> tuple[CloudReply, ServedPolicy]:
            return await self.sample(served.client, prompt, params), served

        sampled, served = await self._try(ask)
        ids, reason, stop = self._cut(sampled, params, room)
        logprobs = sampled.logprobs[: len(ids)]
        behavior = None
        if params.modifies_distribution:
            logprobs, behavior = await self._logprobs_of_truncated(served, prompt, ids, params)
        return TokenChunk(
            token_ids=ids,
            logprobs=logprobs,
            versions=[served.version] * len(ids),
            behavior_logprobs=behavior,
            finish_reason=reason,
            stop=stop,
        )

    def _cut(
        self, sampled: CloudReply, params: SamplingParams, room: int
    ) -> tuple[list[int], FinishReason, str | None]:
        """The reply up to where it ends by our own rules: services differ in what they stop at."""
        rule = StopRule(params, room, self._eos, self._tokenizer)
        for position, token in enumerate(sampled.token_ids):
            reason, stop = rule.push(token)
            if reason is not None:
                return sampled.token_ids[: position + 1], reason, stop
        return sampled.token_ids, sampled.finish_reason, None

    async def _logprobs_of_truncated(
        self, served: ServedPolicy, prompt: Ids, ids: list[int], params: SamplingParams
    ) -> tuple[list[float], list[float]]:
        """(of the full softmax, of the distribution sampled from). A service does not say which one its
        numbers are of, so they are not used. A greedy reply's are known by scoring it, and can be trained
        on; of other ones the second are not to be had, so the first are not asked for."""
        if params.temperature > 0 or not ids or not params.score:
            return [math.nan] * len(ids), [math.nan] * len(ids)
        whole = np.concatenate([prompt, np.asarray(ids, np.int32)])
        scores = await self.score(served.client, whole)
        return scores[len(prompt) :].tolist(), [0.0] * len(ids)

    async def _try(self, work: Callable[[ServedPolicy], Awaitable[T]]) -> T:
        """With the policy served now; once more, on a new connection, where the service lost it."""
        served = await self._current()
        try:
            return await work(served)
        except CloudError as failure:
            if failure.kind != "lost":
                raise
        return await work(await self._current(instead_of=served))

    async def _current(self, instead_of: ServedPolicy | None = None) -> ServedPolicy:
        async with self._changing:
            if self._closed:
                raise EngineUnavailable("the engine is closed")
            if self._served is not None and self._served is not instead_of:
                return self._served
            if instead_of is not None:
                await self.disconnect()
            version, path = self._wanted
            self._served = ServedPolicy(version, path, await self.open_sampler(path))
            return self._served

    async def load(self, policy: Policy) -> None:
        """Requests in flight end under the version they began with."""
        if policy.artifact.kind not in self._info.artifacts:
            raise EngineError(
                f"the {self._info.kind} engine takes base and remote, not {policy.artifact.kind}"
            )
        path = None if policy.artifact.kind == "base" else policy.artifact.path
        async with self._changing:
            if self._closed:
                raise EngineUnavailable("the engine is closed")
            try:
                client = await self._opened(path)
            except CloudError as failure:
                raise failure.to_engine_error() from None
            self._wanted = (policy.version, path)
            self._served = ServedPolicy(policy.version, path, client)

    async def _opened(self, path: str | None) -> Any:
        try:
            return await self.open_sampler(path)
        except CloudError as failure:
            if failure.kind != "lost":
                raise
        await self.disconnect()
        return await self.open_sampler(path)

    async def status(self) -> EngineStatus:
        return EngineStatus(
            version=self._wanted[0],
            running=self._running,
            waiting=self._waiting,
            generated_tokens=self._generated,
            prompt_tokens=self._prompted,
        )

    async def close(self) -> None:
        async with self._changing:
            if not self._closed:
                self._closed = True
                self._served = None
                await self.disconnect()


def _eos_ids(folder: Path, tokenizer: Any) -> frozenset[int]:
    """Ids that end a reply, wherever the model's files name them."""
    found = set[int]() if tokenizer.eos_token_id is None else {int(tokenizer.eos_token_id)}
    for name in ("config.json", "generation_config.json"):
        if (folder / name).is_file():
            ids = json.loads((folder / name).read_text()).get("eos_token_id")
            found.update([ids] if isinstance(ids, int) else ids or [])
    return frozenset(found)
