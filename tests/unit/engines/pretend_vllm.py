"""A server that speaks as vLLM does as far as the engine's own part is concerned: what it says is up to the
test, which can have it fail where real servers seldom do."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web


class PretendVllm:
    def __init__(self) -> None:
        self.heard: list[str] = []
        """Paths that were asked for, in order."""
        self.failing: set[str] = set()
        """Paths that answer 500."""
        self.say: asyncio.Queue[bytes | None] = asyncio.Queue()
        """What a reply streams; None ends it."""
        self.url = ""

    async def _any(self, request: web.Request) -> web.StreamResponse:
        self.heard.append(request.path)
        if request.path in self.failing:
            return web.json_response({"error": {"message": "as the test wants it"}}, status=500)
        if request.path == "/inference/v1/generate":
            return await self._generate(request)
        return web.json_response({"results": [None]})

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        while (part := await self.say.get()) is not None:
            await response.write(part)
        return response

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[PretendVllm]:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._any)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        try:
            yield self
        finally:
            await runner.cleanup()


def event(*ids: int, finish: str | None = None, **more: Any) -> bytes:
    """Tokens as vLLM 0.26 tells them, with a logprob of -1 each."""
    content = [
        {"token": f"token_id:{token}", "logprob": -1.0, "bytes": None, "top_logprobs": []} for token in ids
    ]
    choice = {"index": 0, "logprobs": {"content": content}, "finish_reason": finish, "token_ids": list(ids)}
    return b"data: " + json.dumps({"request_id": "r", "choices": [choice | more]}).encode() + b"\n\n"


END = b"data: [DONE]\n\n"
