"""Providers that speak Anthropic's Messages API: responses, and translated requests."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, cast

import msgspec

from instar.gateway.base import bad_request
from instar.gateway.dialects.base import ModelRequest
from instar.gateway.upstream.replies import ReplyDraft, ReplyReader, TokenUsage, parse_error
from instar.types import Json, Message, ToolCall
from instar.wire.anthropic import (
    MessagesDelta,
    MessagesEvent,
    MessagesReplyBlock,
    MessagesResponse,
    MessagesUsage,
)

DEFAULT_MAX_TOKENS = 8192
"""The token limit of a reply if the agent set none: the API requires one."""

_LENGTH_REASONS = ("max_tokens", "model_context_window_exceeded")
_decode = msgspec.json.Decoder(MessagesResponse).decode
_decode_event = msgspec.json.Decoder(MessagesEvent).decode


def _add_usage(usage: TokenUsage, wire: MessagesUsage | None) -> None:
    # In a stream the counts may be sent repeatedly; the last ones are valid.
    if wire is None:
        return
    if wire.input_tokens is not None:
        cached = wire.cache_read_input_tokens
        usage.prompt = wire.input_tokens + (cached or 0) + (wire.cache_creation_input_tokens or 0)
        usage.cached = cached
    if wire.output_tokens is not None:
        usage.sampled = wire.output_tokens


class MessagesReader(ReplyReader):
    def __init__(self, *, emit_deltas: bool = False) -> None:
        super().__init__(emit_deltas=emit_deltas)
        self._draft = ReplyDraft(0, self.deltas)
        self._calls: dict[int, int] = {}  # block index → tool call index

    def read(self, body: bytes) -> None:
        response = _decode(body)
        if response.content is None:
            raise parse_error(body)
        self.set_response_id(response.id)
        for index, block in enumerate(response.content):
            self._begin_block(index, block)
            if index in self._calls:
                self._draft.add_arguments(self._calls[index], bytes(block.input).decode())
        _add_usage(self.usage, response.usage)
        self._end(response.stop_reason, response.stop_sequence)

    def feed(self, data: bytes) -> None:
        event = _decode_event(data)
        if event.type == "error":
            raise parse_error(data)
        if event.type == "message_start" and event.message:
            self.set_response_id(event.message.id)
            _add_usage(self.usage, event.message.usage)
        elif event.type == "content_block_start" and event.content_block:
            self._begin_block(event.index, event.content_block)
        elif event.type == "content_block_delta" and event.delta:
            self._add_delta(event.index, event.delta)
        elif event.type == "content_block_stop" and event.index in self._calls:
            self._close_call(self._calls[event.index])
        elif event.type == "message_stop":
            self.is_done = True
        elif event.type == "message_delta":
            _add_usage(self.usage, event.usage)
            if event.delta and event.delta.stop_reason:
                self._end(event.delta.stop_reason, event.delta.stop_sequence)

    def _end(self, reason: str | None, sequence: str | None) -> None:
        self.has_ended = True
        self._draft.finish_reason = "length" if reason in _LENGTH_REASONS else "stop"
        self._draft.stop_string = sequence

    def _begin_block(self, index: int, block: MessagesReplyBlock) -> None:
        if block.type == "tool_use":
            self._calls[index] = self._draft.open_call(block.id or "", block.name or "")
        elif block.type == "text":
            self._draft.add_text(block.text or "")
        elif block.type == "thinking":
            self._draft.add_reasoning(block.thinking or "")

    def _add_delta(self, index: int, delta: MessagesDelta) -> None:
        if delta.type == "text_delta":
            self._draft.add_text(delta.text)
        elif delta.type == "thinking_delta":
            self._draft.add_reasoning(delta.thinking)
        elif delta.type == "input_json_delta" and index in self._calls:
            self._draft.add_arguments(self._calls[index], delta.partial_json)

    def _close_call(self, call_index: int) -> None:
        # For a call without arguments the provider sends no pieces of them, or an empty one.
        if not any(self._draft.calls[call_index].arguments):
            self._draft.add_arguments(call_index, "{}")

    @property
    def drafts(self) -> list[ReplyDraft]:
        return [self._draft]


# --- translated requests ------------------------------------------------------------------------


def build_messages_request(request: ModelRequest, model: str) -> Json:
    """Return a request of a different dialect as a Messages API body."""
    _check_supported(request)
    instructions, rest = _split_system(request.messages)
    body: Json = {
        "model": model,
        "max_tokens": request.max_tokens or DEFAULT_MAX_TOKENS,
        "messages": _turns(rest),
    }
    if request.tools:
        body["tools"] = [
            {
                "name": tool["name"],
                "description": tool["description"],
                "input_schema": {"type": "object", **tool["parameters"]},
            }
            for tool in request.tools
        ]
    settings: Json = {
        "system": "\n\n".join(instructions) or None,
        "temperature": request.temperature,
        "top_p": request.top_p,
        "top_k": request.top_k,
        "stop_sequences": list(request.stop) or None,
        "stream": request.stream or None,
    }
    return body | {name: value for name, value in settings.items() if value is not None}


def _check_supported(request: ModelRequest) -> None:
    unsupported = {"n": request.n > 1, "seed": request.seed is not None}
    for name, is_set in unsupported.items():
        if is_set:
            raise bad_request(
                f"'{name}' is not supported: this model is served by Anthropic's Messages API, "
                "which has no such parameter.",
                name,
                "unsupported_parameter",
            )


def _split_system(messages: Sequence[Message]) -> tuple[list[str], Sequence[Message]]:
    count = next((i for i, message in enumerate(messages) if message["role"] != "system"), len(messages))
    return [message["content"] for message in messages[:count] if message["content"]], messages[count:]


def _turns(messages: Sequence[Message]) -> list[Json]:
    """Return the messages as turns. Adjacent tool results and user messages become one turn of the user."""
    turns: list[Json] = []
    for message in messages:
        role = "assistant" if message["role"] == "assistant" else "user"
        if not (blocks := _blocks(message)):
            continue
        if turns and turns[-1]["role"] == role:
            turns[-1]["content"] += blocks
        else:
            turns.append({"role": role, "content": blocks})
    return turns


def _blocks(message: Message) -> list[Json]:
    if message["role"] == "tool":
        return [
            {
                "type": "tool_result",
                "tool_use_id": _valid_id(message.get("tool_call_id", "")),
                "content": message["content"],
            }
        ]
    blocks: list[Json] = []
    if message["content"].strip():  # blocks of white space alone are rejected
        blocks.append({"type": "text", "text": message["content"]})
    for call in message.get("tool_calls", ()):
        blocks.append(
            {
                "type": "tool_use",
                "id": _valid_id(call["id"]),
                "name": call["name"],
                "input": _call_input(call),
            }
        )
    return blocks


def _valid_id(call_id: str) -> str:
    # Ids of other providers may contain characters that are rejected here.
    return re.sub(r"[^a-zA-Z0-9_-]", "_", call_id)


def _call_input(call: ToolCall) -> Json:
    # The API requires an object. Arguments that are not one, because the model wrote bad JSON, become text.
    try:
        value: Any = msgspec.json.decode(call["arguments"])
    except msgspec.DecodeError:
        value = None
    return cast(Json, value) if isinstance(value, dict) else {"arguments": call["arguments"]}
