"""Checks that several dialects share, and the parts that OpenAI's APIs have in common."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any, TypeVar

import msgspec
import orjson

from instar.gateway.base import ApiError, bad_request, from_validation
from instar.gateway.dialects.base import ModelRequest, ReplyChoice, TokenLogprob
from instar.types import Json, ToolCall

T = TypeVar("T")

MAX_STOP_STRINGS = 16
RANGES: dict[str, tuple[float, float]] = {
    "n": (1, 128),
    "max_tokens": (1, math.inf),
    "temperature": (0, 2),
    "top_p": (0, 1),
    "top_k": (0, 1 << 31),
    "seed": (-(1 << 63), (1 << 63) - 1),
}
SESSION_KEYS = ("session_id", "conversation_id", "thread_id", "chat_id")
"""Keys of ``metadata`` in which agents send the id of their session."""

# --- requests -----------------------------------------------------------------------------------


def decode_body(decoder: msgspec.json.Decoder[T], body: bytes) -> T:
    try:
        return decoder.decode(body)
    except msgspec.DecodeError as error:
        raise from_validation(error) from error
    except (UnicodeDecodeError, RecursionError) as error:
        raise bad_request(f"The body is not valid JSON: {error}", code="invalid_json") from error


def unsupported_value(message: str, param: str) -> ApiError:
    return bad_request(message, param, "unsupported_value")


def missing_parameter(path: str) -> ApiError:
    return bad_request(f"Missing required parameter: '{path}'.", path, "missing_required_parameter")


def find_unsupported_values(body: object, supported: Mapping[str, Sequence[Any]]) -> list[ApiError]:
    """Return an error for each field whose value is neither None nor among its supported values."""
    errors: list[ApiError] = []
    for name, values in supported.items():
        value = getattr(body, name)
        if value is None or value in values:
            continue
        allowed = ", ".join(map(repr, values))
        remedy = f"supported: {allowed}." if allowed else "leave it out."
        errors.append(unsupported_value(f"Unsupported value for '{name}': {value!r}; {remedy}", name))
    return errors


def check_ranges(body: object, ranges: Mapping[str, tuple[float, float]]) -> None:
    for name, (low, high) in ranges.items():
        value = getattr(body, name)
        if value is not None and not low <= value <= high:
            raise bad_request(f"'{name}' is {value}; it must be in [{low}, {high}].", name, "invalid_value")
    if getattr(body, "top_p") == 0:  # noqa: B009 - every body has it
        raise bad_request("'top_p' must be greater than 0.", "top_p", "invalid_value")


def check_tool_is_listed(name: str | None, tools: set[str], path: str = "tool_choice") -> None:
    if name not in tools:
        raise bad_request(f"The tool {name!r} is not in 'tools'.", path, "invalid_value")


def no_tools_error() -> ApiError:
    message = "'tool_choice' requires a tool, and 'tools' is empty."
    return bad_request(message, "tool_choice", "invalid_value")


def parse_stop(stop: str | Sequence[str] | None, param: str = "stop") -> tuple[str, ...]:
    strings = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if "" in strings:
        raise bad_request("A stop string is empty.", f"{param}[{strings.index('')}]", "invalid_value")
    if len(strings) > MAX_STOP_STRINGS:
        message = f"'{param}' has {len(strings)} strings; at most {MAX_STOP_STRINGS} are allowed."
        raise bad_request(message, param, "invalid_value")
    return strings


def placeholder(value: msgspec.Struct, kind: str) -> str:
    """Return a text that stands for content other than text, such as an image. The text includes a hash of
    the content, so that messages with different images differ."""
    return f"[{kind} {blake2b(msgspec.json.encode(value), digest_size=8).hexdigest()}]"


# --- OpenAI's responses -------------------------------------------------------------------------

_ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}


def format_openai_error(error: ApiError) -> Json:
    kind = _ERROR_TYPES.get(error.status, "server_error" if error.status >= 500 else "invalid_request_error")
    return {"error": {"message": error.message, "type": kind, "param": error.param, "code": error.code}}


def format_usage(choices: Sequence[ReplyChoice]) -> Json:
    """Return the ``usage`` object of a response. The prompt is counted once, whatever ``n`` is. The number of
    reasoning tokens is included only if no reply has reasoning, because otherwise it is unknown."""
    prompt, sampled = choices[0].prompt_tokens, sum(choice.sampled_tokens for choice in choices)
    usage: Json = {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}
    if choices[0].cached_tokens is not None:
        usage["prompt_tokens_details"] = {"cached_tokens": choices[0].cached_tokens}
    if not any(choice.message.get("reasoning") for choice in choices):
        usage["completion_tokens_details"] = {"reasoning_tokens": 0}
    return usage


def format_logprob(token: TokenLogprob) -> Json:
    return {
        "token": token.text,
        "logprob": token.logprob,  # orjson writes NaN as null, so a missing one stays missing
        "bytes": list(token.text.encode()),
        "top_logprobs": [],
    }


def format_tool_call(call: ToolCall) -> Json:
    return {
        "id": call["id"],
        "type": "function",
        "function": {"name": call["name"], "arguments": call["arguments"]},
    }


def format_event(value: Json) -> bytes:
    return b"data: " + orjson.dumps(value) + b"\n\n"


def format_named_event(value: Json, data: bytes) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (value["type"].encode(), data)


def format_stream_end(head: Json, request: ModelRequest, choices: Sequence[ReplyChoice]) -> bytes:
    """Return the events that follow the finish reasons at the end of a stream."""
    done = b"data: [DONE]\n\n"
    if not request.include_usage:
        return done
    return format_event({**head, "choices": [], "usage": format_usage(choices)}) + done
