"""Middleware for vLLM's server, which itself checks its key only on sampling routes, not on weight changes.

Servers are started with ``--middleware instar.engines.vllm.auth.RequireKeyMiddleware``. This module imports
only the standard library because vLLM runs in its own environment.
"""

from __future__ import annotations

import hmac
import os
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]

OPEN = ("/health",)
REFUSAL = b'{"error": {"message": "a bearer token is required"}}'


class RequireKeyMiddleware:
    """Asks for the key in `VLLM_API_KEY` on every path but /health."""

    def __init__(self, app: App) -> None:
        self._app = app
        self._expected = f"Bearer {os.environ['VLLM_API_KEY']}".encode()

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or scope["path"] in OPEN or self._has_key(scope):
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            headers = [(b"content-type", b"application/json")]
            await send({"type": "http.response.start", "status": 401, "headers": headers})
            await send({"type": "http.response.body", "body": REFUSAL})
        else:
            await send({"type": "websocket.close", "code": 1008})

    def _has_key(self, scope: Message) -> bool:
        given = dict(scope["headers"]).get(b"authorization", b"")
        return hmac.compare_digest(given, self._expected)
