"""Every response body of every dialect, validated strictly against the types of the providers' SDKs.

The types allow unknown fields, and declare fields that may be missing like fields that may be null. So a
field that the types do not have must be in `EXTENSIONS`, and a field that may be null instead of missing in
`NULLABLE`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic.types as anthropic_types
import openai.types as openai_types
import pytest
from openai.types import chat, responses
from openai.types.responses.input_token_count_response import InputTokenCountResponse
from openai.types.shared import ErrorObject
from pydantic import BaseModel, TypeAdapter

from instar.config import ModelConfig, ScriptedEngineConfig
from instar.engines.scripted import ScriptedEngine
from tests.unit.gateway.conftest import ADMIN_KEY, RunningGateway, StartGateway
from tests.unit.gateway.wire import DIALECTS, build_request, post

EXTENSIONS = {
    "ChatCompletionMessage": {"reasoning_content"},  # as sent by vLLM and DeepSeek
    "ChoiceDelta": {"reasoning_content"},
    "Logprob": {"bytes"},  # as in the complete response
    "Response": {"store"},  # sent by OpenAI
}
"""The fields that the types lack, by type."""
NULLABLE = {
    "ChatCompletionChunk": {"usage"},
    "ChatCompletionMessage": {"content", "refusal"},
    "Choice": {"finish_reason", "logprobs"},
    "ChoiceLogprobs": {"refusal"},
    "Completion": {"usage"},
    "CompletionChoice": {"logprobs"},
    "Delta": {"stop_sequence"},
    "ErrorResponse": {"request_id"},
    "FunctionTool": {"description", "strict"},
    "Logprobs": {"top_logprobs"},
    "Message": {"stop_reason", "stop_sequence"},
    "Reasoning": {"effort", "summary"},
    "Response": {
        *("completed_at", "error", "incomplete_details", "instructions", "max_output_tokens"),
        *("max_tool_calls", "previous_response_id", "prompt_cache_key", "safety_identifier", "usage", "user"),
    },
}
"""The fields that the providers send as null, and that the types declare as possibly missing, by type."""

RESPONSE_TYPES: dict[str, Any] = {
    "chat": chat.ChatCompletion,
    "completions": openai_types.Completion,
    "responses": responses.Response,
    "messages": anthropic_types.Message,
}
EVENT_TYPES: dict[str, Any] = {
    "chat": chat.ChatCompletionChunk,
    "completions": openai_types.Completion,
    "responses": responses.ResponseStreamEvent,
    "messages": anthropic_types.RawMessageStreamEvent,
}
SCHEMA = {"type": "object", "properties": {"expression": {"type": "string"}}}
TOOLS: dict[str, Any] = {
    "chat": {"type": "function", "function": {"name": "calc", "parameters": SCHEMA}},
    "responses": {"type": "function", "name": "calc", "parameters": SCHEMA},
    "messages": {"name": "calc", "input_schema": SCHEMA},
}
LOGPROBS: dict[str, dict[str, Any]] = {
    "chat": {"logprobs": True},
    "completions": {"logprobs": 0},
    "responses": {"include": ["message.output_text.logprobs"]},
}
THINKING = {"messages": {"thinking": {"type": "enabled", "budget_tokens": 1024}, "max_tokens": 2048}}


def reply(prompt: str, seed: int | None) -> str:
    """Reply to the last turn with the text, reasoning and call that it names."""
    turn = prompt.split("<|im_start|>")[-2]
    parts = {
        "think": "<think>\nHm.\n</think>\n\n",
        "talk": "So be it. ",
        "call": '<tool_call>{"name": "calc", "arguments": {"expression": "1"}}</tool_call>',
    }
    return "".join(text for name, text in parts.items() if name in turn)


@pytest.fixture
async def gateway(start_gateway: StartGateway, model: ModelConfig) -> RunningGateway:
    script = ScriptedEngineConfig(function="tests.unit.gateway.test_wire_types:reply")
    return await start_gateway(ScriptedEngine(model, script))


def validate(wire_type: Any, body: bytes | str) -> None:
    problems = list(find_problems(TypeAdapter(wire_type).validate_json(body, strict=True)))
    assert not problems, f"{problems} in {body!r}"


def find_problems(value: Any) -> Iterator[str]:
    """Yield the unknown fields and the unexpected nulls in a validated value."""
    if isinstance(value, list):
        for item in value:
            yield from find_problems(item)
    if not isinstance(value, BaseModel):
        return
    name = type(value).__name__
    for field in set(value.model_extra or ()) - EXTENSIONS.get(name, set()):
        yield f"{name}.{field} is unknown"
    for field in value.model_fields_set & type(value).model_fields.keys():
        item = getattr(value, field)
        is_nullable = type(value).model_fields[field].is_required() or field in NULLABLE.get(name, ())
        if item is None and not is_nullable:
            yield f"{name}.{field} is null"
        yield from find_problems(item)


def read_events(body: str) -> list[str]:
    lines = [line.removeprefix("data: ") for line in body.splitlines() if line.startswith("data: ")]
    return [line for line in lines if line != "[DONE]"]


CASES = {
    "text": ("talk", {}),
    "empty": ("say nothing", {}),
    "call": ("talk call", {}),
    "call-only": ("call", {}),
    "reasoning": ("think talk call", THINKING),
    "truncated": ("talk", {dialect: {"max_tokens": 1} for dialect in DIALECTS}),
    "logprobs": ("talk", LOGPROBS),
    "stop": ("talk", {"chat": {"stop": ["be"]}, "messages": {"stop_sequences": ["be"]}}),
}


def build_case_request(dialect: str, case: str) -> dict[str, Any]:
    text, fields_by_dialect = CASES[case]
    fields: dict[str, Any] = dict(fields_by_dialect.get(dialect, {}))
    if dialect == "responses" and "max_tokens" in fields:
        fields["max_output_tokens"] = fields.pop("max_tokens")
    if dialect in TOOLS:
        fields["tools"] = [TOOLS[dialect]]
    return build_request(dialect, text, **fields)


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_response_matches_the_types_of_the_provider(gateway: RunningGateway, dialect: str) -> None:
    for case in CASES:
        response = await post(gateway, build_case_request(dialect, case), dialect)
        assert response.status_code == 200, response.text
        validate(RESPONSE_TYPES[dialect], response.content)


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_stream_matches_the_types_of_the_provider(gateway: RunningGateway, dialect: str) -> None:
    has_options = dialect in ("chat", "completions")
    options: dict[str, Any] = {"stream_options": {"include_usage": True}} if has_options else {}
    for case in CASES:
        body = build_case_request(dialect, case) | {"stream": True} | options
        response = await post(gateway, body, dialect)
        events = read_events(response.text)
        assert len(events) > 1
        for event in events:
            fields = json.loads(event)
            if fields.get("type") == "ping":
                continue  # The SDK's type leaves this event out.
            if dialect == "completions":
                for choice in fields[
                    "choices"
                ]:  # The type is not for chunks, which have null before the end.
                    choice["finish_reason"] = choice["finish_reason"] or "stop"
            validate(EVENT_TYPES[dialect], json.dumps(fields))


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_error_matches_the_types_of_the_provider(gateway: RunningGateway, dialect: str) -> None:
    response = await post(gateway, {"model": "m", "unknown": 1}, dialect)
    assert response.status_code == 400
    if dialect == "messages":
        validate(anthropic_types.ErrorResponse, response.content)
    else:
        validate(ErrorObject, json.dumps(response.json()["error"]))


async def test_token_counts_match_the_types_of_the_provider(gateway: RunningGateway) -> None:
    headers = {"Authorization": f"Bearer {ADMIN_KEY}"}
    for path, dialect, wire_type in (
        ("/v1/messages/count_tokens", "messages", anthropic_types.MessageTokensCount),
        ("/v1/responses/input_tokens", "responses", InputTokenCountResponse),
    ):
        body = build_request(dialect, "talk")
        body.pop("max_tokens", None)
        response = await gateway.http.post(path, json=body, headers=headers)
        validate(wire_type, response.content)


async def test_models_match_the_types_of_the_provider(gateway: RunningGateway) -> None:
    headers = {"Authorization": f"Bearer {ADMIN_KEY}"}
    models = (await gateway.http.get("/v1/models", headers=headers)).json()
    for item in models["data"]:
        validate(openai_types.Model, json.dumps(item))
    headers["anthropic-version"] = "2023-06-01"
    models = (await gateway.http.get("/v1/models", headers=headers)).json()
    for item in models["data"]:
        validate(anthropic_types.ModelInfo, json.dumps(item))
