"""A `/v1/completions` server on a real socket that returns the scripted engine's logprobs.

The requested model name selects the behaviour:

- `vllm`: returns `prompt_logprobs`
- `openai`: supports `echo`
- `strict`: supports `echo` and rejects unknown fields
- `sglang`: supports `echo`, but only if a token is sampled
- `llama`: returns only the logprobs of sampled tokens
- `bos`: prepends a token to the prompt
- `token_ids`: supports `echo` and returns token ids instead of texts
- `wrong_ids`: like `token_ids`, with wrong ids
- `foreign`: has a different vocabulary
- `flaky`: fails three times, then behaves like `vllm`
- `unresponsive`: does not respond
- `denied`: responds with status 401
- `malformed`: does not return JSON
- `incomplete`: omits a logprob
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from aiohttp import web

from instar.engines.base import Engine
from instar.gateway.serve import bind

KEY = "sk-teacher-secret"
KNOWN_FIELDS = {"model", "prompt", "max_tokens", "temperature", "echo", "logprobs"}


@dataclass
class TeacherServer:
    engine: Engine
    tokenizer: Any
    url: str = ""
    bodies: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    authorizations: set[str] = field(default_factory=set[str])
    active_requests: int = 0
    max_active_requests: int = 0

    async def complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        self.authorizations.add(request.headers.get("Authorization", ""))
        self.active_requests += 1
        self.max_active_requests = max(self.max_active_requests, self.active_requests)
        try:
            await asyncio.sleep(0.005)
            return await self.respond(body)
        finally:
            self.active_requests -= 1

    async def respond(self, body: dict[str, Any]) -> web.StreamResponse:
        model = body["model"]
        if model == "flaky" and len(self.bodies) <= 3:
            headers = {"Retry-After": "0.1"} if len(self.bodies) == 3 else {}
            return web.Response(status=(500, 503, 429)[len(self.bodies) - 1], headers=headers)
        if model == "unresponsive":
            await asyncio.sleep(60)
        if model == "denied":
            return web.json_response({"error": f"Incorrect API key provided: {KEY}"}, status=401)
        if model == "malformed":
            return web.Response(text="<html>")
        if model == "strict" and (unknown := body.keys() - KNOWN_FIELDS):
            return web.json_response({"error": f"unknown: {unknown}"}, status=400)
        ids: list[int] = ([1] if model == "bos" else []) + body["prompt"]
        values = [None, *map(float, (await self.engine.logprobs(ids))[1:])]
        if model == "incomplete" and len(ids) > 30:
            values[25] = None
        usage = {"prompt_tokens": len(ids), "completion_tokens": 1}
        return web.json_response({"choices": [self.make_choice(body, ids, values)], "usage": usage})

    def make_choice(self, body: dict[str, Any], ids: list[int], values: list[float | None]) -> dict[str, Any]:
        model = body["model"]
        choice: dict[str, Any] = {"index": 0, "text": "x", "logprobs": None, "finish_reason": "length"}
        if model in ("vllm", "flaky", "bos", "foreign"):
            if body.get("prompt_logprobs") is not None:
                choice["prompt_logprobs"] = [
                    self.make_logprob_entry(model, *pair) for pair in zip(ids, values, strict=True)
                ]
            return choice
        if body.get("logprobs") is None or (model == "sglang" and not body["logprobs"]):
            return choice
        sampled = [-0.5] * body["max_tokens"]
        if model == "llama":
            return choice | {"logprobs": {"token_logprobs": [-0.5], "tokens": ["x"]}}
        texts = [self.tokenizer.decode([token]) for token in ids]
        if model in ("token_ids", "wrong_ids"):
            texts = [f"token_id:{token + (model == 'wrong_ids')}" for token in ids]
        return choice | {
            "logprobs": {"token_logprobs": [*values, *sampled], "tokens": [*texts, *("x" for _ in sampled)]}
        }

    def make_logprob_entry(self, model: str, token: int, value: float | None) -> dict[str, Any] | None:
        if value is None:
            return None
        text = self.tokenizer.decode([token + 5 if model == "foreign" else token])
        top_token = {"logprob": -0.01, "rank": 1, "decoded_token": "?"}
        own_token = {"logprob": value, "rank": 2, "decoded_token": text}
        return (
            {"3": top_token, str(token): own_token} if token % 2 and token != 3 else {str(token): own_token}
        )


@asynccontextmanager
async def serve_teacher(engine: Engine, tokenizer: Any) -> AsyncGenerator[TeacherServer]:
    teacher = TeacherServer(engine, tokenizer)
    app = web.Application(client_max_size=1 << 24)
    app.router.add_post("/v1/completions", teacher.complete)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    listener = bind("127.0.0.1", 0)
    await web.SockSite(runner, listener).start()
    teacher.url = f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
    try:
        yield teacher
    finally:
        await runner.cleanup()


def make_token_ids(length: int = 40, seed: int = 0) -> Any:
    return np.random.default_rng(seed).integers(4, 290, length).astype(np.int32)
