"""OpenAI's chat completions."""

from __future__ import annotations

import time
from collections.abc import Sequence

import orjson

from instar.gateway.base import ApiError
from instar.gateway.dialects import chat_read
from instar.gateway.dialects.base import Choice, Dialect, Request, StreamWriter, TokenLogprob
from instar.gateway.dialects.openai_common import closing, event, usage
from instar.gateway.dialects.openai_errors import openai_error
from instar.record.base import CallDelta, Delta
from instar.types import Json, ToolCall

_FINISH = {"stop": "stop", "length": "length", "aborted": "stop"}


def _finish(choice: Choice) -> str:
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


def _wire_choice(index: int, choice: Choice, logprobs: bool) -> Json:
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
    def __init__(self, request_id: str, request: Request) -> None:
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

    def delta(self, index: int, deltas: Sequence[Delta], logprobs: Sequence[TokenLogprob]) -> bytes:
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

    def end(self, choices: Sequence[Choice]) -> bytes:
        out = [self._chunk(i, {}, finish_reason=_finish(choice)) for i, choice in enumerate(choices)]
        return b"".join([*out, closing(self._head, self._request, choices)])

    def failure(self, error: ApiError) -> bytes:
        return event(openai_error(error))

    def _chunk(
        self, index: int, delta: Json, *, finish_reason: str | None = None, logprobs: Json | None = None
    ) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        return event({**self._head, "choices": [choice]})

    def _call(self, index: int, call: CallDelta) -> list[bytes]:
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
    plain_messages = True
    id_prefix = "chatcmpl"

    def read(self, body: bytes) -> Request:
        return chat_read.read(body)

    def answer(self, request_id: str, request: Request, choices: Sequence[Choice]) -> bytes:
        return orjson.dumps(
            {
                "id": request_id,
                "object": "chat.completion",
                "created": int(time.time()),
                "model": request.model,
                "choices": [_wire_choice(i, choice, request.logprobs) for i, choice in enumerate(choices)],
                "usage": usage(choices),
            }
        )

    def writer(self, request_id: str, request: Request) -> StreamWriter:
        return ChatStreamWriter(request_id, request)

    def error(self, error: ApiError) -> bytes:
        return orjson.dumps(openai_error(error))
