"""OpenAI's completions over a real socket, with the official SDK."""

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
from tests.unit.gateway.conftest import Serve, Served
from tests.unit.gateway.scripts import CALL

PROMPT = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
SAID = "You said: hello"


async def complete(gateway: Served, session: OpenedSession, prompt: Any = PROMPT, **options: Any) -> Any:
    options.setdefault("max_tokens", 100)
    async with gateway.client(session) as client:
        return await client.completions.create(model="m", prompt=prompt, **options)


async def streamed(
    gateway: Served, session: OpenedSession, prompt: Any = PROMPT, **options: Any
) -> list[Any]:
    options.setdefault("max_tokens", 100)
    async with gateway.client(session) as client:
        stream = await client.completions.create(model="m", prompt=prompt, stream=True, **options)
        return [chunk async for chunk in stream]


async def test_completions_continue_text_and_token_ids_alike(gateway: Served, renderer: Renderer) -> None:
    session = await gateway.open()
    ids = renderer.encode(PROMPT)
    for prompt in (PROMPT, [PROMPT], ids, [ids]):
        answer = await complete(gateway, session, prompt)
        assert (answer.object, answer.choices[0].text) == ("text_completion", SAID)
        assert answer.choices[0].finish_reason == "stop"
        assert answer.id.startswith("cmpl")
    calls = await gateway.calls(session)
    assert [call.prompt_ids.tolist() for call in calls] == [ids] * 4
    assert answer.usage.prompt_tokens == len(ids)
    assert answer.usage.completion_tokens == len(calls[-1].sampled_ids)
    assert all(call.trainable and np.isfinite(call.logprobs).all() for call in calls)
    assert {call.dialect for call in calls} == {"completions"}


async def test_completions_live_prompt_joins_the_session_it_continues(gateway: Served) -> None:
    async def ask(prompt: str, key: str) -> str:
        headers = {"Authorization": f"Bearer {key}"}
        body = {"model": "m", "prompt": prompt, "max_tokens": 100}
        answer = await gateway.http.post("/v1/completions", json=body, headers=headers)
        return answer.headers["x-instar-session"]

    one, two = [await create_key(gateway.store, "agent", name, name) for name in ("a", "b")]
    first = await ask(PROMPT, one)
    assert await ask(PROMPT + SAID + " and more", one) == first
    assert await ask(PROMPT + SAID + " and more", two) != first
    assert await ask(PROMPT, one) != first  # the same again may be another conversation


async def test_completions_stream_sends_one_chunk_per_token(gateway: Served) -> None:
    session = await gateway.open()
    chunks = await streamed(gateway, session, stream_options={"include_usage": True})
    texts = [chunk.choices[0].text for chunk in chunks if chunk.choices]
    assert "".join(texts) == SAID
    assert len(texts) > 5
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
    (call,) = await gateway.calls(session)
    assert chunks[-1].usage.completion_tokens == len(call.sampled_ids)


async def test_completions_reply_is_plain_text(serving: Serve, model: ModelConfig) -> None:
    said = f" <think>\nhm</think>\n{CALL}\n"
    gateway = await serving(engine=ScriptedEngine(model, ScriptedEngineConfig(replies=[said])))
    session = await gateway.open()
    assert (await complete(gateway, session)).choices[0].text == said
    assert "".join(chunk.choices[0].text for chunk in await streamed(gateway, session)) == said
    replies = [call.reply for call in await gateway.calls(session)]
    assert replies == [{"role": "assistant", "content": said}] * 2


async def test_completions_honour_length_stop_and_n(gateway: Served) -> None:
    session = await gateway.open()
    long = PROMPT.replace("hello", "long")
    async with gateway.client(session) as client:
        answer = await client.completions.create(model="m", prompt=long)
    assert (answer.choices[0].finish_reason, answer.usage.completion_tokens) == ("length", 16)
    answer = await complete(gateway, session, stop=" said", n=2, best_of=2)
    assert [choice.text for choice in answer.choices] == ["You", "You"]


async def test_completions_logprobs_match_the_recorded_ones(gateway: Served) -> None:
    session = await gateway.open()
    told = (await complete(gateway, session, logprobs=0)).choices[0].logprobs
    assert "".join(told.tokens) == SAID
    assert [
        SAID[at : at + len(t)] for at, t in zip(told.text_offset, told.tokens, strict=True)
    ] == told.tokens
    chunks = await streamed(gateway, session, logprobs=0)
    pieces = [chunk.choices[0].logprobs for chunk in chunks if chunk.choices[0].logprobs]
    assert [token for piece in pieces for token in piece.tokens] == told.tokens
    assert [at for piece in pieces for at in piece.text_offset] == told.text_offset
    one, two = await gateway.calls(session)
    assert np.allclose(told.token_logprobs, one.logprobs[:-1])
    assert np.allclose([p for piece in pieces for p in piece.token_logprobs], two.logprobs[:-1])


async def test_completions_repeated_prompt_is_a_sibling(gateway: Served) -> None:
    session = await gateway.open()
    for _ in range(2):
        await complete(gateway, session)
    one, two = await gateway.calls(session)
    assert (one.link, two.link) == ("root", "sibling")


FAULTS: list[tuple[dict[str, Any], str]] = [
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


async def test_completions_reject_invalid_fields_by_name(gateway: Served) -> None:
    session = await gateway.open()
    for options, param in FAULTS:
        with pytest.raises(openai.BadRequestError) as refused:
            await complete(gateway, session, **options)
        assert refused.value.param == param, options
    assert await gateway.calls(session) == []


async def test_completions_score_a_prompt_without_recording(gateway: Served, renderer: Renderer) -> None:
    session = await gateway.open()
    ids = renderer.encode(PROMPT)
    assert gateway.engine is not None
    expected = await gateway.engine.logprobs(ids)
    for prompt in (ids, PROMPT):
        answer = await complete(gateway, session, prompt, echo=True, logprobs=0, max_tokens=0)
        told = answer.choices[0].logprobs
        assert (answer.choices[0].text, "".join(told.tokens)) == (PROMPT, PROMPT)
        assert told.token_logprobs[0] is None
        assert np.allclose(told.token_logprobs[1:], expected[1:])
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(ids), 0)
    assert await gateway.calls(session) == []


@pytest.mark.parametrize(
    "asked",
    [
        {"echo": True, "logprobs": 0, "max_tokens": 1},
        {"echo": True, "max_tokens": 0},
        {"echo": True, "logprobs": 3, "max_tokens": 0},
        {"logprobs": 0, "max_tokens": 0},
        {"echo": True, "logprobs": 0, "max_tokens": 0, "stream": True},
    ],
)
async def test_completions_reject_echo_unless_only_scoring(gateway: Served, asked: dict[str, Any]) -> None:
    session = await gateway.open()
    with pytest.raises(openai.BadRequestError):
        await complete(gateway, session, **asked)


async def test_completions_score_prompts_for_another_gateway(
    gateway: Served, renderer: Renderer, model: ModelConfig
) -> None:
    section = {"type": "completions", "base_url": f"{gateway.url}/v1", "model": "any"}
    key = await create_key(gateway.store, "agent", "student", "student")
    teacher = CompletionsReference(CompletionsReferenceConfig.model_validate(section), model, key)
    await teacher.start()
    ids = np.asarray(renderer.encode(PROMPT + SAID), np.int32)
    assert gateway.engine is not None
    assert np.allclose(await teacher.score(ids), await gateway.engine.logprobs(ids), equal_nan=True)
    await teacher.close()
