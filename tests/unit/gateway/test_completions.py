"""The completions API: the official `openai` SDK against a running gateway."""

from __future__ import annotations

from typing import Any

import numpy as np
import openai
import pytest

from instar.config import CompletionsReferenceConfig, ModelConfig, ScriptedEngineConfig
from instar.engines.scripted import ScriptedEngine
from instar.gateway.auth import create_key
from instar.gateway.base import OpenedSession
from instar.record.base import Renderer
from instar.reference.completions import CompletionsReference
from tests.unit.gateway.conftest import RunningGateway, StartGateway
from tests.unit.gateway.scripts import TOOL_CALL

PROMPT = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
REPLY = "You said: hello"


async def complete(
    gateway: RunningGateway, session: OpenedSession, prompt: Any = PROMPT, **options: Any
) -> Any:
    options.setdefault("max_tokens", 100)
    async with gateway.openai_client(session) as client:
        return await client.completions.create(model="m", prompt=prompt, **options)


async def stream_completion(
    gateway: RunningGateway, session: OpenedSession, prompt: Any = PROMPT, **options: Any
) -> list[Any]:
    options.setdefault("max_tokens", 100)
    async with gateway.openai_client(session) as client:
        stream = await client.completions.create(model="m", prompt=prompt, stream=True, **options)
        return [chunk async for chunk in stream]


async def test_completions_continue_text_and_token_ids_alike(
    gateway: RunningGateway, renderer: Renderer
) -> None:
    session = await gateway.open_session()
    ids = renderer.encode(PROMPT)
    for prompt in (PROMPT, [PROMPT], ids, [ids]):
        response = await complete(gateway, session, prompt)
        assert (response.object, response.choices[0].text) == ("text_completion", REPLY)
        assert response.choices[0].finish_reason == "stop"
        assert response.id.startswith("cmpl")
    calls = await gateway.calls(session)
    assert [call.prompt_ids.tolist() for call in calls] == [ids] * 4
    assert response.usage.prompt_tokens == len(ids)
    assert response.usage.completion_tokens == len(calls[-1].sampled_ids)
    assert all(call.trainable and np.isfinite(call.logprobs).all() for call in calls)
    assert {call.dialect for call in calls} == {"completions"}


async def test_completions_live_prompt_joins_the_session_it_continues(gateway: RunningGateway) -> None:
    async def send(prompt: str, key: str) -> str:
        headers = {"Authorization": f"Bearer {key}"}
        body = {"model": "m", "prompt": prompt, "max_tokens": 100}
        response = await gateway.http.post("/v1/completions", json=body, headers=headers)
        return response.headers["x-instar-session"]

    first_key, second_key = [await create_key(gateway.store, "agent", name, name) for name in ("a", "b")]
    first = await send(PROMPT, first_key)
    assert await send(PROMPT + REPLY + " and more", first_key) == first
    assert await send(PROMPT + REPLY + " and more", second_key) != first
    assert await send(PROMPT, first_key) != first  # The same prompt may start a new conversation.


async def test_completions_stream_sends_text_in_chunks_and_then_usage(gateway: RunningGateway) -> None:
    session = await gateway.open_session()
    chunks = await stream_completion(gateway, session, stream_options={"include_usage": True})
    texts = [chunk.choices[0].text for chunk in chunks if chunk.choices]
    assert "".join(texts) == REPLY
    assert len(texts) > 5
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
    (call,) = await gateway.calls(session)
    assert chunks[-1].usage.completion_tokens == len(call.sampled_ids)


async def test_completions_reply_is_plain_text(start_gateway: StartGateway, model: ModelConfig) -> None:
    reply = f" <think>\nhm</think>\n{TOOL_CALL}\n"
    gateway = await start_gateway(engine=ScriptedEngine(model, ScriptedEngineConfig(replies=[reply])))
    session = await gateway.open_session()
    assert (await complete(gateway, session)).choices[0].text == reply
    assert "".join(chunk.choices[0].text for chunk in await stream_completion(gateway, session)) == reply
    replies = [call.reply for call in await gateway.calls(session)]
    assert replies == [{"role": "assistant", "content": reply}] * 2


async def test_completions_apply_the_default_max_tokens_stop_and_n(gateway: RunningGateway) -> None:
    session = await gateway.open_session()
    long_prompt = PROMPT.replace("hello", "long")
    async with gateway.openai_client(session) as client:
        response = await client.completions.create(model="m", prompt=long_prompt)
    assert (response.choices[0].finish_reason, response.usage.completion_tokens) == ("length", 16)
    response = await complete(gateway, session, stop=" said", n=2, best_of=2)
    assert [choice.text for choice in response.choices] == ["You", "You"]


