"""The Messages dialect without a gateway: requests, token counts, errors and responses."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from anthropic.types import Message as AnthropicMessage

from instar.gateway.base import ApiError
from instar.gateway.dialects.base import ModelRequest, ReplyChoice
from instar.gateway.dialects.messages import MessagesDialect, format_models
from instar.types import Message, ToolCall

DIALECT = MessagesDialect()
REQUEST: dict[str, Any] = {"model": "m", "max_tokens": 64, "messages": [{"role": "user", "content": "hi"}]}
SESSION_ID = "6a05e087-8870-4876-a543-7e6f03946a05"


def parse_request(**fields: Any) -> ModelRequest:
    return DIALECT.parse_request(json.dumps({**REQUEST, **fields}).encode())


def parse_messages(*messages: Any) -> tuple[Message, ...]:
    return parse_request(messages=messages).messages


def text(value: str, **fields: Any) -> dict[str, Any]:
    return {"type": "text", "text": value, **fields}


def make_choice(message: Message, **options: Any) -> ReplyChoice:
    return ReplyChoice(
        **{"message": message, "finish_reason": "stop", "prompt_tokens": 9, "sampled_tokens": 5, **options}
    )


def format_reply(
    message: Message, *, request: ModelRequest | None = None, **options: Any
) -> AnthropicMessage:
    body = DIALECT.format_response("msg_1", request or parse_request(), [make_choice(message, **options)])
    return AnthropicMessage.model_validate_json(body, strict=True)


# --- requests, token counts and errors ----------------------------------------------------------


def test_messages_request_from_claude_code_is_parsed() -> None:
    """Claude Code 2.1.197 sends content blocks, cache markers, settings and a billing line that changes."""
    cached = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
    request = parse_request(
        system=[
            text("x-anthropic-billing-header: cc_version=2.1.197.fc3; cc_entrypoint=cli; cch=71fea;"),
            text("You are a Claude agent.", **cached),
            text("\nBe brief.", **cached),
        ],
        messages=[
            {"role": "user", "content": [text("<system-reminder>"), text("Fix it.", **cached)]},
            {"role": "system", "content": "Agents: none"},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "Read first.", "signature": "s"},
                    {"type": "redacted_thinking", "data": "x"},
                    text("Let me see."),
                    {"type": "tool_use", "id": "t1", "name": "Read", "input": {"path": "a", "n": 1}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "t1", "content": [text("1"), text("2")]},
                    text("Go on."),
                ],
            },
        ],
        tools=[
            {
                "name": "Read",
                "description": "Reads.",
                "input_schema": {"type": "object", "properties": {}},
                "eager_input_streaming": True,
                "defer_loading": True,
                **cached,
            },
            {"type": "tool_search_tool_regex_20251119", "name": "tool_search_tool_regex"},
        ],
        metadata={"user_id": json.dumps({"device_id": "d", "account_uuid": "", "session_id": SESSION_ID})},
        thinking={"type": "adaptive"},
        context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        output_config={"effort": "high"},
        service_tier="auto",
        stream=True,
    )
    assert request.messages == (
        {"role": "system", "content": "You are a Claude agent.\n\n\nBe brief."},
        {"role": "user", "content": "<system-reminder>\n\nFix it."},
        {"role": "system", "content": "Agents: none"},
        {
            "role": "assistant",
            "content": "Let me see.",
            "reasoning": "Read first.",
            "tool_calls": [ToolCall(id="t1", name="Read", arguments='{"path": "a", "n": 1}')],
        },
        {"role": "tool", "content": "1\n\n2", "tool_call_id": "t1"},
        {"role": "user", "content": "Go on."},
    )
    assert [tool["name"] for tool in request.tools] == ["Read"]
    assert request.session_hints == (f"claude-session:{SESSION_ID}",)
    assert request.stream
    assert request.max_tokens == 64


def test_messages_request_drops_the_billing_line() -> None:
    first, second = (
        parse_request(system=f"x-anthropic-billing-header: cch={i};\nBe brief.") for i in range(2)
    )
    assert first.messages == second.messages
    assert first.messages[0] == {"role": "system", "content": "Be brief."}
    assert parse_request(system=[text("x-anthropic-billing-header: cch=1;")]).messages[0]["role"] == "user"


def test_messages_request_keeps_text_before_tool_results() -> None:
    results = [{"type": "tool_result", "tool_use_id": i, "content": i, "is_error": i == "b"} for i in "ab"]
    messages = parse_messages({"role": "user", "content": [text("First."), results[0], text(""), results[1]]})
    assert [(m["role"], m["content"]) for m in messages if m["content"]] == [
        ("user", "First."),
        ("tool", "a"),
        ("tool", "Error: b"),
    ]


@pytest.mark.parametrize(
    ("user_id", "session_hints"),
    [
        (f"user_ab_account_cd_session_{SESSION_ID}", (f"claude-session:{SESSION_ID}",)),
        (json.dumps({"session_id": SESSION_ID}), (f"claude-session:{SESSION_ID}",)),
        ("bob", ("user_id:bob",)),
        ("{bob", ("user_id:{bob",)),
        ('{"session_id": 3}', ('user_id:{"session_id": 3}',)),
        ("", ()),
        (None, ()),
    ],
)
def test_messages_user_id_is_parsed_as_session_hint(
    user_id: str | None, session_hints: tuple[str, ...]
) -> None:
    assert parse_request(metadata={"user_id": user_id}).session_hints == session_hints


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}
TOOL = {"name": "a", "input_schema": {}}
SEARCH_TOOL = {"type": "web_search_20250305", "name": "web_search"}


def user(*blocks: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(blocks)}


def assistant(*blocks: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": list(blocks)}


def tool_result(content: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": "a", "content": content}


INVALID_FIELDS: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": None}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"temperature": 1.5}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_k": -1}, "top_k"),
    ({"stop_sequences": ["a", ""]}, "stop_sequences[1]"),
    ({"stop_sequences": ["a"] * 17}, "stop_sequences"),
    ({"logprobs": True}, "logprobs"),
    ({"n": 2}, "n"),
    ({"seed": 2}, "seed"),
    ({"thinking": {"type": "deep"}}, "thinking.type"),
    ({"tool_choice": {"type": "any"}}, "tool_choice"),
    ({"tool_choice": {"type": "tool", "name": "a"}, "tools": []}, "tool_choice"),
    ({"tool_choice": {"type": "tool"}, "tools": [TOOL]}, "tool_choice.name"),
    ({"tool_choice": {"type": "tool", "name": "b"}, "tools": [TOOL]}, "tool_choice.name"),
    ({"tool_choice": {"type": "some"}, "tools": [TOOL]}, "tool_choice.type"),
    ({"tools": [{"name": "a"}]}, "tools[0].input_schema"),
    ({"tools": [{"input_schema": {}}]}, "tools[0].name"),
    ({"tools": [{"name": "a", "input_schema": {"properties": 3}}]}, "tools[0].input_schema.properties"),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
    ({"messages": [user(IMAGE, {"type": "text"})]}, "messages[0].content[1].text"),
    ({"messages": [user({"type": "tool_result", "content": "x"})]}, "messages[0].content[0].tool_use_id"),
    ({"messages": [user(tool_result({"type": "text"}))]}, "messages[0].content[0].content"),
    ({"messages": [assistant({"type": "tool_use", "input": {}})]}, "messages[0].content[0].name"),
    (
        {"messages": [assistant({"type": "tool_use", "name": "a", "input": "x"})]},
        "messages[0].content[0].input",
    ),
]
PROVIDER_FEATURES: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": 0}, "max_tokens"),
    ({"container": "c"}, "container"),
    ({"compaction": {"type": "x"}}, "compaction"),
    ({"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
    ({"thread": {"type": "create"}}, "thread"),
    ({"output_format": {"type": "json_schema", "schema": {}}}, "output_format"),
    ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
    (
        {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}},
        "context_management.edits[0].type",
    ),
    ({"tools": [TOOL, SEARCH_TOOL]}, "tools[1].type"),
    ({"tools": [SEARCH_TOOL], "tool_choice": {"type": "tool", "name": "web_search"}}, "tools[0].type"),
    (
        {"tools": [{"type": "mcp_toolset"}], "tool_choice": {"type": "tool", "name": "remote"}},
        "tools[0].type",
    ),
    (
        {
            "tools": [TOOL, {"type": "tool_search_tool_regex_20251119", "name": "search"}],
            "tool_choice": {"type": "tool", "name": "search"},
        },
        "tool_choice",
    ),
    ({"system": [IMAGE]}, "system[0]"),
    ({"messages": [user(text("a"), IMAGE)]}, "messages[0].content[1]"),
    ({"messages": [user({"type": "document", "source": {"type": "url"}})]}, "messages[0].content[0]"),
    ({"messages": [user(tool_result([IMAGE]))]}, "messages[0].content[0].content[0]"),
    ({"messages": [*REQUEST["messages"], {"role": "assistant", "content": "So"}]}, "messages[1]"),
    (
        {"messages": [assistant({"type": "server_tool_use", "name": "x", "input": {}}), user(text("b"))]},
        "messages[0].content[0]",
    ),
]


@pytest.mark.parametrize(("fields", "path"), INVALID_FIELDS, ids=[path for _, path in INVALID_FIELDS])
def test_messages_invalid_field_error_names_its_path(fields: dict[str, Any], path: str) -> None:
    with pytest.raises(ApiError) as caught:
        parse_request(**fields)
    assert_error_names_path(caught.value, path)


@pytest.mark.parametrize(("fields", "path"), PROVIDER_FEATURES, ids=[path for _, path in PROVIDER_FEATURES])
def test_messages_request_marks_provider_features_as_unsupported(fields: dict[str, Any], path: str) -> None:
    request = parse_request(**fields)
    assert request.unsupported_error is not None
    assert_error_names_path(request.unsupported_error, path)
    assert request.messages


def assert_error_names_path(error: ApiError, path: str) -> None:
    assert (error.status, error.param) == (400, path)
    formatted = json.loads(DIALECT.format_error(error))
    assert formatted["type"] == "error"
    assert formatted["error"]["type"] == "invalid_request_error"
    assert path in formatted["error"]["message"]


def test_messages_request_distinguishes_images() -> None:
    def parse_content(data: str, **fields: Any) -> str:
        image = {"type": "image", "source": {"type": "base64", "data": data}, **fields}
        return parse_messages(user(text("Look:"), image))[0]["content"]

    assert re.fullmatch(r"Look:\n\n\[image [0-9a-f]{16}\]", parse_content("AA"))
    assert parse_content("AA") == parse_content("AA", cache_control={"type": "ephemeral"})
    assert parse_content("AA") != parse_content("AB")


def test_messages_request_drops_provider_tool_blocks() -> None:
    """The same blocks are dropped from the recorded reply, so that the next request matches it."""
    request = parse_request(
        messages=[
            assistant(
                text("I look. "),
                {"type": "server_tool_use", "id": "s1", "name": "web_search", "input": {"query": "x"}},
                {
                    "type": "web_search_tool_result",
                    "tool_use_id": "s1",
                    "content": [{"type": "web_search_result"}],
                },
                {
                    "type": "web_fetch_tool_result",
                    "tool_use_id": "s2",
                    "content": {"type": "web_fetch_result"},
                },
                text("Found."),
            ),
            user(text("Go on.")),
        ]
    )
    assert request.messages[0] == {"role": "assistant", "content": "I look. Found."}
    assert request.unsupported_error
    assert request.unsupported_error.param == "messages[0].content[1]"


ACCEPTED_FIELDS: list[dict[str, Any]] = [
    {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
    {"output_config": {"effort": "low", "task_budget": {"type": "tokens", "total": 9}}},
    {"fallbacks": "default", "speed": "fast", "service_tier": "auto"},
]


@pytest.mark.parametrize("fields", ACCEPTED_FIELDS)
def test_messages_request_accepts_fields_that_only_guide_the_model(fields: dict[str, Any]) -> None:
    request = parse_request(tools=[TOOL], **fields)
    assert request.unsupported_error is None
    assert [tool["name"] for tool in request.tools] == ["a"]


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'{"model": "\xff"}', b'{"a":' * 9000], ids=range(5))
def test_messages_request_rejects_invalid_bodies(body: bytes) -> None:
    with pytest.raises(ApiError) as caught:
        DIALECT.parse_request(body)
    assert caught.value.status == 400


def test_messages_count_allows_missing_max_tokens_and_final_reply() -> None:
    messages = [*REQUEST["messages"], {"role": "assistant", "content": "Hello."}]
    request = DIALECT.parse_count_request(json.dumps({"model": "m", "messages": messages}).encode())
    assert [message["role"] for message in request.messages] == ["user", "assistant"]
    assert json.loads(DIALECT.format_count(7)) == {"input_tokens": 7}


def test_messages_count_rejects_unsupported_content() -> None:
    request = DIALECT.parse_count_request(json.dumps({"model": "m", "messages": [user(IMAGE)]}).encode())
    assert request.unsupported_error is not None
    assert_error_names_path(request.unsupported_error, "messages[0].content[0]")


def test_messages_request_drops_tools_with_tool_choice_none() -> None:
    tools = [{"name": "a", "input_schema": {}}]
    assert parse_request(tools=tools, tool_choice={"type": "none"}).tools == ()
    assert len(parse_request(tools=tools, tool_choice={"type": "auto"}).tools) == 1


@pytest.mark.parametrize(
    ("status", "error_type"),
    [
        (401, "authentication_error"),
        (403, "permission_error"),
        (404, "not_found_error"),
        (410, "invalid_request_error"),
        (413, "request_too_large"),
        (429, "rate_limit_error"),
        (500, "api_error"),
        (502, "api_error"),
        (503, "overloaded_error"),
    ],
)
def test_messages_error_type_matches_the_status(status: int, error_type: str) -> None:
    assert json.loads(DIALECT.format_error(ApiError(status, "No.")))["error"] == {
        "type": error_type,
        "message": "No.",
    }


# --- responses ----------------------------------------------------------------------------------

REPLY = Message(role="assistant", content="Hello.", reasoning="A greeting.")


def test_messages_response_has_content_stop_reason_and_usage() -> None:
    response = format_reply(REPLY, cached_tokens=4)
    assert [block.type for block in response.content] == ["text"]
    assert (response.stop_reason, response.stop_sequence) == ("end_turn", None)
    assert response.usage.input_tokens == 5
    assert response.usage.cache_read_input_tokens == 4
    assert response.usage.output_tokens == 5
    assert format_reply(REPLY, finish_reason="length").stop_reason == "max_tokens"
    stopped = format_reply(REPLY, stop_string="END")
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "END")


def test_messages_response_includes_thinking_only_on_request() -> None:
    shown = format_reply(
        REPLY, request=parse_request(thinking={"type": "enabled", "budget_tokens": 1024})
    ).content[0]
    assert shown.type == "thinking"
    assert shown.thinking == "A greeting."
    assert shown.signature
    omitted = format_reply(
        REPLY, request=parse_request(thinking={"type": "adaptive", "display": "omitted"})
    ).content[0]
    assert omitted.type == "thinking"
    assert omitted.thinking == ""
    assert len(format_reply(REPLY, request=parse_request(thinking={"type": "disabled"})).content) == 1


def test_messages_response_for_an_empty_reply_has_an_empty_text_block() -> None:
    (block,) = format_reply(Message(role="assistant", content="")).content
    assert block.type == "text"
    assert block.text == ""


@pytest.mark.parametrize("arguments", ["[1]", "3", '{"a": ', '{"a": NaN}', '{"a": 1e999}'])
def test_messages_response_writes_invalid_arguments_as_text(arguments: str) -> None:
    call = ToolCall(id="t", name="calc", arguments=arguments)
    response = format_reply(Message(role="assistant", content="", tool_calls=[call]))
    (block,) = response.content
    assert block.type == "text"
    assert arguments in block.text
    assert response.stop_reason == "end_turn"


def test_messages_response_encodes_large_integers_and_surrogates() -> None:
    call = ToolCall(id="t", name="calc", arguments='{"a": 123456789012345678901234567890, "b": "\\ud800"}')
    body = DIALECT.format_response(
        "msg_1", parse_request(), [make_choice(Message(role="assistant", content="", tool_calls=[call]))]
    )
    assert json.loads(body)["content"][0]["input"]["a"] == 123456789012345678901234567890


def test_messages_models_list_has_pagination_fields() -> None:
    listed = json.loads(format_models(["a", "b"]))
    assert [model["id"] for model in listed["data"]] == ["a", "b"]
    assert (listed["first_id"], listed["last_id"], listed["has_more"]) == ("a", "b", False)
    assert json.loads(format_models([]))["first_id"] is None
