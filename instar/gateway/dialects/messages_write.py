"""The canonical reply → Anthropic's Messages: one message, or the events of a stream."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Literal, NoReturn, cast

import orjson

from instar.gateway.base import ApiError
from instar.gateway.dialects.base import ModelRequest, ReplyChoice, StreamWriter, TokenLogprob
from instar.gateway.dialects.messages_read import Body
from instar.record.base import ReplyDelta, ToolCallDelta
from instar.types import Json, ToolCall

SIGNATURE = "instar"
"""Clients give back only thinking that is signed. Nothing is checked by it."""

ThinkingDisplay = Literal["whole", "omitted", "not"]
BlockType = Literal["text", "thinking", "tool_use"]


def dump_json(value: Json) -> bytes:
    try:
        return orjson.dumps(value)
    except TypeError:
        # Integers beyond 64 bits and lone surrogates, which a tool's arguments may hold.
        return json.dumps(value).encode()


def thinking_display(request: ModelRequest) -> ThinkingDisplay:
    """Thinking is answered to those who asked for it: others take the first block for the text."""
    thinking = request.parsed_body.thinking if isinstance(request.parsed_body, Body) else None
    if thinking is None or thinking.type == "disabled":
        return "not"
    return "omitted" if thinking.display == "omitted" else "whole"


def format_message(request_id: str, request: ModelRequest, choice: ReplyChoice) -> Json:
    content = _content(choice, thinking_display(request))
    return {
        "id": request_id,
        "type": "message",
        "role": "assistant",
        "model": request.model,
        "content": content,
        **_stop(choice, called=any(block["type"] == "tool_use" for block in content)),
        "usage": _usage(choice),
    }


def _content(choice: ReplyChoice, shown: ThinkingDisplay) -> list[Json]:
    reply = choice.message
    blocks: list[Json] = []
    if shown != "not" and (reasoning := reply.get("reasoning")):
        thinking = reasoning if shown == "whole" else ""
        blocks.append({"type": "thinking", "thinking": thinking, "signature": SIGNATURE})
    calls = [_tool_use(call) for call in reply.get("tool_calls", ())]
    if reply["content"].strip() or not calls:
        blocks.append({"type": "text", "text": reply["content"], "citations": None})
    return blocks + calls


def _tool_use(call: ToolCall) -> Json:
    """A call whose arguments are no JSON object cannot be said as one: it is answered as text."""
    arguments = _object(call["arguments"])
    if arguments is None:
        return {"type": "text", "text": f"{call['name']}({call['arguments']})", "citations": None}
    return {"type": "tool_use", "id": call["id"], "name": call["name"], "input": arguments}


def _object(text: str) -> Json | None:
    try:
        value: Any = json.loads(text or "{}", parse_constant=_no_constant)
        json.dumps(value, allow_nan=False)  # numbers such as 1e999 are read as infinite
    except (ValueError, RecursionError):
        return None
    return cast(Json, value) if isinstance(value, dict) else None


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _stop(choice: ReplyChoice, *, called: bool) -> Json:
    reason = "max_tokens" if choice.finish_reason == "length" else "tool_use" if called else "end_turn"
    if choice.finish_reason == "stop" and choice.stop_string is not None:
        reason = "stop_sequence"
    return {"stop_reason": reason, "stop_sequence": choice.stop_string if reason == "stop_sequence" else None}


def _usage(choice: ReplyChoice | None) -> Json:
    """The whole prompt is what was not cached + what was. None: nothing is known yet."""
    cached = choice.cached_tokens or 0 if choice else 0
    return {
        "input_tokens": choice.prompt_tokens - cached if choice else 0,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": choice.sampled_tokens if choice else 0,
    }


def format_anthropic_error(error: ApiError) -> Json:
    kind = _ERRORS.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
    named = error.param is None or error.param in error.message
    text = error.message if named else f"{error.param}: {error.message}"
    return {"type": "error", "error": {"type": kind, "message": text}, "request_id": None}


_ERRORS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}


# --- streams ------------------------------------------------------------------------------------


def _event(value: Json) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (value["type"].encode(), dump_json(value))


class MessagesStreamWriter(StreamWriter):
    """One block is open at a time. White space at the end of what was said so far is held back: there is no
    block of white space alone, which clients drop or refuse; it opens the next text, if one comes."""

    def __init__(self, request_id: str, request: ModelRequest) -> None:
        self._request_id = request_id
        self._request = request
        self._shown = thinking_display(request)
        self._index = -1
        self._open: BlockType | None = None
        self._call = -1
        self._held = ""

    def begin(self, index: int) -> bytes:
        start: Json = {
            "id": self._request_id,
            "type": "message",
            "role": "assistant",
            "model": self._request.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": _usage(None),
        }
        return _event({"type": "message_start", "message": start}) + _event({"type": "ping"})

    def write_deltas(
        self, index: int, deltas: Sequence[ReplyDelta], logprobs: Sequence[TokenLogprob]
    ) -> bytes:
        out: list[bytes] = []
        for delta in deltas:
            if delta.call is not None:
                out += self._tool_use(delta.call)
            elif delta.reasoning:
                out += self._thinking(delta.reasoning)
            else:
                out += self._text(delta.text)
        return b"".join(out)

    def finish(self, choices: Sequence[ReplyChoice]) -> bytes:
        choice = choices[0]
        out: list[bytes] = []
        if self._held and self._open == "text":
            out.append(self._piece({"type": "text_delta", "text": self._held}))
        called = bool(choice.message.get("tool_calls"))
        if self._open in (None, "thinking") and not called:
            out += self._start("text", {"text": ""})
        out += self._stop()
        stop = _stop(choice, called=called)
        out.append(_event({"type": "message_delta", "delta": stop, "usage": _usage(choice)}))
        out.append(_event({"type": "message_stop"}))
        return b"".join(out)

    def write_error(self, error: ApiError) -> bytes:
        return _event(format_anthropic_error(error))

    def _thinking(self, thought: str) -> list[bytes]:
        if self._shown == "not":
            return []
        out = self._start("thinking", {"thinking": "", "signature": ""}) if self._open != "thinking" else []
        if self._shown == "whole":
            out.append(self._piece({"type": "thinking_delta", "thinking": thought}))
        return out

    def _text(self, text: str) -> list[bytes]:
        text = self._held + text
        said = text.rstrip()
        self._held = text[len(said) :]
        if not said:
            return []
        out = self._start("text", {"text": "", "citations": None}) if self._open != "text" else []
        return [*out, self._piece({"type": "text_delta", "text": said})]

    def _tool_use(self, call: ToolCallDelta) -> list[bytes]:
        out: list[bytes] = []
        if self._open != "tool_use" or call.index != self._call:
            self._call = call.index
            out += self._start("tool_use", {"id": call.id, "name": call.name, "input": {}})
        if call.arguments:
            out.append(self._piece({"type": "input_json_delta", "partial_json": call.arguments}))
        return out

    def _start(self, kind: BlockType, block: Json) -> list[bytes]:
        out = self._stop()
        self._index += 1
        self._open = kind
        start = {
            "type": "content_block_start",
            "index": self._index,
            "content_block": {"type": kind, **block},
        }
        return [*out, _event(start)]

    def _stop(self) -> list[bytes]:
        if self._open is None:
            return []
        out = [_event({"type": "content_block_stop", "index": self._index})]
        if self._open == "thinking":
            out.insert(0, self._piece({"type": "signature_delta", "signature": SIGNATURE}))
        self._open = None
        return out

    def _piece(self, delta: Json) -> bytes:
        return _event({"type": "content_block_delta", "index": self._index, "delta": delta})
