"""Base class for engines that sample from a training service."""

from __future__ import annotations

import asyncio
import json
import math
import time
from abc import abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
import numpy as np

from instar.clouds.base import CloudError
from instar.config import CloudConfig, CloudEngineConfig, ModelConfig
from instar.engines.base import Engine, EngineInfo, EngineStatus, Prompt
from instar.engines.checks import check_artifact, check_request, check_score_request
from instar.engines.policies import LoadedPolicy, PolicyTable
from instar.engines.stopping import StopRule, collect_eos_ids
from instar.errors import EngineError, EngineUnavailable
from instar.models import load_tokenizer, resolve_tokenizer
from instar.types import (
    Artifact,
    FinishReason,
    Floats,
    Ids,
    Policy,
    PolicyRef,
    SamplingParams,
    TokenChunk,
)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class CloudReply:
    token_ids: list[int]
    logprobs: list[float]
    """The logprob of each token; NaN if the service did not return it."""
    finish_reason: FinishReason


@dataclass(frozen=True, slots=True)
class Sampler:
    """The sampler of a policy on the service. Another one replaces it if the policy is exported again."""

    artifact: Artifact
    client: Any = None
    """None for the base model until the first request."""
    connection: int = 0
    """The number of the connection that the client belongs to."""


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
            sampling_fields=(),
            serves_several_policies=True,
        )
        self._slots = asyncio.Semaphore(engine_config.max_in_flight)
        self._policies = PolicyTable(
            Sampler(Artifact("base")),
            engine_config.max_adapters,
            lambda _: None,
            serves_base=model.adapter is None,
        )
        self._policy_lock = asyncio.Lock()
        """Held while samplers are opened."""
        self._connection_count = 0
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
            with self._lease(policy) as loaded:
                reply = await self._call(loaded, lambda client: self.sample(client, prompt, params))
                ids, reason, stop = self._truncate(reply, params, self.info.max_context - len(prompt))
                logprobs, behavior = reply.logprobs[: len(ids)], None
                if params.modifies_distribution:
                    logprobs, behavior = await self._score_modified(loaded, prompt, ids, params)
                self._status.prompt_tokens += len(prompt)
                self._status.generated_tokens += len(ids)
                version = loaded.ref.version if policy is None else policy.version
                yield TokenChunk(ids, logprobs, [version] * len(ids), behavior, reason, stop)

    async def logprobs(self, token_ids: Prompt, policy: PolicyRef | None = None) -> Floats:
        ids = check_score_request(self.info, token_ids, policy)
        async with self._acquire_slot():
            with self._lease(policy) as loaded:
                if len(ids) < 2:
                    return np.full(len(ids), np.nan, np.float32)
                return await self._call(loaded, lambda client: self.score(client, ids))

    @contextmanager
    def _lease(self, policy: PolicyRef | None) -> Generator[LoadedPolicy[Sampler]]:
        """Yield the policy, or the served one if it is None, for one request."""
        loaded = self._policies.acquire_head() if policy is None else self._policies.acquire(policy)
        try:
            yield loaded
        finally:
            self._policies.release(loaded)

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
        self, loaded: LoadedPolicy[Sampler], prompt: Ids, ids: list[int], params: SamplingParams
    ) -> tuple[list[float], list[float]]:
        """Return the logprobs under the full softmax and under the modified distribution. The service's own
        logprobs are not used, because they could be either. A greedy reply is scored in a second request if
        ``params.logprobs`` is True. Otherwise, all logprobs are NaN."""
        if params.temperature > 0 or not ids or not params.logprobs:
            return [math.nan] * len(ids), [math.nan] * len(ids)
        sequence = np.concatenate([prompt, np.asarray(ids, np.int32)])
        scores = await self._call(loaded, lambda client: self.score(client, sequence))
        return scores[len(prompt) :].tolist(), [0.0] * len(ids)

    async def _call(self, loaded: LoadedPolicy[Sampler], call: Callable[[Any], Awaitable[T]]) -> T:
        """Return the result of ``call(client)``. Reconnect once if the session is lost."""
        sampler = await self._open_if_needed(loaded)
        try:
            return await call(sampler.client)
        except CloudError as failure:
            if failure.kind != "lost":
                raise
        sampler = await self._open_if_needed(loaded, lost=sampler)
        return await call(sampler.client)

    async def _open_if_needed(self, loaded: LoadedPolicy[Sampler], lost: Sampler | None = None) -> Sampler:
        """Return the policy's sampler. If it is ``lost``, reconnect first, after which the samplers of other
        policies are opened again when a request needs them."""
        if self._is_open(loaded.content) and loaded.content is not lost:
            return loaded.content
        async with self._policy_lock:
            sampler = loaded.content
            if sampler is lost and self._is_open(sampler):
                _check_not_expired(loaded.ref, sampler.artifact)
                await self._reconnect()
            if not self._is_open(sampler) or sampler is lost:
                loaded.content = await self._open(loaded.ref, sampler.artifact)
            return loaded.content

    def _is_open(self, sampler: Sampler) -> bool:
        return sampler.client is not None and sampler.connection == self._connection_count

    async def _open(self, ref: PolicyRef, artifact: Artifact) -> Sampler:
        """Connect if necessary, and open a sampler. The caller holds the lock. Raises EngineError if the
        sampler has expired, and CloudError."""
        if self._is_closed:
            raise EngineUnavailable("The engine is closed.")
        _check_not_expired(ref, artifact)
        path = None if artifact.kind == "base" else artifact.path
        try:
            client = await self.open_sampler(path)
        except CloudError as failure:
            if failure.kind != "lost":
                raise
            if path is not None and await self._is_connected():
                raise CloudError("refused", str(failure)) from None
            await self._reconnect()
            client = await self.open_sampler(path)
        return Sampler(artifact, client, self._connection_count)

    async def _is_connected(self) -> bool:
        """Return False if the session is lost, and not only a sampler."""
        try:
            await self.open_sampler(None)
        except CloudError as failure:
            if failure.kind != "lost":
                raise
            return False
        return True

    async def _reconnect(self) -> None:
        self._connection_count += 1
        await self.disconnect()

    async def load(self, policy: Policy) -> None:
        check_artifact(self.info, policy)
        async with self._policy_lock:
            self._policies.set_head(policy.ref, await self._open_policy(policy))

    async def keep(self, policy: Policy) -> None:
        check_artifact(self.info, policy)
        async with self._policy_lock:
            if policy.ref not in self._policies:
                return self._policies.keep(policy.ref, await self._open_policy(policy))
            with self._lease(policy.ref) as loaded:
                # Another process may still have the path of an earlier export.
                if (policy.artifact.expires_at or 0.0) > (loaded.content.artifact.expires_at or 0.0):
                    loaded.content = await self._open_policy(policy)

    async def _open_policy(self, policy: Policy) -> Sampler:
        try:
            return await self._open(policy.ref, policy.artifact)
        except CloudError as failure:
            raise failure.to_engine_error() from None

    async def unload(self, policy: PolicyRef) -> None:
        self._policies.unload(policy)

    async def status(self) -> EngineStatus:
        version, policies = self._policies.head.ref.version, self._policies.refs
        return msgspec.structs.replace(self._status, version=version, policies=policies)

    async def close(self) -> None:
        async with self._policy_lock:
            if not self._is_closed:
                self._is_closed = True
                await self._reconnect()


def _check_not_expired(ref: PolicyRef, artifact: Artifact) -> None:
    if artifact.expires_at is not None and artifact.expires_at <= time.time():
        raise EngineError(
            f"The sampler of {ref} has expired on the service. The trainer exports it again while it runs."
        )
