"""Base class for engines that sample from a training service."""

from __future__ import annotations

import asyncio
import copy
import json
import math
from abc import abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from instar.clouds.base import CloudError
from instar.config import CloudConfig, CloudEngineConfig, ModelConfig
from instar.engines.base import Engine, EngineInfo, EngineStatus, Prompt
from instar.engines.checks import check_artifact, check_request, check_score_request
from instar.engines.stopping import StopRule, collect_eos_ids
from instar.errors import EngineUnavailable
from instar.models import load_tokenizer, resolve_tokenizer
from instar.types import FinishReason, Floats, Ids, Policy, PolicyRef, SamplingParams, TokenChunk

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class CloudReply:
    token_ids: list[int]
    logprobs: list[float]
    """The logprob of each token; NaN if the service did not return it."""
    finish_reason: FinishReason


@dataclass(frozen=True, slots=True)
class ServedPolicy:
    version: int
    client: Any


class CloudEngine(Engine):
    """An engine that samples from a training service. Each reply arrives as one chunk. Subclasses implement
    the four abstract methods with the service's SDK. All but ``disconnect`` raise CloudError on failure."""

    def __init__(
        self, model: ModelConfig, cloud_config: CloudConfig, engine_config: CloudEngineConfig
    ) -> None:
        folder = resolve_tokenizer(model.name)
        self.tokenizer: Any = load_tokenizer(folder)
        paths = [folder / name for name in ("config.json", "generation_config.json")]
        values = [json.loads(path.read_text()).get("eos_token_id") for path in paths if path.is_file()]
        self.eos_ids = collect_eos_ids(self.tokenizer.eos_token_id, *values)
        self.model = model
        self.cloud_config = cloud_config
        self._info = EngineInfo(
            kind=cloud_config.type,
            model=model.name,
            vocab_size=len(self.tokenizer),
            max_context=model.context_length,
            artifacts=("base", "remote"),
            streams=False,
            versions_per_token=False,
            can_score=True,
        )
        self._slots = asyncio.Semaphore(engine_config.max_in_flight)
        self._policy_lock = asyncio.Lock()
        self._served: ServedPolicy | None = None
        self._policy_path: str | None = None
        """The path of the policy to serve, or None for the base model. Its version is in ``_status``."""
        self._status = EngineStatus(version=0)
        self._is_closed = False

    @abstractmethod
    async def open_sampler(self, path: str | None) -> Any:
        """Return a client for the policy at ``path`` (None for the base model). Connects if necessary."""

    @abstractmethod
    async def sample(self, client: Any, prompt: Ids, params: SamplingParams) -> CloudReply:
        """Sample one reply. The caller truncates it after the first stop string or stop id."""

    @abstractmethod
    async def score(self, client: Any, token_ids: Ids) -> Floats:
        """Return the logprob of every token. The first one is NaN."""

    @abstractmethod
    async def disconnect(self) -> None:
        """Close the connection, if there is one, without raising errors."""

    async def generate(
        self, prompt_ids: Prompt, params: SamplingParams, policy: PolicyRef | None = None
    ) -> AsyncGenerator[TokenChunk, None]:
        prompt = check_request(self.info, prompt_ids, params, policy)
        async with self._acquire_slot():
            call = self._call_with_reconnect(lambda client: self.sample(client, prompt, params))
            reply, served = await call
            ids, reason, stop = self._truncate(reply, params, self.info.max_context - len(prompt))
            logprobs, behavior = reply.logprobs[: len(ids)], None
            if params.modifies_distribution:
                logprobs, behavior = await self._score_modified(served, prompt, ids, params)
            self._status.prompt_tokens += len(prompt)
            self._status.generated_tokens += len(ids)
            yield TokenChunk(ids, logprobs, [served.version] * len(ids), behavior, reason, stop)

    async def logprobs(self, token_ids: Prompt, policy: PolicyRef | None = None) -> Floats:
        ids = check_score_request(self.info, token_ids, policy)
        if len(ids) < 2:
            return np.full(len(ids), np.nan, np.float32)
        async with self._acquire_slot():
            return (await self._call_with_reconnect(lambda client: self.score(client, ids)))[0]

    @asynccontextmanager
    async def _acquire_slot(self) -> AsyncGenerator[None]:
        """Limit concurrent requests to ``max_in_flight``, and convert CloudError to EngineError."""
        self._status.waiting += 1
        try:
            await self._slots.acquire()
        finally:
            self._status.waiting -= 1
        self._status.running += 1
        try:
            yield
        except CloudError as failure:
            raise failure.to_engine_error() from None
        finally:
            self._status.running -= 1
            self._slots.release()

    def _truncate(
        self, reply: CloudReply, params: SamplingParams, context_left: int
    ) -> tuple[list[int], FinishReason, str | None]:
        """Truncate the reply after the first token that must end it; a service may continue after that token.
        Return the ids, the finish reason, and the stop string that ended the reply, or None."""
        rule = StopRule(params, context_left, self.eos_ids, self.tokenizer)
        for position, token in enumerate(reply.token_ids):
            reason, stop = rule.push(token)
            if reason is not None:
                return reply.token_ids[: position + 1], reason, stop
        return reply.token_ids, reply.finish_reason, None

    async def _score_modified(
        self, served: ServedPolicy, prompt: Ids, ids: list[int], params: SamplingParams
    ) -> tuple[list[float], list[float]]:
        """Return the logprobs under the full softmax and under the modified distribution. The service's own
        logprobs are not used, because they could be either. A greedy reply is scored in a second request if
        ``params.logprobs`` is True. Otherwise, all logprobs are NaN."""
        if params.temperature > 0 or not ids or not params.logprobs:
            return [math.nan] * len(ids), [math.nan] * len(ids)
        scores = await self.score(served.client, np.concatenate([prompt, np.asarray(ids, np.int32)]))
        return scores[len(prompt) :].tolist(), [0.0] * len(ids)

    async def _call_with_reconnect(self, call: Callable[[Any], Awaitable[T]]) -> tuple[T, ServedPolicy]:
        """Return the result of ``call(client)`` and its policy. Reconnect once if the session is lost."""
        served = await self._ensure_served_policy()
        try:
            return await call(served.client), served
        except CloudError as failure:
            if failure.kind != "lost":
                raise
        served = await self._ensure_served_policy(lost=served)
        return await call(served.client), served

    async def _ensure_served_policy(self, lost: ServedPolicy | None = None) -> ServedPolicy:
        """Return the served policy, and open it if necessary. If it is ``lost``, reconnect first."""
        async with self._policy_lock:
            if self._is_closed:
                raise EngineUnavailable("The engine is closed.")
            if self._served is not None and self._served is not lost:
                return self._served
            if lost is not None:
                await self.disconnect()
            client = await self.open_sampler(self._policy_path)
            self._served = ServedPolicy(self._status.version, client)
            return self._served

    async def load(self, policy: Policy) -> None:
        check_artifact(self.info, policy)
        path = None if policy.artifact.kind == "base" else policy.artifact.path
        async with self._policy_lock:
            if self._is_closed:
                raise EngineUnavailable("The engine is closed.")
            try:
                try:
                    client = await self.open_sampler(path)
                except CloudError as failure:
                    if failure.kind != "lost":
                        raise
                    await self.disconnect()
                    client = await self.open_sampler(path)
            except CloudError as failure:
                raise failure.to_engine_error() from None
            self._status.version, self._policy_path = policy.version, path
            self._served = ServedPolicy(policy.version, client)

    async def status(self) -> EngineStatus:
        return copy.copy(self._status)

    async def close(self) -> None:
        async with self._policy_lock:
            if not self._is_closed:
                self._is_closed = True
                self._served = None
                await self.disconnect()
