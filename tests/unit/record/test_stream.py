"""Parsing of replies from token streams, with or without eager tool calls."""

from __future__ import annotations

import json
import random

import pytest

from instar.record.base import ReplyDelta, StreamParser, ToolCallDelta
from instar.record.render import TemplateRenderer
from instar.record.tool_calls import JsonObjectTracker, format_call, parse_call
from instar.types import Message, ToolCall
from tests.unit.record.conversations import CALC, collect_calls, make_call_text, make_reply_text, make_words

TOOL_CALL = '<tool_call>{"name": "calc", "arguments": {"expression": "24 * 310"}}</tool_call>'


def feed_in_chunks(parser: StreamParser, ids: list[int], sizes: list[int]) -> list[ReplyDelta]:
    deltas: list[ReplyDelta] = []
    position = 0
    for size in sizes:
        deltas += parser.feed(ids[position : position + size])
        position += size
    return [*deltas, *parser.feed(ids[position:]), *parser.finish()]


def drop_ids(message: Message) -> object:
    calls = [(call["name"], call["arguments"]) for call in message.get("tool_calls", ())]
    return message["content"], message.get("reasoning"), calls


def test_stream_yields_the_same_reply_for_any_chunking(renderer: TemplateRenderer) -> None:
    rng = random.Random(2)
    vocab_size = len(renderer._tokenizer)
    for turn in range(200):
        if turn % 3:
            ids = renderer.encode(rng.choice(["", "<think>", " <think>hm</think>\n"]) + make_reply_text(rng))
        else:
            ids = [rng.randrange(vocab_size) for _ in range(rng.randint(0, 80))]
        stop = rng.choice([(), ("stop",), ("\n\n", "wor")])
        expected = renderer.parse(ids, [CALC], stop)
        parser = renderer.stream([CALC], stop)
        deltas = feed_in_chunks(parser, ids, [rng.choice([1, 1, 1, 2, 5]) for _ in range(len(ids))])
        assert drop_ids(parser.message) == drop_ids(expected)
        assert "".join(delta.text for delta in deltas) == expected["content"]
        assert "".join(delta.reasoning for delta in deltas) == expected.get("reasoning", "")
        assert collect_calls(deltas) == parser.message.get("tool_calls", [])


def test_stream_never_splits_characters(tiny_renderer: TemplateRenderer) -> None:
    text = "naïve 日本語 😀👩‍👩‍👧 end"
    parser = tiny_renderer.stream()
    ids = tiny_renderer.encode(text)
    deltas = feed_in_chunks(parser, ids, [1] * len(ids))
    assert len(ids) > len(text), "the tiny tokenizer no longer has single-byte tokens"
    assert len(deltas) > 10, "the reply is not streamed"
    assert all("\ufffd" not in delta.text for delta in deltas)
    assert parser.message["content"] == text


def test_stream_emits_invalid_bytes_without_delay(tiny_renderer: TemplateRenderer) -> None:
    lone_byte = tiny_renderer.encode("é")[-1:]
    parser = tiny_renderer.stream()
    assert sum(len(delta.text) for delta in parser.feed(lone_byte * 50)) >= 45


def test_stream_parses_calls_and_surrounding_text(tiny_renderer: TemplateRenderer) -> None:
    reply = tiny_renderer.parse(tiny_renderer.encode(f"Let me.\n{TOOL_CALL}\n{TOOL_CALL}\n"), [CALC])
    assert reply["content"] == "Let me."
    assert [call["arguments"] for call in reply.get("tool_calls", ())] == ['{"expression": "24 * 310"}'] * 2


def test_stream_without_tools_treats_a_call_as_text(tiny_renderer: TemplateRenderer) -> None:
    assert tiny_renderer.parse(tiny_renderer.encode(TOOL_CALL)) == {
        "role": "assistant",
        "content": TOOL_CALL,
    }


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>not json</tool_call>",
        '<tool_call>{"name": "calc"',
        '<tool_call>{"name": "calc", "arguments": {}',
        '<tool_call>{"name": "calc", "arguments": {}} x</tool_call>',
        '<tool_call>{"name": "calc", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": 5, "arguments": {}}</tool_call>',
        '<tool_call>{"arguments": {}}</tool_call>',
        "<tool_call>",
        "a < b, <tool",
    ],
)
def test_stream_treats_malformed_calls_as_text(tiny_renderer: TemplateRenderer, text: str) -> None:
    assert tiny_renderer.parse(tiny_renderer.encode(text), [CALC]) == {"role": "assistant", "content": text}


