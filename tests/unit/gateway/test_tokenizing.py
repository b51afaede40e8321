"""Large prompts do not block the gateway: they are rejected early or tokenized in threads."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Awaitable
from typing import Any, TypeVar

import httpx
import pytest

from instar.config import GatewayConfig, ModelConfig, ScriptedEngineConfig
from instar.engines.scripted import ScriptedEngine
from instar.gateway.base import ApiError
from instar.gateway.tokenizing import TokenizerPool
from tests.unit.gateway.conftest import ADMIN_KEY, RunningGateway, StartGateway
from tests.unit.gateway.wire import PATHS, build_request, get_session_id, list_all_calls, post

T = TypeVar("T")
COUNT_PATH = "/v1/messages/count_tokens"
LARGE_TEXT = "some words " * 90_000
TOOLS = [{"type": "function", "function": {"name": "calc", "parameters": {"type": "object"}}}]


async def start_gateway_with_context(
    start_gateway: StartGateway, model: ModelConfig, max_context: int
) -> RunningGateway:
    engine = ScriptedEngine(
        model.model_copy(update={"max_context": max_context}),
        ScriptedEngineConfig(function="tests.unit.gateway.scripts:reply"),
    )
    return await start_gateway(engine=engine)


async def post_encoded(gateway: RunningGateway, path: str, body: Any) -> httpx.Response:
    headers = {"Authorization": f"Bearer {ADMIN_KEY}"}
    return await gateway.http.post(path, content=json.dumps(body).encode(), headers=headers)


async def measure_blocked_fraction(work: Awaitable[T]) -> tuple[T, float]:
    """Return the result and the longest time that the event loop was blocked, as a fraction of the process's
    CPU time. Unlike wall time, CPU time does not depend on other processes."""
    task = asyncio.ensure_future(work)
    start, previous = time.process_time(), time.thread_time()
    longest = 0.0
    while not task.done():
        await asyncio.sleep(0)
        longest, previous = max(longest, time.thread_time() - previous), time.thread_time()
    return await task, longest / (time.process_time() - start)


@pytest.mark.parametrize("dialect", PATHS)
async def test_prompt_that_cannot_fit_is_rejected_before_tokenization(
    gateway: RunningGateway, dialect: str
) -> None:
    response = await post(gateway, build_request(dialect, "some words " * 20_000), dialect)
    assert response.status_code == 400
    assert "at least" in response.json()["error"]["message"]
    assert await list_all_calls(gateway) == []


@pytest.mark.parametrize("dialect", PATHS)
async def test_large_prompt_does_not_block_the_gateway(
    start_gateway: StartGateway, model: ModelConfig, dialect: str
) -> None:
    gateway = await start_gateway_with_context(start_gateway, model, 200_000)
    body = build_request(dialect, LARGE_TEXT)
    response, blocked_fraction = await measure_blocked_fraction(post_encoded(gateway, PATHS[dialect], body))
    assert (response.status_code, "context" in response.text) == (400, True)
    assert blocked_fraction < 0.5


@pytest.mark.parametrize("part", ["reply", "tools", "arguments"])
async def test_large_parts_of_a_conversation_do_not_block_the_gateway(
    start_gateway: StartGateway, model: ModelConfig, part: str
) -> None:
    gateway = await start_gateway_with_context(start_gateway, model, 200_000)
    body = build_request("chat", "one", "two", "three", tools=TOOLS)
    if part == "reply":
        body["messages"][1]["content"] = LARGE_TEXT
    elif part == "tools":
        body["tools"][0]["function"]["description"] = LARGE_TEXT
    else:
        function = {"name": "calc", "arguments": json.dumps({"text": LARGE_TEXT})}
        body["messages"][1]["tool_calls"] = [{"id": "call-1", "type": "function", "function": function}]
    response, blocked_fraction = await measure_blocked_fraction(post_encoded(gateway, PATHS["chat"], body))
    assert (response.status_code, "context" in response.text) == (400, True)
    assert blocked_fraction < 0.5


async def test_counting_many_tokens_does_not_block_the_gateway(
    start_gateway: StartGateway, model: ModelConfig
) -> None:
    gateway = await start_gateway_with_context(start_gateway, model, 200_000)
    body = build_request("messages", LARGE_TEXT)
    response, blocked_fraction = await measure_blocked_fraction(post_encoded(gateway, COUNT_PATH, body))
    assert response.json()["input_tokens"] > 200_000
    assert blocked_fraction < 0.5


async def test_large_prompts_extend_the_recorded_tokens(
    start_gateway: StartGateway, model: ModelConfig
) -> None:
    gateway = await start_gateway_with_context(start_gateway, model, 400_000)
    text = "some words " * 8_000
    first = await post(gateway, build_request("chat", text, max_tokens=5))
    reply = first.json()["choices"][0]["message"]["content"]
    continuation = build_request("chat", text, reply, text + "again", max_tokens=5)
    responses = await asyncio.gather(*(post(gateway, continuation) for _ in range(3)))
    assert {get_session_id(response) for response in responses} == {get_session_id(first)}
    root, *later = await list_all_calls(gateway)
    assert len(later) == 3
    for call in later:
        assert call.prompt_ids[: len(root.sequence)].tolist() == root.sequence.tolist()


# --- the tokenizer pool -------------------------------------------------------------------------


async def test_pool_runs_one_prompt_per_key_at_a_time() -> None:
    pool = TokenizerPool(GatewayConfig())
    finish, second_started = threading.Event(), threading.Event()
    first = asyncio.create_task(pool.run("one", finish.wait))
    second = asyncio.create_task(pool.run("one", second_started.set))
    await pool.run("two", lambda: None)  # A different key does not have to wait.
    assert not second_started.is_set()
    finish.set()
    await asyncio.gather(first, second)
    assert second_started.is_set()


async def test_pool_rejects_a_key_with_too_many_waiting_prompts() -> None:
    pool, finish = TokenizerPool(GatewayConfig(max_in_flight=8)), threading.Event()
    tasks = [asyncio.create_task(pool.run("one", finish.wait)) for _ in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(ApiError, match="2 large prompts") as caught:
        await pool.run("one", lambda: None)
    assert (caught.value.status, caught.value.retry_after) == (429, 1)
    await pool.run("two", lambda: None)
    finish.set()
    await asyncio.gather(*tasks)
    await pool.run("one", lambda: None)


async def test_pool_stops_waiting_after_the_timeout() -> None:
    pool, finish = TokenizerPool(GatewayConfig(request_timeout=0.05)), threading.Event()
    for _ in range(2):  # The second prompt waits for the first one's thread.
        with pytest.raises(ApiError, match="not tokenized within"):
            await pool.run("one", finish.wait)
    finish.set()
