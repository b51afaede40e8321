"""Conversations with tool calls in the formats of published model families, from folders with made-up names.

An agent that sends everything back as it received it must extend every prompt exactly, and every sampled
token must be trained on. Formats that drop earlier reasoning rewrite the history after a new user message.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from instar.cli.model_probe import hold_probe
from instar.cli.models import ModelReport, check_renderer
from instar.config import ModelConfig, RunConfig, ScriptedEngineConfig
from instar.engines.scripted import ScriptedEngine
from instar.gateway.base import OpenSession
from instar.models import load_tokenizer
from instar.record.render import TemplateRenderer, load_renderer
from instar.rollout.gateway_client import GatewayClient
from instar.store.sqlite import SqliteStore
from instar.types import Call, Channel
from tests import model_families
from tests.integration.clients.recorded_sessions import (
    RecordedSession,
    count_sampled_tokens,
    count_trained_tokens,
    find_continued_call,
    is_exact,
)
from tests.model_families import COMPACT, FAMILIES, ODD, ModelFamily
from tests.serving import ADMIN_KEY, running_gateway

PUBLISHED = json.loads((Path(__file__).parents[2] / "docs" / "models.json").read_text())["families"]
"""The rows of docs/models.md."""
PARAMETERS = {
    "type": "object",
    "properties": {"text": {"type": "string"}, "count": {"type": "integer"}},
    "required": ["text"],
}
TOOLS = [
    {"type": "function", "function": {"name": name, "description": "A tool.", "parameters": PARAMETERS}}
    for name in ("search", "fetch")
]


@pytest.fixture(params=FAMILIES, ids=lambda family: family.name)
def family(request: pytest.FixtureRequest) -> ModelFamily:
    return request.param


@pytest.fixture
def folder(family: ModelFamily, tmp_path: Path) -> Path:
    try:
        return family.save_tokenizer(tmp_path)
    except model_families.TokenizerUnavailable as error:
        pytest.skip(str(error))


async def request_reply(http: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> dict[str, Any]:
    """Return the reply's message, or put it together from the pieces of a stream."""
    async with http.post(url, json=body) as response:
        text = await response.text()
        assert response.status == 200, text
    if not body["stream"]:
        return json.loads(text)["choices"][0]["message"]
    message: dict[str, Any] = {"role": "assistant", "content": "", "reasoning_content": ""}
    for line in text.splitlines():
        if not line.startswith("data: {"):
            continue
        for choice in json.loads(line.removeprefix("data: "))["choices"]:
            delta = choice["delta"]
            message["content"] += delta.get("content") or ""
            message["reasoning_content"] += delta.get("reasoning_content") or delta.get("reasoning") or ""
            for piece in delta.get("tool_calls") or []:
                calls = message.setdefault("tool_calls", [])
                if piece["index"] == len(calls):
                    calls.append(
                        {"id": piece["id"], "type": "function", "function": {"name": "", "arguments": ""}}
                    )
                for name, part in piece["function"].items():
                    calls[piece["index"]]["function"][name] += part or ""
    return message


async def hold_conversation(url: str, key: str, family: ModelFamily) -> list[dict[str, Any]]:
    """Hold a conversation of four turns and return the replies."""
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": f"step-1 of {family.name}; search twice"},
    ]
    replies: list[dict[str, Any]] = []
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {key}"}) as http:
        for step in range(2, 6):
            body = {"model": "m", "messages": messages, "tools": TOOLS, "max_tokens": 500}
            message = await request_reply(http, f"{url}/chat/completions", {**body, "stream": step % 2 == 0})
            replies.append(message)
            messages.append(
                {k: v for k, v in message.items() if k in ("role", "content", "tool_calls") and v}
            )
            calls = message.get("tool_calls") or []
            messages[-1].setdefault("content", None if calls else "")
            text = f"step-{step} of {family.name};"
            if calls:
                messages += [
                    {"role": "tool", "tool_call_id": call["id"], "content": f"{text} result é {i}"}
                    for i, call in enumerate(calls)
                ]
            else:
                messages.append({"role": "user", "content": f"{text} and now?"})
    return replies


