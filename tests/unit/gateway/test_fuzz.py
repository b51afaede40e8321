"""Randomly mutated requests succeed or get an error in their dialect, and leave no partial records."""

from __future__ import annotations

import asyncio
import copy
import gzip
import json
import os
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from instar.config import GatewayConfig, ModelConfig, ScriptedEngineConfig
from instar.engines.scripted import ScriptedEngine
from tests.unit.gateway.conftest import ADMIN_KEY, RunningGateway, StartGateway
from tests.unit.gateway.wire import PATHS, build_request, list_all_calls, wait_for_in_flight

TRAFFIC = Path(__file__).parents[1] / "record" / "fixtures" / "traffic"
REQUEST_COUNT = int(os.environ.get("INSTAR_FUZZ", "800"))
"""The number of requests per dialect. The variable `INSTAR_FUZZ` overrides it."""
CONCURRENCY = 16
DEEP_PLACEHOLDER = "@deep@"
"""Placeholder for a hundred thousand nested lists."""
SCHEMA = {"type": "object", "properties": {"x": {"type": "string"}}, "required": ["x"]}

UNUSUAL_VALUES: list[Any] = [
    None, True, False, 0, -1, 1, 7, 10**30, -(10**30), 1 << 31, 1 << 63, 0.5, 1e308, -1e308, float("nan"),
    float("inf"), "", " ", "x", "\x00", "\ud800", "\udfff\ud83d", "🌍" * 50, "a" * 5000, "<|im_end|>", "null",
    [], {}, [[]], [None], [{}], {"": ""}, {"type": "text"}, {"type": "text", "text": None}, ["a", 1, None],
    {"a": {"b": {"c": [1, 2, {"d": None}]}}}, DEEP_PLACEHOLDER, {"x": DEEP_PLACEHOLDER},
    "assistant", "tool", "system", "user",
    "function", "developer", {"role": "user", "content": "x"}, [{"role": "assistant", "content": None}],
    {"type": "function", "function": {"name": "f"}}, "required", "none", {"type": "any"}, [0, 5, 10**9, -3],
]  # fmt: skip
FIELD_NAMES = [
    "messages", "input", "prompt", "model", "tools", "n", "stream", "stop", "temperature", "top_p",
    "max_tokens", "tool_choice", "metadata", "user", "system", "role", "content", "type", "text", "name",
    "arguments", "id",
    "tool_calls", "tool_call_id", "function", "parameters", "properties", "seed", "logprobs", "thinking", "x",
    "previous_response_id", "instructions", "reasoning", "tool_use_id", "call_id", "output", "summary",
    "k\ud800",
]  # fmt: skip


