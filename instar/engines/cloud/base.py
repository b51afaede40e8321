"""The base class of engines that sample from a training service.

A service returns complete replies: each is one chunk, with the version that was served when it began.
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
    token_ids: list[int]
    logprobs: list[float]
    """NaN for logprobs that the service did not return."""
    finish_reason: FinishReason


@dataclass(frozen=True, slots=True)
class ServedPolicy:
    version: int
    path: str | None
    """The policy's path on the service; None for the base model."""
    client: Any


class CloudEngine(Engine):
    """The base class of engines that sample from a training service. A subclass implements four methods that
    call the service's SDK and raise CloudError."""

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
        self._policy_lock = asyncio.Lock()
        self._served: ServedPolicy | None = None
        self._target = (0, cast("str | None", None))
        """The version and path of `_served`, or of the policy that will replace it."""
        self._running = self._waiting = self._generated_tokens = self._prompt_tokens = 0
        self._closed = False

    @abstractmethod
    async def open_sampler(self, path: str | None) -> Any:
        """Return a client that samples from the policy at ``path``, or from the base model if ``path`` is
        None. Connects to the service if needed."""

    @abstractmethod
    async def sample(self, client: Any, prompt: Ids, params: SamplingParams) -> CloudReply:
        """Return one reply. Stop strings and ids are sent only to save tokens, because the caller truncates
        the reply anyway."""

    @abstractmethod
    async def score(self, client: Any, token_ids: Ids) -> Floats:
        """Return the logprob of every token given the preceding tokens (NaN at index 0)."""

    @abstractmethod
    async def disconnect(self) -> None:
        """Close the connection, if there is one. Does not raise."""

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
            self._prompt_tokens += len(prompt)
            self._generated_tokens += len(chunk.token_ids)
            yield chunk

    async def logprobs(self, token_ids: Prompt) -> Floats:
        ids = to_ids(token_ids)
        check_score_request(self._info, ids)
        if len(ids) < 2:
            return np.full(len(ids), np.nan, np.float32)
        async with self._slot():
            return await self._with_reconnect(lambda served: self.score(served.client, ids))

    @asynccontextmanager
    async def _slot(self) -> AsyncGenerator[None]:
        """Hold one of the ``max_in_flight`` request slots, waiting until one is free. A CloudError in the
        block is raised as an engine error."""
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
        context_left = self._info.max_context - len(prompt)

        async def sample(served: ServedPolicy) -> tuple[CloudReply, ServedPolicy]:
            return await self.sample(served.client, prompt, params), served

        reply, served = await self._with_reconnect(sample)
        ids, reason, stop = self._cut(reply, params, context_left)
        logprobs = reply.logprobs[: len(ids)]
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
        self, reply: CloudReply, params: SamplingParams, context_left: int
    ) -> tuple[list[int], FinishReason, str | None]:
        """Return the ids of the reply up to where Instar's own rules end it, the finish reason and the stop
        string. Services differ in where they stop."""
        rule = StopRule(params, context_left, self._eos, self._tokenizer)
        for position, token in enumerate(reply.token_ids):
            reason, stop = rule.push(token)
            if reason is not None:
                return reply.token_ids[: position + 1], reason, stop
        return reply.token_ids, reply.finish_reason, None

    async def _logprobs_of_truncated(
        self, served: ServedPolicy, prompt: Ids, ids: list[int], params: SamplingParams
    ) -> tuple[list[float], list[float]]:
        """Return the logprobs under the full softmax and under the distribution that was sampled from. The
        service's own numbers are not used, because it does not say which of the two they are. A greedy reply
        is scored in a second request; for other replies both lists are NaN."""
        if params.temperature > 0 or not ids or not params.score:
            return [math.nan] * len(ids), [math.nan] * len(ids)
        scores = await self.score(served.client, np.concatenate([prompt, np.asarray(ids, np.int32)]))
        return scores[len(prompt) :].tolist(), [0.0] * len(ids)

    async def _with_reconnect(self, work: Callable[[ServedPolicy], Awaitable[T]]) -> T:
        """Return the result of ``work`` for the served policy. If the service has lost the connection,
        reconnect and call ``work`` again."""
        served = await self._current()
        try:
            return await work(served)
        except CloudError as failure:
            if failure.kind != "lost":
                raise
        return await work(await self._current(instead_of=served))

    async def _current(self, instead_of: ServedPolicy | None = None) -> ServedPolicy:
        async with self._policy_lock:
            if self._closed:
                raise EngineUnavailable("The engine is closed.")
            if self._served is not None and self._served is not instead_of:
                return self._served
            if instead_of is not None:
                await self.disconnect()
            version, path = self._target
            self._served = ServedPolicy(version, path, await self.open_sampler(path))
            return self._served

    async def load(self, policy: Policy) -> None:
        """Serve the policy; requests in flight finish under the version they began with."""
        if policy.artifact.kind not in self._info.artifacts:
            raise EngineError(
                f"The {self._info.kind} engine loads base and remote, not {policy.artifact.kind}."
            )
        path = None if policy.artifact.kind == "base" else policy.artifact.path
        async with self._policy_lock:
            if self._closed:
                raise EngineUnavailable("The engine is closed.")
            try:
                client = await self._reopen_sampler(path)
            except CloudError as failure:
                raise failure.to_engine_error() from None
            self._target = (policy.version, path)
            self._served = ServedPolicy(policy.version, path, client)

    async def _reopen_sampler(self, path: str | None) -> Any:
        try:
            return await self.open_sampler(path)
        except CloudError as failure:
            if failure.kind != "lost":
                raise
        await self.disconnect()
        return await self.open_sampler(path)

    async def status(self) -> EngineStatus:
        return EngineStatus(
            version=self._target[0],
            running=self._running,
            waiting=self._waiting,
            generated_tokens=self._generated_tokens,
            prompt_tokens=self._prompt_tokens,
        )

    async def close(self) -> None:
        async with self._policy_lock:
            if not self._closed:
                self._closed = True
                self._served = None
                await self.disconnect()


def _eos_ids(folder: Path, tokenizer: Any) -> frozenset[int]:
    """Return the ids that end a reply, collected from all of the model's files."""
    eos_ids = set[int]() if tokenizer.eos_token_id is None else {int(tokenizer.eos_token_id)}
    for name in ("config.json", "generation_config.json"):
        if (folder / name).is_file():
            ids = json.loads((folder / name).read_text()).get("eos_token_id")
            eos_ids.update([ids] if isinstance(ids, int) else ids or [])
    return frozenset(eos_ids)
