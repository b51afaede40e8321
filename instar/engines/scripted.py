"""An engine that plays given replies, token by token, through the model's real tokenizer.

It is deterministic: the logprob of a token is made from the ids before it, its position and the
seed. Policies are accepted and stamped without being read.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator, Callable, Sequence
from hashlib import blake2b
from typing import Any, cast

from instar.config import ModelConfig, ScriptedEngineConfig
from instar.engines.base import Engine, EngineInfo, EngineStatus
from instar.engines.checks import check_request
from instar.engines.stopping import StopRule
from instar.errors import ConfigError, EngineError, EngineUnavailable
from instar.models import load_tokenizer, resolve_model
from instar.registry import load_object
from instar.types import Policy, SamplingParams, TokenChunk

Script = Callable[[str, int | None], str]


class ScriptedEngine(Engine):
    def __init__(self, model: ModelConfig, config: ScriptedEngineConfig) -> None:
        self._tokenizer: Any = load_tokenizer(resolve_model(model.name))
        if self._tokenizer.eos_token_id is None:
            raise ConfigError(f"model.name: the tokenizer of {model.name} has no end-of-sequence token")
        if not config.replies and config.function is None:
            raise ConfigError("engine.replies: give at least one reply, or a function")
        self._config = config
        self._script = cast(Script, load_object(config.function)) if config.function else None
        self._reply_ids = [self._encode(reply) for reply in config.replies]
        self._info = EngineInfo(
            kind="scripted",
            model=model.name,
            vocab_size=len(self._tokenizer),
            max_context=model.max_context,
            artifacts=("adapter", "weights", "base"),
        )
        self._version = 0
        self._running = self._generated = self._prompted = 0
        self._closed = False

    @property
    def info(self) -> EngineInfo:
        return self._info

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams) -> AsyncIterator[TokenChunk]:
        check_request(self._info, prompt_ids, params)
        self._check_open()
        reply = self._reply(prompt_ids, params.seed)
        stop = StopRule(
            params, self._info.max_context - len(prompt_ids), [self._tokenizer.eos_token_id], self._tokenizer
        )
        digest = blake2b(_pack(prompt_ids), key=str(params.seed).encode())
        self._prompted += len(prompt_ids)
        self._running += 1
        try:
            for token in reply:
                await asyncio.sleep(self._config.delay)
                self._check_open()
                digest.update(_pack([token]))
                reason, stop_string = stop.push(token)
                self._generated += 1
                logprob = _logprob(digest.digest())
                yield TokenChunk(
                    token_ids=[token],
                    logprobs=[logprob],
                    versions=[self._version],
                    behavior_logprobs=[logprob] if params.truncates else None,
                    finish_reason=reason,
                    stop=stop_string,
                )
                if reason is not None:
                    return
        finally:
            self._running -= 1

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

    def _reply(self, prompt_ids: Sequence[int], seed: int | None) -> list[int]:
        """The reply of this turn: a conversation that holds n ended replies of ours is at turn n.
        A reply is played again from the first one when they run out."""
        if self._script is not None:
            prompt: str = self._tokenizer.decode(list(prompt_ids), skip_special_tokens=False)
            return self._encode(self._script(prompt, seed))
        return self._reply_ids[_turns(list(prompt_ids), self._reply_ids) % len(self._reply_ids)]

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return [*ids, self._tokenizer.eos_token_id]


def _turns(prompt: list[int], replies: list[list[int]]) -> int:
    """How many replies were played before: found in order, whole, in the prompt."""
    turns, start = 0, 0
    while True:
        reply = replies[turns % len(replies)]
        found = next(
            (i for i in range(start, len(prompt) - len(reply) + 1) if prompt[i : i + len(reply)] == reply),
            None,
        )
        if found is None:
            return turns
        turns, start = turns + 1, found + len(reply)


def _pack(ids: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(ids)}i", *ids)


def _logprob(digest: bytes) -> float:
    """From -3 to 0, both excluded."""
    return -3.0 * (int.from_bytes(digest[:6], "little") + 1) / (2**48 + 1)
