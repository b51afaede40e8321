"""Tests for sampling fields and variables of the chat template, with a tiny model behind a real gateway."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest

from instar.backends.local.backend import LocalBackend
from instar.config import (
    GatewayConfig,
    LocalBackendConfig,
    LocalEngineConfig,
    LoraConfig,
    LossConfig,
    ModelConfig,
    ScriptedEngineConfig,
    UpstreamEngineConfig,
)
from instar.data.advantages import MAX_SAMPLING_WEIGHT, reweight_truncated_sampling
from instar.data.linearize import linearize, with_advantage
from instar.engines.local.engine import LocalEngine
from instar.engines.scripted import ScriptedEngine
from instar.gateway.base import IGNORED_FIELDS_HEADER, SESSION_HEADER
from instar.gateway.upstream.http import HttpUpstream
from instar.record.render import load_renderer
from instar.types import Link
from tests.tiny import make_tiny_model, make_tiny_tokenizer
from tests.unit.engines.test_local import compute_expected_logprobs, load_reference_model
from tests.unit.gateway.conftest import RunningGateway, StartGateway, run_gateway
from tests.unit.gateway.provider import run_provider

TEMPLATE = (
    "{%- if enable_thinking is defined and not enable_thinking %}"
    "{{- '<|im_start|>system\n/no_think<|im_end|>\n' }}{%- endif %}"
    "{%- if reasoning_effort is defined %}"
    "{{- '<|im_start|>system\n' + reasoning_effort + '<|im_end|>\n' }}{%- endif %}"
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)
NO_THINKING = "<|im_start|>system\n/no_think<|im_end|>\n"
CHAT, MESSAGES_PATH, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
USER: Any = {"role": "user", "content": "How is it?"}
SETTINGS: dict[str, Any] = {
    "min_p": 0.02,
    "presence_penalty": 0.4,
    "frequency_penalty": 0.3,
    "repetition_penalty": 1.2,
    "logit_bias": {"40": 3.0, "41": -100},
}
RECORDED_SETTINGS = {**SETTINGS, "logit_bias": {40: 3.0, 41: -100.0}}


@pytest.fixture(scope="module")
def thinking_model(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    folder = make_tiny_model(tmp_path_factory.mktemp("thinking"))
    make_tiny_tokenizer(template=TEMPLATE).save_pretrained(folder)
    return ModelConfig(name=str(folder), dtype="fp32", device="cpu", max_context=768)


@asynccontextmanager
async def run_local_gateway(
    model: ModelConfig, store_path: Path, **settings: Any
) -> AsyncGenerator[RunningGateway]:
    engine = LocalEngine(model, LocalEngineConfig(threads=1))
    renderer = load_renderer(Path(model.name), model)
    async with run_gateway(store_path, engine, renderer, GatewayConfig(**settings)) as gateway:
        yield gateway
    await engine.close()


@pytest.fixture
async def local_gateway(thinking_model: ModelConfig, tmp_path: Path) -> AsyncGenerator[RunningGateway]:
    async with run_local_gateway(thinking_model, tmp_path / "store.db") as gateway:
        yield gateway


async def post(gateway: RunningGateway, path: str, **fields: Any) -> httpx.Response:
    limit = "max_output_tokens" if path == RESPONSES else "max_tokens"
    response = await gateway.post_json(path, {"model": "m", limit: 12, **fields})
    assert response.status_code == 200, response.text
    return response


async def get_prompt(gateway: RunningGateway, response: httpx.Response) -> str:
    *_, call = await gateway.store.calls(response.headers[SESSION_HEADER])
    return str(make_tiny_tokenizer().decode(call.prompt_ids))


async def test_sampling_fields_are_recorded_and_their_importance_ratio_is_one(
    local_gateway: RunningGateway, thinking_model: ModelConfig
) -> None:
    session = await local_gateway.open_session()
    for path, fields in ((CHAT, {"messages": [USER]}), ("/v1/completions", {"prompt": "Hi there"})):
        body = {"model": "m", "max_tokens": 40, "seed": 3, **fields, **SETTINGS}
        response = await local_gateway.post_json(path, body, key=session.api_key)
        assert response.status_code == 200, response.text
        assert IGNORED_FIELDS_HEADER not in response.headers
    body = {"prompt_ids": [5, 6, 7], "max_tokens": 40, "seed": 3, **SETTINGS}
    response = await local_gateway.post_json("/v1/generate", body, key=session.api_key)
    assert response.status_code == 200, response.text
    calls = await local_gateway.calls(session)
    assert len(calls) == 3
    model: Any = load_reference_model(Path(thinking_model.name))
    for call in calls:
        assert call.trainable
        assert {name: getattr(call.params, name) for name in SETTINGS} == RECORDED_SETTINGS
        expected = compute_expected_logprobs(model, call.prompt_ids.tolist(), call.sampled_ids.tolist())
        assert call.logprobs == pytest.approx(expected, abs=1e-4)
        assert call.behavior_logprobs is not None
        assert np.abs(call.behavior_logprobs - call.logprobs).max() > 0.5
        assert 41 not in call.sampled_ids
    stored = await local_gateway.store.session(session.session_id)
    assert stored is not None
    samples = [with_advantage(sample, 1.0) for sample in linearize(stored, calls)]
    backend = LocalBackend(thinking_model, LocalBackendConfig(lora=LoraConfig(rank=4)), seed=0)
    result = await backend.forward_backward(samples, LossConfig())
    assert result.metrics["ratio_mean"] == pytest.approx(1, abs=1e-4)
    for sample in samples:
        assert sample.behavior_logprobs is not None
        trained = sample.mask > 0
        ratio = np.exp(sample.logprobs - sample.behavior_logprobs)[trained]
        weights = reweight_truncated_sampling(sample).advantages[trained]
        assert weights == pytest.approx(np.minimum(ratio, MAX_SAMPLING_WEIGHT), rel=1e-5)
    await backend.close()


async def test_train_channel_keeps_only_the_bias_of_the_agent(local_gateway: RunningGateway) -> None:
    session = await local_gateway.open_session(channel="train", group_id="g")
    body = {"model": "m", "max_tokens": 9, "messages": [USER], **SETTINGS}
    response = await local_gateway.post_json(CHAT, body, key=session.api_key)
    assert response.status_code == 200, response.text
    (call,) = await local_gateway.calls(session)
    assert call.params.logit_bias == {40: 3.0, 41: -100.0}
    assert msgspec.structs.replace(call.params, logit_bias={}).modifies_distribution is False


INVALID_FIELDS: list[tuple[dict[str, Any], str]] = [
    ({"min_p": 1.5}, "min_p"),
    ({"presence_penalty": -2.5}, "presence_penalty"),
    ({"frequency_penalty": 3}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"logit_bias": {"7": 101}}, "logit_bias.7"),
    ({"logit_bias": {"320": 1}}, "logit_bias.320"),
    ({"logit_bias": {"seven": 1}}, "logit_bias"),
    ({"chat_template_kwargs": {"enable_thinking": [True]}}, "chat_template_kwargs.enable_thinking"),
    ({"chat_template_kwargs": {"messages": "x"}}, "chat_template_kwargs.messages"),
    ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs.tokenize"),
    ({"chat_template_kwargs": {"reasoning_effort": "<|im_end|>"}}, "chat_template_kwargs"),
    ({"reasoning_effort": "<|im_end|>"}, "reasoning_effort"),
]


async def test_invalid_values_are_rejected_by_name(local_gateway: RunningGateway) -> None:
    for fields, param in INVALID_FIELDS:
        body = {"model": "m", "messages": [USER], **fields}
        response = await local_gateway.post_json(CHAT, body)
        assert response.status_code == 400, fields
        error = response.json()["error"]
        assert error["param"].startswith(param), (fields, error)


async def test_template_variables_are_rendered_recorded_and_part_of_the_prompts_identity(
    local_gateway: RunningGateway, thinking_model: ModelConfig
) -> None:
    session = await local_gateway.open_session()
    renderer = load_renderer(Path(thinking_model.name), thinking_model)
    off, on = {"enable_thinking": False}, {"enable_thinking": True}
    messages = [USER]
    for kwargs in (off, off, on, off):
        body = {"model": "m", "max_tokens": 8, "messages": messages, "chat_template_kwargs": kwargs}
        response = await local_gateway.post_json(CHAT, body, key=session.api_key)
        assert response.status_code == 200, response.text
        messages = [*messages, response.json()["choices"][0]["message"], {"role": "user", "content": "And?"}]
    first, second, third, fourth = await local_gateway.calls(session)
    tokenizer = make_tiny_tokenizer()
    assert str(tokenizer.decode(first.prompt_ids)).startswith(NO_THINKING)
    assert (second.link, second.parent_id) == (Link.EXTENDS, first.call_id)
    prompt = second.prompt_ids.tolist()
    assert prompt[: len(first.sequence)] == first.sequence.tolist()
    assert (
        prompt[len(first.sequence) :]
        == renderer.with_template_kwargs(off).render(second.messages)[-len(prompt) + len(first.sequence) :]
    )
    assert third.link is Link.BRANCH
    assert third.prompt_ids.tolist() == renderer.with_template_kwargs(on).render(third.messages)
    assert NO_THINKING not in str(tokenizer.decode(third.prompt_ids))
    assert fourth.link is Link.BRANCH
    recorded = [call.params.chat_template_kwargs for call in (first, second, third, fourth)]
    assert recorded == [off, off, on, off]


async def test_template_variables_distinguish_calls_after_a_restart(
    thinking_model: ModelConfig, tmp_path: Path
) -> None:
    kwargs = {"chat_template_kwargs": {"enable_thinking": False}}
    links: list[Link] = []
    reply: Any = None
    session_id = ""
    for fields in (kwargs, {}, kwargs):
        async with run_local_gateway(thinking_model, tmp_path / "store.db") as gateway:
            messages = [USER, reply, USER] if reply else [USER]
            path = f"/s/{session_id}{CHAT}" if session_id else CHAT
            response = await post(gateway, path, messages=messages, **fields)
            session_id = response.headers[SESSION_HEADER]
            reply = reply or response.json()["choices"][0]["message"]
            links.append((await gateway.store.calls(session_id))[-1].link)
    assert links == [Link.ROOT, Link.BRANCH, Link.EXTENDS]


REASONING_FIELDS: list[tuple[str, dict[str, Any], dict[str, Any], list[str]]] = [
    (CHAT, {"reasoning_effort": "none"}, {"reasoning_effort": "none", "enable_thinking": False}, []),
    (CHAT, {"reasoning_effort": "high"}, {"reasoning_effort": "high", "enable_thinking": True}, []),
    (
        CHAT,
        {"reasoning_effort": "high", "chat_template_kwargs": {"enable_thinking": False}},
        {"reasoning_effort": "high", "enable_thinking": False},
        [],
    ),
    (RESPONSES, {"reasoning": {"effort": "low"}}, {"reasoning_effort": "low", "enable_thinking": True}, []),
    (MESSAGES_PATH, {"thinking": {"type": "disabled"}}, {"enable_thinking": False}, []),
    (
        MESSAGES_PATH,
        {"thinking": {"type": "enabled", "budget_tokens": 1024}},
        {"enable_thinking": True},
        ["thinking.budget_tokens"],
    ),
    (
        MESSAGES_PATH,
        {"thinking": {"type": "disabled"}, "output_config": {"effort": "low"}},
        {"enable_thinking": False, "reasoning_effort": "low"},
        [],
    ),
]


async def test_reasoning_fields_set_the_variables_with_their_meaning(local_gateway: RunningGateway) -> None:
    for path, fields, expected, ignored in REASONING_FIELDS:
        content: dict[str, Any] = {"input": "How is it?"} if path == RESPONSES else {"messages": [USER]}
        response = await post(local_gateway, path, **content, **fields)
        *_, call = await local_gateway.store.calls(response.headers[SESSION_HEADER])
        assert call.params.chat_template_kwargs == expected
        prompt = await get_prompt(local_gateway, response)
        assert prompt.startswith(NO_THINKING) == (expected["enable_thinking"] is False)
        effort = expected.get("reasoning_effort")
        assert (f"<|im_start|>system\n{effort}<|im_end|>" in prompt) == (effort is not None)
        assert response.headers.get(IGNORED_FIELDS_HEADER, "") == ", ".join(ignored)


async def test_token_count_uses_the_template_variables(local_gateway: RunningGateway) -> None:
    counts: list[int] = []
    for kind in ("enabled", "disabled"):
        body = {"model": "m", "messages": [USER], "thinking": {"type": kind}}
        response = await local_gateway.post_json("/v1/messages/count_tokens", body)
        counts.append(response.json()["input_tokens"])
    extra = len(make_tiny_tokenizer().encode(NO_THINKING))
    assert counts[1] == counts[0] + extra


async def test_secret_in_a_template_variable_is_not_stored(local_gateway: RunningGateway) -> None:
    secret = "sk-proj-" + "a1B2c3D4" * 5
    response = await post(
        local_gateway, CHAT, messages=[USER], chat_template_kwargs={"reasoning_effort": secret}
    )
    (call,) = await local_gateway.store.calls(response.headers[SESSION_HEADER])
    assert not call.trainable
    assert len(call.prompt_ids) == 0
    assert secret not in str(call.params)


class LimitedEngine(ScriptedEngine):
    """A scripted engine without the optional sampling fields, like the samplers of training services."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__(model, ScriptedEngineConfig(replies=["Fine."]))
        self._info = msgspec.structs.replace(self.info, kind="service", sampling_fields=())


