"""The dialect of Anthropic's Messages API, and its responses. ``messages_request.py`` parses requests."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Literal, NoReturn, cast

import orjson

from instar.gateway.base import ApiError
from instar.gateway.dialects.base import (
    ERROR_TYPES,
    Dialect,
    ModelRequest,
    ReplyChoice,
    ReplyChoices,
    StreamWriter,
    TokenLogprobs,
)
from instar.gateway.dialects.common import format_named_event
from instar.gateway.dialects.messages_request import DECODER, RANGES, parse_request
from instar.record.base import ReplyDelta, ToolCallDelta
from instar.types import Json
from instar.wire.anthropic import MessagesRequestBody, MessagesResponse

SIGNATURE = "instar"
"""The signature of thinking blocks. Clients require a signature; the gateway never verifies it."""

ThinkingDisplay = Literal["full", "omitted", "none"]
"""``omitted`` returns thinking blocks without their text, and ``none`` returns no thinking blocks."""
BlockType = Literal["text", "thinking", "tool_use"]

_ERROR_TYPES = ERROR_TYPES | {
    404: "not_found_error",
    413: "request_too_large",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}


def _dump_json(value: Json) -> bytes:
    try:
        return orjson.dumps(value)
    except TypeError:
        # A tool's arguments may contain integers beyond 64 bits and lone surrogates.
        return json.dumps(value).encode()


def _get_thinking_display(request: ModelRequest) -> ThinkingDisplay:
    # Thinking is returned only on request, because other clients expect the text in the first block.
    body = request.parsed_body
    thinking = body.thinking if isinstance(body, MessagesRequestBody) else None
    if thinking is None or thinking.type == "disabled":
        return "none"
    return "omitted" if thinking.display == "omitted" else "full"


def _format_message(
    request_id: str, request: ModelRequest, content: list[Json], choice: ReplyChoice | None
) -> Json:
    """Return a message. ``choice`` is None at the start of a stream, when the reply is not known yet."""
    has_calls = any(block["type"] == "tool_use" for block in content)
    stop: Json = {"stop_reason": None, "stop_sequence": None}
    return {
        "id": request_id,
        "type": "message",
        "role": "assistant",
        "model": request.model,
        "content": content,
        **(_format_stop(choice, has_calls=has_calls) if choice else stop),
        "usage": _format_usage(choice),
    }


def _format_content(choice: ReplyChoice, display: ThinkingDisplay) -> list[Json]:
    reply = choice.message
    blocks: list[Json] = []
    if display != "none" and (reasoning := reply.get("reasoning")):
        thinking = reasoning if display == "full" else ""
        blocks.append({"type": "thinking", "thinking": thinking, "signature": SIGNATURE})
    calls = reply.get("tool_calls", ())
    if reply["content"].strip() or not calls:
        blocks.append({"type": "text", "text": reply["content"]})
    for call in calls:
        arguments = _parse_object(call["arguments"])
        if arguments is None:  # The API cannot represent arguments that are not a JSON object.
            blocks.append({"type": "text", "text": f"{call['name']}({call['arguments']})"})
        else:
            blocks.append({"type": "tool_use", "id": call["id"], "name": call["name"], "input": arguments})
    return blocks


def _parse_object(text: str) -> Json | None:
    try:
        value: Any = json.loads(text or "{}", parse_constant=_reject_constant)
        json.dumps(value, allow_nan=False)  # raises ValueError for 1e999, which is parsed as infinity
    except (ValueError, RecursionError):
        return None
    return cast(Json, value) if isinstance(value, dict) else None


def _reject_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not valid JSON")


def _format_stop(choice: ReplyChoice, *, has_calls: bool) -> Json:
    reason = "max_tokens" if choice.finish_reason == "length" else "tool_use" if has_calls else "end_turn"
    if choice.finish_reason == "stop" and choice.stop_string is not None:
        reason = "stop_sequence"
    return {"stop_reason": reason, "stop_sequence": choice.stop_string if reason == "stop_sequence" else None}


def _format_usage(choice: ReplyChoice | None) -> Json:
    """Return the ``usage`` object, with zeros if ``choice`` is None. Cached input is counted separately."""
    cached = choice.cached_tokens or 0 if choice else 0
    return {
        "input_tokens": choice.prompt_tokens - cached if choice else 0,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": choice.sampled_tokens if choice else 0,
    }


def _format_error(error: ApiError) -> Json:
    default = "api_error" if error.status >= 500 else "invalid_request_error"
    error_type = _ERROR_TYPES.get(error.status, default)
    needs_param = error.param is not None and error.param not in error.message
    text = f"{error.param}: {error.message}" if needs_param else error.message
    return {"type": "error", "error": {"type": error_type, "message": text}, "request_id": None}


def _format_event(value: Json) -> bytes:
    return format_named_event(value, _dump_json(value))


class MessagesStreamWriter(StreamWriter):
    """Formats the events of one streamed message. At most one content block is open at a time.

    Trailing whitespace is held back until more text arrives, because clients drop or reject blocks that
    contain only whitespace.
    """

    def __init__(self, request_id: str, request: ModelRequest) -> None:
        super().__init__(request_id, request)
        self._thinking_display = _get_thinking_display(request)
        self._block_index = -1
        self._open_block: BlockType | None = None
        self._call_index = -1
        self._held_space = ""

    def begin(self, index: int) -> bytes:
        message = _format_message(self._request_id, self._request, [], None)
        return _format_event({"type": "message_start", "message": message}) + _format_event({"type": "ping"})

    def write_deltas(self, index: int, deltas: Sequence[ReplyDelta], logprobs: TokenLogprobs) -> bytes:
        events: list[bytes] = []
        for delta in deltas:
            if delta.call is not None:
                events += self._write_call(delta.call)
            elif delta.reasoning:
                events += self._write_thinking(delta.reasoning)
            else:
                events += self._write_text(delta.text)
        return b"".join(events)

    def finish(self, choices: ReplyChoices) -> bytes:
        choice = choices[0]
        events: list[bytes] = []
        if self._held_space and self._open_block == "text":
            events.append(self._format_delta({"type": "text_delta", "text": self._held_space}))
        has_calls = bool(choice.message.get("tool_calls"))
        if self._open_block in (None, "thinking") and not has_calls:
            events += self._start_block("text", {"text": ""})
        events += self._stop_block()
        stop = _format_stop(choice, has_calls=has_calls)
        events.append(_format_event({"type": "message_delta", "delta": stop, "usage": _format_usage(choice)}))
        return b"".join([*events, _format_event({"type": "message_stop"})])

    def write_error(self, error: ApiError) -> bytes:
        return _format_event(_format_error(error))

    def _write_thinking(self, text: str) -> list[bytes]:
        if self._thinking_display == "none":
            return []
        is_open = self._open_block == "thinking"
        events = [] if is_open else self._start_block("thinking", {"thinking": "", "signature": ""})
        if self._thinking_display == "full":
            events.append(self._format_delta({"type": "thinking_delta", "thinking": text}))
        return events

    def _write_text(self, text: str) -> list[bytes]:
        text = self._held_space + text
        visible = text.rstrip()
        self._held_space = text[len(visible) :]
        if not visible:
            return []
        is_open = self._open_block == "text"
        events = [] if is_open else self._start_block("text", {"text": ""})
        return [*events, self._format_delta({"type": "text_delta", "text": visible})]

    def _write_call(self, call: ToolCallDelta) -> list[bytes]:
        events: list[bytes] = []
        if self._open_block != "tool_use" or call.index != self._call_index:
            self._call_index = call.index
            events += self._start_block("tool_use", {"id": call.id, "name": call.name, "input": {}})
        if call.arguments:
            events.append(self._format_delta({"type": "input_json_delta", "partial_json": call.arguments}))
        return events

    def _start_block(self, block_type: BlockType, block: Json) -> list[bytes]:
        events = self._stop_block()
        self._block_index += 1
        self._open_block = block_type
        start = {"type": "content_block_start", "index": self._block_index}
        return [*events, _format_event({**start, "content_block": {"type": block_type, **block}})]

    def _stop_block(self) -> list[bytes]:
        if self._open_block is None:
            return []
        events = [_format_event({"type": "content_block_stop", "index": self._block_index})]
        if self._open_block == "thinking":
            events.insert(0, self._format_delta({"type": "signature_delta", "signature": SIGNATURE}))
        self._open_block = None
        return events

    def _format_delta(self, delta: Json) -> bytes:
        return _format_event({"type": "content_block_delta", "index": self._block_index, "delta": delta})


class MessagesDialect(Dialect):
    name = "messages"
    path = "/messages"
    id_prefix = "msg"
    count_path = "/messages/count_tokens"
    stream_writer_class = MessagesStreamWriter
    decoder = DECODER
    ranges = RANGES
    response_type = MessagesResponse

    def parse_request(self, body: bytes) -> ModelRequest:
        return parse_request(body)

    def format_response(self, request_id: str, request: ModelRequest, choices: ReplyChoices) -> bytes:
        content = _format_content(choices[0], _get_thinking_display(request))
        return _dump_json(_format_message(request_id, request, content, choices[0]))

    def format_error(self, error: ApiError) -> bytes:
        return orjson.dumps(_format_error(error))

    def parse_count_request(self, body: bytes) -> ModelRequest:
        return parse_request(body, needs_reply=False)

    def format_count(self, tokens: int) -> bytes:
        return orjson.dumps({"input_tokens": tokens})


def format_models(ids: list[str]) -> bytes:
    """Return the response of ``GET /v1/models`` for a client that sends ``anthropic-version``."""
    fields = {"created_at": "1970-01-01T00:00:00Z", "lifecycle": "active"}
    data = [{"type": "model", "id": name, "display_name": name, **fields} for name in ids]
    first, last = (ids[0], ids[-1]) if ids else (None, None)
    return orjson.dumps({"data": data, "has_more": False, "first_id": first, "last_id": last})