def test_stream_parses_a_valid_call_after_a_broken_one(tiny_renderer: TemplateRenderer) -> None:
    reply = tiny_renderer.parse(tiny_renderer.encode(f"<tool_call>oops {TOOL_CALL}"), [CALC])
    assert reply["content"] == "<tool_call>oops"
    assert len(reply.get("tool_calls", ())) == 1


def test_stream_holds_back_the_start_of_a_stop_string(tiny_renderer: TemplateRenderer) -> None:
    parser = tiny_renderer.stream(stop=["END"])
    assert "".join(d.text for d in parser.feed(tiny_renderer.encode("one EN"))) == "one"
    assert "".join(d.text for d in parser.feed(tiny_renderer.encode("GLAND EN"))) == " ENGLAND"
    assert "".join(d.text for d in parser.feed(tiny_renderer.encode("D two"))) == ""
    assert "".join(d.text for d in parser.finish()) == " "
    assert parser.message["content"] == "one ENGLAND "


@pytest.mark.parametrize("text", ["Plan BE", "spaces  "])
def test_stream_finished_twice_keeps_its_text(tiny_renderer: TemplateRenderer, text: str) -> None:
    """A complete reply is finished again if it is recorded because another reply of its request failed."""
    parser = tiny_renderer.stream(stop=["END"])
    parser.feed(tiny_renderer.encode(text))
    parser.finish()
    assert parser.finish() == []
    assert parser.message["content"] == text


def test_stream_parses_reasoning(tiny_renderer: TemplateRenderer) -> None:
    reply = tiny_renderer.parse(tiny_renderer.encode("<think>\nhm</think>\n\nYes"))
    assert reply == {"role": "assistant", "content": "Yes", "reasoning": "\nhm"}


def test_parse_call_keeps_the_text_of_arguments() -> None:
    call = parse_call('{"name": "f", "arguments": {"a":1.0,  "b": "\\u00e9"}}')
    assert call is not None
    assert call["arguments"] == '{"a":1.0,  "b": "\\u00e9"}'
    reparsed = parse_call(format_call(call).removeprefix("<tool_call>").removesuffix("</tool_call>"))
    assert reparsed is not None
    assert reparsed["arguments"] == call["arguments"]


def test_format_call_quotes_invalid_arguments() -> None:
    written = format_call(ToolCall(id="", name="f", arguments="{oops"))
    assert written == '<tool_call>{"name": "f", "arguments": "{oops"}</tool_call>'


