"""Helpers that send requests in every dialect over plain HTTP, and restart a gateway on its store."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx

from instar.config import GatewayConfig, ModelConfig, ScriptedEngineConfig
from instar.engines.scripted import ScriptedEngine
from instar.record.base import Renderer
from instar.types import Call
from tests.unit.gateway.conftest import ADMIN_KEY, RunningGateway, run_gateway

PATHS = {
    "chat": "/v1/chat/completions",
    "completions": "/v1/completions",
    "responses": "/v1/responses",
    "messages": "/v1/messages",
}
DIALECTS = tuple(PATHS)


def build_request(dialect: str, *texts: str, **fields: Any) -> dict[str, Any]:
    """Return a request body with alternating user and assistant turns."""
    turns = [{"role": "assistant" if i % 2 else "user", "content": text} for i, text in enumerate(texts)]
    match dialect:
        case "completions":
            formatted = [f"<|im_start|>{turn['role']}\n{turn['content']}<|im_end|>\n" for turn in turns]
            prompt = "".join([*formatted, "<|im_start|>assistant\n"])
            body: dict[str, Any] = {"prompt": prompt, "max_tokens": 500}
        case "responses":
            body = {"input": turns}
        case "messages":
            body = {"messages": turns, "max_tokens": 500}
        case _:
            body = {"messages": turns}
    return {"model": "m", **body, **fields}


async def post(
    gateway: RunningGateway,
    body: Any,
    dialect: str = "chat",
    key: str = ADMIN_KEY,
    prefix: str = "",
    **headers: str,
) -> httpx.Response:
    """Post a body to the dialect's route. Underscores in header names become hyphens."""
    extra_headers = {name.replace("_", "-"): value for name, value in headers.items()}
    return await gateway.http.post(
        prefix + PATHS[dialect], json=body, headers={"Authorization": f"Bearer {key}", **extra_headers}
    )


def get_session_id(response: httpx.Response) -> str:
    assert response.status_code == 200, response.text
    return response.headers["x-instar-session"]


async def list_all_calls(gateway: RunningGateway) -> list[Call]:
    """Return the calls of all sessions, in the order in which the sessions were opened."""
    rows = await gateway.store.sessions("run")
    by_session = [await gateway.store.calls(row.session.session_id) for row in rows]
    return [call for calls in by_session for call in calls]


async def count_in_flight(gateway: RunningGateway) -> int:
    response = await gateway.http.get("/stats", headers={"Authorization": f"Bearer {ADMIN_KEY}"})
    return response.json()["in_flight"]


async def wait_for_in_flight(gateway: RunningGateway, count: int, timeout_seconds: float = 10) -> None:
    """Wait until ``count`` model calls are in flight."""
    async with asyncio.timeout(timeout_seconds):
        while await count_in_flight(gateway) != count:  # noqa: ASYNC110 — there is no event to wait for
            await asyncio.sleep(0.005)


@asynccontextmanager
async def run_scripted_gateway(
    store_path: Path,
    model: ModelConfig,
    renderer: Renderer,
    *,
    config: GatewayConfig | None = None,
    hash_key: bytes = b"key",
    delay: float = 0.0,
) -> AsyncGenerator[RunningGateway]:
    """Run a gateway on the store at ``store_path``. With an existing store, this simulates a restart."""
    script = ScriptedEngineConfig(function="tests.unit.gateway.scripts:reply", delay=delay)
    engine = ScriptedEngine(model, script)
    async with run_gateway(
        store_path, engine, renderer, config or GatewayConfig(), hash_key=hash_key
    ) as gateway:
        yield gateway


async def wait_until(condition: Callable[[], object], timeout_seconds: float = 30) -> None:
    """Wait until the condition returns a true value. Raise TimeoutError if the timeout expires."""
    async with asyncio.timeout(timeout_seconds):
        while not condition():  # noqa: ASYNC110 - nothing reports the condition
            await asyncio.sleep(0.01)
