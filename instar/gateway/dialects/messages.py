"""Anthropic's Messages."""

from __future__ import annotations

from collections.abc import Sequence

import orjson

from instar.gateway.base import ApiError
from instar.gateway.dialects.base import Dialect, ModelRequest, ReplyChoice, StreamWriter
from instar.gateway.dialects.messages_read import parse_count_request, parse_request
from instar.gateway.dialects.messages_write import (
    MessagesStreamWriter,
    dump_json,
    format_anthropic_error,
    format_message,
)


class MessagesDialect(Dialect):
    name = "messages"
    path = "/messages"
    id_prefix = "msg"
    count_path = "/messages/count_tokens"

    def parse_request(self, body: bytes) -> ModelRequest:
        return parse_request(body)

    def format_response(
        self, request_id: str, request: ModelRequest, choices: Sequence[ReplyChoice]
    ) -> bytes:
        return dump_json(format_message(request_id, request, choices[0]))

    def create_stream_writer(self, request_id: str, request: ModelRequest) -> StreamWriter:
        return MessagesStreamWriter(request_id, request)

    def format_error(self, error: ApiError) -> bytes:
        return orjson.dumps(format_anthropic_error(error))

    def parse_count_request(self, body: bytes) -> ModelRequest:
        return parse_count_request(body)

    def format_count(self, tokens: int) -> bytes:
        return orjson.dumps({"input_tokens": tokens})


def format_models(ids: list[str]) -> bytes:
    """``GET /v1/models`` for a client that sends ``anthropic-version``."""
    data = [
        {
            "type": "model",
            "id": name,
            "display_name": name,
            "created_at": "1970-01-01T00:00:00Z",
            "lifecycle": "active",
        }
        for name in ids
    ]
    first, last = (ids[0], ids[-1]) if ids else (None, None)
    return orjson.dumps({"data": data, "has_more": False, "first_id": first, "last_id": last})
