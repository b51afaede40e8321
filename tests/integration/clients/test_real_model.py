"""The official SDKs at a gateway with a real model: what it says is not ours to choose, the record is."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import anthropic
import numpy as np
import openai
import pytest

from instar.config import LocalEngineConfig, ModelConfig, RunConfig
from instar.engines.local.engine import LocalEngine
from instar.models import DEFAULT_MODEL, resolve_model
from instar.rollout.base import AgentSession
from instar.rollout.gateway_client import GatewayClient
from instar.store.sqlite import SqliteStore
from instar.types import Channel
from tests.integration.clients.recorded_sessions import (
    RecordedSession,
    count_sampled_tokens,
    count_trained_tokens,
    is_exact,
)
from tests.serving import ADMIN_KEY, running_gateway

QUESTIONS = ("Name a colour.", "And another one.", "Which is nicer?")
LENGTH = 12


@dataclass
class RealModelHarness:
    client: GatewayClient
    store: SqliteStore


@pytest.fixture
async def house(tmp_path: Path) -> AsyncIterator[RealModelHarness]:
    model = ModelConfig(name=str(resolve_model(DEFAULT_MODEL)), max_context=1024)
    engine, store = LocalEngine(model, LocalEngineConfig(threads=2)), SqliteStore(tmp_path / "store.db")
    async with running_gateway(RunConfig(name="real", model=model), store, engine) as url:
        client = GatewayClient(url, ADMIN_KEY)
        yield RealModelHarness(client, store)
        await client.close()
    await engine.close()
    await store.close()


@dataclass(frozen=True)
class ReceivedReply:
    """What the client was told of a reply."""

    text: str
    usage: tuple[int, int]
    pieces: int


async def chat(session: AgentSession) -> list[ReceivedReply]:
    told: list[ReceivedReply] = []
    messages: list[Any] = [{"role": "system", "content": "Be short."}]
    async with openai.AsyncOpenAI(base_url=session.base_url, api_key=session.api_key) as client:
        for question in QUESTIONS:
            messages.append({"role": "user", "content": question})
            stream = await client.chat.completions.create(
                model="instar",
                messages=messages,
                max_tokens=LENGTH,
                stream=True,
                stream_options={"include_usage": True},
            )
            chunks = [chunk async for chunk in stream]
            pieces = [chunk.choices[0].delta.content for chunk in chunks if chunk.choices]
            usage = chunks[-1].usage
            assert usage is not None
            text = "".join(piece or "" for piece in pieces)
            told.append(ReceivedReply(text, (usage.prompt_tokens, usage.completion_tokens), len(pieces)))
            messages.append({"role": "assistant", "content": text})
    return told


async def responses(session: AgentSession) -> list[ReceivedReply]:
    told: list[ReceivedReply] = []
    items: list[Any] = []
    async with openai.AsyncOpenAI(base_url=session.base_url, api_key=session.api_key) as client:
        for question in QUESTIONS:
            items.append({"role": "user", "content": question})
            async with client.responses.stream(
                model="instar", instructions="Be short.", input=items, max_output_tokens=LENGTH
            ) as stream:
                events = [event async for event in stream]
            answer: Any = events[-1].response  # type: ignore[union-attr]  # completed, or cut short
            pieces = sum(event.type == "response.output_text.delta" for event in events)
            usage = answer.usage.input_tokens, answer.usage.output_tokens
            told.append(ReceivedReply(answer.output_text, usage, pieces))
            items += answer.output
    return told


async def messages(session: AgentSession) -> list[ReceivedReply]:
    told: list[ReceivedReply] = []
    said: list[Any] = []
    url = session.base_url.removesuffix("/v1")
    async with anthropic.AsyncAnthropic(base_url=url, api_key=session.api_key) as client:
        for question in QUESTIONS:
            said.append({"role": "user", "content": question})
            async with client.messages.stream(
                model="instar", system="Be short.", messages=said, max_tokens=LENGTH
            ) as stream:
                pieces = [text async for text in stream.text_stream]
                answer = await stream.get_final_message()
            prompt = answer.usage.input_tokens + (answer.usage.cache_read_input_tokens or 0)
            told.append(ReceivedReply("".join(pieces), (prompt, answer.usage.output_tokens), len(pieces)))
            said.append({"role": "assistant", "content": answer.content})
    return told


@pytest.mark.parametrize("converse", [chat, responses, messages])
async def test_what_a_model_says_is_streamed_and_recorded_exactly(
    house: RealModelHarness, converse: Callable[[AgentSession], Awaitable[list[ReceivedReply]]]
) -> None:
    opened = await house.client.open_session(channel=Channel.TRAIN, seed=3)
    told = await converse(opened)
    session = await house.store.session(opened.session_id)
    assert session is not None
    found = RecordedSession(session, await house.store.calls(opened.session_id))
    assert len(found.calls) == len(QUESTIONS)
    for one, call in zip(told, found.calls, strict=True):
        assert one.text == call.reply["content"]
        assert one.usage == (len(call.prompt_ids), len(call.sampled_ids))
        assert one.pieces > len(call.sampled_ids) / 2, "token by token"
        assert np.isfinite(call.logprobs).all()
    for before, after in pairwise(found.calls):
        assert is_exact(after, before)
    assert count_trained_tokens(found) == count_sampled_tokens(found.calls) > LENGTH
