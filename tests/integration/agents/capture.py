"""A server that sends scripted replies to an agent and captures its requests.

It supports the Chat Completions, Responses and Messages APIs, with and without streaming, and does not use
Instar.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

Json = dict[str, Any]
Events = Iterator[tuple[str | None, Json | str]]
"""The name, if any, and the data of each server-sent event."""
DIALECTS = {"/chat/completions": "chat", "/responses": "responses", "/messages": "messages"}
SECRET_HEADERS = {"authorization", "x-api-key", "cookie"}


@dataclass(frozen=True)
class ScriptedReply:
    """A model reply: text, then tool calls."""

    text: str = ""
    calls: tuple[tuple[str, Json], ...] = ()
    prompt_tokens: int = 1000
    """The reported prompt length. Agents use it to decide when to compact their context."""
    status: int = 200
    """The HTTP status. If it is not 200, the response is an error and the other fields are ignored."""


Script = Callable[[str, Json], ScriptedReply]
"""Returns the reply to a request, from its dialect and body."""


@dataclass
class CapturedExchange:
    path: str
    headers: dict[str, str]
    body: Json
    reply: Json
    """The response body in its non-streaming form, even if the response was streamed."""


@dataclass
class CaptureServer:
    script: Script
    exchanges: list[CapturedExchange] = field(default_factory=list[CapturedExchange])

    def create_app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/{path:path}", self._serve, methods=["POST"]),
                Route("/{path:path}", self._list_models, methods=["GET", "HEAD"]),
            ]
        )

    async def _list_models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [{"id": "instar", "object": "model"}]})

    async def _serve(self, request: Request) -> Response:
        path = request.url.path
        body = json.loads(await request.body() or b"{}")
        if path.endswith("/count_tokens"):
            return JSONResponse({"input_tokens": 1000})
        dialect = next((name for suffix, name in DIALECTS.items() if path.endswith(suffix)), None)
        if dialect is None:
            return JSONResponse({"error": {"message": f"Unknown path: {path}"}}, status_code=404)
        reply = self.script(dialect, body)
        number = len(self.exchanges)
        headers = {key: value for key, value in request.headers.items() if key not in SECRET_HEADERS}
        if reply.status != 200:
            error_body = {"type": "error", "error": {"type": "api_error", "message": "try again"}}
            self.exchanges.append(CapturedExchange(path, headers, body, error_body))
            return JSONResponse(error_body, reply.status)
        response_body, events = {
            "chat": _encode_chat,
            "responses": _encode_responses,
            "messages": _encode_messages,
        }[dialect](reply, number, body.get("model", ""))
        self.exchanges.append(CapturedExchange(path, headers, body, response_body))
        if body.get("stream"):
            return StreamingResponse(_format_events(events), media_type="text/event-stream")
        return JSONResponse(response_body)


async def _format_events(events: Events) -> AsyncIterator[bytes]:
    for name, data in events:
        text = data if isinstance(data, str) else json.dumps(data)
        yield f"event: {name}\ndata: {text}\n\n".encode() if name else f"data: {text}\n\n".encode()


def _encode_chat(reply: ScriptedReply, number: int, model: str) -> tuple[Json, Events]:
    calls = [
        {
            "id": f"call_{number:04d}{index}",
            "type": "function",
            "function": {"name": name, "arguments": json.dumps(arguments)},
        }
        for index, (name, arguments) in enumerate(reply.calls)
    ]
    usage = {
        "prompt_tokens": reply.prompt_tokens,
        "completion_tokens": 20,
        "total_tokens": reply.prompt_tokens + 20,
    }
    common_fields = {"id": f"chatcmpl-{number:04d}", "created": 1, "model": model}
    finish = "tool_calls" if calls else "stop"
    message = {"role": "assistant", "content": reply.text or None, **({"tool_calls": calls} if calls else {})}
    choice = {"index": 0, "message": message, "finish_reason": finish}
    response_body = {**common_fields, "object": "chat.completion", "choices": [choice], "usage": usage}

    def make_chunk(delta: Json, finish: str | None = None) -> Json:
        return {
            **common_fields,
            "object": "chat.completion.chunk",
            "choices": [{"index": 0, "delta": delta, "finish_reason": finish}],
        }

    def make_events() -> Events:
        yield None, make_chunk({"role": "assistant", "content": ""})
        if reply.text:
            yield None, make_chunk({"content": reply.text})
        for index, call in enumerate(calls):
            yield None, make_chunk({"tool_calls": [{"index": index, **call}]})
        yield None, make_chunk({}, finish)
        yield None, {**common_fields, "object": "chat.completion.chunk", "choices": [], "usage": usage}
        yield None, "[DONE]"

    return response_body, make_events()


def _encode_messages(reply: ScriptedReply, number: int, model: str) -> tuple[Json, Events]:
    blocks: list[Json] = [{"type": "text", "text": reply.text}] if reply.text else []
    blocks += [
        {"type": "tool_use", "id": f"toolu_{number:04d}{index}", "name": name, "input": arguments}
        for index, (name, arguments) in enumerate(reply.calls)
    ]
    usage = {"input_tokens": reply.prompt_tokens, "output_tokens": 20}
    response_body: Json = {
        "id": f"msg_{number:04d}",
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": blocks,
        "stop_reason": "tool_use" if reply.calls else "end_turn",
        "stop_sequence": None,
        "usage": usage,
    }

    def make_events() -> Events:
        start = {**response_body, "content": [], "stop_reason": None, "usage": {**usage, "output_tokens": 1}}
        yield "message_start", {"type": "message_start", "message": start}
        for index, block in enumerate(blocks):
            if block["type"] == "text":
                initial_block: Json = {"type": "text", "text": ""}
                delta: Json = {"type": "text_delta", "text": block["text"]}
            else:
                initial_block = {**block, "input": {}}
                delta = {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
            yield (
                "content_block_start",
                {"type": "content_block_start", "index": index, "content_block": initial_block},
            )
            yield "content_block_delta", {"type": "content_block_delta", "index": index, "delta": delta}
            yield "content_block_stop", {"type": "content_block_stop", "index": index}
        final_delta = {"stop_reason": response_body["stop_reason"], "stop_sequence": None}
        yield "message_delta", {"type": "message_delta", "delta": final_delta, "usage": usage}
        yield "message_stop", {"type": "message_stop"}

    return response_body, make_events()


def _encode_responses(reply: ScriptedReply, number: int, model: str) -> tuple[Json, Events]:
    items: list[Json] = []
    if reply.text:
        part = {"type": "output_text", "text": reply.text, "annotations": []}
        items.append(
            {
                "id": f"msg_{number:04d}",
                "type": "message",
                "role": "assistant",
                "status": "completed",
                "content": [part],
            }
        )
    items += [
        {
            "id": f"fc_{number:04d}{index}",
            "type": "function_call",
            "call_id": f"call_{number:04d}{index}",
            **_split_namespace(name),
            "arguments": json.dumps(arguments),
            "status": "completed",
        }
        for index, (name, arguments) in enumerate(reply.calls)
    ]
    usage = {
        "input_tokens": reply.prompt_tokens,
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": 20,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": reply.prompt_tokens + 20,
    }
    response_body: Json = {
        "id": f"resp_{number:04d}",
        "object": "response",
        "created_at": 1,
        "status": "completed",
        "model": model,
        "output": items,
        "usage": usage,
    }

    def make_unnumbered_events() -> Iterator[Json]:
        initial_response = {**response_body, "status": "in_progress", "output": [], "usage": None}
        yield {"type": "response.created", "response": initial_response}
        for index, item in enumerate(items):
            position = {"output_index": index, "item_id": item["id"]}
            if item["type"] == "message":
                initial_item = {**item, "content": [], "status": "in_progress"}
                yield {"type": "response.output_item.added", "output_index": index, "item": initial_item}
                event = {"type": "response.output_text.delta", "content_index": 0, "delta": reply.text}
                yield {**event, **position}
            else:
                initial_item = {**item, "arguments": "", "status": "in_progress"}
                yield {"type": "response.output_item.added", "output_index": index, "item": initial_item}
                delta = item["arguments"]
                yield {"type": "response.function_call_arguments.delta", "delta": delta, **position}
            yield {"type": "response.output_item.done", "output_index": index, "item": item}
        yield {"type": "response.completed", "response": response_body}

    def make_events() -> Events:
        for sequence, event in enumerate(make_unnumbered_events()):
            yield event["type"], {**event, "sequence_number": sequence}

    return response_body, make_events()


def _split_namespace(name: str) -> Json:
    """Split ``namespace.tool`` into the fields that the Responses API uses for namespaced tools."""
    namespace, _, tool = name.rpartition(".")
    return {"namespace": namespace, "name": tool} if namespace else {"name": tool}
