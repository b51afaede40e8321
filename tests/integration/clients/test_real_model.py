"""Tests for conversations between the official SDKs and a gateway that serves a real model."""

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
from instar.gateway.base import OpenSession
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
MAX_TOKENS = 12


@dataclass
class RealModelHarness:
    client: GatewayClient
    store: SqliteStore


@pytest.fixture
async def harness(tmp_path: Path) -> AsyncIterator[RealModelHarness]:
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
    """A reply as the client received it."""

    text: str
    usage: tuple[int, int]
    """The number of prompt and sampled tokens."""
    piece_count: int
    """The number of pieces in which the text was streamed."""


async def converse_over_chat(session: AgentSession) -> list[ReceivedReply]:
    replies: list[ReceivedReply] = []
    messages: list[Any] = [{"role": "system", "content": "Be short."}]
    async with openai.AsyncOpenAI(base_url=session.base_url, api_key=session.api_key) as client:
        for question in QUESTIONS:
            messages.append({"role": "user", "content": question})
            stream = await client.chat.completions.create(
                model="instar",
                messages=messages,
                max_tokens=MAX_TOKENS,
                stream=True,
                stream_options={"include_usage": True},
            )
            chunks = [chunk async for chunk in stream]
            pieces = [chunk.choices[0].delta.content for chunk in chunks if chunk.choices]
            usage = chunks[-1].usage
            assert usage is not None
            text = "".join(piece or "" for piece in pieces)
            replies.append(ReceivedReply(text, (usage.prompt_tokens, usage.completion_tokens), len(pieces)))
            messages.append({"role": "assistant", "content": text})
    return replies


async def converse_over_responses(session: AgentSession) -> list[ReceivedReply]:
    replies: list[ReceivedReply] = []
    items: list[Any] = []
    async with openai.AsyncOpenAI(base_url=session.base_url, api_key=session.api_key) as client:
        for question in QUESTIONS:
            items.append({"role": "user", "content": question})
            async with client.responses.stream(
                model="instar", instructions="Be short.", input=items, max_output_tokens=MAX_TOKENS
            ) as stream:
                events = [event async for event in stream]
            response: Any = events[-1].response  # type: ignore[union-attr]  # completed or incomplete
            piece_count = sum(event.type == "response.output_text.delta" for event in events)
            usage = response.usage.input_tokens, response.usage.output_tokens
            replies.append(ReceivedReply(response.output_text, usage, piece_count))
            items += response.output
    return replies


async def converse_over_messages(session: AgentSession) -> list[ReceivedReply]:
    replies: list[ReceivedReply] = []
    conversation: list[Any] = []
    url = session.base_url.removesuffix("/v1")
    async with anthropic.AsyncAnthropic(base_url=url, api_key=session.api_key) as client:
        for question in QUESTIONS:
            conversation.append({"role": "user", "content": question})
            async with client.messages.stream(
                model="instar", system="Be short.", messages=conversation, max_tokens=MAX_TOKENS
            ) as stream:
                pieces = [text async for text in stream.text_stream]
                message = await stream.get_final_message()
            usage = message.usage
            prompt_tokens = usage.input_tokens + (usage.cache_read_input_tokens or 0)
            replies.append(ReceivedReply("".join(pieces), (prompt_tokens, usage.output_tokens), len(pieces)))
            conversation.append({"role": "assistant", "content": message.content})
    return replies


@pytest.mark.parametrize("converse", [converse_over_chat, converse_over_responses, converse_over_messages])
async def test_real_model_replies_are_streamed_and_recorded_exactly(
    harness: RealModelHarness, converse: Callable[[AgentSession], Awaitable[list[ReceivedReply]]]
) -> None:
    agent_session = await harness.client.open_session(OpenSession(channel=Channel.TRAIN, seed=3))
    replies = await converse(agent_session)
    session = await harness.store.session(agent_session.session_id)
    assert session is not None
    recorded = RecordedSession(session, await harness.store.calls(agent_session.session_id))
    assert len(recorded.calls) == len(QUESTIONS)
    for reply, call in zip(replies, recorded.calls, strict=True):
        assert reply.text == call.reply["content"]
        assert reply.usage == (len(call.prompt_ids), len(call.sampled_ids))
        assert reply.piece_count > len(call.sampled_ids) / 2, "the reply must be streamed token by token"
        assert np.isfinite(call.logprobs).all()
    for previous, call in pairwise(recorded.calls):
        assert is_exact(call, previous)
    assert count_trained_tokens(recorded) == count_sampled_tokens(recorded.calls) > MAX_TOKENS
