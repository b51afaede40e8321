"""OpenAI's completions: a prompt, as text or as token ids, is continued. A reply is the text as it is: no
tool calls, no reasoning. With `echo`, `logprobs: 0` and `max_tokens: 0` the prompt itself is scored."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, cast

import msgspec
import orjson

from instar.gateway.base import ApiError, bad_request
from instar.gateway.dialects.base import Dialect, ModelRequest, ReplyChoice, StreamWriter, TokenLogprob
from instar.gateway.dialects.openai_common import (
    RANGES,
    StreamOptions,
    check_ranges,
    decode_body,
    find_unsupported_values,
    format_event,
    format_stream_end,
    format_usage,
    parse_stop,
    unsupported_value,
)
from instar.gateway.dialects.openai_errors import format_openai_error
from instar.record.base import ReplyDelta
from instar.types import Json

_DEFAULT_MAX_TOKENS = 16
"""OpenAI's."""
_LARGEST_ID = (1 << 31) - 1
_FINISH = {"stop": "stop", "length": "length", "aborted": "stop"}


class Body(msgspec.Struct, forbid_unknown_fields=True):
    model: str
    prompt: str | list[Any]
    n: int | None = None
    stop: str | list[str] | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    # Tells whose session this is.
    user: str | None = None
    # Taken at the values that ask for what is done anyway.
    logprobs: int | None = None
    best_of: int | None = None
    echo: bool | None = None
    suffix: str | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[str, float] | None = None


_decoder = msgspec.json.Decoder(Body)

_ONLY: dict[str, tuple[Any, ...]] = {
    # The logprobs of the tokens that were sampled; those of others are not known.
    "logprobs": (0,),
    "suffix": ("",),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logit_bias": ({},),
}


def _prompt(given: str | list[Any]) -> str | tuple[int, ...]:
    if not given:
        raise bad_request("'prompt' is empty.", "prompt", "invalid_value")
    if isinstance(given, str):
        return given
    if not isinstance(given[0], str | list):
        return _ids(given, "prompt")
    if len(given) > 1:
        raise bad_request(f"One prompt is taken at a time, not {len(given)}.", "prompt", "unsupported_value")
    return given[0] if isinstance(given[0], str) else _ids(cast(list[Any], given[0]), "prompt[0]")


def _ids(given: list[Any], path: str) -> tuple[int, ...]:
    for i, token in enumerate(given):
        if type(token) is not int:
            told = f"Expected a token id at '{path}[{i}]', got {type(token).__name__}."
            raise bad_request(told, f"{path}[{i}]", "invalid_type")
        if not 0 <= token <= _LARGEST_ID:
            raise bad_request(f"{token} is no token id.", f"{path}[{i}]", "invalid_value")
    if not given:
        raise bad_request(f"'{path}' is empty.", path, "invalid_value")
    return tuple(given)


def _scores(body: Body) -> bool:
    """Whether nothing is to be sampled: with a reply behind it, a prompt is not echoed."""
    return bool(body.echo) and body.max_tokens == 0 and body.logprobs == 0 and not body.stream


def _refusals(body: Body) -> list[ApiError]:
    refused = find_unsupported_values(body, _ONLY)
    if body.echo and not _scores(body):
        refused.append(
            unsupported_value("'echo' needs 'max_tokens': 0 and 'logprobs': 0, unstreamed.", "echo")
        )
    if body.best_of not in (None, 1, body.n):
        refused.append(unsupported_value("'best_of' is supported only where it equals 'n'.", "best_of"))
    return refused


