"""``POST /v1/generate``: continue a prompt of token ids.

The response is a GenerateResponse. A streamed response has one GeneratedChunk, or an error, per line.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from instar.gateway.base import ApiError, bad_request, invalid_value
from instar.gateway.dialects.base import Dialect, ModelRequest, ReplyChoice, ReplyChoices, StreamWriter
from instar.gateway.dialects.common import RANGES, check_ranges, decode_body, parse_sampling, parse_stop
from instar.types import FinishReason, Json, TokenChunk

MAX_STOP_TOKENS = 256

NonNegativeInt = Annotated[int, msgspec.Meta(ge=0, le=(1 << 31) - 1)]


class TokenParams(msgspec.Struct, forbid_unknown_fields=True):
    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[NonNegativeInt] = []


class GenerateBody(TokenParams, forbid_unknown_fields=True, kw_only=True):
    prompt_ids: list[NonNegativeInt]
    n: int = 1
    stream: bool = False
    model: str = ""


class GeneratedChunk(msgspec.Struct, omit_defaults=True):
    index: int
    token_ids: list[int]
    logprobs: list[float]
    versions: list[int]
    behavior_logprobs: list[float] | None = None
    finish_reason: FinishReason | None = None
    stop: str | None = None


class GeneratedChoice(GeneratedChunk, omit_defaults=True, kw_only=True):
    text: str


class GenerateResponse(msgspec.Struct):
    id: str
    choices: list[GeneratedChoice]


def check_token_params(params: TokenParams, prefix: str = "") -> None:
    """Raise ApiError (400) with the path of the first invalid setting. The path begins with ``prefix``."""
    try:
        check_ranges(params, {name: limits for name, limits in RANGES.items() if name != "n"})
        parse_stop(params.stop)
        parse_sampling(params)
    except ApiError as error:
        raise bad_request(error.message, f"{prefix}{error.param}", error.code) from error
    if (count := len(params.stop_token_ids)) > MAX_STOP_TOKENS:
        message = f"'stop_token_ids' has {count} ids; at most {MAX_STOP_TOKENS} are allowed."
        raise invalid_value(message, f"{prefix}stop_token_ids")


class TokenStreamWriter(StreamWriter):
    def write_tokens(self, index: int, chunk: TokenChunk) -> bytes:
        if not chunk.token_ids:
            return b""
        # The finish reason must not be sent before the call is recorded.
        return _format_line(
            GeneratedChunk(index, chunk.token_ids, chunk.logprobs, chunk.versions, chunk.behavior_logprobs)
        )

    def finish(self, choices: ReplyChoices) -> bytes:
        return b"".join(
            _format_line(GeneratedChunk(i, [], [], [], None, choice.finish_reason, choice.stop_string))
            for i, choice in enumerate(choices)
        )

    def write_error(self, error: ApiError) -> bytes:
        return _format_line({"error": {"message": error.message, "code": error.code, "param": error.param}})


class TokensDialect(Dialect):
    name = "tokens"
    path = "/generate"
    id_prefix = "gen"
    prompt_param = "prompt_ids"
    stream_content_type = "application/x-ndjson"
    is_token_level = True
    stream_writer_class = TokenStreamWriter
    decoder = msgspec.json.Decoder(GenerateBody)
    ranges = RANGES
    response_type = GenerateResponse

    def parse_request(self, body: bytes) -> ModelRequest:
        parsed = decode_body(self.decoder, body)
        if not parsed.prompt_ids:
            raise invalid_value("'prompt_ids' is empty; send at least one token id.", "prompt_ids")
        check_token_params(parsed)
        check_ranges(parsed, {"n": self.ranges["n"]})
        return ModelRequest(
            model=parsed.model,
            messages=(),
            prompt=tuple(parsed.prompt_ids),
            n=parsed.n,
            max_tokens=parsed.max_tokens,
            **parse_sampling(parsed),
            stop=parse_stop(parsed.stop),
            stop_token_ids=tuple(parsed.stop_token_ids),
            stream=parsed.stream,
        )

    def format_response(self, request_id: str, request: ModelRequest, choices: ReplyChoices) -> bytes:
        formatted = [_format_choice(index, choice) for index, choice in enumerate(choices)]
        return msgspec.json.encode(GenerateResponse(request_id, formatted))


def _format_choice(index: int, choice: ReplyChoice) -> GeneratedChoice:
    tokens = choice.tokens
    assert tokens is not None, "the choices of token-level requests have tokens"
    return GeneratedChoice(
        index=index,
        token_ids=tokens.token_ids,
        logprobs=tokens.logprobs,
        versions=tokens.versions,
        behavior_logprobs=tokens.behavior_logprobs,
        finish_reason=choice.finish_reason,
        stop=choice.stop_string,
        text=choice.message["content"],
    )


def _format_line(value: GeneratedChunk | Json) -> bytes:
    return msgspec.json.encode(value) + b"\n"
