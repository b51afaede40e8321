"""An engine that returns scripted replies, encoded with the model's tokenizer.

The logprob of a token depends only on the preceding ids, the token and the seed. ``logprobs`` does not return
the same values as ``generate``. Policies are not read; only their version is used.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
from collections.abc import AsyncGenerator, Callable, Sequence
from functools import lru_cache
from hashlib import blake2b
from typing import Any, cast

import msgspec
import numpy as np

from instar.config import ModelConfig, ScriptedEngineConfig
from instar.engines.base import Engine, EngineInfo, EngineStatus, Prompt
from instar.engines.checks import check_artifact, check_request, check_score_request
from instar.engines.policies import PolicyTable
from instar.engines.stopping import StopRule
from instar.errors import ConfigError, ConstraintError, EngineUnavailable
from instar.models import load_tokenizer, resolve_model
from instar.registry import load_object
from instar.types import Floats, Ids, OutputConstraint, Policy, PolicyRef, SamplingParams, TokenChunk

Script = Callable[..., str]
"""A function that returns the reply to a prompt. Its arguments are the prompt's text and the seed, and the
policy version if it has a parameter ``version``."""
MAX_BURST_TOKENS = 64
"""Without a delay, this many tokens are sent before other tasks can run."""
MAX_CACHED_REPLIES = 256


class ScriptedEngine(Engine):
    def __init__(self, model: ModelConfig, config: ScriptedEngineConfig) -> None:
        self._tokenizer: Any = load_tokenizer(resolve_model(model.name))
        if self._tokenizer.eos_token_id is None:
            raise ConfigError(f"model.name: {model.name} has no end-of-sequence token.")
        if not config.replies and config.function is None:
            raise ConfigError("engine.replies: the list is empty; add a reply or set engine.function.")
        self._config = config
        self._script = cast(Script, load_object(config.function)) if config.function else None
        self._takes_version = (
            self._script is not None and "version" in inspect.signature(self._script).parameters
        )
        self._eos: int = self._tokenizer.eos_token_id
        self._encode_cached = lru_cache(MAX_CACHED_REPLIES)(self._encode)
        self._reply_ids = [self._encode(reply) for reply in config.replies]
        self._reply_bytes = [np.asarray(ids, np.int32).tobytes() for ids in self._reply_ids]
        self._info = EngineInfo(
            kind="scripted",
            model=model.name,
            vocab_size=len(self._tokenizer),
            max_context=model.context_length,
            artifacts=("adapter", "weights", "base", "remote"),
            can_score=True,
            constrains_output=True,
            serves_several_policies=True,
        )
        self._policies = PolicyTable(
            None, config.max_adapters, lambda _: None, serves_base=model.adapter is None
        )
        self._status = EngineStatus(version=0)
        self._is_closed = False

    async def generate(
        self, prompt_ids: Prompt, params: SamplingParams, policy: PolicyRef | None = None
    ) -> AsyncGenerator[TokenChunk, None]:
        prompt = check_request(self.info, prompt_ids, params, policy)
        self._check_open()
        stop_rule = StopRule(params, self.info.max_context - len(prompt), [self._eos], self._tokenizer)
        prompt_bytes = prompt.tobytes()
        version = self._policies.head.ref.version if policy is None else policy.version
        reply = self._choose_reply(prompt, prompt_bytes, params.seed, version)
        if params.constraint is not None:
            _check_form(self._tokenizer.decode(reply[:-1]), params.constraint)
        state, delay = _initial_state(prompt_bytes, params.seed), self._config.delay
        loaded = None if policy is None else self._policies.acquire(policy)
        self._status.prompt_tokens += len(prompt)
        self._status.running += 1
        try:
            for position, token in enumerate(reply):
                if delay or position % MAX_BURST_TOKENS == 0:
                    await asyncio.sleep(delay)
                    self._check_open()
                state = _next_state(state, token)
                reason, stop_string = stop_rule.push(token)
                self._status.generated_tokens += 1
                logprob = _to_logprob(state)
                yield TokenChunk(
                    token_ids=[token],
                    logprobs=[logprob],
                    versions=[self._policies.head.ref.version if policy is None else policy.version],
                    behavior_logprobs=[logprob] if params.modifies_distribution else None,
                    finish_reason=reason,
                    stop=stop_string,
                )
                if reason is not None:
                    return
        finally:
            self._status.running -= 1
            if loaded is not None:
                self._policies.release(loaded)

    async def logprobs(self, token_ids: Prompt, policy: PolicyRef | None = None) -> Floats:
        ids = check_score_request(self.info, token_ids, policy)
        self._check_open()
        if policy is not None:
            self._policies.release(self._policies.acquire(policy))  # raises if it is not loaded
        state = _initial_state(ids[:1].tobytes(), None)
        values = np.full(len(ids), np.nan, np.float32)
        for position, token in enumerate(ids[1:].tolist(), 1):
            state = _next_state(state, token)
            values[position] = _to_logprob(state)
        return values

    async def load(self, policy: Policy) -> None:
        check_artifact(self.info, policy)
        self._policies.set_head(policy.ref, None)

    async def keep(self, policy: Policy) -> None:
        check_artifact(self.info, policy)
        if policy.ref not in self._policies:
            self._policies.keep(policy.ref, None)

    async def unload(self, policy: PolicyRef) -> None:
        self._policies.unload(policy)

    async def status(self) -> EngineStatus:
        version, policies = self._policies.head.ref.version, self._policies.refs
        return msgspec.structs.replace(self._status, version=version, policies=policies)

    async def close(self) -> None:
        self._is_closed = True

    def _check_open(self) -> None:
        if self._is_closed:
            raise EngineUnavailable("The engine is closed.")

    def _choose_reply(self, prompt: Ids, prompt_bytes: bytes, seed: int | None, version: int) -> list[int]:
        """Return the tokens of the reply. Without a script function, the number of scripted replies in the
        prompt is the index of the next reply. After the last reply, the list starts again."""
        if self._script is not None:
            text: str = self._tokenizer.decode(prompt.tolist(), skip_special_tokens=False)
            arguments = {"version": version} if self._takes_version else {}
            return self._encode_cached(self._script(text, seed, **arguments))
        return self._reply_ids[_count_turns(prompt_bytes, self._reply_bytes) % len(self._reply_ids)]

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return [*ids, self._eos]


def _check_form(text: str, constraint: OutputConstraint) -> None:
    """Raise ConstraintError if a reply is neither JSON nor a call, as required. Schemas are not checked."""
    if constraint.reasoning is not None:
        text = text.rpartition(constraint.reasoning[1])[2]
    compact = "".join(text.split())
    is_valid = any("".join(call.begin.split()) in compact for call in constraint.calls)
    if constraint.schema is not None and not is_valid:
        with contextlib.suppress(ValueError):
            json.loads(text)
            is_valid = True
    if not is_valid:
        required = "a call of a required tool" if constraint.schema is None else "JSON"
        raise ConstraintError(f"The scripted reply {text!r} is not {required}.")


def _count_turns(prompt: bytes, replies: Sequence[bytes]) -> int:
    """Count the replies in the prompt. They occur in list order, and the list repeats. Ids have 4 bytes."""
    turns, start = 0, 0
    while True:
        reply = replies[turns % len(replies)]
        position = prompt.find(reply, start)
        while position >= 0 and position % 4:
            position = prompt.find(reply, position + 1)
        if position < 0:
            return turns
        turns, start = turns + 1, position + len(reply)


def _initial_state(prompt: bytes, seed: int | None) -> int:
    return int.from_bytes(blake2b(prompt, key=str(seed).encode(), digest_size=8).digest(), "little")


def _next_state(state: int, token: int) -> int:
    """Return the next state of Knuth's 64-bit linear congruential generator, with the token as increment."""
    return (state * 6364136223846793005 + 2 * token + 1) & (2**64 - 1)


def _to_logprob(state: int) -> float:
    """Return a logprob between -3 and 0 (exclusive)."""
    return -3.0 * ((state >> 16) + 1) / (2**48 + 1)
