from __future__ import annotations

import random

import pytest

from instar.record.base import Delta, StreamParser
from instar.record.render import TemplateRenderer
from instar.record.tools import format_call, parse_call
from instar.types import Message, ToolCall
from tests.unit.record.talk import CALC, calls_of, reply_text

CALL = '<tool_call>{"name": "calc", "arguments": {"expression": "24 * 310"}}</tool_call>'


def ids_of(renderer: TemplateRenderer, text: str) -> list[int]:
    return renderer.encode(text)


def fed(parser: StreamParser, ids: list[int], sizes: list[int]) -> list[Delta]:
    deltas: list[Delta] = []
    at = 0
    for size in sizes:
        deltas += parser.feed(ids[at : at + size])
        at += size
    return [*deltas, *parser.feed(ids[at:]), *parser.finish()]


def without_ids(message: Message) -> object:
    calls = [(call["name"], call["arguments"]) for call in message.get("tool_calls", ())]
    return message["content"], message.get("reasoning"), calls


def test_any_chunking_gives_the_same_reply(renderer: TemplateRenderer) -> None:
    rng = random.Random(2)
    vocabulary = len(renderer._tokenizer)
    for turn in range(200):
        if turn % 3:
            ids = ids_of(renderer, rng.choice(["", "<think>", " <think>hm</think>\n"]) + reply_text(rng))
        else:
            ids = [rng.randrange(vocabulary) for _ in range(rng.randint(0, 80))]
        stop = rng.choice([(), ("stop",), ("\n\n", "wor")])
        whole = renderer.parse(ids, [CALC], stop)
        parser = renderer.stream([CALC], stop)
        deltas = fed(parser, ids, [rng.choice([1, 1, 1, 2, 5]) for _ in range(len(ids))])
        assert without_ids(parser.message) == without_ids(whole)
        assert "".join(delta.text for delta in deltas) == whole["content"]
        assert "".join(delta.reasoning for delta in deltas) == whole.get("reasoning", "")
        assert calls_of(deltas) == parser.message.get("tool_calls", [])


def test_characters_are_never_split(tiny: TemplateRenderer) -> None:
    text = "naïve 日本語 😀👩‍👩‍👧 end"
    parser = tiny.stream()
    ids = ids_of(tiny, text)
    deltas = fed(parser, ids, [1] * len(ids))
    assert len(ids) > len(text), "the tiny tokenizer has single bytes"
    assert len(deltas) > 10, "it does stream"
    assert all("\ufffd" not in delta.text for delta in deltas)
    assert parser.message["content"] == text


def test_invalid_bytes_come_out_and_do_not_pile_up(tiny: TemplateRenderer) -> None:
    lone = ids_of(tiny, "é")[-1:]
    parser = tiny.stream()
    assert sum(len(delta.text) for delta in parser.feed(lone * 50)) >= 45


def test_calls_and_text_around_them(tiny: TemplateRenderer) -> None:
    reply = tiny.parse(ids_of(tiny, f"Let me.\n{CALL}\n{CALL}\n"), [CALC])
    assert reply["content"] == "Let me."
    assert [call["arguments"] for call in reply.get("tool_calls", ())] == ['{"expression": "24 * 310"}'] * 2


def test_without_tools_a_call_is_text(tiny: TemplateRenderer) -> None:
    assert tiny.parse(ids_of(tiny, CALL)) == {"role": "assistant", "content": CALL}


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
def test_malformed_calls_are_text(tiny: TemplateRenderer, text: str) -> None:
    assert tiny.parse(ids_of(tiny, text), [CALC]) == {"role": "assistant", "content": text}


def test_a_valid_call_behind_a_broken_one(tiny: TemplateRenderer) -> None:
    reply = tiny.parse(ids_of(tiny, f"<tool_call>oops {CALL}"), [CALC])
    assert reply["content"] == "<tool_call>oops"
    assert len(reply.get("tool_calls", ())) == 1


def test_stop_string_start_is_held_back(tiny: TemplateRenderer) -> None:
    parser = tiny.stream(stop=["END"])
    assert "".join(d.text for d in parser.feed(ids_of(tiny, "one EN"))) == "one"
    assert "".join(d.text for d in parser.feed(ids_of(tiny, "GLAND EN"))) == " ENGLAND"
    assert "".join(d.text for d in parser.feed(ids_of(tiny, "D two"))) == ""
    assert "".join(d.text for d in parser.finish()) == " "
    assert parser.message["content"] == "one ENGLAND "


def test_reasoning(tiny: TemplateRenderer) -> None:
    reply = tiny.parse(ids_of(tiny, "<think>\nhm</think>\n\nYes"))
    assert reply == {"role": "assistant", "content": "Yes", "reasoning": "\nhm"}


def test_arguments_keep_their_text() -> None:
    call = parse_call('{"name": "f", "arguments": {"a":1.0,  "b": "\\u00e9"}}')
    assert call is not None
    assert call["arguments"] == '{"a":1.0,  "b": "\\u00e9"}'
    again = parse_call(format_call(call).removeprefix("<tool_call>").removesuffix("</tool_call>"))
    assert again is not None
    assert again["arguments"] == call["arguments"]


def test_invalid_arguments_are_quoted() -> None:
    written = format_call(ToolCall(id="", name="f", arguments="{oops"))
    assert written == '<tool_call>{"name": "f", "arguments": "{oops"}</tool_call>'
