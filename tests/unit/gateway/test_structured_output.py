"""Tests for replies of a required form, with the SDKs and a tiny model with random weights."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Literal

import anthropic
import jsonschema
import msgspec
import numpy as np
import openai
import pytest
from pydantic import BaseModel

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
from instar.errors import RenderError
from instar.gateway.base import OpenedSession
from instar.gateway.upstream.http import HttpUpstream
from instar.record.base import Renderer
from instar.record.render import TemplateRenderer, load_renderer
from instar.types import Tool
from tests.tiny import make_tiny_model, make_tiny_tokenizer
from tests.unit.engines.test_local import compute_expected_logprobs, load_reference_model
from tests.unit.gateway.conftest import RunningGateway, StartGateway, run_gateway
from tests.unit.gateway.provider import run_provider


class Wind(BaseModel):
    is_strong: bool


class Weather(BaseModel):
    city: Literal["Oslo", "Rome"]
    degrees: Literal[-5, 0, 20]
    wind: Wind | None


PARAMETERS = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["n"],
    "additionalProperties": False,
}
FUNCTIONS: list[Any] = [
    {"type": "function", "function": {"name": name, "parameters": PARAMETERS}} for name in ("add", "drop")
]
MESSAGES: Any = [{"role": "user", "content": "How is it?"}]
SCHEMA_FORMAT: Any = {
    "type": "json_schema",
    "json_schema": {"name": "weather", "schema": Weather.model_json_schema()},
}


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    folder = make_tiny_model(tmp_path_factory.mktemp("tiny"))
    return ModelConfig(name=str(folder), dtype="fp32", device="cpu", max_context=768)


@pytest.fixture
async def local_gateway(tiny_model: ModelConfig, tmp_path: Path) -> AsyncGenerator[RunningGateway]:
    engine = LocalEngine(tiny_model, LocalEngineConfig(threads=1))
    renderer = load_renderer(Path(tiny_model.name), tiny_model)
    async with run_gateway(tmp_path / "store.db", engine, renderer, GatewayConfig()) as gateway:
        yield gateway
    await engine.close()


@pytest.fixture
async def session(local_gateway: RunningGateway) -> OpenedSession:
    return await local_gateway.open_session()


@pytest.fixture
async def client(local_gateway: RunningGateway, session: OpenedSession) -> AsyncGenerator[openai.AsyncOpenAI]:
    async with local_gateway.openai_client(session) as client:
        yield client


async def test_chat_parse_returns_the_model_and_records_both_logprobs(
    local_gateway: RunningGateway,
    tiny_model: ModelConfig,
    session: OpenedSession,
    client: openai.AsyncOpenAI,
) -> None:
    response = await client.chat.completions.parse(model="m", messages=MESSAGES, response_format=Weather)
    assert isinstance(response.choices[0].message.parsed, Weather)
    assert response.choices[0].finish_reason == "stop"
    (call,) = await local_gateway.calls(session)
    assert call.trainable
    model: Any = load_reference_model(Path(tiny_model.name))
    expected = compute_expected_logprobs(model, call.prompt_ids.tolist(), call.sampled_ids.tolist())
    ratio = np.exp(np.asarray(expected) - call.logprobs)
    assert ratio == pytest.approx(1, abs=1e-4)
    assert call.behavior_logprobs is not None
    assert (call.behavior_logprobs >= call.logprobs - 1e-5).all()
    assert call.behavior_logprobs.sum() > call.logprobs.sum() + 10
    assert call.params.constraint is not None


async def test_importance_ratio_of_constrained_replies_is_one_before_training(
    local_gateway: RunningGateway,
    tiny_model: ModelConfig,
    session: OpenedSession,
    client: openai.AsyncOpenAI,
) -> None:
    requirements: list[dict[str, Any]] = [
        {"response_format": SCHEMA_FORMAT},
        {"response_format": SCHEMA_FORMAT, "temperature": 0.7},
        {"tools": FUNCTIONS, "tool_choice": "required", "parallel_tool_calls": False},
    ]
    for options in requirements:
        await client.chat.completions.create(model="m", messages=MESSAGES, seed=4, **options)
    calls = await local_gateway.calls(session)
    stored = await local_gateway.store.session(session.session_id)
    assert stored is not None
    samples = [with_advantage(sample, 1.0) for sample in linearize(stored, calls)]
    assert sum(sample.trained_tokens for sample in samples) == sum(len(call.sampled_ids) for call in calls)
    backend = LocalBackend(tiny_model, LocalBackendConfig(lora=LoraConfig(rank=4)), seed=0)
    result = await backend.forward_backward(samples, LossConfig())
    assert result.metrics["ratio_mean"] == pytest.approx(1, abs=1e-4)
    assert result.metrics["ratio_max"] == pytest.approx(1, abs=1e-4)
    for sample in samples:
        assert sample.behavior_logprobs is not None
        trained = sample.mask > 0
        weights = reweight_truncated_sampling(sample).advantages[trained]
        expected = np.exp(sample.logprobs - sample.behavior_logprobs)[trained]
        assert weights == pytest.approx(np.minimum(expected, MAX_SAMPLING_WEIGHT), rel=1e-5)
    await backend.close()


async def test_chat_stream_parses_json_of_every_choice(client: openai.AsyncOpenAI) -> None:
    options: Any = {"model": "m", "messages": MESSAGES, "n": 3, "response_format": Weather}
    async with client.chat.completions.stream(**options) as stream:
        events = [event.type async for event in stream]
        completion = await stream.get_final_completion()
    assert events.count("content.delta") > 10
    assert all(isinstance(choice.message.parsed, Weather) for choice in completion.choices)


@pytest.mark.parametrize("settings", [{}, {"temperature": 0.0}, {"temperature": 0.5, "top_p": 0.9}])
async def test_json_object_replies_are_objects(client: openai.AsyncOpenAI, settings: dict[str, Any]) -> None:
    response = await client.chat.completions.create(
        model="m", messages=MESSAGES, response_format={"type": "json_object"}, seed=5, **settings
    )
    content = response.choices[0].message.content or ""
    if response.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(content), dict)
    else:
        assert content.startswith("{")


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_responses_parse_returns_the_model(client: openai.AsyncOpenAI, is_streamed: bool) -> None:
    if is_streamed:
        async with client.responses.stream(model="m", input="Hi", text_format=Weather) as stream:
            response = await stream.get_final_response()
    else:
        response = await client.responses.parse(model="m", input="Hi", text_format=Weather)
    assert isinstance(response.output_parsed, Weather)
    assert response.text is not None
    assert response.text.format is not None
    assert response.text.format.type == "json_schema"


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_anthropic_parse_returns_the_model(session: OpenedSession, is_streamed: bool) -> None:
    async with anthropic.AsyncAnthropic(
        base_url=session.base_url.removesuffix("/v1"), api_key=session.api_key, max_retries=0
    ) as client:
        options: Any = {"model": "m", "max_tokens": 500, "messages": MESSAGES, "output_format": Weather}
        if is_streamed:
            async with client.messages.stream(**options) as stream:
                message: Any = await stream.get_final_message()
        else:
            message = await client.messages.parse(**options)
    assert isinstance(message.parsed_output, Weather)


async def test_required_tool_choice_forces_a_call_in_every_dialect(
    local_gateway: RunningGateway, session: OpenedSession, client: openai.AsyncOpenAI
) -> None:
    chat = await client.chat.completions.create(
        model="m",
        messages=MESSAGES,
        tools=FUNCTIONS,
        tool_choice={"type": "function", "function": {"name": "drop"}},
    )
    assert chat.choices[0].finish_reason == "tool_calls"
    (call,) = chat.choices[0].message.tool_calls or []
    assert call.type == "function"
    assert call.function.name == "drop"
    jsonschema.validate(json.loads(call.function.arguments), PARAMETERS)
    async with client.chat.completions.stream(
        model="m", messages=MESSAGES, tools=FUNCTIONS, tool_choice="required", parallel_tool_calls=False
    ) as stream:
        completion = await stream.get_final_completion()
    assert len(completion.choices[0].message.tool_calls or []) == 1
    tools: Any = [{"type": "function", **tool["function"]} for tool in FUNCTIONS]
    response = await client.responses.create(model="m", input="Hi", tools=tools, tool_choice="required")
    assert {item.type for item in response.output} == {"function_call"}
    async with anthropic.AsyncAnthropic(
        base_url=session.base_url.removesuffix("/v1"), api_key=session.api_key, max_retries=0
    ) as messages_client:
        message = await messages_client.messages.create(
            model="m",
            max_tokens=500,
            messages=MESSAGES,
            tools=[{"name": "add", "input_schema": PARAMETERS}],  # type: ignore[typeddict-item]
            tool_choice={"type": "any", "disable_parallel_tool_use": True},
        )
    assert [block.type for block in message.content] == ["tool_use"]
    assert message.stop_reason == "tool_use"
    assert all(row.trainable for row in await local_gateway.calls(session))


async def test_tool_schema_that_is_expensive_to_compile_is_not_enforced(client: openai.AsyncOpenAI) -> None:
    parameters = {"properties": {"n": {"type": "array", "minItems": 10**9}}, "required": ["n"]}
    tools: Any = [{"type": "function", "function": {"name": "add", "parameters": parameters}}]
    response = await client.chat.completions.create(
        model="m", messages=MESSAGES, tools=tools, tool_choice="required", seed=1
    )
    assert (response.choices[0].message.tool_calls or [])[0].type == "function"


async def test_format_with_tools_allows_json_or_a_call(client: openai.AsyncOpenAI) -> None:
    kinds: set[str] = set()
    for seed in range(12):
        response = await client.chat.completions.create(
            model="m", messages=MESSAGES, tools=FUNCTIONS, response_format=SCHEMA_FORMAT, seed=seed
        )
        kinds.add(response.choices[0].finish_reason)
        if response.choices[0].finish_reason == "stop":
            Weather.model_validate_json(response.choices[0].message.content or "")
    assert kinds == {"stop", "tool_calls"}


def make_schema_format(schema: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}


INVALID_FORMATS: list[tuple[dict[str, Any], str, str]] = [
    (make_schema_format({"type": "array", "uniqueItems": True}), "response_format", "uniqueItems"),
    (make_schema_format({"type": "objct"}), "response_format", "objct"),
    (make_schema_format(None), "response_format.json_schema.schema", "Missing"),
    ({"response_format": {"type": "grammar"}}, "response_format.type", "'json_schema', 'json_object'"),
    (make_schema_format("x"), "response_format.json_schema.schema", "object"),
    # Engines would need minutes and gigabytes of memory to compile these schemas.
    (make_schema_format({"type": "array", "maxItems": 10**9}), "response_format", "'maxItems' are too large"),
    (make_schema_format({"items": [{"minItems": 6000}] * 2}), "response_format", "the limit is 10000"),
    (
        make_schema_format({"allOf": [{"multipleOf": 997}, {"multipleOf": 9.91}]}),
        "response_format",
        "multipleOf",
    ),
    (make_schema_format({"const": "x" * 70_000}), "response_format", "length is 700"),
]


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_invalid_format_is_rejected_with_field_and_reason(
    local_gateway: RunningGateway, session: OpenedSession, client: openai.AsyncOpenAI, is_streamed: bool
) -> None:
    for options, param, reason in INVALID_FORMATS:
        with pytest.raises(openai.BadRequestError, match=reason) as caught:
            await client.chat.completions.create(model="m", messages=MESSAGES, stream=is_streamed, **options)
        assert caught.value.param == param
    assert await local_gateway.calls(session) == []


async def test_secrets_in_a_schema_are_not_stored(
    local_gateway: RunningGateway, session: OpenedSession, client: openai.AsyncOpenAI
) -> None:
    secret = "sk-proj-" + "a1B2c3D4" * 5
    schema = {"enum": [1, 2], "description": f"The key is {secret}"}
    await client.chat.completions.create(model="m", messages=MESSAGES, **make_schema_format(schema))
    (call,) = await local_gateway.calls(session)
    assert call.params.constraint is not None
    assert secret not in str(call.params.constraint)
    assert '"enum": [1, 2]' in str(call.params.constraint)


class UnconstrainedEngine(ScriptedEngine):
    """A scripted engine without the capability, like the samplers of training services."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__(model, ScriptedEngineConfig(replies=["{}"]))
        self._info = msgspec.structs.replace(self.info, kind="service", constrains_output=False)


