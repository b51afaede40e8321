"""Read the responses of providers that speak Anthropic's Messages API, and translate requests for them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import msgspec

from instar.gateway.base import bad_request
from instar.gateway.dialects.base import ModelRequest
from instar.gateway.upstream.replies import ReplyDraft, ReplyReader, TokenUsage, parse_error
from instar.types import Json, Message
from instar.wire import anthropic as wire

DEFAULT_MAX_TOKENS = 8192
"""Sent if the agent sets no token limit, because the API requires one."""

_LENGTH_REASONS = ("max_tokens", "model_context_window_exceeded")
_decode = msgspec.json.Decoder(wire.MessagesResponse).decode
_decode_event = msgspec.json.Decoder(wire.MessagesEvent).decode


def _update_usage(usage: TokenUsage, reported: wire.MessagesUsage | None) -> None:
    # A stream may send the counts several times; the last ones are final.
    if reported is None:
        return
    if reported.input_tokens is not None:
        cached = reported.cache_read_input_tokens
        usage.prompt = reported.input_tokens + (cached or 0) + (reported.cache_creation_input_tokens or 0)
        usage.cached = cached
    if reported.output_tokens is not None:
        usage.sampled = reported.output_tokens


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
        _update_usage(self.usage, response.usage)
        self._end(response.stop_reason, response.stop_sequence)

    def feed(self, data: bytes) -> None:
        event = _decode_event(data)
        if event.type == "error":
            raise parse_error(data)
        if event.type == "message_start" and event.message:
            self.set_response_id(event.message.id)
            _update_usage(self.usage, event.message.usage)
        elif event.type == "content_block_start" and event.content_block:
            self._begin_block(event.index, event.content_block)
        elif event.type == "content_block_delta" and event.delta:
            self._add_delta(event.index, event.delta)
        elif event.type == "content_block_stop" and event.index in self._calls:
            # The provider sends no arguments, or an empty string, for a call without arguments.
            call_index = self._calls[event.index]
            if not any(self._draft.calls[call_index].argument_pieces):
                self._draft.add_arguments(call_index, "{}")
        elif event.type == "message_stop":
            self.is_exhausted = True
        elif event.type == "message_delta":
            _update_usage(self.usage, event.usage)
            if event.delta and event.delta.stop_reason:
                self._end(event.delta.stop_reason, event.delta.stop_sequence)

    def _end(self, reason: str | None, sequence: str | None) -> None:
        self.has_seen_end = True
        self._draft.finish_reason = "length" if reason in _LENGTH_REASONS else "stop"
        self._draft.stop_string = sequence

    def _begin_block(self, index: int, block: wire.MessagesReplyBlock) -> None:
        if block.type == "tool_use":
            self._calls[index] = self._draft.open_call(block.id or "", block.name or "")
        elif block.type == "text":
            self._draft.add_text(block.text or "")
        elif block.type == "thinking":
            self._draft.add_reasoning(block.thinking or "")

    def _add_delta(self, index: int, delta: wire.MessagesDelta) -> None:
        if delta.type == "text_delta":
            self._draft.add_text(delta.text)
        elif delta.type == "thinking_delta":
            self._draft.add_reasoning(delta.thinking)
        elif delta.type == "input_json_delta" and index in self._calls:
            self._draft.add_arguments(self._calls[index], delta.partial_json)

    @property
    def drafts(self) -> list[ReplyDraft]:
        return [self._draft]


def build_messages_request(request: ModelRequest, model: str) -> Json:
    """Translate a request to a Messages API body. Raise ApiError (400) if it has a seed, ``n`` above 1 or
    variables of a chat template."""
    unsupported = {"n": request.n > 1, "seed": request.seed is not None}
    for name, is_set in (unsupported | {"chat_template_kwargs": bool(request.chat_template_kwargs)}).items():
        if is_set:
            message = f"'{name}' is not supported by Anthropic's API, which serves this model; leave it out."
            raise bad_request(message, name, "unsupported_parameter")
    messages = request.messages
    roles = [message["role"] for message in messages]
    count = next((i for i, role in enumerate(roles) if role != "system"), len(messages))
    instructions = [message["content"] for message in messages[:count] if message["content"]]
    body: Json = {
        "model": model,
        "max_tokens": request.max_tokens or DEFAULT_MAX_TOKENS,
        "messages": _build_turns(messages[count:]),
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
        if (required := request.required_output) is not None:
            name = required.only_tool
            body["tool_choice"] = {"type": "tool", "name": name} if name else {"type": "any"}
    settings: Json = {
        "system": "\n\n".join(instructions) or None,
        "temperature": request.temperature,
        "top_p": request.top_p,
        "top_k": request.top_k,
        "stop_sequences": list(request.stop) or None,
        "stream": request.stream or None,
    }
    return body | {name: value for name, value in settings.items() if value is not None}


def _build_turns(messages: Sequence[Message]) -> list[Json]:
    """Convert messages to turns. Adjacent messages with the same API role become one turn."""
    turns: list[Json] = []
    for message in messages:
        role = "assistant" if message["role"] == "assistant" else "user"
        if not (blocks := _build_blocks(message)):
            continue
        if turns and turns[-1]["role"] == role:
            turns[-1]["content"] += blocks
        else:
            turns.append({"role": role, "content": blocks})
    return turns


def _build_blocks(message: Message) -> list[Json]:
    content = message["content"]
    if message["role"] == "tool":
        call_id = _replace_invalid_characters(message.get("tool_call_id", ""))
        return [{"type": "tool_result", "tool_use_id": call_id, "content": content}]
    # The API rejects blocks that contain only whitespace.
    blocks: list[Json] = [{"type": "text", "text": content}] if content.strip() else []
    for call in message.get("tool_calls", ()):
        try:
            arguments: Any = msgspec.json.decode(call["arguments"])
        except msgspec.DecodeError:
            arguments = None
        if not isinstance(arguments, dict):  # The model wrote other text, but the API requires an object.
            arguments = {"arguments": call["arguments"]}
        call_id = _replace_invalid_characters(call["id"])
        blocks.append({"type": "tool_use", "id": call_id, "name": call["name"], "input": arguments})
    return blocks


def _replace_invalid_characters(call_id: str) -> str:
    # Ids from other providers may contain characters that the API rejects.
    return re.sub(r"[^a-zA-Z0-9_-]", "_", call_id)
