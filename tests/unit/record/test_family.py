"""A renderer that the library wrote by hand, on the tiny tokenizer with that family's own tokens."""

from __future__ import annotations

import random

import pytest

from instar.record.base import ReplyDelta
from instar.record.family import FamilyRenderer
from instar.types import Message
from tests.tiny import make_tiny_tokenizer
from tests.unit.record.talk import CALC, call_text, calls_of, words

QUESTION = Message(role="user", content="What is 24 * 310?")
REPLY = (
    "<think>\nhm\n</think>\n\nLet me see, 日本.\n"
    '<tool_call>\n{"name": "calc", "arguments": {"expression": "24 * 310"}}\n</tool_call>'
)


@pytest.fixture(scope="module")
def qwen3() -> FamilyRenderer:
    tokenizer = make_tiny_tokenizer()
    marks = ["think", "tool_call", "tool_response"]
    tokenizer.add_tokens([mark for name in marks for mark in (f"<{name}>", f"</{name}>")])
    return FamilyRenderer(tokenizer, "qwen3")


def ids_of(renderer: FamilyRenderer, text: str) -> list[int]:
    return renderer.encode(text)


def test_family_parse_equals_stream(qwen3: FamilyRenderer) -> None:
    ids = [*ids_of(qwen3, REPLY), qwen3.stop_token_ids[0]]
    whole = qwen3.parse(ids, [CALC])
    assert (whole["content"], whole.get("reasoning")) == ("Let me see, 日本.", "hm")
    assert [call["arguments"] for call in whole.get("tool_calls", ())] == ['{"expression": "24 * 310"}']
    rng = random.Random(5)
    for _ in range(10):
        parser, at, deltas = qwen3.stream([CALC]), 0, []
        while at < len(ids):
            size = rng.randint(1, 4)
            deltas += parser.feed(ids[at : at + size])
            at += size
        deltas += parser.finish()
        assert "".join(delta.text for delta in deltas) == whole["content"] == parser.message["content"]
        assert "".join(delta.reasoning for delta in deltas) == "hm"
        assert calls_of(deltas) == parser.message.get("tool_calls")
        assert len(deltas) > 4, "it does stream"


@pytest.mark.parametrize("ended", [True, False])
def test_family_tool_results_extend_exactly(qwen3: FamilyRenderer, ended: bool) -> None:
    prompt = qwen3.render([QUESTION], [CALC])
    sampled = ids_of(qwen3, REPLY) + ([qwen3.stop_token_ids[0]] if ended else [])
    new = [Message(role="tool", content="7440", tool_call_id="x")]
    extended = qwen3.extend(prompt, sampled, new, [CALC])
    assert extended is not None
    assert extended[: len(prompt) + len(sampled)] == [*prompt, *sampled]


def test_family_question_after_reasoning_is_not_bridged(qwen3: FamilyRenderer) -> None:
    prompt = qwen3.render([QUESTION])
    assert qwen3.extend(prompt, ids_of(qwen3, "<think>\nhm\n</think>\n\nYes"), [QUESTION]) is None


def test_family_malformed_call_is_text(qwen3: FamilyRenderer) -> None:
    reply = qwen3.parse(ids_of(qwen3, "hi <tool_call>\n{bad\n</tool_call>"), [CALC])
    assert "tool_calls" not in reply
    assert reply["content"].startswith("hi")
    assert "<tool_call>\n{bad\n</tool_call>" in reply["content"]


def fed(
    renderer: FamilyRenderer, text: str, *, stop: tuple[str, ...] = (), eager: bool = True
) -> list[ReplyDelta]:
    """Token by token. What the pieces add up to is the message."""
    parser = renderer.stream([CALC], stop, eager=eager)
    deltas = [delta for token in ids_of(renderer, text) for delta in parser.feed([token])]
    deltas += parser.finish()
    message = parser.message
    assert "".join(delta.text for delta in deltas) == message["content"]
    assert "".join(delta.reasoning for delta in deltas) == message.get("reasoning", "")
    assert calls_of(deltas) == message.get("tool_calls", [])
    return deltas


def said(deltas: list[ReplyDelta]) -> str:
    return "".join(delta.text for delta in deltas)


def test_family_stream_emits_arguments_as_written(qwen3: FamilyRenderer) -> None:
    written = '{"expression":  "' + "日本 + \\u00e9 " * 20 + '"}'
    deltas = fed(qwen3, f'Hm.<tool_call>\n{{"name": "calc", "arguments": {written}}}\n</tool_call>')
    pieces = [delta.call for delta in deltas if delta.call]
    assert len(pieces) > 100
    assert calls_of(deltas)[0]["arguments"] == written


def test_family_stream_emits_a_call_when_it_is_closed(qwen3: FamilyRenderer) -> None:
    parser = qwen3.stream([CALC])
    assert any(delta.call for delta in parser.feed(ids_of(qwen3, REPLY)))


def test_family_stream_keeps_a_truncated_call_once_emitted(qwen3: FamilyRenderer) -> None:
    cut = '<tool_call>\n{"name": "calc", "arguments": {"expression": "24 *'
    assert calls_of(fed(qwen3, cut))[0]["arguments"] == '{"expression": "24 *'
    assert said(fed(qwen3, cut, eager=False)) == cut


def test_family_stream_ignores_draft_calls_in_reasoning(qwen3: FamilyRenderer) -> None:
    draft = '<tool_call>\n{"name": "calc", "arguments": {"expression": "1"}}\n</tool_call>'
    deltas = fed(qwen3, f"<think>\nI might {draft}\n</think>\n\nNo.")
    assert calls_of(deltas) == []
    assert said(deltas) == "No."
    assert len(calls_of(fed(qwen3, f"<think>\nI will {draft}"))) == 1


def test_family_stream_does_not_emit_stop_strings(qwen3: FamilyRenderer) -> None:
    assert said(fed(qwen3, "one END two", stop=("END",))) == "one "
    assert said(fed(qwen3, "one EN two", stop=("END",))) == "one EN two"
    deltas = fed(qwen3, "<think>\nhm END", stop=("END",))
    assert "".join(delta.reasoning for delta in deltas) == "hm "
    call = '<tool_call>\n{"name": "calc", "arguments": {"expression": "a END'
    assert calls_of(fed(qwen3, call, stop=("END",)))[0]["arguments"] == '{"expression": "a '


def test_family_stream_emits_text_as_sampled(qwen3: FamilyRenderer) -> None:
    parser = qwen3.stream([CALC])
    told = ""
    for i, token in enumerate(ids_of(qwen3, "a < b <b>bold</b> " * 50)):
        told += said(parser.feed([token]))
        assert len(told.split()) >= (i - 12) // 12, "at most a few tokens late"


def test_family_stream_deltas_of_random_replies_add_up(qwen3: FamilyRenderer) -> None:
    rng = random.Random(6)
    marks = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
    for _ in range(150):
        parts = [rng.choice([*marks, words(rng), call_text(rng)]) for _ in range(rng.randint(1, 6))]
        fed(qwen3, "".join(parts), stop=rng.choice([(), ("stop",)]), eager=rng.random() < 0.7)


def test_family_plain_reply_is_text(qwen3: FamilyRenderer) -> None:
    parser = qwen3.stream_text(["END"])
    deltas = [*parser.feed(ids_of(qwen3, f" {REPLY}\n END")), *parser.finish()]
    assert said(deltas) == parser.message["content"] == f" {REPLY}\n "
