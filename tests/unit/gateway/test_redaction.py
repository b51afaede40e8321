"""Secrets are never stored, and calls whose prompt or reply contains a secret are not trainable."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from instar.config import GatewayConfig, ModelConfig, RedactConfig, ScriptedEngineConfig
from instar.engines.scripted import ScriptedEngine
from instar.record.base import Renderer
from instar.types import Call, Link
from tests.tiny import make_tiny_tokenizer
from tests.unit.gateway.conftest import ADMIN_KEY, RunningGateway, StartGateway
from tests.unit.gateway.wire import (
    DIALECTS,
    PATHS,
    build_request,
    get_session_id,
    post,
    run_scripted_gateway,
)

SECRET = "sk-proj-" + "Zq8xW3vN" * 5


def read_stored_bytes(path: Path) -> bytes:
    """Return all bytes of the store, including the write-ahead log."""
    return b"".join(file.read_bytes() for file in sorted(path.parent.glob(f"{path.name}*")))


def contains_secret(path: Path, secret: str, ids: list[int] | None = None) -> bool:
    """Return True if the store contains the secret, a part of it, or its token ids ``ids``."""
    encodings = [secret.encode(), secret[8:24].encode()]
    if ids:  # The first and last ids may differ with the surrounding text.
        encodings.append(np.asarray(ids[2:-2], np.int32).tobytes())
    data = read_stored_bytes(path)
    return any(encoding in data for encoding in encodings)


def encode_text(text: str) -> list[int]:
    return make_tiny_tokenizer().encode(text, add_special_tokens=False)


def test_contains_secret_finds_stored_token_ids(tmp_path: Path) -> None:
    (tmp_path / "a.db-wal").write_bytes(b"x" + np.asarray(encode_text(SECRET), np.int32).tobytes())
    assert contains_secret(tmp_path / "a.db", SECRET, encode_text(SECRET))


async def list_calls(gateway: RunningGateway, session_id: str) -> list[Call]:
    return await gateway.store.calls(session_id)


def assert_redacted(call: Call) -> None:
    assert not call.trainable
    assert (call.reason or "").startswith("redacted")
    assert len(call.prompt_ids) == len(call.sampled_ids) == len(call.logprobs) == len(call.versions) == 0


# --- one call -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("stream", [False, True])
async def test_secret_in_prompt_and_reply_is_redacted(
    gateway: RunningGateway, dialect: str, stream: bool
) -> None:
    response = await post(gateway, build_request(dialect, f"my key is {SECRET}", stream=stream), dialect)
    if not stream:
        assert SECRET in response.text, "the agent gets the reply unchanged"
    (call,) = await list_calls(gateway, get_session_id(response))
    assert_redacted(call)
    assert "[redacted api-key]" in call.messages[0]["content"]
    assert "[redacted api-key]" in call.reply["content"]
    assert not contains_secret(gateway.store_path, SECRET, encode_text(SECRET))


async def test_secret_in_token_id_prompt_is_redacted(gateway: RunningGateway) -> None:
    ids = encode_text(f"<|im_start|>user\nmy key is {SECRET}<|im_end|>\n<|im_start|>assistant\n")
    headers = {"Authorization": f"Bearer {ADMIN_KEY}"}
    body = {"prompt_ids": ids, "max_tokens": 3}
    responses = [
        await gateway.http.post("/v1/generate", json=body, headers=headers),
        await post(gateway, {"model": "m", "prompt": ids, "max_tokens": 3}, "completions"),
    ]
    for response in responses:
        (call,) = await list_calls(gateway, get_session_id(response))
        assert_redacted(call)
    assert not contains_secret(gateway.store_path, SECRET, encode_text(SECRET))


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "system", "content": SECRET}, {"role": "user", "content": "hi"}],
        [{"role": "user", "content": "hi", "name": SECRET}],
        [{"role": "user", "content": [{"type": "text", "text": "a: "}, {"type": "text", "text": SECRET}]}],
        [
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": "", "reasoning_content": f"hm {SECRET}"},
            {"role": "user", "content": "hi"},
        ],
        [
            {"role": "user", "content": "hi"},
            {
                "role": "assistant",
                "tool_calls": [
                    {
                        "id": "c1",
                        "type": "function",
                        "function": {"name": "sh", "arguments": f'{{"cmd": "export K={SECRET}"}}'},
                    }
                ],
            },
            {"role": "tool", "tool_call_id": "c1", "content": "ok"},
        ],
        [
            {"role": "user", "content": "hi"},
            {
                "role": "assistant",
                "tool_calls": [
                    {"id": "c1", "type": "function", "function": {"name": "env", "arguments": "{}"}}
                ],
            },
            {"role": "tool", "tool_call_id": "c1", "content": f"API_KEY={SECRET}\n"},
        ],
    ],
)  # fmt: skip
async def test_secret_in_any_part_of_a_message_is_redacted(
    gateway: RunningGateway, messages: list[Any]
) -> None:
    response = await post(gateway, {"model": "m", "messages": messages})
    (call,) = await list_calls(gateway, get_session_id(response))
    assert_redacted(call)
    assert not contains_secret(gateway.store_path, SECRET, encode_text(SECRET))


async def test_secret_in_tools_is_redacted(gateway: RunningGateway) -> None:
    parameters = {"type": "object", "properties": {"key": {"type": "string", "default": SECRET}}}
    function = {"name": "f", "description": "d", "parameters": parameters}
    body = build_request("chat", "hi", tools=[{"type": "function", "function": function}])
    response = await post(gateway, body)
    (call,) = await list_calls(gateway, get_session_id(response))
    assert_redacted(call)
    assert not contains_secret(gateway.store_path, SECRET, encode_text(SECRET))


async def test_secret_in_tools_of_a_submission_without_messages_is_redacted(gateway: RunningGateway) -> None:
    session = await gateway.open_session()
    ids = encode_text("hi")
    call = {
        "prompt_ids": ids,
        "sampled_ids": ids,
        "logprobs": [-0.5] * len(ids),
        "versions": [0] * len(ids),
        "finish_reason": "stop",
        "tools": [{"name": "f", "description": SECRET, "parameters": {}}],
    }
    response = await gateway.post_json(f"/sessions/{session.session_id}/calls", {"calls": [call]})
    assert response.status_code == 201, response.text
    assert_redacted((await gateway.calls(session))[0])
    assert not contains_secret(gateway.store_path, SECRET)


async def test_secret_in_session_fields_is_redacted(gateway: RunningGateway) -> None:
    opened = await gateway.open_session(metadata={"env": {"KEY": SECRET}}, task={"prompt": f"use {SECRET}"})
    path = f"/sessions/{opened.session_id}"
    rewards = {"rewards": [{"value": 1.0, "source": "judge", "detail": {"said": [f"it leaked {SECRET}"]}}]}
    await gateway.post_json(f"{path}/complete", {"metadata": {"log": SECRET}, **rewards})
    failed = await gateway.open_session()
    await gateway.post_json(f"/sessions/{failed.session_id}/fail", {"reason": f"401 for {SECRET}"})
    assert not contains_secret(gateway.store_path, SECRET)


@pytest.mark.parametrize("id_source", ["user", "header"])
async def test_secret_in_external_id_is_hashed(gateway: RunningGateway, id_source: str) -> None:
    async def find_session(external_id: str) -> str:
        if id_source == "user":
            return get_session_id(await post(gateway, build_request("chat", "hi", user=external_id)))
        return get_session_id(await post(gateway, build_request("chat", "hi"), x_session_id=external_id))

    first = await find_session(SECRET)
    assert await find_session(SECRET) == first
    assert await find_session(SECRET + "x") != first, "different secrets have different hashes"
    assert not contains_secret(gateway.store_path, SECRET)


async def test_secret_in_engine_error_is_redacted(start_gateway: StartGateway, model: ModelConfig) -> None:
    class LeakingEngine(ScriptedEngine):
        async def generate(self, prompt_ids: Any, params: Any, policy: Any = None) -> Any:
            async for chunk in super().generate(prompt_ids, params):
                yield chunk
                raise RuntimeError(f"refused: {SECRET}")

    gateway = await start_gateway(engine=LeakingEngine(model, ScriptedEngineConfig()))
    response = await post(gateway, build_request("chat", "hi", user="u"))
    assert response.status_code == 500
    assert SECRET not in response.text
    assert not contains_secret(gateway.store_path, SECRET)


async def test_configured_patterns_are_redacted(start_gateway: StartGateway) -> None:
    gateway = await start_gateway(config=GatewayConfig(redact=RedactConfig(patterns=[r"Project \w+"])))
    response = await post(gateway, build_request("chat", "about Project Aurora"))
    (call,) = await list_calls(gateway, get_session_id(response))
    assert_redacted(call)
    assert call.reply["content"] == "You said: about [redacted]"
    assert b"Aurora" not in read_stored_bytes(gateway.store_path)


async def test_call_without_a_secret_is_stored_unchanged(gateway: RunningGateway) -> None:
    response = await post(gateway, build_request("chat", "the risk-assessment of task-lists"))
    (call,) = await list_calls(gateway, get_session_id(response))
    assert call.trainable
    assert len(call.sampled_ids)


# --- later calls of a session -------------------------------------------------------------------


async def send_request(gateway: RunningGateway, texts: list[str], **options: Any) -> Call:
    """Send a chat request and return the last call of its session."""
    response = await post(gateway, build_request("chat", *texts), **options)
    return (await list_calls(gateway, get_session_id(response)))[-1]


async def test_only_calls_after_a_secret_are_untrainable(
    tmp_path: Path, model: ModelConfig, renderer: Renderer
) -> None:
    gateway_args = (tmp_path / "store.db", model, renderer)
    with_secret = ["hi", "You said: hi", f"key {SECRET}", f"You said: key {SECRET}", "go on"]
    async with run_scripted_gateway(*gateway_args) as gateway:
        session = await gateway.open_session()
        request_options = {"key": session.api_key, "prefix": f"/s/{session.session_id}"}
        first = await send_request(gateway, with_secret[:1], **request_options)
        second = await send_request(gateway, with_secret[:3], **request_options)
        third = await send_request(gateway, with_secret, **request_options)
        assert first.trainable
        for call in (second, third):
            assert_redacted(call)
        assert (second.link, second.parent_id) == (Link.EXTENDS, first.call_id)
        assert (third.link, third.parent_id) == (Link.EXTENDS, second.call_id)
        clean = await send_request(gateway, ["hi", "You said: hi", "nothing special"], **request_options)
        assert clean.trainable
        assert (clean.link, clean.parent_id) == (Link.EXTENDS, first.call_id)
        edited = await send_request(
            gateway, ["hi", "You said: hi", "key ***", "You said: key ***", "go on"], **request_options
        )
        assert edited.trainable
    async with run_scripted_gateway(*gateway_args) as gateway:
        fourth = await send_request(gateway, [*with_secret, "You said: go on", "and on"], **request_options)
        assert_redacted(fourth)
        # The third call's tokens are not stored, so the fourth call may be unable to extend them.
        assert fourth.parent_id in (third.call_id, None)
        repeated = await send_request(gateway, with_secret, **request_options)
        assert_redacted(repeated)
        assert repeated.link is Link.SIBLING
        clean = await send_request(gateway, ["hi", "You said: hi", "something else"], **request_options)
        assert clean.trainable
        continued = await send_request(
            gateway, ["hi", "You said: hi", "something else", clean.reply["content"], "x"], **request_options
        )
        assert continued.trainable
        assert continued.link is Link.EXTENDS
    assert not contains_secret(tmp_path / "store.db", SECRET, encode_text(SECRET))


class PromptRecordingEngine(ScriptedEngine):
    """Records the prompts that it receives."""

    prompts: list[list[int]]

    async def generate(self, prompt_ids: Any, params: Any, policy: Any = None) -> Any:
        self.prompts = [*getattr(self, "prompts", []), [int(token) for token in prompt_ids]]
        async for chunk in super().generate(prompt_ids, params):
            yield chunk


async def test_redacted_conversation_prompts_extend_the_original_tokens(
    start_gateway: StartGateway, model: ModelConfig
) -> None:
    engine = PromptRecordingEngine(model, ScriptedEngineConfig(function="tests.unit.gateway.scripts:reply"))
    gateway = await start_gateway(engine=engine)
    messages = [f"key {SECRET}"]
    for turn in range(4):
        response = await post(gateway, build_request("chat", *messages), x_session_id="s")
        messages += [response.json()["choices"][0]["message"]["content"], f"turn {turn}"]
    for prompt, next_prompt in zip(engine.prompts, engine.prompts[1:], strict=False):
        assert next_prompt[: len(prompt)] == prompt
    calls = await list_calls(gateway, get_session_id(response))
    assert [call.link for call in calls] == [Link.ROOT, *[Link.EXTENDS] * 3]
    for call in calls:
        assert_redacted(call)


async def test_repeated_redacted_completion_is_a_sibling_after_a_restart(
    tmp_path: Path, model: ModelConfig, renderer: Renderer
) -> None:
    gateway_args = (tmp_path / "store.db", model, renderer)
    body = build_request("completions", f"key {SECRET}")
    async with run_scripted_gateway(*gateway_args) as gateway:
        session = await gateway.open_session()
        first = await post(gateway, body, "completions", key=session.api_key)
    async with run_scripted_gateway(*gateway_args) as gateway:
        repeated = await post(gateway, body, "completions", key=session.api_key)
        assert repeated.status_code == 200, repeated.text
        assert repeated.json()["usage"] == first.json()["usage"]
        calls = await list_calls(gateway, session.session_id)
        assert [call.link for call in calls] == [Link.ROOT, Link.SIBLING]


async def test_secret_in_one_of_several_replies_redacts_only_that_reply(
    start_gateway: StartGateway, model: ModelConfig
) -> None:
    script = ScriptedEngineConfig(function=f"{__name__}:leak_with_odd_seed")
    gateway = await start_gateway(engine=ScriptedEngine(model, script))
    session = await gateway.open_session(seed=7)
    response = await post(gateway, build_request("chat", "hi", n=8), key=session.api_key)
    leaked = [SECRET in choice["message"]["content"] for choice in response.json()["choices"]]
    assert 0 < sum(leaked) < 8
    calls = await gateway.calls(session)
    assert [not call.trainable for call in calls] == leaked
    for call in calls:
        if call.trainable:
            assert len(call.prompt_ids)
        else:
            assert_redacted(call)
    clean = next(call for call in calls if call.trainable)
    response = await post(
        gateway, build_request("chat", "hi", clean.reply["content"], "more"), key=session.api_key
    )
    assert response.status_code == 200
    last = (await gateway.calls(session))[-1]
    assert (last.link, last.parent_id) == (Link.EXTENDS, clean.call_id)
    assert not contains_secret(gateway.store_path, SECRET, encode_text(SECRET))


def leak_with_odd_seed(prompt: str, seed: int | None) -> str:
    return f"it is {SECRET}" if (seed or 0) % 2 else f"I will not tell {seed}"


async def test_redacted_reply_is_sampled_again_on_retry(gateway: RunningGateway) -> None:
    """A replay would send the redacted text to the agent, because the original text is not stored."""
    session = await gateway.open_session()
    body = build_request("chat", f"key {SECRET}")
    first = await post(gateway, body, key=session.api_key, idempotency_key="k")
    retry = await post(gateway, body, key=session.api_key, idempotency_key="k")
    assert SECRET in retry.text
    assert retry.json()["id"] != first.json()["id"]
    assert [call.link for call in await gateway.calls(session)] == [Link.ROOT, Link.SIBLING]


async def test_reply_without_a_secret_to_a_redacted_prompt_is_replayed(
    start_gateway: StartGateway, model: ModelConfig
) -> None:
    gateway = await start_gateway(engine=ScriptedEngine(model, ScriptedEngineConfig(replies=["fine"])))
    session = await gateway.open_session()
    body = build_request("chat", f"key {SECRET}")
    first = await post(gateway, body, key=session.api_key, idempotency_key="k")
    retry = await post(gateway, body, key=session.api_key, idempotency_key="k")
    assert retry.json()["id"] == first.json()["id"]
    assert retry.json()["usage"] == first.json()["usage"]


# --- hashes and gateway keys --------------------------------------------------------------------


@pytest.mark.parametrize("dialect", ["chat", "completions"])
async def test_message_hashes_are_keyed(
    tmp_path: Path, model: ModelConfig, renderer: Renderer, dialect: str
) -> None:
    """Without the key, a stored hash cannot be compared with the hash of a guessed text."""
    stored_hashes: list[tuple[bytes, bytes]] = []
    for name, key in (("a", b"one"), ("b", b"two")):
        async with run_scripted_gateway(tmp_path / name, model, renderer, hash_key=key) as gateway:
            assert (await post(gateway, build_request(dialect, "hi"), dialect)).status_code == 200
            await gateway.store.close()
        with sqlite3.connect(tmp_path / name) as db:
            stored_hashes.append(db.execute("SELECT digests, tail_key FROM calls").fetchone())
    for first, second in zip(*stored_hashes, strict=True):
        chunks = {first[i : i + 16] for i in range(0, len(first or b"") - 15, 16)}
        assert not any(chunk in second for chunk in chunks)
    assert all(digests for digests, _ in stored_hashes)


@pytest.mark.parametrize("path", [PATHS["chat"], PATHS["messages"]])
async def test_gateway_keys_are_not_stored(gateway: RunningGateway, path: str) -> None:
    session = await gateway.open_session()
    headers = {"x-api-key": session.api_key}
    await gateway.http.post(path, json=build_request("messages", "hi"), headers=headers)
    assert session.api_key.encode() not in read_stored_bytes(gateway.store_path)