REQUIREMENTS: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/chat/completions", {"messages": MESSAGES, "response_format": SCHEMA_FORMAT}, "response_format"),
    ("/v1/responses", {"input": "Hi", "text": {"format": {"type": "json_object"}}}, "text.format"),
    (
        "/v1/messages",
        {
            "messages": MESSAGES,
            "max_tokens": 9,
            "output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}},
        },
        "output_config.format",
    ),
]


@pytest.mark.parametrize(("path", "fields", "param"), REQUIREMENTS)
async def test_engine_without_the_capability_rejects_the_field(
    start_gateway: StartGateway, model: ModelConfig, path: str, fields: dict[str, Any], param: str
) -> None:
    gateway = await start_gateway(UnconstrainedEngine(model))
    response = await gateway.post_json(path, {"model": "m", **fields})
    assert response.status_code == 400
    assert f"'{param}' cannot be honoured: the service engine cannot constrain replies" in response.text


async def test_required_call_is_a_hint_for_an_engine_without_the_capability(
    start_gateway: StartGateway, model: ModelConfig
) -> None:
    gateway = await start_gateway(UnconstrainedEngine(model))
    body = {"model": "m", "messages": MESSAGES, "tools": FUNCTIONS, "tool_choice": "required"}
    response = await gateway.post_json("/v1/chat/completions", body)
    assert response.status_code == 200, response.text
    assert response.json()["choices"][0]["message"]["content"] == "{}"


