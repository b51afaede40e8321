"""The request and response format of vLLM's `/inference/v1/generate` route."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

import msgspec

from instar.types import Ids, Json, OutputConstraint, SamplingParams

GENERATE_PATH = "/inference/v1/generate"
NEG_INF_LOGPROB = -9999.0
"""vLLM sends this value instead of -inf. `clean_logprob` treats it as a missing logprob (NaN)."""
MAX_SEED = (1 << 63) - 1


class _Logprob(msgspec.Struct):
    logprob: float


class _Logprobs(msgspec.Struct):
    content: list[_Logprob]


class WeightSpan(msgspec.Struct):
    version: str
    start: int
    end: int


class Choice(msgspec.Struct):
    token_ids: list[int] | None = None
    logprobs: _Logprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    """The stop token's id or the stop string. vLLM before 0.27 does not send it."""
    weight_versions: list[WeightSpan] | None = None
    """The weight version of each range of tokens. vLLM before 0.27 does not send it."""


class _PromptTokensDetails(msgspec.Struct):
    cached_tokens: int | None = None


class Usage(msgspec.Struct):
    prompt_tokens: int = 0
    prompt_tokens_details: _PromptTokensDetails | None = None


class Event(msgspec.Struct):
    choices: list[Choice] = []
    usage: Usage | None = None
    error: Json | None = None


class ScoreResponse(msgspec.Struct):
    choices: list[Choice]
    prompt_logprobs: list[dict[str, _Logprob] | None]


decode_event = msgspec.json.Decoder(Event).decode
decode_scores = msgspec.json.Decoder(ScoreResponse).decode


def encode_generate_request(
    prompt: Ids,
    params: SamplingParams,
    *,
    context_left: int,
    eos_ids: Collection[int],
    model: str | None,
    send_seed: bool,
) -> bytes:
    vllm_params: Json = {
        "max_tokens": min(params.max_tokens, context_left),
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k,
        "stop_token_ids": sorted({*eos_ids, *params.stop_token_ids}),
        # vLLM needs the text only to find stop strings, which may contain special tokens.
        "detokenize": bool(params.stop),
        "skip_special_tokens": False,
    }
    vllm_params |= params.optional_settings
    if params.stop:
        vllm_params["stop"] = list(params.stop)
    if params.seed is not None and send_seed:
        vllm_params["seed"] = params.seed & MAX_SEED
    if params.logprobs:
        vllm_params["logprobs"] = 0
    if params.constraint is not None:
        vllm_params["structured_outputs"] = encode_constraint(params.constraint)
    return _encode_request(prompt, vllm_params, model, stream=True, stream_options={"include_usage": True})


def encode_constraint(constraint: OutputConstraint) -> Json:
    """Return the value of ``structured_outputs``: a JSON schema or, if that is not enough, xgrammar's format
    of structural tags."""
    choices: list[Json] = []
    if constraint.schema is not None:
        if not constraint.calls and constraint.reasoning is None:
            return {"json": constraint.schema}
        choices.append(_encode_schema(constraint.schema))
    if constraint.calls:
        tags = [
            {"type": "tag", "begin": call.begin, "content": _encode_schema(call.schema), "end": call.end}
            for call in constraint.calls
        ]
        limits = {"at_least_one": True, "stop_after_first": constraint.separator is None}
        separator = constraint.separator or ""
        choices.append({"type": "tags_with_separator", "tags": tags, "separator": separator, **limits})
    if constraint.reasoning is not None:
        begin, end = constraint.reasoning
        ends = [f"{end}\n\n", f"{end}\n", end]
        thought = {"type": "tag", "begin": begin, "content": {"type": "any_text"}, "end": ends}
        reasoned = {"type": "sequence", "elements": [thought, {"type": "or", "elements": choices}]}
        choices = [*(choices if begin else ()), reasoned]
    body = {"type": "structural_tag", "format": {"type": "or", "elements": choices}}
    return {"structural_tag": msgspec.json.encode(body).decode()}


def _encode_schema(schema: str) -> Json:
    return {"type": "json_schema", "json_schema": msgspec.json.decode(schema)}


def encode_score_request(ids: Ids, model: str | None) -> bytes:
    """Return a request for the logprobs of ``ids``. The last id is not part of the prompt; it is the only
    token that can be sampled. This lets ``ids`` fill the entire context."""
    vllm_params: Json = {
        "max_tokens": 1,
        "temperature": 0.0,
        "prompt_logprobs": 0,
        "logprobs": 0,
        "allowed_token_ids": [int(ids[-1])],
        "ignore_eos": True,
        "detokenize": False,
    }
    return _encode_request(ids[:-1], vllm_params, model, stream=False)


def _encode_request(prompt: Ids, vllm_params: Json, model: str | None, **options: Any) -> bytes:
    body: Json = {"token_ids": prompt.tolist(), "sampling_params": vllm_params, **options}
    return msgspec.json.encode(body if model is None else {**body, "model": model})


def get_logprobs(choice: Choice) -> list[float]:
    assert choice.token_ids is not None
    if choice.logprobs is None:
        return [math.nan] * len(choice.token_ids)
    return [clean_logprob(entry.logprob) for entry in choice.logprobs.content]


def clean_logprob(value: float) -> float:
    return math.nan if value == NEG_INF_LOGPROB else min(value, 0.0)  # rounding can exceed 0