class CompletionsStreamWriter(StreamWriter):
    def __init__(self, request_id: str, request: ModelRequest) -> None:
        self._request = request
        self._head = _head(request_id, request)
        if request.include_usage:
            self._head["usage"] = None
        self._offsets = [0] * request.n

    def begin(self, index: int) -> bytes:
        return b""

    def write_deltas(
        self, index: int, deltas: Sequence[ReplyDelta], logprobs: Sequence[TokenLogprob]
    ) -> bytes:
        text = "".join(delta.text for delta in deltas)
        told = _logprobs(logprobs, self._offsets[index]) if logprobs else None
        self._offsets[index] += sum(len(token.text) for token in logprobs)
        return self._chunk(index, text, logprobs=told) if text or told else b""

    def finish(self, choices: Sequence[ReplyChoice]) -> bytes:
        out = [self._chunk(i, "", finish=_FINISH[choice.finish_reason]) for i, choice in enumerate(choices)]
        return b"".join([*out, format_stream_end(self._head, self._request, choices)])

    def write_error(self, error: ApiError) -> bytes:
        return format_event(format_openai_error(error))

    def _chunk(
        self, index: int, text: str, *, finish: str | None = None, logprobs: Json | None = None
    ) -> bytes:
        choice = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish}
        return format_event({**self._head, "choices": [choice]})


class CompletionsDialect(Dialect):
    name = "completions"
    path = "/completions"
    messages_param = "prompt"
    id_prefix = "cmpl"

    def parse_request(self, body: bytes) -> ModelRequest:
        wire = decode_body(_decoder, body)
        scores = _scores(wire)
        check_ranges(wire, {name: RANGES[name] for name in RANGES if not (scores and name == "max_tokens")})
        refused = _refusals(wire)
        return ModelRequest(
            model=wire.model,
            messages=(),
            prompt=_prompt(wire.prompt),
            session_hints=(f"user:{wire.user}",) if wire.user else (),
            n=wire.n or 1,
            max_tokens=wire.max_tokens or _DEFAULT_MAX_TOKENS,
            temperature=wire.temperature,
            top_p=wire.top_p,
            top_k=wire.top_k,
            seed=wire.seed,
            stop=parse_stop(wire.stop),
            stream=bool(wire.stream),
            include_usage=bool(wire.stream_options and wire.stream_options.include_usage),
            logprobs=wire.logprobs is not None,
            score_prompt=scores,
            unsupported_error=refused[0] if refused else None,
        )

    def format_response(
        self, request_id: str, request: ModelRequest, choices: Sequence[ReplyChoice]
    ) -> bytes:
        told = [_wire_choice(i, choice, request.logprobs) for i, choice in enumerate(choices)]
        return orjson.dumps({**_head(request_id, request), "choices": told, "usage": format_usage(choices)})

    def format_scores(self, request_id: str, request: ModelRequest, tokens: Sequence[TokenLogprob]) -> bytes:
        choice = {
            "index": 0,
            "text": "".join(token.text for token in tokens),
            "logprobs": _logprobs(tokens, 0),
            "finish_reason": "length",
        }
        used = {"prompt_tokens": len(tokens), "completion_tokens": 0, "total_tokens": len(tokens)}
        return orjson.dumps({**_head(request_id, request), "choices": [choice], "usage": used})

    def create_stream_writer(self, request_id: str, request: ModelRequest) -> StreamWriter:
        return CompletionsStreamWriter(request_id, request)

    def format_error(self, error: ApiError) -> bytes:
        return orjson.dumps(format_openai_error(error))


def _head(request_id: str, request: ModelRequest) -> Json:
    return {
        "id": request_id,
        "object": "text_completion",
        "created": int(time.time()),
        "model": request.model,
    }


def _wire_choice(index: int, choice: ReplyChoice, logprobs: bool) -> Json:
    return {
        "index": index,
        "text": choice.message["content"],
        "logprobs": _logprobs(choice.logprobs, 0) if logprobs else None,
        "finish_reason": _FINISH[choice.finish_reason],
    }


def _logprobs(tokens: Sequence[TokenLogprob], offset: int) -> Json:
    offsets: list[int] = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token.text)
    return {
        "tokens": [token.text for token in tokens],
        "token_logprobs": [token.logprob for token in tokens],  # orjson writes NaN as null
        "top_logprobs": None,
        "text_offset": offsets,
    }