def build_complete_bodies(dialect: str) -> list[Any]:
    """Return bodies that use most fields of the dialect."""
    match dialect:
        case "chat":
            call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x": "1"}'}}
            tool = {"type": "function", "function": {"name": "f", "description": "d", "parameters": SCHEMA}}
            messages = [
                {"role": "system", "content": "s"},
                {"role": "user", "content": [{"type": "text", "text": "hi"}]},
                {"role": "assistant", "content": "a", "reasoning_content": "r", "tool_calls": [call]},
                {"role": "tool", "tool_call_id": "c1", "content": "1"},
            ]
            settings = {
                "n": 2,
                "stop": ["END"],
                "seed": 3,
                "temperature": 0.5,
                "top_p": 0.9,
                "logprobs": True,
            }
            return [{"model": "m", "messages": messages, "tools": [tool], "max_tokens": 20, **settings}]
        case "completions":
            settings = {"max_tokens": 10, "stop": "x", "seed": 1, "logprobs": 0, "n": 2, "user": "u"}
            prompts: list[Any] = ["once upon", [1, 2, 3, 40], ["a"], [[5, 6]], [""]]
            return [{"model": "m", "prompt": prompt, **settings} for prompt in prompts]
        case "responses":
            items = [
                {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]},
                {"type": "reasoning", "id": "r", "summary": [{"type": "summary_text", "text": "t"}]},
                {"type": "function_call", "call_id": "c", "name": "f", "arguments": '{"x": "1"}'},
                {"type": "function_call_output", "call_id": "c", "output": "1"},
            ]
            tool = {
                "type": "function",
                "name": "f",
                "description": "d",
                "parameters": SCHEMA,
                "strict": False,
            }
            settings = {"max_output_tokens": 20, "temperature": 1, "metadata": {"k": "v"}, "store": True}
            return [
                {"model": "m", "instructions": "s", "input": items, "tools": [tool], **settings},
                {"model": "m", "input": "hi", "previous_response_id": "resp-missing"},
            ]
        case _:
            blocks = [
                {"type": "thinking", "thinking": "t", "signature": "s"},
                {"type": "text", "text": "a"},
                {"type": "tool_use", "id": "t1", "name": "f", "input": {"x": "1"}},
            ]
            results = [
                {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "1"}]},
                {"type": "text", "text": "go on"},
            ]
            messages = [
                {"role": "user", "content": "hi"},
                {"role": "assistant", "content": blocks},
                {"role": "user", "content": results},
            ]
            settings = {"stop_sequences": ["END"], "temperature": 0.5, "thinking": {"type": "disabled"}}
            tools = [{"name": "f", "description": "d", "input_schema": SCHEMA}]
            system = [{"type": "text", "text": "s", "cache_control": {"type": "ephemeral"}}]
            return [
                {
                    "model": "m",
                    "max_tokens": 20,
                    "system": system,
                    "messages": messages,
                    "tools": tools,
                    **settings,
                }
            ]


def load_recorded_bodies(dialect: str) -> list[Any]:
    """Return request bodies recorded from real agents."""
    bodies: list[Any] = []
    for file in sorted(TRAFFIC.glob("*.json.gz")):
        for entry in json.loads(gzip.decompress(file.read_bytes()))[:2]:
            if entry["path"].split("?")[0] == PATHS[dialect]:
                bodies.append(entry["body"])
    return bodies


