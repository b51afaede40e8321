"""The chat dialect: the official `openai` SDK against a running gateway."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest

from instar.config import ModelConfig, SamplingConfig, ScriptedEngineConfig
from instar.engines.scripted import ScriptedEngine
from instar.gateway.base import OpenedSession
from instar.gateway.dialects.base import ReplyChoice
from instar.gateway.dialects.chat import ChatDialect
from instar.record.base import Renderer
from instar.types import CallStatus, Link
from tests.unit.gateway.conftest import RunningGateway, StartGateway

TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "calc",
        "description": "Evaluate arithmetic.",
        "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}},
    },
}


def user(text: str) -> Any:
    return {"role": "user", "content": text}


async def chat(gateway: RunningGateway, session: OpenedSession, messages: list[Any], **options: Any) -> Any:
    async with gateway.openai_client(session) as client:
        return await client.chat.completions.create(model="instar", messages=messages, **options)


async def stream_chat(
    gateway: RunningGateway, session: OpenedSession, messages: list[Any], **options: Any
) -> list[Any]:
    async with gateway.openai_client(session) as client:
        stream = await client.chat.completions.create(
            model="instar", messages=messages, stream=True, **options
        )
        return [chunk async for chunk in stream]


async def test_chat_completion_returns_and_records_the_reply(
    gateway: RunningGateway, renderer: Renderer
) -> None:
    session = await gateway.open_session()
    response = await chat(gateway, session, [user("hello")])
    assert response.choices[0].message.content == "You said: hello"
    assert response.choices[0].finish_reason == "stop"
    (call,) = await gateway.calls(session)
    assert call.prompt_ids.tolist() == renderer.render([{"role": "user", "content": "hello"}])
    assert renderer.parse(call.sampled_ids.tolist())["content"] == "You said: hello"
    assert call.sampled_ids[-1] in renderer.stop_token_ids
    assert response.usage.prompt_tokens == len(call.prompt_ids)
    assert response.usage.completion_tokens == len(call.sampled_ids)
    assert call.trainable
    assert np.isfinite(call.logprobs).all()
    assert call.request_id == response.id


async def test_chat_stream_sends_text_in_chunks_and_then_usage(gateway: RunningGateway) -> None:
    session = await gateway.open_session()
    chunks = await stream_chat(gateway, session, [user("héllo 😀")], stream_options={"include_usage": True})
    texts = [chunk.choices[0].delta.content for chunk in chunks if chunk.choices]
    assert "".join(text or "" for text in texts) == "You said: héllo 😀"
    assert len(texts) > 8
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
    (call,) = await gateway.calls(session)
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == len(call.sampled_ids)


@pytest.mark.parametrize("streamed", [False, True])
async def test_chat_tool_turns_extend_the_recorded_tokens(gateway: RunningGateway, streamed: bool) -> None:
    session = await gateway.open_session(channel="train")
    messages = [user("What is 24 * 310?")]
    async with gateway.openai_client(session) as client:
        if streamed:
            async with client.chat.completions.stream(model="m", messages=messages, tools=[TOOL]) as stream:
                response = await stream.get_final_completion()
        else:
            response = await client.chat.completions.create(model="m", messages=messages, tools=[TOOL])
    message = response.choices[0].message
    assert response.choices[0].finish_reason == "tool_calls"
    assert message.content == "Let me see."
    (sampled_call,) = message.tool_calls or []
    assert sampled_call.type == "function"
    assert (sampled_call.function.name, sampled_call.function.arguments) == (
        "calc",
        '{"expression": "24 * 310"}',
    )
    echoed = message.model_dump(exclude={"parsed"})
    for call in echoed["tool_calls"]:
        call["function"].pop("parsed_arguments", None)
    messages += [echoed, {"role": "tool", "tool_call_id": sampled_call.id, "content": "7440"}]
    second_response = await chat(gateway, session, messages, tools=[TOOL])
    assert second_response.choices[0].message.content == "The answer is 7440."
    first_call, second_call = await gateway.calls(session)
    assert (second_call.link, second_call.parent_id) == (Link.EXTENDS, first_call.call_id)
    assert np.array_equal(second_call.prompt_ids[: len(first_call.sequence)], first_call.sequence)
    assert second_call.base_tokens == len(first_call.sequence)


async def test_chat_choices_are_recorded_as_calls_of_one_request(gateway: RunningGateway) -> None:
    session = await gateway.open_session(seed=1)
    response = await chat(gateway, session, [user("seed")], n=3)
    calls = await gateway.calls(session)
    assert [choice.message.content for choice in response.choices] == [c.reply["content"] for c in calls]
    assert len({call.params.seed for call in calls}) == 3
    assert {call.request_id for call in calls} == {response.id}
    assert [call.link for call in calls] == [Link.ROOT, Link.SIBLING, Link.SIBLING]


async def test_chat_stream_sends_all_choices(gateway: RunningGateway) -> None:
    session = await gateway.open_session()
    chunks = await stream_chat(gateway, session, [user("hello")], n=2)
    for index in (0, 1):
        choices = [chunk.choices[0] for chunk in chunks if chunk.choices[0].index == index]
        assert "".join(choice.delta.content or "" for choice in choices) == "You said: hello"
        assert choices[-1].finish_reason == "stop"


@pytest.mark.parametrize("streamed", [False, True])
async def test_chat_stop_string_is_recorded_but_not_returned(gateway: RunningGateway, streamed: bool) -> None:
    session = await gateway.open_session()
    if streamed:
        chunks = await stream_chat(gateway, session, [user("one END two")], stop=["END"])
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    else:
        text = (await chat(gateway, session, [user("one END two")], stop="END")).choices[0].message.content
    assert text == "You said: one "
    (call,) = await gateway.calls(session)
    assert call.finish_reason == "stop"
    continuation = [user("one END two"), {"role": "assistant", "content": "You said: one"}, user("x")]
    await chat(gateway, session, continuation)
    _, second_call = await gateway.calls(session)
    assert np.array_equal(second_call.prompt_ids[: len(call.sequence)], call.sequence)


async def test_chat_max_tokens_ends_the_reply_with_length(gateway: RunningGateway) -> None:
    session = await gateway.open_session()
    response = await chat(gateway, session, [user("long")], max_completion_tokens=5)
    assert response.choices[0].finish_reason == "length"
    (call,) = await gateway.calls(session)
    assert len(call.sampled_ids) == 5


async def test_chat_logprobs_match_the_recorded_ones(gateway: RunningGateway) -> None:
    session = await gateway.open_session()
    response = await chat(gateway, session, [user("hi")], logprobs=True)
    returned = response.choices[0].logprobs.content
    chunks = await stream_chat(gateway, session, [user("hi")], logprobs=True)
    streamed = [t for c in chunks if c.choices[0].logprobs for t in c.choices[0].logprobs.content]
    assert "".join(token.token for token in returned) == "You said: hi"
    assert [token.token for token in streamed] == [token.token for token in returned]
    first_call, second_call = await gateway.calls(session)
    assert np.allclose([token.logprob for token in returned], first_call.logprobs[:-1])
    assert np.allclose([token.logprob for token in streamed], second_call.logprobs[:-1])
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == "You said: hi"


async def test_chat_stream_with_logprobs_sends_held_back_text(gateway: RunningGateway) -> None:
    session = await gateway.open_session()
    chunks = await stream_chat(gateway, session, [user("hi")], logprobs=True, stop=["hi there"])
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == "You said: hi"


async def test_chat_train_sessions_ignore_the_agents_seed(gateway: RunningGateway) -> None:
    seeds: list[int | None] = []
    for seed in (1, 2):
        session = await gateway.open_session(channel="train", seed=seed)
        await chat(gateway, session, [user("hi")], seed=42)
        seeds += [call.params.seed for call in await gateway.calls(session)]
    assert len(set(seeds)) == 2


async def test_chat_rewritten_history_branches_and_repeated_request_is_a_sibling(
    gateway: RunningGateway,
) -> None:
    session = await gateway.open_session()
    await chat(gateway, session, [user("one")])
    await chat(gateway, session, [user("one")])
    await chat(gateway, session, [user("zero"), {"role": "assistant", "content": "?"}, user("one")])
    links = [call.link for call in await gateway.calls(session)]
    assert links == [Link.ROOT, Link.SIBLING, Link.BRANCH]


async def test_chat_retry_with_count_header_returns_the_recorded_reply(gateway: RunningGateway) -> None:
    session = await gateway.open_session()
    first = await chat(gateway, session, [user("one")])
    retry = await chat(gateway, session, [user("one")], extra_headers={"x-stainless-retry-count": "1"})
    assert retry.id == first.id
    assert retry.choices[0].message.content == first.choices[0].message.content
    assert len(await gateway.calls(session)) == 1


async def test_chat_sampling_params_depend_on_the_channel_and_session(start_gateway: StartGateway) -> None:
    gateway = await start_gateway(sampling=SamplingConfig(temperature=1.0, top_p=0.9))
    train, live = await gateway.open_session(channel="train"), await gateway.open_session()
    val = await gateway.open_session(channel="val", sampling={"temperature": 0})
    for session in (train, live, val):
        await chat(gateway, session, [user("hi")], temperature=0.3, top_p=0.5)
    (train_call,), (live_call,), (val_call,) = [await gateway.calls(s) for s in (train, live, val)]
    assert (train_call.params.temperature, train_call.params.top_p) == (1.0, 0.9)
    assert (live_call.params.temperature, live_call.params.top_p) == (0.3, 0.5)
    assert val_call.params.temperature == 0
    assert train_call.behavior_logprobs is not None
    assert train_call.trainable


async def test_chat_live_seed_is_derived_from_the_session_unless_requested(gateway: RunningGateway) -> None:
    seeds: list[list[int | None]] = []
    for _ in range(2):
        session = await gateway.open_session(seed=7)
        await chat(gateway, session, [user("hi")])
        await chat(gateway, session, [user("ho")])
        await chat(gateway, session, [user("ha")], seed=5)
        seeds.append([call.params.seed for call in await gateway.calls(session)])
    assert seeds[0] == seeds[1]
    assert len(set(seeds[0])) == 3
    assert seeds[0][-1] == 5
    # The derived seed must not change between processes or versions.
    assert seeds[0][0] == 4895008828178295159


async def test_chat_call_is_recorded_before_the_finish_reason_is_sent(gateway: RunningGateway) -> None:
    session = await gateway.open_session()
    finish_count = 0
    async with gateway.openai_client(session) as client:
        stream = await client.chat.completions.create(model="m", messages=[user("hello")], stream=True)
        async for chunk in stream:
            if chunk.choices[0].finish_reason is not None:
                finish_count += 1
                assert _count_calls(gateway.store_path, session.session_id) == 1
    assert finish_count == 1


def _count_calls(path: Path, session_id: str) -> int:
    with sqlite3.connect(path) as db:
        ((count,),) = db.execute("SELECT count(*) FROM calls WHERE session_id = ?", (session_id,))
    db.close()
    return int(count)


@pytest.mark.parametrize("streamed", [True, False])
async def test_chat_call_is_recorded_as_aborted_when_the_client_disconnects(
    start_gateway: StartGateway, streamed: bool
) -> None:
    gateway = await start_gateway(delay=0.05)
    session = await gateway.open_session()
    if streamed:
        async with gateway.openai_client(session) as client:
            stream = await client.chat.completions.create(model="m", messages=[user("long")], stream=True)
            reply_text = ""
            async for chunk in stream:
                reply_text += chunk.choices[0].delta.content or ""
                if reply_text.startswith("word"):
                    break
            await stream.close()
    else:
        request_task = asyncio.create_task(chat(gateway, session, [user("long")]))
        while (await gateway.engine.status()).generated_tokens < len("word"):  # noqa: ASYNC110 - no event
            await asyncio.sleep(0.01)
        request_task.cancel()
    while not (calls := await gateway.calls(session)):  # noqa: ASYNC110 - no event
        await asyncio.sleep(0.01)
    (call,) = calls
    assert (call.status, call.finish_reason, call.trainable) == (CallStatus.ABORTED, "aborted", False)
    assert 0 < len(call.sampled_ids) < 200
    assert call.reply["content"].startswith("word")
    assert (await gateway.engine.status()).running == 0


async def test_chat_session_continues_after_a_restart(start_gateway: StartGateway) -> None:
    first = await start_gateway()
    session = await first.open_session()
    await chat(first, session, [user("one")])
    second = await start_gateway()
    moved_session = OpenedSession(
        session.session_id, f"{second.url}/s/{session.session_id}/v1", session.api_key
    )
    continuation = [user("one"), {"role": "assistant", "content": "You said: one"}, user("two")]
    await chat(second, moved_session, continuation)
    first_call, second_call = await second.calls(session)
    assert (second_call.link, second_call.parent_id) == (Link.EXTENDS, first_call.call_id)


async def test_chat_turns_store_only_new_tokens(start_gateway: StartGateway, model: ModelConfig) -> None:
    long_context = model.model_copy(update={"max_context": 100_000})
    gateway = await start_gateway(engine=ScriptedEngine(long_context, ScriptedEngineConfig(replies=["fine"])))
    session = await gateway.open_session()
    messages = [user("go")]
    async with gateway.openai_client(session) as client:
        for turn in range(50):
            response = await client.chat.completions.create(model="m", messages=messages)
            reply = {"role": "assistant", "content": response.choices[0].message.content}
            messages += [reply, user(f"and {turn}")]
    calls = await gateway.calls(session)
    stored_tokens = sum(len(call.prompt_ids) - call.base_tokens + len(call.sampled_ids) for call in calls)
    assert stored_tokens == len(calls[-1].sequence)
    assert [call.base_messages for call in calls[1:]] == [len(call.messages) + 1 for call in calls[:-1]]


async def test_chat_stream_sends_arguments_as_they_arrive(gateway: RunningGateway) -> None:
    session = await gateway.open_session()
    chunks = await stream_chat(gateway, session, [user("What is 24 * 310?")], tools=[TOOL])
    deltas = [chunk.choices[0].delta for chunk in chunks]
    pieces = [piece for delta in deltas for piece in delta.tool_calls or ()]
    assert {piece.index for piece in pieces} == {0}
    assert (pieces[0].type, pieces[0].function.name, pieces[0].function.arguments) == ("function", "calc", "")
    assert pieces[0].id
    assert not any(piece.id or piece.function.name for piece in pieces[1:])
    assert len(pieces) > 5, "the arguments arrived in a few large pieces"
    assert "".join(piece.function.arguments for piece in pieces) == '{"expression": "24 * 310"}'
    assert [c.choices[0].finish_reason for c in chunks][-1] == "tool_calls"
    (call,) = await gateway.calls(session)
    (sampled_call,) = call.reply.get("tool_calls", [])
    assert (sampled_call["id"], sampled_call["arguments"]) == (pieces[0].id, '{"expression": "24 * 310"}')


ACCEPTED_FIELDS: list[dict[str, Any]] = [
    {"tools": [TOOL], "parallel_tool_calls": False},
    {"tools": [{**TOOL, "function": {**TOOL["function"], "strict": True}}]},
    {"reasoning_effort": "high", "verbosity": "low", "service_tier": "auto"},
    {"modalities": ["text"], "response_format": {"type": "text"}, "store": False, "logit_bias": {}},
    {"prediction": {"type": "content", "content": "You said"}, "prompt_cache_key": "k"},
    {"metadata": {"session_id": "s"}, "user": "u", "safety_identifier": "i"},
]


async def test_chat_request_accepts_fields_that_agents_send_by_default(gateway: RunningGateway) -> None:
    session = await gateway.open_session()
    for options in ACCEPTED_FIELDS:
        response = await chat(gateway, session, [user("hello")], **options)
        assert response.choices[0].message.content == "You said: hello"


UNSUPPORTED_FIELDS: list[tuple[dict[str, Any], str]] = [
    ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "unknown"}}}, "tool_choice"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
        "response_format.json_schema.schema",
    ),
    ({"modalities": ["text", "audio"], "audio": {"voice": "x", "format": "wav"}}, "modalities"),
    ({"web_search_options": {}}, "web_search_options"),
    ({"functions": [{"name": "f"}]}, "functions"),
    ({"function_call": "auto"}, "function_call"),
    (
        {"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}},
        "chat_template_kwargs.enable_thinking",
    ),
    ({"extra_body": {"min_p": 1.1}}, "min_p"),
    ({"extra_body": {"guided_regex": "a"}}, "guided_regex"),
]


async def test_chat_unsupported_field_error_names_the_field(gateway: RunningGateway) -> None:
    session = await gateway.open_session()
    for options, param in UNSUPPORTED_FIELDS:
        with pytest.raises(openai.BadRequestError) as caught:
            await chat(gateway, session, [user("hello")], **options)
        assert caught.value.param == param
    assert await gateway.calls(session) == []


UNSUPPORTED_PARTS: list[tuple[Any, str]] = [
    ({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}, "content[0]"),
    ({"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}, "content[0]"),
    ({"role": "assistant", "content": "x", "function_call": {"name": "f"}}, "function_call"),
    ({"role": "assistant", "audio": {"id": "x"}}, "audio"),
]


async def test_chat_unsupported_message_part_error_names_its_path(gateway: RunningGateway) -> None:
    session = await gateway.open_session()
    # The history is long enough to be cached. The second request must be rejected at the same path.
    history = [user("word " * 50)] * 50
    for message, path in UNSUPPORTED_PARTS:
        for next_messages in ([], [user("and?")]):
            with pytest.raises(openai.BadRequestError) as caught:
                await chat(gateway, session, [*history, message, *next_messages])
            assert caught.value.param == f"messages[50].{path}"


async def test_chat_request_parses_refusals_and_parts_as_text(gateway: RunningGateway) -> None:
    session = await gateway.open_session()
    text = [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]
    refusals = [{"content": None, "refusal": "no"}, {"content": [{"type": "refusal", "refusal": "no"}]}]
    for refusal in refusals:
        messages = [user("one"), {"role": "assistant", **refusal}, {"role": "user", "content": text}]
        response = await chat(gateway, session, messages)
        assert response.choices[0].message.content == "You said: hello"
    calls = await gateway.calls(session)
    assert [call.messages[1]["content"] for call in calls] == ["no", "no"]


def test_chat_session_hints_include_their_field_names() -> None:
    body = {
        "model": "m",
        "messages": [user("hi")],
        "user": "bob",
        "safety_identifier": "bob",
        "prompt_cache_key": "k",
        "metadata": {"thread_id": "t", "session_id": "s", "chat_id": 5, "other": "x"},
    }
    request = ChatDialect().parse_request(json.dumps(body).encode())
    expected = ("session_id:s", "thread_id:t", "prompt_cache_key:k", "safety_identifier:bob", "user:bob")
    assert request.session_hints == expected


def test_chat_usage_includes_only_known_counts() -> None:
    choice = ReplyChoice({"role": "assistant", "content": "x"}, "stop", 10, 2, cached_tokens=8)
    request = ChatDialect().parse_request(b'{"model": "m", "messages": [{"role": "user", "content": "x"}]}')
    usage = json.loads(ChatDialect().format_response("id", request, [choice]))["usage"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 8}
    assert usage["completion_tokens_details"] == {"reasoning_tokens": 0}