def check_replies(family: ModelFamily, replies: list[dict[str, Any]]) -> None:
    calls = [
        [
            (call["function"]["name"], json.loads(call["function"]["arguments"]))
            for call in reply.get("tool_calls") or []
        ]
        for reply in replies
    ]
    both = [("search", json.loads(COMPACT)), ("search", json.loads(ODD))]
    assert calls[0] == (both[:1] if family.tool_format == "harmony" else both)
    assert calls[1:] == [[("fetch", {"text": "ü", "count": 0})], [], []]
    if family.has_text_before_calls:
        assert (replies[0]["content"] or "").strip() == model_families.TEXT.strip()
    assert replies[2]["content"] == "It is “3”."
    if family.reasoning:
        assert all(
            (reply.get("reasoning_content") or reply.get("reasoning", "")).strip() == "Hmm, é 🙂."
            for reply in replies
        )


def count_branches(calls: list[Call]) -> tuple[int, int]:
    """Return the number of turns that do not extend their history after results, and after user messages."""
    after_results = after_users = 0
    for i, call in enumerate(calls[1:], start=1):
        parent = find_continued_call(call, calls[:i])
        assert parent is not None
        if not is_exact(call, parent):
            is_user = call.messages[-1]["role"] == "user"
            after_users += is_user
            after_results += not is_user
    return after_results, after_users


@pytest.mark.timeout(600)
async def test_conversation_with_calls_is_exact(family: ModelFamily, folder: Path, tmp_path: Path) -> None:
    model = ModelConfig(name=str(folder), max_context=100_000)
    config = RunConfig(name="families", model=model)
    engine = ScriptedEngine(model, ScriptedEngineConfig(function="tests.model_families:reply"))
    store = SqliteStore(tmp_path / "store.db")
    async with running_gateway(config, store, engine) as url:
        client = GatewayClient(url, ADMIN_KEY)
        session = await client.open_session(OpenSession(channel=Channel.TRAIN))
        replies = await hold_conversation(session.base_url, session.api_key, family)
        await client.close()
        recorded = await store.session(session.session_id)
        calls = sorted(await store.calls(session.session_id), key=lambda call: call.started_at)
    assert recorded is not None
    check_replies(family, replies)
    assert len(calls) == 4
    trained = count_trained_tokens(RecordedSession(recorded, calls))
    branches = count_branches(calls)
    await engine.close()
    await store.close()
    assert branches == (0, int(family.rewrites_after_user))
    assert trained == count_sampled_tokens(calls)


@pytest.mark.timeout(600)
def test_check_of_the_model_agrees_with_docs_and_with_replies_of_other_authors(
    family: ModelFamily, folder: Path
) -> None:
    renderer, tokenizer = load_renderer(folder, ModelConfig(name=str(folder))), load_tokenizer(folder)
    report = ModelReport(family.name)
    check_renderer(report, renderer, tokenizer)
    assert report.is_exact
    assert {name: getattr(report, name) for name in PUBLISHED[family.name]} == PUBLISHED[family.name]
    probe = hold_probe(renderer, tokenizer, family.write_reply)
    assert probe.is_exact
    assert probe.rewritten == family.rewrites_after_user


@pytest.mark.timeout(600)
def test_tool_format_is_detected(family: ModelFamily, folder: Path) -> None:
    renderer = load_renderer(folder, ModelConfig(name=str(folder)))
    assert isinstance(renderer, TemplateRenderer)
    assert ("generic" if renderer.uses_generic_tools else renderer.tool_format.name) == family.tool_format
    stop_texts = {renderer.decode_token(i) for i in renderer.stop_token_ids}
    assert stop_texts >= {family.eos, family.call_end} - {""}
    assert "<|channel|>" not in stop_texts
