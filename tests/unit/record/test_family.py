"""A renderer that the library wrote by hand, on the tiny tokenizer with that family's own tokens."""

from __future__ import annotations

import random

import pytest

from instar.record.family import FamilyRenderer
from instar.types import Message
from tests.tiny import make_tiny_tokenizer
from tests.unit.record.talk import CALC, calls_of

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


def test_parse_and_stream_agree(qwen3: FamilyRenderer) -> None:
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
def test_tool_results_extend_exactly(qwen3: FamilyRenderer, ended: bool) -> None:
    prompt = qwen3.render([QUESTION], [CALC])
    sampled = ids_of(qwen3, REPLY) + ([qwen3.stop_token_ids[0]] if ended else [])
    new = [Message(role="tool", content="7440", tool_call_id="x")]
    extended = qwen3.extend(prompt, sampled, new, [CALC])
    assert extended is not None
    assert extended[: len(prompt) + len(sampled)] == [*prompt, *sampled]


def test_a_new_question_drops_old_reasoning_so_it_is_not_bridged(qwen3: FamilyRenderer) -> None:
    prompt = qwen3.render([QUESTION])
    assert qwen3.extend(prompt, ids_of(qwen3, "<think>\nhm\n</think>\n\nYes"), [QUESTION]) is None


def test_malformed_call_is_text(qwen3: FamilyRenderer) -> None:
    reply = qwen3.parse(ids_of(qwen3, "hi <tool_call>\n{bad\n</tool_call>"), [CALC])
    assert "tool_calls" not in reply
    assert reply["content"].startswith("hi")
    assert "<tool_call>\n{bad\n</tool_call>" in reply["content"]
