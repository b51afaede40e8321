"""What OpenAI's chat completions and completions have in common on the wire."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import msgspec
import orjson

from instar.gateway.base import ApiError, bad_request, from_validation
from instar.gateway.dialects.base import ModelRequest, ReplyChoice
from instar.types import Json

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


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None


def decode_body(decoder: msgspec.json.Decoder[T], body: bytes) -> T:
    try:
        return decoder.decode(body)
    except msgspec.DecodeError as error:
        raise from_validation(error) from error
    except (UnicodeDecodeError, RecursionError) as error:
        raise bad_request(f"The body is not valid JSON: {error}", code="invalid_json") from error


def unsupported_value(message: str, param: str) -> ApiError:
    return bad_request(message, param, "unsupported_value")


def find_unsupported_values(body: object, only: Mapping[str, Sequence[Any]]) -> list[ApiError]:
    """The fields that have another value than the ones that can be honoured."""
    wrong: list[ApiError] = []
    for name, allowed in only.items():
        value = getattr(body, name)
        if value is None or value in allowed:
            continue
        said = ", ".join(map(repr, allowed))
        taken = f"supported: {said}." if said else "leave it out."
        wrong.append(unsupported_value(f"Unsupported value for '{name}': {value!r}; {taken}", name))
    return wrong


def check_ranges(body: object, ranges: Mapping[str, tuple[float, float]]) -> None:
    for name, (low, high) in ranges.items():
        value = getattr(body, name)
        if value is not None and not low <= value <= high:
            raise bad_request(f"'{name}' is {value}, out of [{low}, {high}].", name, "invalid_value")
    if getattr(body, "top_p") == 0:  # noqa: B009 - every body has it
        raise bad_request("'top_p' must be greater than 0.", "top_p", "invalid_value")


def parse_stop(given: str | list[str] | None) -> tuple[str, ...]:
    stop = [given] if isinstance(given, str) else given or []
    if "" in stop:
        raise bad_request("A stop string is empty.", f"stop[{stop.index('')}]", "invalid_value")
    if len(stop) > MAX_STOP_STRINGS:
        message = f"{len(stop)} stop strings are more than {MAX_STOP_STRINGS}."
        raise bad_request(message, "stop", "invalid_value")
    return tuple(stop)


def format_usage(choices: Sequence[ReplyChoice]) -> Json:
    """The prompt counts once, whatever ``n``. How many tokens were reasoning is said where it is known: where
    there was none."""
    prompt, sampled = choices[0].prompt_tokens, sum(choice.sampled_tokens for choice in choices)
    told: Json = {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}
    if choices[0].cached_tokens is not None:
        told["prompt_tokens_details"] = {"cached_tokens": choices[0].cached_tokens}
    if not any(choice.message.get("reasoning") for choice in choices):
        told["completion_tokens_details"] = {"reasoning_tokens": 0}
    return told


def format_event(value: Json) -> bytes:
    return b"data: " + orjson.dumps(value) + b"\n\n"


def format_stream_end(head: Json, request: ModelRequest, choices: Sequence[ReplyChoice]) -> bytes:
    """The end of a stream, behind the finish reasons."""
    told = (
        format_event({**head, "choices": [], "usage": format_usage(choices)})
        if request.include_usage
        else b""
    )
    return told + b"data: [DONE]\n\n"
