"""Middleware that requires the API key on every route of a vLLM server except /health. vLLM itself requires
the key only on sampling routes, but not on the routes that change weights.

This module imports only the standard library and modules that do the same, because vLLM runs in its own
environment.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from instar.http.auth import has_bearer_token

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]

ERROR_BODY = b'{"error": {"message": "The key is missing or wrong; send Authorization: Bearer <key>."}}'


class RequireKeyMiddleware:
    def __init__(self, app: App) -> None:
        self._app = app
        self._key = os.environ["VLLM_API_KEY"]

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        is_public = scope["type"] == "lifespan" or scope["path"] == "/health"
        if is_public or has_bearer_token(scope["headers"], self._key):
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            headers = [(b"content-type", b"application/json")]
            await send({"type": "http.response.start", "status": 401, "headers": headers})
            await send({"type": "http.response.body", "body": ERROR_BODY})
        else:
            await send({"type": "websocket.close", "code": 1008})
