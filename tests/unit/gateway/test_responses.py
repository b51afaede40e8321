"""The Responses dialect without a gateway: requests, responses, and replies that agents send back."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from instar.gateway.base import ApiError
from instar.gateway.dialects.base import ModelRequest, ReplyChoice, TokenLogprob
from instar.gateway.dialects.responses import ResponsesDialect
from instar.record.base import ReplyDelta, ToolCallDelta
from instar.record.hashing import canonical_content
from instar.types import FinishReason, Json, Message, ToolCall

DIALECT = ResponsesDialect()
EVENT_ADAPTER: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
TRAFFIC = Path(__file__).parent.parent / "record" / "fixtures" / "traffic"
RESPONSE_ID = "resp-0123456789abcdef0123"

CALC_TOOL = {
    "type": "function",
    "name": "calc",
    "parameters": {"type": "object", "properties": {}},
    "strict": True,
}
PATCH_TOOL = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Edits files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": "start: patch"},
}
AGENTS_NAMESPACE = {
    "type": "namespace",
    "name": "agents",
    "description": "Sub-agents.",
    "tools": [{"type": "function", "name": "spawn", "parameters": {"type": "object", "properties": {}}}],
}
TOOLS = [CALC_TOOL, PATCH_TOOL, AGENTS_NAMESPACE]


def parse_request(**body: Any) -> ModelRequest:
    return DIALECT.parse_request(json.dumps({"model": "m", "input": "Hi", **body}).encode())


def make_choice(message: Message, finish_reason: FinishReason = "stop", **fields: Any) -> ReplyChoice:
    return ReplyChoice(message, finish_reason, prompt_tokens=7, sampled_tokens=3, **fields)


def format_reply(
    request: ModelRequest, message: Message, finish_reason: FinishReason = "stop", **fields: Any
) -> Json:
    """Return the response, validated by the SDK."""
    body = json.loads(
        DIALECT.format_response(RESPONSE_ID, request, [make_choice(message, finish_reason, **fields)])
    )
    Response.model_validate(body)
    return body


def stream_events(
    request: ModelRequest,
    pieces: Iterable[Sequence[ReplyDelta]],
    message: Message,
    finish_reason: FinishReason = "stop",
) -> list[Json]:
    """Return the events of a stream, validated by the SDK."""
    writer = DIALECT.stream_writer_class(RESPONSE_ID, request)
    raw = writer.begin(0)
    raw += b"".join(writer.write_deltas(0, deltas, ()) for deltas in pieces)
    raw += writer.finish([make_choice(message, finish_reason)])
    events: list[Json] = []
    for block in raw.decode().removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        EVENT_ADAPTER.validate_python(event)
        events.append(event)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


def assistant(content: str = "", *calls: ToolCall, reasoning: str = "") -> Message:
    message = Message(role="assistant", content=content)
    if reasoning:
        message["reasoning"] = reasoning
    if calls:
        message["tool_calls"] = list(calls)
    return message


def call(name: str, arguments: str, call_id: str = "call-1") -> ToolCall:
    return ToolCall(id=call_id, name=name, arguments=arguments)


# --- requests -----------------------------------------------------------------------------------


def test_responses_request_parses_string_input_and_instructions() -> None:
    request = parse_request(instructions="Be brief.")
    assert request.messages == (
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
    )
    assert request.instruction_count == 1
    assert parse_request().instruction_count == 0


def test_responses_request_joins_items_of_one_turn() -> None:
    request = parse_request(
        input=[
            {"role": "developer", "content": "Rules."},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "24*310?"}]},
            {"type": "reasoning", "id": "rs_x", "summary": [], "encrypted_content": "gAAA",
             "content": [{"type": "reasoning_text", "text": "Hmm."}]},
            {"type": "message", "role": "assistant", "id": "msg_x", "status": "completed",
             "content": [{"type": "output_text", "text": "Let me see.", "annotations": []}]},
            {"type": "function_call", "call_id": "a", "name": "calc", "arguments": '{"x": 1}'},
            {"type": "custom_tool_call", "call_id": "b", "name": "apply_patch", "input": "*** Begin\n"},
            {"type": "function_call_output", "call_id": "a", "output": "7440"},
            {"type": "custom_tool_call_output", "call_id": "b",
             "output": [{"type": "input_text", "text": "Done"}, {"type": "input_text", "text": "."}]},
            {"role": "assistant", "content": "7440."},
            {"role": "user", "content": "Thanks"},
        ]
    )  # fmt: skip
    assert request.messages == (
        {"role": "system", "content": "Rules."},
        {"role": "user", "content": "24*310?"},
        assistant(
            "Let me see.",
            call("calc", '{"x": 1}', "a"),
            call("apply_patch", '{"input": "*** Begin\\n"}', "b"),
            reasoning="Hmm.",
        ),
        {"role": "tool", "content": "7440", "tool_call_id": "a"},
        {"role": "tool", "content": "Done.", "tool_call_id": "b"},
        assistant("7440."),
        {"role": "user", "content": "Thanks"},
    )


def test_responses_request_joins_calls_separated_by_results() -> None:
    request = parse_request(tools=TOOLS)
    reply = assistant("", call("calc", '{"x": 1}', "a"), call("calc", '{"x": 2}', "b"))
    first, second = format_reply(request, reply)["output"]
    outputs = [{"type": "function_call_output", "call_id": c, "output": c} for c in "ab"]
    parsed = parse_request(input=[{"role": "user", "content": "Hi"}, first, outputs[0], second, outputs[1]])
    assert [message["role"] for message in parsed.messages] == ["user", "assistant", "tool", "tool"]
    assert parsed.messages[1] == reply


def test_responses_request_keeps_adjacent_replies_separate() -> None:
    request = parse_request()
    first, second = assistant("One.", reasoning="1"), assistant("Two.", reasoning="2")
    items = [
        item
        for i, message in enumerate((first, second))
        for item in json.loads(
            DIALECT.format_response(f"resp-{i}{RESPONSE_ID[6:]}", request, [make_choice(message)])
        )["output"]
    ]
    assert parse_request(input=items).messages == (first, second)
    without_ids = [{"role": "assistant", "content": "One."}, {"role": "assistant", "content": "Two."}]
    assert parse_request(input=without_ids).messages == (assistant("One."), assistant("Two."))


def test_responses_request_offers_tools_under_unique_names() -> None:
    request = parse_request(tools=[*TOOLS, {"type": "web_search", "external_web_access": True}])
    assert [tool["name"] for tool in request.tools] == ["calc", "apply_patch", "agents__spawn"]
    assert "start: patch" in request.tools[1]["parameters"]["properties"]["input"]["description"]
    listed = format_reply(request, assistant("Hi"))["tools"]
    assert [tool["type"] for tool in listed] == ["function", "custom", "namespace"]
    assert parse_request(tools=TOOLS, tool_choice="none").tools == ()


def test_responses_request_parses_other_fields() -> None:
    request = parse_request(
        previous_response_id="resp-1",
        max_output_tokens=9,
        temperature=0.5,
        top_p=0.9,
        include=["message.output_text.logprobs"],
        stream=True,
        user="bob",
        metadata={"session_id": "s", "team": "x"},
        client_metadata={"thread_id": "t"},
        prompt_cache_key="p",
    )
    assert request.previous_response_id == "resp-1"
    assert (request.max_tokens, request.temperature, request.top_p) == (9, 0.5, 0.9)
    assert request.logprobs
    assert request.stream
    assert [name.split(":")[1] for name in request.session_hints] == ["s", "t", "p", "bob"]
    assert parse_request(input=[], previous_response_id="resp-1").messages == ()


CODEX_FIELDS = {
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"summary": "auto"},
    "store": False,
    "stream": True,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "01a1df40-4a3e-7ba1-b998-1d7b8c57a583",
    "client_metadata": {"session_id": "01a1df40", "x-codex-turn-metadata": "{}"},
    "text": {"verbosity": "low"},
}
"""The fields that Codex sends in addition to items and tools."""


def test_responses_request_from_codex_is_accepted() -> None:
    request = parse_request(
        **CODEX_FIELDS, tools=[*TOOLS, {"type": "web_search", "external_web_access": True}]
    )
    assert request.unsupported_error is None
    assert request.session_hints[0] == "session_id:01a1df40"


@pytest.mark.parametrize("scenario", ["compaction", "edit", "retry", "subagents"])
def test_responses_recorded_codex_traffic_is_accepted(scenario: str) -> None:
    with gzip.open(TRAFFIC / f"codex-{scenario}.json.gz") as file:
        exchanges = json.load(file)
    requests = [DIALECT.parse_request(json.dumps(exchange["body"]).encode()) for exchange in exchanges]
    assert [request.unsupported_error for request in requests] == [None] * len(exchanges)
    assert len({request.session_hints[0] for request in requests}) == 1


def test_responses_request_distinguishes_unsupported_content() -> None:
    """A provider may support content that the engines reject, so different images must not be equal."""
    image_parts = [{"type": "input_image", "image_url": url} for url in ("a", "b")]
    first, second = (parse_request(input=[{"role": "user", "content": [part]}]) for part in image_parts)
    assert first.messages != second.messages
    searched = [{"type": "web_search_call", "id": "ws_1"}, {"role": "assistant", "content": "Found."}]
    assert parse_request(input=searched).messages == (assistant("Found."),)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": 3}, "input"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role"),
        ({"input": [{"content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]"),
        ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content[0]"),
        ({"input": [{"type": "item_reference"}]}, "input[0].id"),
        ({"input": [{"type": "local_shell_call", "id": "1"}]}, "input[0].type"),
        ({"input": [{"type": "function_call", "call_id": "a", "arguments": "{}"}]}, "input[0].name"),
        ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "input[0].call_id"),
        ({"input": [{"type": "function_call", "name": "f", "call_id": "a"}]}, "input[0].arguments"),
        ({"input": [{"type": "custom_tool_call", "name": "f", "call_id": "a"}]}, "input[0].input"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0].call_id"),
        ({"input": [{"type": "function_call_output", "call_id": "a"}]}, "input[0].output"),
        ({"tools": [{"type": "file_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        (
            {"tools": [{"type": "namespace", "name": "n", "tools": [{"type": "mcp"}]}]},
            "tools[0].tools[0].type",
        ),
        ({"tools": [{**CALC_TOOL, "parameters": {"properties": 3}}]}, "tools[0].parameters.properties"),
        ({"tools": [CALC_TOOL, {"type": "custom", "name": "calc"}]}, "tools[1].name"),
        ({"tools": [CALC_TOOL], "tool_choice": {"type": "function", "name": "f"}}, "tool_choice"),
        ({"tools": [CALC_TOOL], "tool_choice": {"type": "mcp"}}, "tool_choice.type"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"background": True}, "background"),
        ({"truncation": "auto"}, "truncation"),
        ({"include": ["file_search_call.results"]}, "include[0]"),
        ({"text": {"format": {"type": "grammar", "name": "x"}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
        ({"reasoning": {"strength": 3}}, "reasoning.strength"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"temperature": 3}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": 10**30}, "max_output_tokens"),
        ({"metadata": {"n": 10**30}}, "metadata[...]"),
        ({"n": 2}, "n"),
    ],
)
def test_responses_invalid_or_unsupported_field_error_names_its_path(body: Json, param: str) -> None:
    try:
        error = parse_request(**body).unsupported_error
    except ApiError as raised:
        error = raised
    assert error
    assert (error.status, error.param) == (400, param)
    formatted = json.loads(DIALECT.format_error(error))["error"]
    assert formatted["type"] == "invalid_request_error"
    assert formatted["param"] == param


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b'{"input": "\xff"}', b'{"model": "\\ud83d"}', b"[" * 9999]
)
def test_responses_request_rejects_invalid_bodies(body: bytes) -> None:
    with pytest.raises(ApiError) as caught:
        DIALECT.parse_request(body)
    assert caught.value.status == 400


# --- responses ----------------------------------------------------------------------------------


def test_responses_response_has_all_fields() -> None:
    request = parse_request(instructions="Be brief.", tools=TOOLS, metadata={"a": "b"}, max_output_tokens=50)
    reply = assistant("So.", call("agents__spawn", "{}"), reasoning="Hmm.")
    body = format_reply(request, reply, cached_tokens=5)
    assert (body["status"], body["id"], body["metadata"]) == ("completed", RESPONSE_ID, {"a": "b"})
    assert [item["type"] for item in body["output"]] == ["reasoning", "message", "function_call"]
    assert (body["output"][2]["name"], body["output"][2]["namespace"]) == ("spawn", "agents")
    assert body["usage"]["input_tokens_details"]["cached_tokens"] == 5
    assert Response.model_validate(body).output_text == "So."


def test_responses_response_keeps_large_integers_in_tool_schemas() -> None:
    tool = {**CALC_TOOL, "parameters": {"type": "object", "properties": {"x": {"maximum": 10**30}}}}
    assert str(10**30).encode() in DIALECT.format_response(
        RESPONSE_ID, parse_request(tools=[tool]), [make_choice(assistant("Hi"))]
    )


def test_responses_truncated_reply_is_incomplete() -> None:
    body = format_reply(parse_request(), assistant("So"), "length")
    assert body["status"] == body["output"][0]["status"] == "incomplete"
    assert body["incomplete_details"] == {"reason": "max_output_tokens"}
    last = stream_events(parse_request(), [[ReplyDelta(text="So")]], assistant("So"), "length")[-1]
    assert last["type"] == "response.incomplete"


def test_responses_empty_reply_is_an_empty_message() -> None:
    assert format_reply(parse_request(), assistant())["output"][0]["content"][0]["text"] == ""
    assert (
        stream_events(parse_request(), [], assistant())[-1]["response"]["output"][0]["content"][0]["text"]
        == ""
    )


def test_responses_logprobs_cover_only_the_text() -> None:
    request = parse_request(include=["message.output_text.logprobs"])
    tokens = [TokenLogprob(text, -1.0) for text in ("<think>", "Hm", "</think>", "So", ".")]
    body = format_reply(request, assistant("So.", reasoning="Hm"), logprobs=tokens)
    assert [token["token"] for token in body["output"][1]["content"][0]["logprobs"]] == ["So", "."]
    writer = DIALECT.stream_writer_class(RESPONSE_ID, request)
    deltas = ([], [ReplyDelta(reasoning="Hm")], [], [ReplyDelta(text="So")], [ReplyDelta(text=".")])
    raw = b"".join(
        writer.write_deltas(0, token_deltas, [token])
        for token_deltas, token in zip(deltas, tokens, strict=True)
    )
    raw += writer.finish([make_choice(assistant("So.", reasoning="Hm"))])
    last = json.loads(raw.rpartition(b"data: ")[2])["response"]["output"][1]
    assert last == body["output"][1]


def test_responses_stream_error_is_a_response_failed_event() -> None:
    writer = DIALECT.stream_writer_class(RESPONSE_ID, parse_request())
    writer.begin(0)
    writer.write_deltas(0, [ReplyDelta(text="So")], ())
    raw = writer.write_error(ApiError(503, "gone")).decode()
    event = json.loads(raw.split("data: ")[1])
    EVENT_ADAPTER.validate_python(event)
    assert (event["type"], event["response"]["error"]["message"]) == ("response.failed", "gone")


# --- random replies: round trips and streams ----------------------------------------------------

TEXTS = ["", " ", "\n\n", "Hello", "a\nb ", ' "quoted" \\ ', "ünï 🦎 ", "<tag>{}", "\u2028x\x07"]
ARGUMENTS = ["{}", '{"x": [1, {"y": null}], "z": "🦎\\n"}', '{ "x" :1.50}', "not json", '{"x": ', ""]
PATCH_INPUTS = ["", '*** Begin Patch\n+é\t"q" \\\n', "🦎🦎", '{"input": "x"}', "/\u2028\x01"]


def make_random_call(rng: random.Random, index: int) -> ToolCall:
    name = rng.choice(["calc", "apply_patch", "agents__spawn", "unknown_tool"])
    arguments = rng.choice(ARGUMENTS)
    if name == "apply_patch" and rng.random() < 0.8:
        arguments = json.dumps({"input": rng.choice(PATCH_INPUTS)}, ensure_ascii=rng.random() < 0.5)
    return call(name, arguments, f"call-{index}")


def make_random_reply(rng: random.Random) -> Message:
    calls = [make_random_call(rng, i) for i in range(rng.choice([0, 0, 1, 2, 3]))]
    return assistant(
        rng.choice(TEXTS) + rng.choice(TEXTS), *calls, reasoning=rng.choice(["", "Hmm.", " I\n think"])
    )


def split_randomly(rng: random.Random, text: str) -> Iterator[str]:
    while text:
        size = rng.randint(1, 4)
        yield text[:size]
        text = text[size:]


def split_into_deltas(rng: random.Random, message: Message) -> Iterator[list[ReplyDelta]]:
    """Yield the deltas of a stream. Part of the text may follow the first tool call."""
    content = message["content"]
    split = rng.randint(0, len(content)) if message.get("tool_calls") else len(content)
    yield from ([ReplyDelta(reasoning=piece)] for piece in split_randomly(rng, message.get("reasoning", "")))
    yield from ([ReplyDelta(text=piece)] for piece in split_randomly(rng, content[:split]))
    for i, tool_call in enumerate(message.get("tool_calls", ())):
        yield [ReplyDelta(call=ToolCallDelta(i, tool_call["id"], tool_call["name"]))]
        yield from (
            [ReplyDelta(call=ToolCallDelta(i, arguments=piece))]
            for piece in split_randomly(rng, tool_call["arguments"])
        )
        if i == 0:
            yield from ([ReplyDelta(text=piece)] for piece in split_randomly(rng, content[split:]))


def echo_items(rng: random.Random, items: list[Json]) -> list[Json]:
    """Return the items as an agent might send them back: reordered, or without some fields."""
    groups = [[item for item in items if item["type"] in types] for types in (
        {"reasoning"}, {"message"}, {"function_call", "custom_tool_call"},
    )]  # fmt: skip
    if rng.random() < 0.5 and len(groups[1]) < 2:
        rng.shuffle(groups)
        items = [item for group in groups for item in group]
    dropped = rng.choice([set[str](), {"id"}, {"id", "status"}, {"status"}])
    return [{key: value for key, value in item.items() if key not in dropped} for item in items]


@pytest.mark.parametrize("seed", range(150))
def test_responses_output_sent_back_matches_the_recorded_reply(seed: int) -> None:
    rng = random.Random(seed)
    request, reply = parse_request(tools=TOOLS), make_random_reply(rng)
    streamed = stream_events(request, split_into_deltas(rng, reply), reply)
    for output in (format_reply(request, reply)["output"], streamed[-1]["response"]["output"]):
        items = [
            {"role": "user", "content": "Hi"},
            *echo_items(rng, output),
            {"role": "user", "content": "Go on"},
        ]
        messages = parse_request(input=items).messages
        assert len(messages) == 3
        assert canonical_content(messages[1]) == canonical_content(reply)
        assert messages[1].get("reasoning") == reply.get("reasoning")
        call_ids = [tool_call["id"] for tool_call in messages[1].get("tool_calls", ())]
        assert call_ids == [tool_call["id"] for tool_call in reply.get("tool_calls", ())]


@pytest.mark.parametrize("seed", range(40))
def test_responses_stream_events_add_up_to_the_response(seed: int) -> None:
    rng = random.Random(seed)
    request, reply = parse_request(tools=TOOLS), make_random_reply(rng)
    events = stream_events(request, split_into_deltas(rng, reply), reply)
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    assert events[-1]["type"] == "response.completed"
    output = events[-1]["response"]["output"]
    assert output == [event["item"] for event in events if event["type"] == "response.output_item.done"]
    for index, item in enumerate(output):
        item_events = [event for event in events if event.get("output_index") == index]
        assert item_events[0]["type"] == "response.output_item.added"
        assert item_events[0]["item"]["id"] == item["id"]
        streamed_text = "".join(event["delta"] for event in item_events if event["type"].endswith(".delta"))
        complete_text = item.get("arguments", item.get("input"))
        assert streamed_text == (item["content"][0]["text"] if complete_text is None else complete_text)
        assert {event["item_id"] for event in item_events if "item_id" in event} <= {item["id"]}


# --- tool calls ---------------------------------------------------------------------------------


def test_responses_stream_sends_custom_input_as_it_arrives() -> None:
    text = 'a"\\\n/é🦎'
    arguments = json.dumps({"input": text})
    reply = assistant("", call("apply_patch", arguments))
    pieces = [[ReplyDelta(call=ToolCallDelta(0, "call-1", "apply_patch"))]]
    pieces += [[ReplyDelta(call=ToolCallDelta(0, arguments=character))] for character in arguments]
    events = stream_events(parse_request(tools=TOOLS), pieces, reply)
    assert [e["delta"] for e in events if e["type"] == "response.custom_tool_call_input.delta"] == list(text)
    assert cast(Json, events[-1]["response"])["output"][0]["input"] == text


@pytest.mark.parametrize(
    "arguments", ['{"input": "x", "more": 1}', '{"input": 3}', '{"input": "\\ud83d"}', "[]"]
)
def test_responses_custom_call_with_unexpected_arguments_is_a_function_call(arguments: str) -> None:
    reply = assistant("", call("apply_patch", arguments))
    (item,) = format_reply(parse_request(tools=TOOLS), reply)["output"]
    assert (item["type"], item["arguments"]) == ("function_call", arguments)
    assert parse_request(input=[item]).messages == (reply,)


def test_responses_whitespace_before_a_call_is_not_a_message() -> None:
    reply = assistant("\n\n", call("calc", "{}"))
    assert [item["type"] for item in format_reply(parse_request(tools=TOOLS), reply)["output"]] == [
        "function_call"
    ]
