"""Anthropic's Messages."""

from __future__ import annotations

from collections.abc import Sequence

import orjson

from instar.gateway.base import ApiError
from instar.gateway.dialects.base import Choice, Dialect, Request, StreamWriter
from instar.gateway.dialects.messages_read import read_count_request, read_request
from instar.gateway.dialects.messages_write import MessagesStreamWriter, dumps, error_object, message


class MessagesDialect(Dialect):
    name = "messages"
    path = "/messages"
    id_prefix = "msg"
    count_path = "/messages/count_tokens"

    def read(self, body: bytes) -> Request:
        return read_request(body)

    def answer(self, request_id: str, request: Request, choices: Sequence[Choice]) -> bytes:
        return dumps(message(request_id, request, choices[0]))

    def writer(self, request_id: str, request: Request) -> StreamWriter:
        return MessagesStreamWriter(request_id, request)

    def error(self, error: ApiError) -> bytes:
        return orjson.dumps(error_object(error))

    def read_count(self, body: bytes) -> Request:
        return read_count_request(body)

    def count(self, tokens: int) -> bytes:
        return orjson.dumps({"input_tokens": tokens})


def models_answer(ids: list[str]) -> bytes:
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
