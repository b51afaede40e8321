"""The OpenAI completions API, which continues a text or token id prompt.

The reply is plain text, without tool calls or reasoning. A request with ``echo: true``, ``logprobs: 0`` and
``max_tokens: 0``, without ``stream``, returns the logprobs of its prompt instead of a reply.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, cast

import msgspec
import orjson

from instar.gateway.base import bad_request, invalid_value
from instar.gateway.dialects import common
from instar.gateway.dialects.base import Dialect, ModelRequest, ReplyChoices, TokenLogprobs
from instar.record.base import ReplyDelta
from instar.types import Json
from instar.wire.openai import ChatResponse, CompletionsRequestBody

_DEFAULT_MAX_TOKENS = 16  # OpenAI's default
_MAX_TOKEN_ID = (1 << 31) - 1

_SUPPORTED_VALUES: dict[str, tuple[Any, ...]] = {
    "logprobs": (0,),  # Only the logprobs of the sampled tokens are known.
    "suffix": ("",),
}


def _parse_prompt(prompt: str | list[Any]) -> str | tuple[int, ...]:
    if not prompt:
        raise invalid_value("'prompt' is empty; send text or token ids.", "prompt")
    if isinstance(prompt, str):
        return prompt
    if not isinstance(prompt[0], str | list):
        return _parse_token_ids(prompt, "prompt")
    if len(prompt) > 1:
        message = f"'prompt' has {len(prompt)} prompts; send one prompt per request."
        raise common.unsupported_value(message, "prompt")
    first = prompt[0]
    return first if isinstance(first, str) else _parse_token_ids(cast(list[Any], first), "prompt[0]")


def _parse_token_ids(token_ids: list[Any], path: str) -> tuple[int, ...]:
    for i, token in enumerate(token_ids):
        if type(token) is not int:
            message = f"Expected a token id at '{path}[{i}]', got {type(token).__name__}."
            raise bad_request(message, f"{path}[{i}]", "invalid_type")
        if not 0 <= token <= _MAX_TOKEN_ID:
            message = f"'{path}[{i}]' is {token}; token ids are between 0 and {_MAX_TOKEN_ID}."
            raise invalid_value(message, f"{path}[{i}]")
    if not token_ids:
        raise invalid_value(f"'{path}' is empty; send at least one token id.", path)
    return tuple(token_ids)


class CompletionsStreamWriter(common.ChunkStreamWriter):
    object_name = "text_completion"
    empty_content: ClassVar[Json] = {"text": ""}

    def __init__(self, request_id: str, request: ModelRequest) -> None:
        super().__init__(request_id, request)
        self._text_offsets = [0] * request.n

    def write_deltas(self, index: int, deltas: Sequence[ReplyDelta], logprobs: TokenLogprobs) -> bytes:
        text = "".join(delta.text for delta in deltas)
        if not text and not logprobs:
            return b""
        formatted_logprobs = _format_logprobs(logprobs, self._text_offsets[index]) if logprobs else None
        self._text_offsets[index] += sum(len(token.text) for token in logprobs)
        return self._format_chunk(index, {"text": text}, logprobs=formatted_logprobs)


class CompletionsDialect(Dialect):
    name = "completions"
    path = "/completions"
    messages_param = "prompt"
    id_prefix = "cmpl"
    stream_writer_class = CompletionsStreamWriter
    decoder = msgspec.json.Decoder(CompletionsRequestBody)
    ranges = common.RANGES
    response_type = ChatResponse

    def parse_request(self, body: bytes) -> ModelRequest:
        parsed = common.decode_body(self.decoder, body)
        is_scoring = (
            bool(parsed.echo) and parsed.max_tokens == 0 and parsed.logprobs == 0 and not parsed.stream
        )
        checked_fields = [name for name in self.ranges if not (is_scoring and name == "max_tokens")]
        common.check_ranges(parsed, {name: self.ranges[name] for name in checked_fields})
        errors = common.find_unsupported_values(parsed, _SUPPORTED_VALUES)
        if parsed.echo and not is_scoring:
            message = "'echo' is supported only with 'max_tokens': 0 and 'logprobs': 0, without 'stream'."
            errors.append(common.unsupported_value(message, "echo"))
        if parsed.best_of not in (None, 1, parsed.n):
            message = f"'best_of' is {parsed.best_of}; it must be 1 or equal to 'n' ({parsed.n or 1})."
            errors.append(common.unsupported_value(message, "best_of"))
        return ModelRequest(
            model=parsed.model,
            messages=(),
            prompt=_parse_prompt(parsed.prompt),
            session_hints=(f"user:{parsed.user}",) if parsed.user else (),
            user_ids=(parsed.user,) if parsed.user else (),
            n=parsed.n or 1,
            max_tokens=parsed.max_tokens or _DEFAULT_MAX_TOKENS,
            **common.parse_sampling(parsed),
            stop=common.parse_stop(parsed.stop),
            stream=bool(parsed.stream),
            include_usage=bool(parsed.stream_options and parsed.stream_options.include_usage),
            logprobs=parsed.logprobs is not None,
            score_prompt=is_scoring,
            unsupported=tuple(errors),
        )

    def format_response(self, request_id: str, request: ModelRequest, choices: ReplyChoices) -> bytes:
        formatted = [
            {
                "index": index,
                "text": choice.message["content"],
                "logprobs": _format_logprobs(choice.logprobs, 0) if request.logprobs else None,
                "finish_reason": common.format_finish_reason(choice),
            }
            for index, choice in enumerate(choices)
        ]
        head = common.format_response_head("text_completion", request_id, request)
        return orjson.dumps({**head, "choices": formatted, "usage": common.format_usage(choices)})

    def format_scores(self, request_id: str, request: ModelRequest, tokens: TokenLogprobs) -> bytes:
        choice = {
            "index": 0,
            "text": "".join(token.text for token in tokens),
            "logprobs": _format_logprobs(tokens, 0),
            "finish_reason": "length",
        }
        usage = {"prompt_tokens": len(tokens), "completion_tokens": 0, "total_tokens": len(tokens)}
        head = common.format_response_head("text_completion", request_id, request)
        return orjson.dumps({**head, "choices": [choice], "usage": usage})


def _format_logprobs(tokens: TokenLogprobs, offset: int) -> Json:
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