def iter_locations(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield a (container, key) pair for every nested value."""
    items: list[tuple[Any, Any]] = []
    if isinstance(value, dict):
        items = list(value.items())
    elif isinstance(value, list):
        items = list(enumerate(value))
    for key, item in items:
        yield value, key
        yield from iter_locations(item)


class BodyFuzzer:
    """Generates random mutations of the seed bodies."""

    def __init__(self, seed_bodies: list[Any], rng: random.Random) -> None:
        self.seed_bodies = seed_bodies
        self.rng = rng

    def generate_bodies(self, count: int) -> Iterator[bytes]:
        for _ in range(count):
            body = copy.deepcopy(self.rng.choice(self.seed_bodies))
            if isinstance(body, dict) and self.rng.random() < 0.5:
                body["stream"] = self.rng.random() < 0.5
            for _ in range(self.rng.choice([0, 1, 1, 1, 2, 3, 6])):
                body = self.mutate(body)
            raw = (
                json.dumps(body)
                .encode()
                .replace(f'"{DEEP_PLACEHOLDER}"'.encode(), b"[" * 100_000 + b"]" * 100_000)
            )
            yield self.corrupt(raw) if self.rng.random() < 0.15 else raw

    def mutate(self, body: Any) -> Any:
        rng = self.rng
        locations = list(iter_locations(body))
        if not locations or rng.random() < 0.01:
            return rng.choice(UNUSUAL_VALUES)
        # Half of the mutations are near the start, because tools make up most of a body.
        container, key = rng.choice(locations if rng.random() < 0.5 else locations[:60])
        match rng.randrange(7):
            case 0:
                del container[key]
            case 1 if isinstance(container, dict):
                container[rng.choice(FIELD_NAMES)] = copy.deepcopy(rng.choice(UNUSUAL_VALUES))
            case 2 if isinstance(container, dict):
                container[rng.choice(FIELD_NAMES)] = container.pop(key)
            case 3 if isinstance(container, list):
                container.insert(key, copy.deepcopy(rng.choice([*UNUSUAL_VALUES, container[key]])))
            case 4 if isinstance(container, list):
                rng.shuffle(container)
            case 5:
                other, other_key = rng.choice(locations)
                container[key] = copy.deepcopy(other[other_key])
            case _:
                container[key] = copy.deepcopy(rng.choice(UNUSUAL_VALUES))
        return body

    def corrupt(self, raw: bytes) -> bytes:
        rng = self.rng
        index = rng.randrange(len(raw))
        match rng.randrange(6):
            case 0:
                return raw[:index]
            case 1:
                return (
                    raw[:index]
                    + rng.choice([b"\xff", b"\xc3", b"\xed\xa0\x80", b"\x00", b"\\ud800"])
                    + raw[index:]
                )
            case 2:
                return raw[:index] + bytes([rng.randrange(256)]) + raw[index + 1 :]
            case 3:
                return raw[:index] + raw[index + rng.randrange(1, 20) :]
            case 4:
                return b"\xef\xbb\xbf" + raw
            case _:
                return raw + rng.choice([b"}", b"\n\n", b"{}", b"\x00"])


def is_valid_error(dialect: str, response: Any) -> bool:
    """Return True if a client of the dialect can parse the error."""
    error = response["error"]
    if dialect == "messages":
        return response["type"] == "error" and bool(error["type"] and error["message"])
    return bool(error["message"] and error["type"]) and {"param", "code"} <= set(error)


@pytest.fixture
async def fuzzed_gateway(start_gateway: StartGateway, model: ModelConfig) -> RunningGateway:
    long_context = model.model_copy(update={"max_context": 200_000})
    replies = ['Well.\n<tool_call>{"name": "f", "arguments": {"x": "1"}}</tool_call>', "Done."]
    engine = ScriptedEngine(long_context, ScriptedEngineConfig(replies=replies))
    return await start_gateway(engine=engine, config=GatewayConfig(request_timeout=20))


class CheckedSender:
    """Sends requests, and checks that each succeeds or gets a valid 4xx error."""

    def __init__(self, gateway: RunningGateway, http: aiohttp.ClientSession, dialect: str) -> None:
        self.gateway = gateway
        self.http = http
        self.dialect = dialect
        self.status_counts: Counter[int] = Counter()

    async def send(self, path: str, body: bytes, **headers: str) -> tuple[int, bytes]:
        headers = {"Authorization": f"Bearer {ADMIN_KEY}", "Content-Type": "application/json", **headers}
        async with self.http.post(self.gateway.url + path, data=body, headers=headers) as response:
            content = await response.read()
        self.status_counts[response.status] += 1
        assert 200 <= response.status < 500, (response.status, content[:500], shorten_body(body))
        if response.status >= 400:
            assert is_valid_error(self.dialect, json.loads(content)), (content[:500], shorten_body(body))
        return response.status, content

    async def send_all(self, path: str, bodies: Iterator[bytes]) -> None:
        async def send_remaining() -> None:
            for body in bodies:
                await self.send(path, body)

        async with asyncio.TaskGroup() as group:
            for _ in range(CONCURRENCY):
                group.create_task(send_remaining())


def shorten_body(body: bytes) -> bytes:
    return body if len(body) < 4000 else body[:2000] + b" ... " + body[-500:]


def open_http_session() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=30))


@pytest.mark.parametrize("dialect", list(PATHS))
async def test_mutated_requests_cause_no_server_errors_or_partial_records(
    fuzzed_gateway: RunningGateway, dialect: str
) -> None:
    seed_bodies = (
        build_complete_bodies(dialect) * 4
        + [build_request(dialect, "hi")] * 4
        + load_recorded_bodies(dialect)
    )
    fuzzer = BodyFuzzer(seed_bodies, random.Random(dialect))
    async with open_http_session() as http:
        sender = CheckedSender(fuzzed_gateway, http, dialect)
        await sender.send_all(PATHS[dialect], fuzzer.generate_bodies(REQUEST_COUNT))
        assert sender.status_counts[200] > REQUEST_COUNT / 20, sender.status_counts
        assert sender.status_counts[400] > REQUEST_COUNT / 20, sender.status_counts
        await wait_for_in_flight(fuzzed_gateway, 0)
        calls = await list_all_calls(fuzzed_gateway)
        assert len({call.request_id for call in calls}) == sender.status_counts[200]
        sessions = await fuzzed_gateway.store.sessions("run")
        assert {row.session.session_id for row in sessions} == {call.session_id for call in calls}
        status, _ = await sender.send(PATHS[dialect], json.dumps(build_request(dialect, "hi")).encode())
        assert status == 200


async def test_mutated_count_requests_cause_no_server_errors(fuzzed_gateway: RunningGateway) -> None:
    fuzzer = BodyFuzzer(build_complete_bodies("messages"), random.Random(1))
    async with open_http_session() as http:
        sender = CheckedSender(fuzzed_gateway, http, "messages")
        await sender.send_all("/v1/messages/count_tokens", fuzzer.generate_bodies(REQUEST_COUNT // 4))
    assert await list_all_calls(fuzzed_gateway) == []


SUBMITTED_CALL = {
    "prompt_ids": [1, 2, 3], "sampled_ids": [4, 2], "logprobs": [-0.1, -0.2], "versions": [0, 0],
    "finish_reason": "stop", "messages": [{"role": "user", "content": "x"}], "params": {"temperature": 1},
    "reply": {"role": "assistant", "content": "y"}, "client_key": "k",
}  # fmt: skip
OTHER_ROUTES: list[tuple[str, Any]] = [
    (
        "/v1/generate",
        {"prompt_ids": [1, 2, 3], "max_tokens": 5, "n": 2, "stop": ["x"], "stop_token_ids": [2]},
    ),
    (
        "/sessions",
        {"channel": "live", "metadata": {"a": 1}, "task": {"b": 2}, "seed": 1, "sampling": {"top_k": 1}},
    ),
    ("/sessions/{}/calls", {"calls": [SUBMITTED_CALL]}),
    (
        "/sessions/{}/complete",
        {"reward": 1.0, "metadata": {}, "rewards": [{"value": 1, "detail": {"a": "b"}}]},
    ),
]


@pytest.mark.parametrize(("path", "seed_body"), OTHER_ROUTES)
async def test_mutated_requests_to_other_routes_cause_no_server_errors(
    fuzzed_gateway: RunningGateway, path: str, seed_body: Any
) -> None:
    fuzzer = BodyFuzzer([seed_body], random.Random(path))
    async with open_http_session() as http:
        sender = CheckedSender(fuzzed_gateway, http, "chat")
        for body in fuzzer.generate_bodies(REQUEST_COUNT // 8):
            session_id = (await fuzzed_gateway.open_session()).session_id if "{}" in path else ""
            await sender.send(path.format(session_id), body)
    await wait_for_in_flight(fuzzed_gateway, 0)


async def test_unusual_headers_and_paths_cause_no_server_errors(fuzzed_gateway: RunningGateway) -> None:
    body = json.dumps(build_request("chat", "hi")).encode()
    async with open_http_session() as http:
        sender = CheckedSender(fuzzed_gateway, http, "chat")
        for name, value in [
            ("X-Instar-Session", "nö\t"),
            ("X-Instar-Session", "%00../"),
            ("X-Session-Id", "ÿ" * 300),
            ("Idempotency-Key", "é" * 5000),
            ("Idempotency-Key", ""),
            ("X-Stainless-Retry-Count", "many"),
            ("Content-Encoding", "gzip"),
            ("Content-Type", "text/plain"),
            ("Accept", "unknown/type"),
            ("X-Claude-Code-Session-Id", "a" * 9000),
        ]:
            await sender.send(PATHS["chat"], body, **{name: value})
        for path in [
            "/s//v1/chat/completions",
            "/s/%2e%2e/v1/chat/completions",
            "/s/a/b/v1/chat/completions",
            "/v1/chat/completions/",
            "/v1/%ff",
            "/sessions/%00/complete",
            "/sessions//complete",
        ]:
            await sender.send(path, body)
