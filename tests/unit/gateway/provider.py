"""A fake provider on a real socket that serves four dialects with fixed replies and failures.

The requested model selects the behaviour: `plain` (text), `tools` (a tool call), `exact` (token ids, like
vLLM), `bytewise` (the stream is sent byte by byte), `crlf` (the stream has CRLF line ends), `truncated` (the
stream ends early), `disconnecting` (the connection is aborted), `limited` (429), `broken` (500), `malformed`
(invalid JSON), `failing` (an error event in the stream), `keep_open` (the connection stays open after the
stream ends).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import orjson
from aiohttp import web

from instar.gateway.serve import bind

TEXT = "Grüße, 世界 🌍!"
ARGUMENTS = '{"city": "Zürich"}'
USAGE = {"prompt_tokens": 12, "completion_tokens": 7, "total_tokens": 19}


def split_text(text: str) -> list[str]:
    return [text[i : i + 3] for i in range(0, len(text), 3)]


# --- chat and completions -----------------------------------------------------------------------


def build_chat_response(model: str, n: int) -> Any:
    message: dict[str, Any] = {"role": "assistant", "content": TEXT, "refusal": None, "annotations": []}
    finish = "stop"
    if model == "tools":
        finish = "tool_calls"
        function = {"name": "weather", "arguments": ARGUMENTS}
        message |= {
            "content": None,
            "reasoning_content": "Look it up.",
            "tool_calls": [{"id": "call_1", "type": "function", "function": function}],
        }
    choices: list[Any] = [
        {"index": i, "message": message, "logprobs": None, "finish_reason": finish} for i in range(n)
    ]
    response = {
        "id": "chatcmpl-9",
        "object": "chat.completion",
        "created": 1,
        "model": "m",
        "choices": choices,
    }
    if model == "exact":
        logprobs = {"content": [{"token": "a", "logprob": -0.5, "bytes": [97], "top_logprobs": []}] * 3}
        choices[0] |= {"token_ids": [7, 8, 2], "logprobs": logprobs}
        response["prompt_token_ids"] = [1, 5, 6]
    return response | {"usage": USAGE}


def build_chat_stream(model: str, n: int) -> list[Any]:
    def chunk(index: int, delta: Any, finish: str | None = None, **fields: Any) -> Any:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish, **fields}
        return {"id": "chatcmpl-9", "object": "chat.completion.chunk", "model": "m", "choices": [choice]}

    events: list[Any] = [chunk(i, {"role": "assistant", "content": ""}) for i in range(n)]
    if model == "exact":
        events[0]["prompt_token_ids"] = [1, 5, 6]
        for token in (7, 8):
            logprobs = {"content": [{"token": "a", "logprob": -0.5, "top_logprobs": []}]}
            events.append(chunk(0, {"content": "ab"}, token_ids=[token], logprobs=logprobs))
        logprobs = {"content": [{"token": "", "logprob": -0.25, "top_logprobs": []}]}
        return [*events, chunk(0, {}, "stop", token_ids=[2], logprobs=logprobs), "[DONE]"]
    if model == "tools":
        events.append(chunk(0, {"reasoning_content": "Look it up."}))
        call = {"index": 0, "id": "call_1", "type": "function"}
        events.append(chunk(0, {"tool_calls": [{**call, "function": {"name": "weather", "arguments": ""}}]}))
        for text in split_text(ARGUMENTS):
            events.append(chunk(0, {"tool_calls": [{"index": 0, "function": {"arguments": text}}]}))
        events.append(chunk(0, {}, "tool_calls"))
    else:
        events += [chunk(i, {"content": text}) for text in split_text(TEXT) for i in range(n)]
        events += [chunk(i, {}, "stop") for i in range(n)]
    usage = {"id": "chatcmpl-9", "object": "chat.completion.chunk", "model": "m", "choices": []}
    return [*events, usage | {"usage": USAGE}, "[DONE]"]


def build_completion(model: str, n: int) -> Any:
    choice: dict[str, Any] = {"index": 0, "text": TEXT, "logprobs": None, "finish_reason": "length"}
    if model == "exact":
        logprobs = {"tokens": ["a"] * 3, "token_logprobs": [-0.5, -0.5, None], "top_logprobs": None}
        choice |= {"token_ids": [7, 8, 2], "prompt_token_ids": [1, 5, 6], "logprobs": logprobs}
    response = {"id": "cmpl-9", "object": "text_completion", "created": 1, "model": "m"}
    return response | {"choices": [choice], "usage": USAGE}


def build_completion_stream(model: str, n: int) -> list[Any]:
    def chunk(text: str, finish: str | None = None) -> Any:
        choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": finish}
        return {"id": "cmpl-9", "object": "text_completion", "created": 1, "model": "m", "choices": [choice]}

    return [*(chunk(text) for text in split_text(TEXT)), chunk("", "length"), "[DONE]"]


# --- responses ----------------------------------------------------------------------------------


def build_response(model: str, n: int = 1) -> Any:
    part = {"type": "output_text", "text": TEXT, "annotations": [], "logprobs": []}
    output: list[Any] = [
        {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed", "content": [part]}
    ]
    if model == "tools":
        summary = [{"type": "summary_text", "text": "Look it up."}]
        call = {"type": "function_call", "id": "fc_1", "call_id": "call_1", "status": "completed"}
        output = [
            {"type": "reasoning", "id": "rs_1", "summary": summary},
            call | {"name": "weather", "arguments": ARGUMENTS},
        ]
    usage = {
        "input_tokens": 12,
        "input_tokens_details": {"cached_tokens": 4},
        "output_tokens": 7,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 19,
    }
    return {
        "id": "resp_9",
        "object": "response",
        "created_at": 1,
        "status": "completed",
        "model": "m",
        "output": output,
        "usage": usage,
        "error": None,
        "incomplete_details": None,
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
    }


def build_response_stream(model: str, n: int) -> list[Any]:
    complete_response = build_response(model)
    started_response = complete_response | {"status": "in_progress", "output": [], "usage": None}
    events: list[Any] = [{"type": "response.created", "response": started_response}]
    for index, item in enumerate(complete_response["output"]):
        location = {"output_index": index, "item_id": item["id"]}
        empty = item | ({"arguments": ""} if "arguments" in item else {"content": []})
        events.append({"type": "response.output_item.added", "output_index": index, "item": empty})
        if item["type"] == "message":
            part = {"type": "output_text", "text": "", "annotations": []}
            location |= {"content_index": 0}
            events.append({"type": "response.content_part.added", "part": part, **location})
            deltas = [{"delta": text, "logprobs": []} for text in split_text(TEXT)]
            events += [{"type": "response.output_text.delta", **delta, **location} for delta in deltas]
            events.append({"type": "response.output_text.done", "text": TEXT, "logprobs": [], **location})
            done = {"type": "response.content_part.done", "part": item["content"][0]}
            events.append(done | location)
        elif item["type"] == "function_call":
            prefix = "response.function_call_arguments"
            events += [
                {"type": f"{prefix}.delta", "delta": text, **location} for text in split_text(ARGUMENTS)
            ]
            events.append({"type": f"{prefix}.done", "arguments": ARGUMENTS, "name": "weather", **location})
        else:
            event_type = "response.reasoning_summary_text.delta"
            events.append({"type": event_type, "delta": "Look it up.", "summary_index": 0, **location})
        events.append({"type": "response.output_item.done", "output_index": index, "item": item})
    events.append({"type": "response.completed", "response": complete_response})
    return [event | {"sequence_number": i} for i, event in enumerate(events)]


# --- messages -----------------------------------------------------------------------------------


def build_message(model: str, n: int = 1) -> Any:
    content: list[Any] = [{"type": "text", "text": TEXT}]
    if model == "tools":
        content = [
            {"type": "thinking", "thinking": "Look it up.", "signature": "sig"},
            {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": orjson.loads(ARGUMENTS)},
        ]
    return {
        "id": "msg_9",
        "type": "message",
        "role": "assistant",
        "model": "m",
        "content": content,
        "stop_reason": "tool_use" if model == "tools" else "end_turn",
        "stop_sequence": None,
        "usage": {"input_tokens": 8, "cache_read_input_tokens": 4, "output_tokens": 7},
    }


def build_message_stream(model: str, n: int) -> list[Any]:
    complete_message = build_message(model)
    started_message = complete_message | {"content": [], "stop_reason": None}
    started_message["usage"] = complete_message["usage"] | {"output_tokens": 1}
    events: list[Any] = [{"type": "message_start", "message": started_message}]
    for index, block in enumerate(complete_message["content"]):
        if block["type"] == "text":
            empty, deltas = {"text": ""}, [{"type": "text_delta", "text": text} for text in split_text(TEXT)]
        elif block["type"] == "thinking":
            empty = {"thinking": "", "signature": ""}
            deltas = [{"type": "thinking_delta", "thinking": "Look it up."}]
            deltas.append({"type": "signature_delta", "signature": "sig"})
        else:
            empty = {"input": {}}
            deltas = [
                {"type": "input_json_delta", "partial_json": text} for text in ["", *split_text(ARGUMENTS)]
            ]
        events.append({"type": "content_block_start", "index": index, "content_block": block | empty})
        events.append({"type": "ping"})
        events += [{"type": "content_block_delta", "index": index, "delta": delta} for delta in deltas]
        events.append({"type": "content_block_stop", "index": index})
    end = {"stop_reason": complete_message["stop_reason"], "stop_sequence": None}
    events.append({"type": "message_delta", "delta": end, "usage": {"output_tokens": 7}})
    return [*events, {"type": "message_stop"}]


# --- the server ---------------------------------------------------------------------------------

RESPONSE_BUILDERS = {
    "chat": (build_chat_response, build_chat_stream),
    "completions": (build_completion, build_completion_stream),
    "responses": (build_response, build_response_stream),
    "messages": (build_message, build_message_stream),
}
PATHS = {f"/v1/{name}": name for name in RESPONSE_BUILDERS if name != "chat"} | {
    "/v1/chat/completions": "chat"
}
RATE_LIMIT_ERROR = {
    "error": {"message": "Slow down.", "type": "rate_limit_error", "param": None, "code": "slow"}
}
STREAM_ERROR = {"type": "error", "error": {"type": "overloaded_error", "message": "Overloaded."}}


def encode_events(events: list[Any], has_event_names: bool, crlf: bool = False) -> list[bytes]:
    encoded: list[bytes] = [b": comment\n\n"]
    for event in events:
        data = event.encode() if isinstance(event, str) else orjson.dumps(event)
        name = f"event: {event['type']}\n".encode() if has_event_names else b""
        encoded.append(name + b"data: " + data + b"\n\n")
    return [event.replace(b"\n", b"\r\n") for event in encoded] if crlf else encoded


@dataclass
class Provider:
    url: str = ""
    """The server's URL without a path."""

    bodies: list[bytes] = field(default_factory=list[bytes])
    """The bodies of all requests, including token counts."""

    headers: list[dict[str, str]] = field(default_factory=list[dict[str, str]])
    """The headers of all requests except token counts, with lower-case names."""

    gate: asyncio.Event | None = None
    """If set, streams wait for this event before sending their last third."""

    released: asyncio.Event = field(default_factory=asyncio.Event)
    """`keep_open` connections are closed when this is set."""

    @property
    def last_request(self) -> Any:
        return orjson.loads(self.bodies[-1])

    async def handle_model_call(self, request: web.Request) -> web.StreamResponse:
        self.bodies.append(await request.read())
        self.headers.append({name.lower(): value for name, value in request.headers.items()})
        model, n = self.last_request["model"], self.last_request.get("n", 1)
        if model == "limited":
            return web.json_response(RATE_LIMIT_ERROR, status=429, headers={"Retry-After": "7"})
        if model == "broken":
            return web.Response(status=500, text="<h1>Internal Server Error</h1>")
        if model == "malformed":
            return web.Response(text="}{ not JSON", content_type="application/json")
        build_complete, build_stream = RESPONSE_BUILDERS[PATHS[request.path]]
        if not self.last_request.get("stream"):
            return web.json_response(
                build_complete(model, n), dumps=lambda value: orjson.dumps(value).decode()
            )
        has_event_names = request.path in ("/v1/responses", "/v1/messages")
        return await self.send_stream(
            request, encode_events(build_stream(model, n), has_event_names, model == "crlf"), model
        )

    async def send_stream(self, request: web.Request, events: list[bytes], model: str) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        gate_index = len(events) * 2 // 3
        for event in events[:gate_index]:
            await send_event(response, event, bytewise=model == "bytewise")
        if self.gate is not None:
            await self.gate.wait()
        if model == "disconnecting" and request.transport is not None:
            request.transport.abort()
        elif model == "failing":
            await send_event(response, b"event: error\ndata: " + orjson.dumps(STREAM_ERROR) + b"\n\n")
        elif model != "truncated":
            for event in events[gate_index:]:
                await send_event(response, event, bytewise=model == "bytewise")
        if model == "keep_open":
            await self.released.wait()
        return response

    async def count_tokens(self, request: web.Request) -> web.StreamResponse:
        self.bodies.append(await request.read())
        return web.json_response({"input_tokens": 12})


async def send_event(response: web.StreamResponse, event: bytes, bytewise: bool = False) -> None:
    for piece in [event[i : i + 1] for i in range(len(event))] if bytewise else [event]:
        await response.write(piece)
        await asyncio.sleep(0)


@asynccontextmanager
async def run_provider() -> AsyncGenerator[Provider]:
    provider = Provider()
    app = web.Application(client_max_size=1 << 30)
    for path in PATHS:
        app.router.add_post(path, provider.handle_model_call)
    app.router.add_post("/v1/messages/count_tokens", provider.count_tokens)
    runner = web.AppRunner(app, shutdown_timeout=1)
    await runner.setup()
    listener = bind("127.0.0.1", 0)
    await web.SockSite(runner, listener).start()
    provider.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    try:
        yield provider
    finally:
        provider.released.set()
        await runner.cleanup()