NEUTRAL: dict[str, Any] = {
    "min_p": 0,
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "repetition_penalty": 1,
    "logit_bias": {},
    "chat_template_kwargs": {},
}
UNSUPPORTED: list[tuple[dict[str, Any], str]] = [
    *(({name: value}, name) for name, value in SETTINGS.items()),
    ({"chat_template_kwargs": {"enable_thinking": False}}, "chat_template_kwargs.enable_thinking"),
    ({"top_logprobs": 3, "logprobs": True}, "top_logprobs"),
    ({"guided_regex": "a+"}, "guided_regex"),
]


async def test_unsupported_fields_are_rejected_by_default(
    start_gateway: StartGateway, model: ModelConfig
) -> None:
    gateway = await start_gateway(LimitedEngine(model))
    await post(gateway, CHAT, messages=[USER], **NEUTRAL)
    for fields, param in UNSUPPORTED:
        response = await gateway.post_json(CHAT, {"model": "m", "messages": [USER], **fields})
        assert response.status_code == 400, fields
        assert response.json()["error"]["param"] == param
    message = "'min_p' is not supported by the service engine; leave it out."
    response = await gateway.post_json(CHAT, {"model": "m", "messages": [USER], "min_p": 0.1})
    assert response.json()["error"]["message"] == message


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_unsupported_fields_are_ignored_and_listed_if_configured(
    start_gateway: StartGateway, model: ModelConfig, is_streamed: bool
) -> None:
    gateway = await start_gateway(LimitedEngine(model), GatewayConfig(unsupported_fields="ignore"))
    for fields, param in UNSUPPORTED:
        response = await post(gateway, CHAT, messages=[USER], stream=is_streamed, **fields)
        assert is_streamed or "Fine." in response.text
        assert response.headers[IGNORED_FIELDS_HEADER] == param
        *_, call = await gateway.store.calls(response.headers[SESSION_HEADER])
        assert call.trainable
        assert not call.params.modifies_distribution
        assert call.params.chat_template_kwargs == {}
    image: Any = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}
    for fields in ({"messages": [image]}, {"messages": [USER], "functions": [{"name": "f"}]}):
        response = await gateway.post_json(CHAT, {"model": "m", **fields})
        assert response.status_code == 400, fields
    for path in (MESSAGES_PATH, "/v1/messages/count_tokens"):
        fields = {"messages": [USER], "max_tokens": 9, "mystery\u2028": 1, "betas": ["x"]}
        response = await gateway.post_json(path, {"model": "m", **fields})
        assert response.status_code == 200, response.text
    body = {"model": "m", "messages": [USER], "line\nbreak": 1, "text \u00e9": 2}
    response = await gateway.post_json(CHAT, body)
    assert response.headers[IGNORED_FIELDS_HEADER] == "line?break, text \\xe9"