def parse_eagerly(renderer: TemplateRenderer, text: str, size: int = 1) -> tuple[list[ReplyDelta], Message]:
    parser = renderer.stream([CALC], eager=True)
    ids = renderer.encode(text)
    deltas = feed_in_chunks(parser, ids, [size] * (len(ids) // size))
    assert collect_calls(deltas) == parser.message.get("tool_calls", [])
    assert "".join(delta.text for delta in deltas) == parser.message["content"]
    return deltas, parser.message


def test_eager_stream_yields_the_same_reply_for_valid_calls(renderer: TemplateRenderer) -> None:
    rng = random.Random(3)
    for _ in range(150):
        text = f"{make_words(rng).replace('<', '')}{make_call_text(rng)}\n{make_call_text(rng)}"
        _, message = parse_eagerly(renderer, text, rng.choice([1, 1, 2, 7]))
        assert drop_ids(message) == drop_ids(renderer.parse(renderer.encode(text), [CALC]))


def test_eager_stream_emits_arguments_as_written(tiny_renderer: TemplateRenderer) -> None:
    written = json.dumps({"code": "print('日本', \"x\")\n" * 20, "n": -1.5e3, "deep": [{"a": None}, []]})
    deltas, message = parse_eagerly(
        tiny_renderer, f'Hm.<tool_call>{{"name": "calc", "arguments": {written}}}</tool_call>'
    )
    pieces = [delta.call for delta in deltas if delta.call]
    assert (pieces[0].name, pieces[0].arguments) == ("calc", "")
    assert len(pieces) > 200, "the arguments are not streamed token by token"
    assert message.get("tool_calls", [])[0]["arguments"] == written


def test_eager_stream_announces_a_call_with_its_first_value(tiny_renderer: TemplateRenderer) -> None:
    parser = tiny_renderer.stream([CALC], eager=True)
    assert not parser.feed(tiny_renderer.encode('<tool_call>{"name": "calc", "arguments": {"n": 1'))
    first, second = parser.feed(tiny_renderer.encode(","))
    assert first.call == ToolCallDelta(0, first.call.id if first.call else "", "calc")
    assert second.call == ToolCallDelta(0, arguments='{"n": 1,')


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>{"name": "calc", "arguments": {}',
        '<tool_call>{"name": "calc", "arguments": {"a": oops}}</tool_call>',
        '<tool_call>{"name": "calc", "arguments": "x"}</tool_call>',
        '<tool_call>{"name": "", "arguments": {"a": "x"}}</tool_call>',
        '<tool_call>{"name": "\\ud800", "arguments": {"a": "x"}}</tool_call>',
        '<tool_call>{"arguments": {"a": "x"}, "name": 5}</tool_call>',
    ],
)
def test_eager_stream_treats_calls_malformed_before_a_value_as_text(
    tiny_renderer: TemplateRenderer, text: str
) -> None:
    assert parse_eagerly(tiny_renderer, text)[1] == {"role": "assistant", "content": text}


@pytest.mark.parametrize(
    ("written", "arguments"),
    [
        ('{"a": "cut of', '{"a": "cut of'),
        ('{"a": "x", "b": 12', '{"a": "x", "b": 12'),
        ('{"a": "x" oops}}</tool_call>', '{"a": "x" oops}}'),
        ('{"a": "two\nlines"}}</tool_call>', '{"a": "two\nlines"}'),
        ('{"a": "x"}} and more</tool_call>', '{"a": "x"}'),
        ('{"a": "x"}', '{"a": "x"}'),
        ('{"a": "\\u12"}}</tool_call>', '{"a": "\\u12"}'),
    ],
)
def test_eager_stream_keeps_emitted_calls(
    tiny_renderer: TemplateRenderer, written: str, arguments: str
) -> None:
    _, message = parse_eagerly(tiny_renderer, f'Hm.<tool_call>{{"name": "calc", "arguments": {written}')
    assert [call["arguments"] for call in message.get("tool_calls", ())] == [arguments]
    assert message["content"] == "Hm."


def test_eager_stream_waits_for_the_end_if_arguments_precede_the_name(
    tiny_renderer: TemplateRenderer,
) -> None:
    deltas, message = parse_eagerly(
        tiny_renderer, '<tool_call>{"arguments": {"a": "x"}, "name": "calc"}</tool_call>'
    )
    assert len(deltas) == 1
    assert len(message.get("tool_calls", ())) == 1


def test_json_object_tracker_agrees_with_json_loads() -> None:
    rng = random.Random(4)
    alphabet = '{}[]",:\\u0a1-.eE \ntrue null\x01'
    for _ in range(3000):
        text = json.dumps(
            {"k": [rng.choice([1, -2.5e9, "é\n", None, True, {}, [], {"a": [[]]}])] * 2, "": ""}
        )
        for _ in range(rng.choice([0, 1, 2])):
            index = rng.randrange(1, len(text))
            text = text[:index] + rng.choice(alphabet) + text[index + rng.choice([0, 1]) :]
        tracker, pending = JsonObjectTracker(), ""
        for char in text:
            pending = (pending + char)[tracker.feed(pending + char) :]
        is_valid = tracker.is_complete and not tracker.has_invalid_string and not pending
        assert is_valid == is_json_object(text), text


def is_json_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False


def test_stream_text_yields_only_text(tiny_renderer: TemplateRenderer) -> None:
    text = f" <think>hm</think> {TOOL_CALL}\n END two"
    parser = tiny_renderer.stream_text(["END"])
    deltas = feed_in_chunks(parser, tiny_renderer.encode(text), [1] * 500)
    assert "".join(d.text for d in deltas) == parser.message["content"] == text.removesuffix("END two")