async def test_completions_logprobs_match_the_recorded_ones(gateway: RunningGateway) -> None:
    session = await gateway.open_session()
    logprobs = (await complete(gateway, session, logprobs=0)).choices[0].logprobs
    assert "".join(logprobs.tokens) == REPLY
    assert [
        REPLY[offset : offset + len(t)]
        for offset, t in zip(logprobs.text_offset, logprobs.tokens, strict=True)
    ] == logprobs.tokens
    chunks = await stream_completion(gateway, session, logprobs=0)
    pieces = [chunk.choices[0].logprobs for chunk in chunks if chunk.choices[0].logprobs]
    assert [token for piece in pieces for token in piece.tokens] == logprobs.tokens
    assert [offset for piece in pieces for offset in piece.text_offset] == logprobs.text_offset
    first, second = await gateway.calls(session)
    assert np.allclose(logprobs.token_logprobs, first.logprobs[:-1])
    assert np.allclose([p for piece in pieces for p in piece.token_logprobs], second.logprobs[:-1])


async def test_completions_repeated_prompt_is_a_sibling(gateway: RunningGateway) -> None:
    session = await gateway.open_session()
    for _ in range(2):
        await complete(gateway, session)
    first, second = await gateway.calls(session)
    assert (first.link, second.link) == ("root", "sibling")


INVALID_OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [[]]}, "prompt[0]"),
    ({"prompt": ["one", "two"]}, "prompt"),
    ({"prompt": [1, 2, 3, -4]}, "prompt[3]"),
    ({"prompt": [1, 2, 3, 1 << 40]}, "prompt[3]"),
    ({"prompt": [1, 2, 3, 2_000_000_000]}, "prompt[3]"),
    ({"prompt": [1, "two"]}, "prompt[1]"),
    ({"prompt": [1, True]}, "prompt[1]"),
    ({"prompt": {"text": "x"}}, "prompt"),
    ({"echo": True}, "echo"),
    ({"suffix": "x"}, "suffix"),
    ({"best_of": 3}, "best_of"),
    ({"logprobs": 5}, "logprobs"),
    ({"stop": ["", "x"]}, "stop[0]"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"temperature": 9}, "temperature"),
    ({"extra_body": {"guided_json": {}}}, "guided_json"),
]


async def test_completions_invalid_field_error_names_its_path(gateway: RunningGateway) -> None:
    session = await gateway.open_session()
    for options, param in INVALID_OPTIONS:
        with pytest.raises(openai.BadRequestError) as caught:
            await complete(gateway, session, **options)
        assert caught.value.param == param, options
    assert await gateway.calls(session) == []


async def test_completions_score_a_prompt_without_recording(
    gateway: RunningGateway, renderer: Renderer
) -> None:
    session = await gateway.open_session()
    ids = renderer.encode(PROMPT)
    assert gateway.engine is not None
    expected = await gateway.engine.logprobs(ids)
    for prompt in (ids, PROMPT):
        response = await complete(gateway, session, prompt, echo=True, logprobs=0, max_tokens=0)
        logprobs = response.choices[0].logprobs
        assert (response.choices[0].text, "".join(logprobs.tokens)) == (PROMPT, PROMPT)
        assert logprobs.token_logprobs[0] is None
        assert np.allclose(logprobs.token_logprobs[1:], expected[1:])
        assert (response.usage.prompt_tokens, response.usage.completion_tokens) == (len(ids), 0)
    assert await gateway.calls(session) == []


@pytest.mark.parametrize(
    "options",
    [
        {"echo": True, "logprobs": 0, "max_tokens": 1},
        {"echo": True, "max_tokens": 0},
        {"echo": True, "logprobs": 3, "max_tokens": 0},
        {"logprobs": 0, "max_tokens": 0},
        {"echo": True, "logprobs": 0, "max_tokens": 0, "stream": True},
        {"echo": True, "logprobs": 0, "max_tokens": 0, "prompt": [""]},
    ],
)
async def test_completions_reject_incomplete_scoring_options(
    gateway: RunningGateway, options: dict[str, Any]
) -> None:
    session = await gateway.open_session()
    with pytest.raises(openai.BadRequestError):
        await complete(gateway, session, **options)


async def test_completions_reference_scores_prompts_through_the_gateway(
    gateway: RunningGateway, renderer: Renderer, model: ModelConfig
) -> None:
    settings = {"type": "completions", "base_url": f"{gateway.url}/v1", "model": "any"}
    key = await create_key(gateway.store, "agent", "student", "student")
    reference = CompletionsReference(CompletionsReferenceConfig.model_validate(settings), model, key)
    await reference.start()
    ids = np.asarray(renderer.encode(PROMPT + REPLY), np.int32)
    assert gateway.engine is not None
    assert np.allclose(await reference.score(ids), await gateway.engine.logprobs(ids), equal_nan=True)
    await reference.close()
