"""Checks and formats shared by several dialects."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any, ClassVar, TypeVar

import msgspec
import orjson

from instar.gateway.base import ApiError, bad_request, convert_validation_error, format_range, invalid_value
from instar.gateway.dialects.base import (
    ModelRequest,
    ReplyChoice,
    ReplyChoices,
    RequiredOutput,
    StreamWriter,
    TokenLogprob,
    format_openai_error,
)
from instar.record.base import ReplyDelta, ToolCallDelta
from instar.types import BIAS_RANGE, OPTIONAL_SAMPLING_FIELDS, SAMPLING_RANGES, Json, Message, Tool, ToolCall
from instar.wire.openai import ResponseFormat

T = TypeVar("T")

MAX_STOP_STRINGS = 16
ANY_TOOL = "*"
RANGES: dict[str, tuple[float, float]] = {
    "n": (1, 128),
    "max_tokens": (1, math.inf),
    "temperature": (0, 2),
    **SAMPLING_RANGES,
    "seed": (-(1 << 63), (1 << 63) - 1),
}
_METADATA_SESSION_KEYS = ("session_id", "conversation_id", "thread_id", "chat_id")


def decode_body(decoder: msgspec.json.Decoder[T], body: bytes) -> T:
    try:
        return decoder.decode(body)
    except msgspec.DecodeError as error:
        raise convert_validation_error(error) from error
    except (UnicodeDecodeError, RecursionError) as error:
        raise bad_request(f"The body is not valid JSON: {error}", code="invalid_json") from error


def unsupported_value(message: str, param: str) -> ApiError:
    return bad_request(message, param, "unsupported_value")


def missing_parameter(path: str) -> ApiError:
    return bad_request(f"Missing required parameter: '{path}'.", path, "missing_required_parameter")


def find_unsupported_values(body: object, supported: Mapping[str, Sequence[Any]]) -> list[ApiError]:
    """Return an error for each field with an unsupported value. None is always supported."""
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
            raise invalid_value(f"'{name}' is {value}; it must be {format_range(low, high)}.", name)
    if getattr(body, "top_p") == 0:  # noqa: B009 - every body has this field
        raise invalid_value("'top_p' is 0; it must be greater than 0.", "top_p")


def check_tool_is_listed(name: str | None, tools: set[str], path: str = "tool_choice") -> None:
    if name not in tools:
        raise invalid_value(f"The tool {name!r} is not in 'tools'; choose a listed tool.", path)


def no_tools_error() -> ApiError:
    message = "'tool_choice' requires a tool, but 'tools' offers none; add a tool or leave 'tool_choice' out."
    return invalid_value(message, "tool_choice")


def parse_required_output(
    value: ResponseFormat | None,
    path: str,
    tools: tuple[Tool, ...],
    choice: str | None,
    errors: list[ApiError],
    *,
    is_single_call: bool | None = False,
) -> RequiredOutput | None:
    """Return what a request requires of the reply. ``value`` is the format at ``path``, and ``choice`` is the
    tool that the reply must call, ANY_TOOL, or None if it need not call one."""
    if choice is not None:
        tools = tuple(tool for tool in tools if choice in (tool["name"], ANY_TOOL))
        if not tools:  # the request lists only tools that are not offered to the model
            errors.append(no_tools_error())
        return RequiredOutput("tool_choice", None, tools, bool(is_single_call) or choice != ANY_TOOL)
    if value is None or value.type == "text":
        return None
    schema = {"type": "object"} if value.type == "json_object" else (value.json_schema or value).schema
    if value.type not in ("json_object", "json_schema"):
        message = f"Unsupported format {value.type!r}; supported: 'json_schema', 'json_object'."
        errors.append(unsupported_value(message, f"{path}.type"))
    elif schema is None:
        errors.append(missing_parameter(f"{path}{'.json_schema' if value.json_schema else ''}.schema"))
    return None if schema is None else RequiredOutput(path, schema, tools, bool(is_single_call))


def parse_sampling(body: object) -> dict[str, Any]:
    """Return the sampling settings of a chat, completions or token request."""
    for token, bias in (getattr(body, "logit_bias", None) or {}).items():
        if not BIAS_RANGE[0] <= bias <= BIAS_RANGE[1]:
            path = f"logit_bias.{token}"
            raise invalid_value(f"'{path}' is {bias}; it must be {format_range(*BIAS_RANGE)}.", path)
    names = ("temperature", "top_p", "top_k", "seed", *OPTIONAL_SAMPLING_FIELDS)
    return {name: getattr(body, name) for name in names}


def parse_stop(stop: str | Sequence[str] | None, param: str = "stop") -> tuple[str, ...]:
    strings = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if "" in strings:
        path = f"{param}[{strings.index('')}]"
        raise invalid_value(f"'{path}' is an empty stop string; leave it out.", path)
    if len(strings) > MAX_STOP_STRINGS:
        message = f"'{param}' has {len(strings)} strings; at most {MAX_STOP_STRINGS} are allowed."
        raise invalid_value(message, param)
    return strings


def check_token_ids(ids: Sequence[int], vocab_size: int, param: str) -> None:
    if ids and (min(ids) < 0 or max(ids) >= vocab_size):
        position = next(i for i, token in enumerate(ids) if not 0 <= token < vocab_size)
        message = f"Token id {ids[position]} is not in the vocabulary; the largest id is {vocab_size - 1}."
        raise invalid_value(message, f"{param}[{position}]")


def parse_session_hints(body: object, *metadata: Json | None) -> tuple[str, ...]:
    # Each value is prefixed with its field name, so that a user id never matches a session id.
    values = [(key, fields.get(key)) for fields in metadata if fields for key in _METADATA_SESSION_KEYS]
    values += [(key, getattr(body, key)) for key in ("prompt_cache_key", "safety_identifier", "user")]
    hints = (f"{key}:{value}" for key, value in values if isinstance(value, str) and value)
    return tuple(dict.fromkeys(hints))


def parse_user_ids(body: object, *metadata: Json | None) -> tuple[str, ...]:
    values = [fields.get("user_id") for fields in metadata if fields]
    values += [getattr(body, key) for key in ("user", "safety_identifier")]
    return tuple(dict.fromkeys(value for value in values if isinstance(value, str) and value))


def format_placeholder(value: msgspec.Struct, kind: str) -> str:
    """Return a placeholder for content that is not text, such as an image, with a hash of the content."""
    return f"[{kind} {blake2b(msgspec.json.encode(value), digest_size=8).hexdigest()}]"


def format_usage(choices: ReplyChoices) -> Json:
    """Return the ``usage`` object. The prompt is counted once for all choices. Reasoning tokens are not
    counted separately, so their number is included only if no reply has reasoning."""
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
        "logprob": token.logprob,  # NaN is a missing logprob; orjson writes it as null.
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


def format_named_event(event: Json, data: bytes) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (event["type"].encode(), data)


def format_response_head(object_name: str, request_id: str, request: ModelRequest) -> Json:
    """Return the first fields of a response or chunk. ``object_name`` is its ``object`` field."""
    return {"id": request_id, "object": object_name, "created": int(time.time()), "model": request.model}


def format_finish_reason(choice: ReplyChoice) -> str:
    if choice.finish_reason == "stop" and choice.message.get("tool_calls"):
        return "tool_calls"
    return "length" if choice.finish_reason == "length" else "stop"


class ChunkStreamWriter(StreamWriter):
    """Formats streams of chat completions and completions. Each chunk has one choice or the usage."""

    object_name: str
    empty_content: ClassVar[Json]
    """The content of the chunk with the finish reason."""

    def __init__(self, request_id: str, request: ModelRequest) -> None:
        super().__init__(request_id, request)
        self._head = format_response_head(self.object_name, request_id, request)
        if request.include_usage:
            self._head["usage"] = None

    def finish(self, choices: ReplyChoices) -> bytes:
        chunks = [
            self._format_chunk(index, self.empty_content, finish_reason=format_finish_reason(choice))
            for index, choice in enumerate(choices)
        ]
        if self._request.include_usage:
            chunks.append(format_event({**self._head, "choices": [], "usage": format_usage(choices)}))
        return b"".join([*chunks, b"data: [DONE]\n\n"])

    def write_error(self, error: ApiError) -> bytes:
        return format_event(format_openai_error(error))

    def _format_chunk(
        self, index: int, content: Json, *, logprobs: Json | None = None, finish_reason: str | None = None
    ) -> bytes:
        choice = {"index": index, **content, "logprobs": logprobs, "finish_reason": finish_reason}
        return format_event({**self._head, "choices": [choice]})


def split_reply(message: Message) -> list[ReplyDelta]:
    reasoning = message.get("reasoning")
    deltas = [ReplyDelta(reasoning=reasoning)] if reasoning else []
    deltas += [ReplyDelta(text=message["content"])] if message["content"] else []
    for index, call in enumerate(message.get("tool_calls", ())):
        deltas.append(ReplyDelta(call=ToolCallDelta(index, call["id"], call["name"], call["arguments"])))
    return deltas
