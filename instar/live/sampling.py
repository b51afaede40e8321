"""Samples the replies of policy versions for their evaluation, outside any session."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import replace

import msgspec
import numpy as np

from instar.engines.base import Engine
from instar.errors import EngineUnavailable
from instar.record.base import Renderer
from instar.types import Call, FinishReason, Floats, Ids, Message, Policy, PolicyRef, SamplingParams, Tool

_PARSER_PROMPT_TOKENS = 64
IDLE_POLL_SECONDS = 0.2
IDLE_TIMEOUT_SECONDS = 60.0
"""After this time without an idle moment, the sampler gives up, and the gate reports what it waits for."""
REPLY_TIMEOUT_SECONDS = 600.0


class ReplySampler:
    """Samples replies with an engine that serves several policies. Requests for evaluation only start while
    no other request waits in the engine."""

    def __init__(self, engine: Engine, renderer: Renderer, max_tokens: int) -> None:
        self._engine = engine
        self._renderer = renderer
        self._max_tokens = max_tokens

    @property
    def can_score(self) -> bool:
        return self._engine.info.can_score

    async def load(self, policy: Policy) -> None:
        """Make the policy available to `sample`. It costs nothing if it is available already."""
        if policy.artifact.kind != "base":
            await self._engine.keep(policy)

    async def sample_reply(
        self, key: str, messages: Sequence[Message], tools: Sequence[Tool], max_tokens: int, policy: Policy
    ) -> Message:
        """Return the most likely reply. The prompt is rendered with the model's template."""
        prompt = self._renderer.render(messages, tools)
        params = SamplingParams(
            max_tokens=max_tokens, temperature=0.0, stop_token_ids=self._renderer.stop_token_ids
        )
        ids, _ = await self._sample(key, np.asarray(prompt, np.int32), params, policy)
        return self._renderer.parse(ids, tools, (), prompt[-_PARSER_PROMPT_TOKENS:])

    async def replay(self, key: str, call: Call, policy: Policy) -> Call:
        """Return the call with another reply to the same prompt, with the sampling settings of the call."""
        max_tokens = min(call.params.max_tokens, self._max_tokens)
        params = msgspec.structs.replace(call.params, max_tokens=max_tokens)
        prompt = call.prompt_ids
        if not len(prompt):
            renderer = self._renderer.with_template_kwargs(call.params.chat_template_kwargs)
            prompt = np.asarray(renderer.render(call.messages, call.tools), np.int32)
            params = msgspec.structs.replace(params, stop_token_ids=self._renderer.stop_token_ids)
        ids, reason = await self._sample(key, prompt, params, policy)
        tail = prompt[-_PARSER_PROMPT_TOKENS:].tolist()
        reply = self._renderer.parse(ids, call.tools, call.params.stop, tail)
        return _replace_reply(call, ids, reply, reason, policy.version)

    async def compute_mean_logprob(self, call: Call, policy: Policy) -> float:
        """Return the mean logprob of the reply's recorded tokens."""
        await self._wait_until_idle()
        values: Floats = await self._engine.logprobs(call.sequence, _get_ref(policy))
        return float(np.nanmean(values[len(call.prompt_ids) :]))

    async def _sample(
        self, key: str, prompt: Ids, params: SamplingParams, policy: Policy
    ) -> tuple[list[int], FinishReason]:
        await self._wait_until_idle()
        room = max(1, self._engine.info.max_context - len(prompt))
        seed = int.from_bytes(hashlib.sha256(key.encode()).digest()[:7], "big")
        params = msgspec.structs.replace(
            params, seed=seed, logprobs=False, max_tokens=min(params.max_tokens, room)
        )
        ids: list[int] = []
        reason: FinishReason | None = None
        try:
            async with (
                asyncio.timeout(REPLY_TIMEOUT_SECONDS),
                aclosing(self._engine.generate(prompt, params, _get_ref(policy))) as chunks,
            ):
                async for chunk in chunks:
                    ids += chunk.token_ids
                    reason = chunk.finish_reason
        except TimeoutError as error:
            message = f"the engine did not finish a reply within {REPLY_TIMEOUT_SECONDS:g} s"
            raise EngineUnavailable(message) from error
        if reason is None or reason == "aborted":
            raise EngineUnavailable("the engine stopped before the end of a reply")
        return ids, reason

    async def _wait_until_idle(self) -> None:
        deadline = time.monotonic() + IDLE_TIMEOUT_SECONDS
        while (await self._engine.status()).waiting:
            if time.monotonic() > deadline:
                raise EngineUnavailable("the engine is busy with other requests")
            await asyncio.sleep(IDLE_POLL_SECONDS)


def _get_ref(policy: Policy) -> PolicyRef:
    """Return the name under which engines have the policy. They have the base model as version 0."""
    return PolicyRef(policy.policy_id, 0) if policy.artifact.kind == "base" else policy.ref


def _replace_reply(
    call: Call, ids: Sequence[int], reply: Message, reason: FinishReason, version: int
) -> Call:
    """Return the call with a reply that was not recorded, for scorers. It has no logprobs."""
    sampled = np.asarray(ids, np.int32)
    return replace(
        call,
        sampled_ids=sampled,
        logprobs=np.full(len(sampled), np.nan, np.float32),
        behavior_logprobs=None,
        versions=np.full(len(sampled), version, np.int32),
        reply=reply,
        finish_reason=reason,
    )