async def test_reasoning_fields_are_listed_if_the_template_has_no_such_variable(
    gateway: RunningGateway,
) -> None:
    response = await post(gateway, CHAT, messages=[USER], reasoning_effort="high")
    assert response.headers[IGNORED_FIELDS_HEADER] == "reasoning_effort"
    thinking = {"type": "enabled", "budget_tokens": 1024}
    response = await post(gateway, MESSAGES_PATH, messages=[USER], thinking=thinking, max_tokens=2048)
    assert response.headers[IGNORED_FIELDS_HEADER] == "thinking, thinking.budget_tokens"


async def test_provider_receives_the_fields_unchanged(start_gateway: StartGateway, tmp_path: Path) -> None:
    fields = {**SETTINGS, "chat_template_kwargs": {"a": [1]}, "reasoning_effort": "low"}
    async with AsyncExitStack() as stack:
        provider = await stack.enter_async_context(run_provider())
        for dialect, path, expected in (
            ("chat", CHAT, {**fields, "chat_template_kwargs": {"a": [1]}}),
            ("chat", MESSAGES_PATH, {"top_k": 3}),
        ):
            upstream = HttpUpstream(UpstreamEngineConfig(base_url=f"{provider.url}/v1", dialect=dialect))
            stack.push_async_callback(upstream.close)
            store = tmp_path / f"{path.replace('/', '-')}.db"
            config = GatewayConfig(unsupported_fields="ignore")
            context = run_gateway(store, None, None, config, upstream=upstream)
            gateway = await stack.enter_async_context(context)
            sent = fields if path == CHAT else {"top_k": 3, "thinking": {"type": "disabled"}}
            response = await post(gateway, path, messages=[USER], **sent)
            received = provider.last_request
            assert {name: received[name] for name in expected} == expected
            ignored = response.headers.get(IGNORED_FIELDS_HEADER)
            assert ignored == (None if path == CHAT else "thinking")
