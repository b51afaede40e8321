"""OpenAI's completions, which continue a prompt given as text or token ids.

The reply is plain text, without tool calls and reasoning. With ``echo``, ``logprobs: 0`` and
``max_tokens: 0`` the response has the logprobs of the prompt itself.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, cast

import msgspec
import orjson

from instar.gateway.base import ApiError, bad_request
from instar.gateway.dialects.base import Dialect, ModelRequest, ReplyChoice, StreamWriter, TokenLogprob
from instar.gateway.dialects.common import (
    RANGES,
    check_ranges,
    decode_body,
    find_unsupported_values,
    format_event,
    format_openai_error,
    format_stream_end,
    format_usage,
    parse_stop,
    unsupported_value,
)
from instar.record.base import ReplyDelta
from instar.types import Json
from instar.wire.openai import CompletionsRequestBody

_DEFAULT_MAX_TOKENS = 16  # as OpenAI documents it
_MAX_TOKEN_ID = (1 << 31) - 1
_FINISH_REASONS = {"stop": "stop", "length": "length", "aborted": "stop"}


_decoder = msgspec.json.Decoder(CompletionsRequestBody)

_SUPPORTED_VALUES: dict[str, tuple[Any, ...]] = {
    # Only the logprobs of the sampled tokens are known.
    "logprobs": (0,),
    "suffix": ("",),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logit_bias": ({},),
}


def _parse_prompt(prompt: str | list[Any]) -> str | tuple[int, ...]:
    if not prompt:
        raise bad_request("'prompt' is empty.", "prompt", "invalid_value")
    if isinstance(prompt, str):
        return prompt
    if not isinstance(prompt[0], str | list):
        return _parse_token_ids(prompt, "prompt")
    if len(prompt) > 1:
        message = f"'prompt' has {len(prompt)} prompts; send one per request."
        raise bad_request(message, "prompt", "unsupported_value")
    return (
        prompt[0] if isinstance(prompt[0], str) else _parse_token_ids(cast(list[Any], prompt[0]), "prompt[0]")
    )


def _parse_token_ids(token_ids: list[Any], path: str) -> tuple[int, ...]:
    for i, token in enumerate(token_ids):
        if type(token) is not int:
            message = f"Expected a token id at '{path}[{i}]', got {type(token).__name__}."
            raise bad_request(message, f"{path}[{i}]", "invalid_type")
        if not 0 <= token <= _MAX_TOKEN_ID:
            raise bad_request(f"{token} is not a token id.", f"{path}[{i}]", "invalid_value")
    if not token_ids:
        raise bad_request(f"'{path}' is empty.", path, "invalid_value")
    return tuple(token_ids)


def _scores_prompt(body: CompletionsRequestBody) -> bool:
    """Return True if the request asks for the logprobs of its prompt and for no reply. A prompt is never
    echoed together with a reply."""
    return bool(body.echo) and body.max_tokens == 0 and body.logprobs == 0 and not body.stream


def _find_unsupported(body: CompletionsRequestBody) -> list[ApiError]:
    errors = find_unsupported_values(body, _SUPPORTED_VALUES)
    if body.echo and not _scores_prompt(body):
        message = "'echo' is supported only with 'max_tokens': 0 and 'logprobs': 0, without 'stream'."
        errors.append(unsupported_value(message, "echo"))
    if body.best_of not in (None, 1, body.n):
        errors.append(unsupported_value("'best_of' must equal 'n'.", "best_of"))
    return errors


class CompletionsStreamWriter(StreamWriter):
    def __init__(self, request_id: str, request: ModelRequest) -> None:
        self._request = request
        self._head = _format_head(request_id, request)
        if request.include_usage:
            self._head["usage"] = None
        self._offsets = [0] * request.n

    def begin(self, index: int) -> bytes:
        return b""

    def write_deltas(
        self, index: int, deltas: Sequence[ReplyDelta], logprobs: Sequence[TokenLogprob]
    ) -> bytes:
        text = "".join(delta.text for delta in deltas)
        if not text and not logprobs:
            return b""
        formatted = _format_logprobs(logprobs, self._offsets[index]) if logprobs else None
        self._offsets[index] += sum(len(token.text) for token in logprobs)
        return self._chunk(index, text, logprobs=formatted)

    def finish(self, choices: Sequence[ReplyChoice]) -> bytes:
        out = [
            self._chunk(i, "", finish=_FINISH_REASONS[choice.finish_reason])
            for i, choice in enumerate(choices)
        ]
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
        scores = _scores_prompt(wire)
        check_ranges(wire, {name: RANGES[name] for name in RANGES if not (scores and name == "max_tokens")})
        errors = _find_unsupported(wire)
        return ModelRequest(
            model=wire.model,
            messages=(),
            prompt=_parse_prompt(wire.prompt),
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
            unsupported_error=errors[0] if errors else None,
        )

    def format_response(
        self, request_id: str, request: ModelRequest, choices: Sequence[ReplyChoice]
    ) -> bytes:
        formatted = [_format_choice(i, choice, request.logprobs) for i, choice in enumerate(choices)]
        return orjson.dumps(
            {**_format_head(request_id, request), "choices": formatted, "usage": format_usage(choices)}
        )

    def format_scores(self, request_id: str, request: ModelRequest, tokens: Sequence[TokenLogprob]) -> bytes:
        choice = {
            "index": 0,
            "text": "".join(token.text for token in tokens),
            "logprobs": _format_logprobs(tokens, 0),
            "finish_reason": "length",
        }
        usage = {"prompt_tokens": len(tokens), "completion_tokens": 0, "total_tokens": len(tokens)}
        return orjson.dumps({**_format_head(request_id, request), "choices": [choice], "usage": usage})

    def create_stream_writer(self, request_id: str, request: ModelRequest) -> StreamWriter:
        return CompletionsStreamWriter(request_id, request)

    def format_error(self, error: ApiError) -> bytes:
        return orjson.dumps(format_openai_error(error))


def _format_head(request_id: str, request: ModelRequest) -> Json:
    return {
        "id": request_id,
        "object": "text_completion",
        "created": int(time.time()),
        "model": request.model,
    }


def _format_choice(index: int, choice: ReplyChoice, logprobs: bool) -> Json:
    return {
        "index": index,
        "text": choice.message["content"],
        "logprobs": _format_logprobs(choice.logprobs, 0) if logprobs else None,
        "finish_reason": _FINISH_REASONS[choice.finish_reason],
    }


def _format_logprobs(tokens: Sequence[TokenLogprob], offset: int) -> Json:
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
