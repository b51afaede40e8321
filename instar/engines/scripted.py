"""An engine that plays given replies, token by token, through the model's real tokenizer.

It is deterministic: the logprob of a token is made from the ids up to it and the seed. Policies are
accepted and stamped without being read.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from functools import lru_cache
from hashlib import blake2b
from typing import Any, cast

import numpy as np

from instar.config import ModelConfig, ScriptedEngineConfig
from instar.engines.base import Engine, EngineInfo, EngineStatus, Prompt
from instar.engines.checks import check_request, check_score_request, to_ids
from instar.engines.stopping import StopRule
from instar.errors import ConfigError, EngineError, EngineUnavailable
from instar.models import load_tokenizer, resolve_model
from instar.registry import load_object
from instar.types import Floats, Ids, Policy, SamplingParams, TokenChunk

Script = Callable[[str, int | None], str]
MAX_BURST_TOKENS = 64
"""Tokens played without a pause, where no delay is asked for; then others have their turn."""
KEPT_REPLIES = 256
"""Replies of a function whose tokens are kept at hand."""


class ScriptedEngine(Engine):
    def __init__(self, model: ModelConfig, config: ScriptedEngineConfig) -> None:
        self._tokenizer: Any = load_tokenizer(resolve_model(model.name))
        if self._tokenizer.eos_token_id is None:
            raise ConfigError(f"model.name: the tokenizer of {model.name} has no end-of-sequence token")
        if not config.replies and config.function is None:
            raise ConfigError("engine.replies: give at least one reply, or a function")
        self._config = config
        self._script = cast(Script, load_object(config.function)) if config.function else None
        self._eos: int = self._tokenizer.eos_token_id
        self._encoded = lru_cache(KEPT_REPLIES)(self._encode)
        self._reply_ids = [self._encode(reply) for reply in config.replies]
        self._written_replies = [np.asarray(ids, np.int32).tobytes() for ids in self._reply_ids]
        self._info = EngineInfo(
            kind="scripted",
            model=model.name,
            vocab_size=len(self._tokenizer),
            max_context=model.max_context,
            artifacts=("adapter", "weights", "base", "remote"),
            scores=True,
        )
        self._version = 0
        self._running = self._generated = self._prompted = 0
        self._closed = False

    @property
    def info(self) -> EngineInfo:
        return self._info

    async def generate(self, prompt_ids: Prompt, params: SamplingParams) -> AsyncGenerator[TokenChunk, None]:
        prompt = to_ids(prompt_ids)
        check_request(self._info, prompt, params)
        self._check_open()
        stop = StopRule(params, self._info.max_context - len(prompt), [self._eos], self._tokenizer)
        written = prompt.tobytes()
        reply = self._reply(prompt, written, params.seed)
        state, truncates, delay = (
            _state(written, params.seed),
            params.modifies_distribution,
            self._config.delay,
        )
        self._prompted += len(prompt)
        self._running += 1
        try:
            for position, token in enumerate(reply):
                if delay or position % MAX_BURST_TOKENS == 0:
                    await asyncio.sleep(delay)
                    self._check_open()
                state = _next_state(state, token)
                reason, stop_string = stop.push(token)
                self._generated += 1
                logprob = _logprob(state)
                yield TokenChunk(
                    token_ids=[token],
                    logprobs=[logprob],
                    versions=[self._version],
                    behavior_logprobs=[logprob] if truncates else None,
                    finish_reason=reason,
                    stop=stop_string,
                )
                if reason is not None:
                    return
        finally:
            self._running -= 1

    async def logprobs(self, token_ids: Prompt) -> Floats:
        ids = to_ids(token_ids)
        check_score_request(self._info, ids)
        self._check_open()
        state = _state(ids[:1].tobytes(), None)
        values = np.full(len(ids), np.nan, np.float32)
        for position, token in enumerate(ids[1:].tolist(), 1):
            state = _next_state(state, token)
            values[position] = _logprob(state)
        return values

    async def load(self, policy: Policy) -> None:
        if policy.artifact.kind not in self._info.artifacts:
            raise EngineError(
                f"the scripted engine takes base, adapter and weights, not {policy.artifact.kind}"
            )
        self._version = policy.version

    async def status(self) -> EngineStatus:
        return EngineStatus(
            version=self._version,
            running=self._running,
            generated_tokens=self._generated,
            prompt_tokens=self._prompted,
        )

    async def close(self) -> None:
        self._closed = True

    def _check_open(self) -> None:
        if self._closed:
            raise EngineUnavailable("the engine is closed")

    def _reply(self, prompt: Ids, written: bytes, seed: int | None) -> list[int]:
        """The reply of this turn: a conversation that holds n ended replies of ours is at turn n.
        A reply is played again from the first one when they run out."""
        if self._script is not None:
            text: str = self._tokenizer.decode(prompt.tolist(), skip_special_tokens=False)
            return self._encoded(self._script(text, seed))
        return self._reply_ids[_turns(written, self._written_replies) % len(self._reply_ids)]

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return [*ids, self._eos]


def _turns(prompt: bytes, replies: Sequence[bytes]) -> int:
    """How many replies were played before: found in order, whole, in the prompt. Ids take 4 bytes each."""
    turns, start = 0, 0
    while True:
        reply = replies[turns % len(replies)]
        found = prompt.find(reply, start)
        while found >= 0 and found % 4:
            found = prompt.find(reply, found + 1)
        if found < 0:
            return turns
        turns, start = turns + 1, found + len(reply)


def _state(prompt: bytes, seed: int | None) -> int:
    return int.from_bytes(blake2b(prompt, key=str(seed).encode(), digest_size=8).digest(), "little")


def _next_state(state: int, token: int) -> int:
    """Knuth's linear congruential step, over 64 bits."""
    return (state * 6364136223846793005 + 2 * token + 1) & (2**64 - 1)


def _logprob(state: int) -> float:
    """From -3 to 0, both excluded."""
    return -3.0 * ((state >> 16) + 1) / (2**48 + 1)
