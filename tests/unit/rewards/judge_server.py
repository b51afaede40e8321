"""A fake judge server with OpenAI's Chat Completions API and Anthropic's Messages API.

The judge's answer is a function of the request. Each of the ``faults`` applies to one request: ``hang`` (the
response is delayed by 30 s), ``drop`` (the connection is aborted), ``truncated`` (the connection is closed
during the response), ``unparseable`` (a reply without an answer), ``invalid`` (not an API response), a status
such as ``500``, or ``429:2`` for a status with a Retry-After header.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from instar.gateway.serve import bind

TOKENS_IN, TOKENS_OUT = 300, 100


@dataclass
class JudgeRequest:
    path: str
    headers: dict[str, str]
    body: dict[str, Any]

    @property
    def system(self) -> str:
        return self.body.get("system") or self.body["messages"][0]["content"]

    @property
    def user(self) -> str:
        return self.body["messages"][-1]["content"]


AnswerFunction = Callable[[JudgeRequest], Any]
"""Returns the answer as JSON, or as text that is sent unchanged."""


@dataclass
class JudgeServer:
    answer_with: AnswerFunction
    url: str = ""
    faults: list[str] = field(default_factory=list[str])
    requests: list[JudgeRequest] = field(default_factory=list[JudgeRequest])
    supports_schema: bool = True
    max_concurrency: int = 0
    _active_requests: int = 0

    async def handle_request(self, request: web.Request) -> web.StreamResponse:
        received = JudgeRequest(request.path, dict(request.headers), await request.json())
        self.requests.append(received)
        self._active_requests += 1
        self.max_concurrency = max(self.max_concurrency, self._active_requests)
        try:
            if self.faults:
                return await self._fail(request, self.faults.pop(0))
            await asyncio.sleep(0)
            return self._respond(received)
        finally:
            self._active_requests -= 1

    def _respond(self, received: JudgeRequest) -> web.Response:
        if not self.supports_schema and ("response_format" in received.body or "tools" in received.body):
            return web.json_response(
                {"error": {"message": "Unknown parameter: 'response_format'."}}, status=400
            )
        answer = self.answer_with(received)
        is_messages_api = received.path.endswith("/messages")
        make_response = _make_messages_response if is_messages_api else _make_chat_response
        return web.json_response(make_response(answer, received.body))

    async def _fail(self, request: web.Request, fault: str) -> web.StreamResponse:
        if fault == "hang":
            await asyncio.sleep(30)
        if fault == "drop":
            assert request.transport is not None
            request.transport.abort()
        if fault == "truncated":
            response = web.StreamResponse(headers={"content-length": "1000"})
            await response.prepare(request)
            await response.write(b'{"choices": [')
            assert request.transport is not None
            request.transport.close()
            return response
        if fault == "unparseable":
            return web.json_response(_make_chat_response("There is no answer.", {}))
        if fault == "invalid":
            return web.Response(text="<html>Bad gateway</html>")
        status, _, retry_after = fault.partition(":")
        headers = {"Retry-After": retry_after} if retry_after else {}
        body = {
            "error": {"message": f"rejected: {request.headers.get('authorization')}", "type": "some_error"}
        }
        return web.json_response(body, status=int(status) if status.isdigit() else 500, headers=headers)


def _make_chat_response(answer: Any, body: dict[str, Any]) -> Any:
    text = answer if isinstance(answer, str) else json.dumps(answer)
    message = {"role": "assistant", "content": text}
    usage = {"prompt_tokens": TOKENS_IN, "completion_tokens": TOKENS_OUT}
    return {"id": "1", "choices": [{"index": 0, "message": message, "finish_reason": "stop"}], "usage": usage}


def _make_messages_response(answer: Any, body: dict[str, Any]) -> Any:
    if "tools" in body and not isinstance(answer, str):
        content = {"type": "tool_use", "id": "1", "name": body["tools"][0]["name"], "input": answer}
    else:
        content = {"type": "text", "text": answer if isinstance(answer, str) else json.dumps(answer)}
    usage = {"input_tokens": TOKENS_IN, "output_tokens": TOKENS_OUT}
    return {"id": "1", "type": "message", "content": [content], "stop_reason": "end_turn", "usage": usage}


@asynccontextmanager
async def serve_judge(answer_with: AnswerFunction) -> AsyncGenerator[JudgeServer]:
    server = JudgeServer(answer_with)
    app = web.Application(client_max_size=1 << 26)
    app.router.add_post("/v1/chat/completions", server.handle_request)
    app.router.add_post("/v1/messages", server.handle_request)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    listener = bind("127.0.0.1", 0)
    await web.SockSite(runner, listener).start()
    server.url = f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
    try:
        yield server
    finally:
        await runner.cleanup()
