"""OpenAI's chat completions."""

from __future__ import annotations

import time
from collections.abc import Sequence

import orjson

from instar.gateway.base import ApiError
from instar.gateway.dialects import chat_read
from instar.gateway.dialects.base import Dialect, ModelRequest, ReplyChoice, StreamWriter, TokenLogprob
from instar.gateway.dialects.openai_common import format_event, format_stream_end, format_usage
from instar.gateway.dialects.openai_errors import format_openai_error
from instar.record.base import ReplyDelta, ToolCallDelta
from instar.types import Json, ToolCall

_FINISH = {"stop": "stop", "length": "length", "aborted": "stop"}


def _finish(choice: ReplyChoice) -> str:
    if choice.finish_reason == "stop" and choice.message.get("tool_calls"):
        return "tool_calls"
    return _FINISH[choice.finish_reason]


def _logprobs(tokens: Sequence[TokenLogprob]) -> Json:
    return {
        "content": [
            {
                "token": token.text,
                "logprob": token.logprob,  # orjson writes NaN as null: missing stays missing
                "bytes": list(token.text.encode()),
                "top_logprobs": [],
            }
            for token in tokens
        ],
        "refusal": None,
    }


def _wire_call(call: ToolCall) -> Json:
    return {
        "id": call["id"],
        "type": "function",
        "function": {"name": call["name"], "arguments": call["arguments"]},
    }


def _wire_choice(index: int, choice: ReplyChoice, logprobs: bool) -> Json:
    message = choice.message
    wire: Json = {"role": "assistant", "content": message["content"], "refusal": None}
    if calls := message.get("tool_calls"):
        wire["content"] = message["content"] or None
        wire["tool_calls"] = [_wire_call(call) for call in calls]
    if reasoning := message.get("reasoning"):
        wire["reasoning_content"] = reasoning
    return {
        "index": index,
        "message": wire,
        "logprobs": _logprobs(choice.logprobs) if logprobs else None,
        "finish_reason": _finish(choice),
    }


class ChatStreamWriter(StreamWriter):
    def __init__(self, request_id: str, request: ModelRequest) -> None:
        self._request = request
        self._head: Json = {
            "id": request_id,
            "object": "chat.completion.chunk",
            "created": int(time.time()),
            "model": request.model,
        }
        if request.include_usage:
            self._head["usage"] = None

    def begin(self, index: int) -> bytes:
        return self._chunk(index, {"role": "assistant", "content": ""})

    def write_deltas(
        self, index: int, deltas: Sequence[ReplyDelta], logprobs: Sequence[TokenLogprob]
    ) -> bytes:
        out: list[bytes] = []
        for delta in deltas:
            if delta.call is not None:
                out += self._call(index, delta.call)
            elif delta.reasoning:
                out.append(self._chunk(index, {"reasoning_content": delta.reasoning}))
            elif not (logprobs and delta is deltas[-1]):
                out.append(self._chunk(index, {"content": delta.text}))
        if logprobs:
            last = deltas[-1].text if deltas else ""
            out.append(self._chunk(index, {"content": last}, logprobs=_logprobs(logprobs)))
        return b"".join(out)

    def finish(self, choices: Sequence[ReplyChoice]) -> bytes:
        out = [self._chunk(i, {}, finish_reason=_finish(choice)) for i, choice in enumerate(choices)]
        return b"".join([*out, format_stream_end(self._head, self._request, choices)])

    def write_error(self, error: ApiError) -> bytes:
        return format_event(format_openai_error(error))

    def _chunk(
        self, index: int, delta: Json, *, finish_reason: str | None = None, logprobs: Json | None = None
    ) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        return format_event({**self._head, "choices": [choice]})

    def _call(self, index: int, call: ToolCallDelta) -> list[bytes]:
        """The name first, then the arguments, as clients expect to put them together."""
        parts: list[Json] = []
        if call.id:
            function = {"name": call.name, "arguments": ""}
            parts.append({"index": call.index, "id": call.id, "type": "function", "function": function})
        if call.arguments:
            parts.append({"index": call.index, "function": {"arguments": call.arguments}})
        return [self._chunk(index, {"tool_calls": [part]}) for part in parts]


class ChatDialect(Dialect):
    name = "chat"
    path = "/chat/completions"
    parses_messages_independently = True
    id_prefix = "chatcmpl"

    def parse_request(self, body: bytes) -> ModelRequest:
        return chat_read.read(body)

    def format_response(
        self, request_id: str, request: ModelRequest, choices: Sequence[ReplyChoice]
    ) -> bytes:
        return orjson.dumps(
            {
                "id": request_id,
                "object": "chat.completion",
                "created": int(time.time()),
                "model": request.model,
                "choices": [_wire_choice(i, choice, request.logprobs) for i, choice in enumerate(choices)],
                "usage": format_usage(choices),
            }
        )

    def create_stream_writer(self, request_id: str, request: ModelRequest) -> StreamWriter:
        return ChatStreamWriter(request_id, request)

    def format_error(self, error: ApiError) -> bytes:
        return orjson.dumps(format_openai_error(error))
