"""Fake vLLM servers. Tests choose the events that a server sends and the paths that fail."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Self

from aiohttp import web

GENERATE_PATH = "/inference/v1/generate"
RPC_PATH = "/collective_rpc"


class FakeVllm:
    """Streams the queued events as replies, and returns an empty result for every other request."""

    def __init__(self) -> None:
        self.paths: list[str] = []
        """The requested paths, in order."""
        self.requested_models: list[str | None] = []
        """The adapters that replies were requested from, in order. None means the server's own weights."""
        self.sampling_params: list[dict[str, Any]] = []
        """The ``sampling_params`` of the requests for replies, in order."""
        self.failing_paths: set[str] = set()
        """Paths that respond with status 500."""
        self.events: asyncio.Queue[bytes | None] = asyncio.Queue()
        """The events to send in replies. None ends a reply."""
        self.url = ""

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        self.paths.append(request.path)
        if request.path in self.failing_paths:
            return web.json_response({"error": {"message": "requested by the test"}}, status=500)
        if request.path == GENERATE_PATH:
            body = await request.json()
            self.sampling_params.append(body["sampling_params"] if body else {})
            self.requested_models.append(body.get("model"))
            return await self._generate(request)
        return web.json_response({"results": [None]})

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        while (data := await self.events.get()) is not None:
            await response.write(data)
        return response

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[Self]:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._handle)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        try:
            yield self
        finally:
            await runner.cleanup()


class StatefulFakeVllm(FakeVllm):
    """Tracks adapters, weights and the paused state."""

    def __init__(self, root: Path, *, supports_adapters: bool = False, has_extension: bool = True) -> None:
        super().__init__()
        self._root = str(root)
        self._supports_adapters = supports_adapters
        self._has_extension = has_extension
        self.paths_failing_once: set[str] = set()
        """Paths whose next request gets status 503. The request takes effect anyway, except for /resume."""
        self.reports_start_time = True
        """True if /metrics includes the start time, which the engine uses to detect restarts."""
        self.restart()

    def restart(self) -> None:
        """Reset all state, as if the server had been restarted."""
        self.start_time = getattr(self, "start_time", 0) + 1
        self.adapters: dict[str, str] = {}
        self.paused = False
        self.weights = "base"
        """The path or transfer key of the loaded weights, or "base" after a restart."""
        self._staged_key = ""

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        if request.path in self.failing_paths or request.path == GENERATE_PATH:
            return await super()._handle(request)
        self.paths.append(request.path)
        should_fail = request.path in self.paths_failing_once
        self.paths_failing_once.discard(request.path)
        if should_fail and request.path == "/resume":
            return web.Response(status=503)
        response = self._respond(request.path, await request.json() if request.can_read_body else {})
        return web.Response(status=503) if should_fail else response

    def _respond(self, path: str, body: dict[str, Any]) -> web.Response:
        match path:
            case "/openapi.json":
                paths = (
                    ["/v1/load_lora_adapter"] if self._supports_adapters else ["/pause", "/resume", RPC_PATH]
                )
                return web.json_response(
                    {"paths": dict.fromkeys([GENERATE_PATH, "/update_weight_version", *paths])}
                )
            case "/v1/models":
                entry = {"id": "m", "root": self._root, "max_model_len": 100_000}
                return web.json_response({"data": [entry]})
            case "/metrics":
                metric = f"process_start_time_seconds {self.start_time}" if self.reports_start_time else ""
                return web.Response(text=f"# HELP\nvllm:lora_requests_info\n{metric}\n")
            case "/v1/load_lora_adapter":
                if body["lora_name"] in self.adapters:
                    return _error_response(f"The lora adapter '{body['lora_name']}' has already been loaded.")
                self.adapters[body["lora_name"]] = body["lora_path"]
            case "/v1/unload_lora_adapter":
                if self.adapters.pop(body["lora_name"], None) is None:
                    return _error_response(f"The lora adapter '{body['lora_name']}' cannot be found.")
            case "/pause" | "/resume":
                self.paused = path == "/pause"
            case "/collective_rpc":
                return self._call_worker(body["method"], body["kwargs"])
            case _:
                pass
        return web.json_response({})

    def _call_worker(self, method: str, kwargs: dict[str, Any]) -> web.Response:
        if method.startswith("instar_") and not self._has_extension:
            return _error_response(f"no method {method}", 500)
        payload: dict[str, Any] = json.loads(kwargs.get("text", "{}"))
        result: dict[str, Any] = {}
        match method:
            case "instar_describe":
                result = {"gpu": None, "ray": False, "nccl": False}
            case "instar_stage":
                self._staged_key = payload["key"]
                result = {"known": True}
            case "instar_commit":
                self.weights = self._staged_key
            case "instar_reload":
                self.weights = payload["path"]
            case "reload_weights":
                self.weights = kwargs["weights_path"]
            case _:
                result = {"done": True}
        return web.json_response({"results": [result]})


def _error_response(message: str, status: int = 400) -> web.Response:
    return web.json_response({"error": {"message": message}}, status=status)


def make_event(*ids: int, finish: str | None = None, **fields: Any) -> bytes:
    """Return a vLLM 0.26 event with these tokens, each with a logprob of -1."""
    content = [
        {"token": f"token_id:{token}", "logprob": -1.0, "bytes": None, "top_logprobs": []} for token in ids
    ]
    choice = {"index": 0, "logprobs": {"content": content}, "finish_reason": finish, "token_ids": list(ids)}
    return b"data: " + json.dumps({"request_id": "r", "choices": [choice | fields]}).encode() + b"\n\n"


END_EVENT = b"data: [DONE]\n\n"
