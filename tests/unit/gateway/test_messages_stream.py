"""The Messages dialect without a gateway: streams, and replies that agents send back."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from anthropic.types import RawMessageStreamEvent
from pydantic import TypeAdapter

from instar.gateway.base import ApiError
from instar.gateway.dialects.base import ModelRequest
from instar.record.base import ReplyDelta, ToolCallDelta
from instar.record.hashing import canonical_content
from instar.types import Message, ToolCall
from tests.unit.gateway.test_messages import (
    DIALECT,
    REQUEST,
    make_choice,
    parse_messages,
    parse_request,
    text,
)

EVENT_ADAPTER: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)


def parse_events(body: bytes) -> Iterator[Any]:
    """Yield the parsed events except pings. Check that each event has the name and fields of its type."""
    for part in body.decode().split("\n\n")[:-1]:
        head, data = part.split("\n")
        value = json.loads(data.removeprefix("data: "))
        assert head == f"event: {value['type']}"
        if value["type"] != "ping":
            EVENT_ADAPTER.validate_json(data.removeprefix("data: "), strict=True)
            yield value


def assemble_message(stream: Sequence[Any]) -> dict[str, Any]:
    """Assemble the message from the events. Check that each block ends before the next one starts."""
    assert [event["type"] for event in stream[-2:]] == ["message_delta", "message_stop"]
    assert stream[0]["type"] == "message_start"
    blocks: list[dict[str, Any]] = []
    closed_count = 0
    for event in stream[1:-2]:
        match event:
            case {"type": "content_block_start"}:
                assert event["index"] == len(blocks) == closed_count
                blocks.append({**event["content_block"]})
            case {"type": "content_block_stop"}:
                assert event["index"] == closed_count
                closed_count += 1
            case {"delta": {"type": "input_json_delta"}}:
                blocks[event["index"]].setdefault("json", "")
                blocks[event["index"]]["json"] += event["delta"]["partial_json"]
            case {"delta": delta}:
                assert event["index"] == closed_count
                (name,) = set(delta) - {"type"}
                blocks[event["index"]][name] += delta[name]
            case _:
                pytest.fail(f"unexpected event: {event}")
    assert closed_count == len(blocks)
    for block in blocks:
        if "json" in block:
            block["input"] = json.loads(block.pop("json"))
    return {**stream[0]["message"], "content": blocks, **stream[-2]["delta"], "usage": stream[-2]["usage"]}


def stream_reply(deltas: Sequence[ReplyDelta], message: Message, request: ModelRequest) -> dict[str, Any]:
    writer = DIALECT.stream_writer_class("msg_1", request)
    body = writer.begin(0) + b"".join(writer.write_deltas(0, [delta], ()) for delta in deltas)
    assert not {e["type"] for e in parse_events(body)} & {"message_delta", "message_stop"}
    return assemble_message(list(parse_events(body + writer.finish([make_choice(message)]))))


def test_messages_stream_sends_arguments_as_they_arrive() -> None:
    deltas = [
        ReplyDelta(reasoning="Hm"),
        ReplyDelta(reasoning="."),
        ReplyDelta(text="\n\n"),
        ReplyDelta(call=ToolCallDelta(0, "t0", "calc")),
        *(ReplyDelta(call=ToolCallDelta(0, arguments=piece)) for piece in ('{"a"', ": 1", "}")),
        ReplyDelta(text="\n"),
        ReplyDelta(call=ToolCallDelta(1, "t1", "now")),
    ]
    calls = [
        ToolCall(id="t0", name="calc", arguments='{"a": 1}'),
        ToolCall(id="t1", name="now", arguments=""),
    ]
    message = Message(role="assistant", content="\n\n\n", reasoning="Hm.", tool_calls=calls)
    response = stream_reply(deltas, message, parse_request(thinking={"type": "adaptive"}))
    assert [block["type"] for block in response["content"]] == ["thinking", "tool_use", "tool_use"]
    assert response["content"][1]["input"] == {"a": 1}
    assert response["content"][2]["input"] == {}
    assert response["stop_reason"] == "tool_use"
    assert response["usage"]["input_tokens"] == 9


@pytest.mark.parametrize(("display", "expected_thinking"), [("summarized", "Hm."), ("omitted", "")])
def test_messages_stream_signs_thinking_even_if_omitted(display: str, expected_thinking: str) -> None:
    message = Message(role="assistant", content="Yes.", reasoning="Hm.")
    deltas = [ReplyDelta(reasoning="Hm"), ReplyDelta(reasoning="."), ReplyDelta(text="Yes.")]
    response = stream_reply(deltas, message, parse_request(thinking={"type": "adaptive", "display": display}))
    thinking_block, text_block = response["content"]
    assert (thinking_block["thinking"], text_block["text"]) == (expected_thinking, "Yes.")
    assert thinking_block["signature"]


def test_messages_stream_error_is_an_error_event() -> None:
    body = DIALECT.stream_writer_class("msg_1", parse_request()).write_error(ApiError(503, "No engine."))
    assert body.startswith(b"event: error\ndata: {")
    assert json.loads(body.decode().split("data: ")[1])["error"]["type"] == "overloaded_error"


# --- round trip of replies -----------------------------------------------------------------------

PIECES = ["Hello", " world", "\n", "  ", ".\n\n", "é😀", '"quoted"', "<tag>", ""]
VALUES: list[Any] = [1, 1.5, -3, True, None, "x\ny", "é😀\\", [1, {"a": []}], {"k": "v"}, 2**70]


def make_random_reply(rng: random.Random) -> tuple[list[ReplyDelta], Message]:
    """Return a random message and its deltas: reasoning first, then text and tool calls in any order."""
    deltas = [ReplyDelta(reasoning=rng.choice(PIECES[:1])) for _ in range(rng.randrange(3))]
    calls: list[ToolCall] = []
    for _ in range(rng.randrange(5)):
        if rng.random() < 0.6:
            deltas += [ReplyDelta(text=rng.choice(PIECES)) for _ in range(rng.randrange(4))]
            continue
        index = len(calls)
        arguments = json.dumps({f"k{i}": rng.choice(VALUES) for i in range(rng.randrange(4))})
        calls.append(ToolCall(id=f"t{index}", name="calc", arguments=arguments))
        cut = rng.randrange(len(arguments) + 1)
        deltas.append(ReplyDelta(call=ToolCallDelta(index, f"t{index}", "calc")))
        deltas += [
            ReplyDelta(call=ToolCallDelta(index, arguments=part))
            for part in (arguments[:cut], arguments[cut:])
        ]
    message = Message(role="assistant", content="".join(delta.text for delta in deltas))
    if reasoning := "".join(delta.reasoning for delta in deltas):
        message["reasoning"] = reasoning
    if calls:
        message["tool_calls"] = calls
    return deltas, message


def echo_reply(blocks: list[dict[str, Any]], rng: random.Random) -> list[dict[str, Any]]:
    """Return the blocks as a client might echo them: thinking dropped, text trimmed or split, empty text
    dropped, and keys reordered."""
    blocks = [block for block in blocks if block["type"] != "thinking" or rng.random() < 0.5]
    echoed: list[dict[str, Any]] = []
    text_indexes = [i for i, block in enumerate(blocks) if block["type"] == "text"]
    trim = rng.random() < 0.5
    for i, block in enumerate(blocks):
        if block["type"] != "text":
            echoed.append(dict(reversed(block.items())))
            continue
        reply_text = block["text"]
        if trim and i == text_indexes[0]:
            reply_text = reply_text.lstrip()
        if trim and i == text_indexes[-1]:
            reply_text = reply_text.rstrip()
        cut = rng.randrange(len(reply_text) + 1)
        parts = [reply_text[:cut], reply_text[cut:]] if rng.random() < 0.3 else [reply_text]
        echoed += [text(part) for part in parts if part or rng.random() < 0.5]
    return echoed


@pytest.mark.parametrize("has_thinking", [True, False])
def test_messages_reply_sent_back_matches_the_recorded_one(has_thinking: bool) -> None:
    request = parse_request(
        thinking={"type": "enabled" if has_thinking else "disabled", "budget_tokens": 1024}
    )
    for seed in range(400):
        rng = random.Random(seed)
        deltas, message = make_random_reply(rng)
        body = DIALECT.format_response("msg_1", request, [make_choice(message)])
        for response in (json.loads(body), stream_reply(deltas, message, request)):
            message_param = {"role": "assistant", "content": echo_reply(response["content"], rng)}
            (parsed,) = parse_messages(message_param, *REQUEST["messages"])[:-1]
            assert canonical_content(parsed) == canonical_content(message), (seed, response)
            ids = [call["id"] for call in message.get("tool_calls", ())]
            assert [call["id"] for call in parsed.get("tool_calls", ())] == ids
