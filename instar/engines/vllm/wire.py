"""The format of vLLM's `/inference/v1/generate`: token ids in, token ids and logprobs out."""

from __future__ import annotations

import math
from collections.abc import Collection

import msgspec

from instar.types import Ids, Json, SamplingParams

GENERATE_PATH = "/inference/v1/generate"
NO_LOGPROB = -9999.0
"""vLLM sends this value for a missing logprob."""
SEED_BITS = (1 << 63) - 1


class _Logprob(msgspec.Struct):
    logprob: float


class _Logprobs(msgspec.Struct):
    content: list[_Logprob]


class WeightSpan(msgspec.Struct):
    """A part of a reply: the tokens from ``start`` to ``end`` were sampled by this version of the weights."""

    version: str
    start: int
    end: int


class Choice(msgspec.Struct):
    token_ids: list[int] | None = None
    logprobs: _Logprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    """vLLM before 0.27 sends neither this field nor ``weight_versions``."""
    weight_versions: list[WeightSpan] | None = None


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class Usage(msgspec.Struct):
    prompt_tokens: int = 0
    prompt_tokens_details: _Details | None = None


class Event(msgspec.Struct):
    choices: list[Choice] = []
    usage: Usage | None = None
    error: Json | None = None


class Scores(msgspec.Struct):
    """The response to a request for the logprobs of a prompt."""

    choices: list[Choice]
    prompt_logprobs: list[dict[str, _Logprob] | None]


decode_event = msgspec.json.Decoder(Event).decode
decode_scores = msgspec.json.Decoder(Scores).decode


def encode_generate_request(
    prompt: Ids,
    params: SamplingParams,
    *,
    context_left: int,
    eos_ids: Collection[int],
    model: str | None,
    send_seed: bool,
) -> bytes:
    sampling: Json = {
        "max_tokens": min(params.max_tokens, context_left),
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k,
        "stop_token_ids": sorted({*eos_ids, *params.stop_token_ids}),
        # Text is needed only for stop strings, which may contain special tokens.
        "detokenize": bool(params.stop),
        "skip_special_tokens": False,
    }
    if params.stop:
        sampling["stop"] = list(params.stop)
    if params.seed is not None and send_seed:
        sampling["seed"] = params.seed & SEED_BITS
    if params.score:
        sampling["logprobs"] = 0
    body: Json = {"token_ids": prompt.tolist(), "sampling_params": sampling, "stream": True}
    body["stream_options"] = {"include_usage": True}
    if model is not None:
        body["model"] = model
    return msgspec.json.encode(body)


def encode_score_request(ids: Ids, model: str | None) -> bytes:
    """Return a request for the logprobs of ``ids``. It allows only the last token to be sampled, so that this
    token is scored without needing room in the context."""
    sampling: Json = {
        "max_tokens": 1,
        "temperature": 0.0,
        "prompt_logprobs": 0,
        "logprobs": 0,
        "allowed_token_ids": [int(ids[-1])],
        "ignore_eos": True,
        "detokenize": False,
    }
    body: Json = {"token_ids": ids[:-1].tolist(), "sampling_params": sampling, "stream": False}
    if model is not None:
        body["model"] = model
    return msgspec.json.encode(body)


def choice_logprobs(choice: Choice) -> list[float]:
    """Return the logprobs of a choice's tokens (NaN where one is missing)."""
    assert choice.token_ids is not None
    if choice.logprobs is None:
        return [math.nan] * len(choice.token_ids)
    return [clean_logprob(entry.logprob) for entry in choice.logprobs.content]


def clean_logprob(value: float) -> float:
    return math.nan if value == NO_LOGPROB else min(value, 0.0)