async def test_scripted_engine_returns_only_replies_of_the_required_form(
    start_gateway: StartGateway, model: ModelConfig
) -> None:
    config = ScriptedEngineConfig(replies=['{"city": "Oslo", "degrees": 0, "wind": null}', "Sunny."])
    gateway = await start_gateway(ScriptedEngine(model, config))
    session = await gateway.open_session()
    async with gateway.openai_client(session) as client:
        await check_scripted_replies(client)


async def check_scripted_replies(client: openai.AsyncOpenAI) -> None:
    first = await client.chat.completions.parse(model="m", messages=MESSAGES, response_format=Weather)
    assert first.choices[0].message.parsed == Weather(city="Oslo", degrees=0, wind=None)
    more: Any = [
        *MESSAGES,
        {"role": "assistant", "content": first.choices[0].message.content},
        {"role": "user", "content": "And now?"},
    ]
    with pytest.raises(openai.BadRequestError, match=r"The scripted reply 'Sunny\.' is not JSON"):
        await client.chat.completions.create(model="m", messages=more, response_format=SCHEMA_FORMAT)
    with pytest.raises(openai.BadRequestError, match="is not a call of a required tool"):
        await client.chat.completions.create(
            model="m", messages=MESSAGES, tools=FUNCTIONS, tool_choice="required"
        )


@pytest.mark.parametrize("dialect", ["chat", "messages"])
async def test_provider_gets_the_format_unchanged_or_rejects_it(
    tmp_path: Path, dialect: Literal["chat", "messages"]
) -> None:
    async with run_provider() as provider, AsyncExitStack() as stack:
        base_url = provider.url + ("" if dialect == "messages" else "/v1")
        upstream = HttpUpstream(UpstreamEngineConfig(base_url=base_url, dialect=dialect))
        stack.push_async_callback(upstream.close)
        context = run_gateway(tmp_path / "store.db", None, None, GatewayConfig(), upstream=upstream)
        gateway = await stack.enter_async_context(context)
        body = {"model": "plain", "messages": MESSAGES, "response_format": SCHEMA_FORMAT}
        response = await gateway.post_json("/v1/chat/completions", body)
        if dialect == "chat":
            assert response.status_code == 200, response.text
            assert provider.last_request["response_format"] == SCHEMA_FORMAT
        else:
            assert response.status_code == 400
            assert response.json()["error"]["param"] == "response_format"


# --- model formats ---


TOOL = Tool(name="add", description="", parameters=PARAMETERS)


def make_renderer(template: str) -> TemplateRenderer:
    return TemplateRenderer(make_tiny_tokenizer(template=template))


def test_llama_format_is_constrained_to_one_bare_call() -> None:
    renderer = make_renderer(
        "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}"
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.tool_calls %}"
        '{"name": {{ m.tool_calls[0].function.name | tojson }}, '
        '"parameters": {{ m.tool_calls[0].function.arguments | tojson }}}'
        "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    assert renderer.tool_format.name == "llama"
    constraint = renderer.constrain(None, [TOOL])
    assert constraint.calls[0].begin == '{"name": "add", "parameters": '
    assert constraint.separator is None


def test_format_without_a_grammar_is_rejected_with_its_name() -> None:
    renderer = make_renderer(
        "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}"
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls or [] %}"
        "<tool_call>\n<function={{ c.function.name }}>\n{% for k, v in c.function.arguments.items() %}"
        "<parameter={{ k }}>\n{{ v }}\n</parameter>\n{% endfor %}</function>\n</tool_call>{% endfor %}"
        "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    assert renderer.tool_format.name == "qwen-xml"
    with pytest.raises(RenderError, match=r"\(qwen-xml\) cannot be constrained"):
        renderer.constrain(None, [TOOL])
    assert renderer.constrain({"type": "object"}, ()).schema == '{"type": "object"}'


def test_reasoning_is_allowed_only_for_models_that_reason(renderer: Renderer) -> None:
    assert renderer.constrain({}, ()).reasoning is None
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.reasoning_content %}"
        "<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    thinking = make_renderer(template)
    assert thinking.constrain({}, ()).reasoning == ("<think>", "</think>")
    prompt = thinking.encode("<|im_start|>assistant\n<think>\n")
    assert thinking.constrain({}, (), prompt).reasoning == ("", "</think>")
