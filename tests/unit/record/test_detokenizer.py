"""Streamed text equals the text of all tokens decoded at once, for every tokenizer."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from instar.models import load_tokenizer
from instar.record.render import TemplateRenderer
from tests.tiny import make_tiny_tokenizer
from tests.unit.record.byte_fallback import make_byte_fallback_tokenizer
from tests.unit.record.conversations import CALC, collect_calls
from tests.unit.record.detokenizing import check_streamed_text

SEQUENCES = 1500


@pytest.mark.parametrize("kind", ["byte-level", "byte fallback", "byte fallback with a prefix"])
def test_streamed_text_of_random_tokens_equals_decoded_text(kind: str) -> None:
    tokenizers = {
        "byte-level": make_tiny_tokenizer,
        "byte fallback": make_byte_fallback_tokenizer,
        "byte fallback with a prefix": lambda: make_byte_fallback_tokenizer(has_prefix=True),
    }
    check_streamed_text(tokenizers[kind](), SEQUENCES)


def test_streamed_text_of_default_model_equals_decoded_text(default_model: Path) -> None:
    check_streamed_text(load_tokenizer(default_model), SEQUENCES)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return make_byte_fallback_tokenizer()


def test_stream_of_byte_tokens_emits_no_incomplete_characters(tokenizer: PreTrainedTokenizerFast) -> None:
    renderer, text = TemplateRenderer(tokenizer), "😀🦩🫨 ok bye"
    ids = renderer.encode(text)
    parser = renderer.stream()
    pieces = [delta.text for token in ids for delta in parser.feed([token])]
    assert pieces[0] == "😀🦩🫨", "a run of bytes is emitted when it ends"
    assert "".join([*pieces, *(delta.text for delta in parser.finish())]) == text
    assert renderer.parse(ids)["content"] == text


def test_stream_of_byte_tokens_keeps_tool_arguments(tokenizer: PreTrainedTokenizerFast) -> None:
    renderer = TemplateRenderer(tokenizer)
    arguments = json.dumps({"expression": "😀🦩🫨 ok"}, ensure_ascii=False)
    ids = renderer.encode(f'<tool_call>{{"name": "calc", "arguments": {arguments}}}</tool_call>')
    parser = renderer.stream([CALC], eager=True)
    deltas = [delta for token in ids for delta in parser.feed([token])] + parser.finish()
    assert [call["arguments"] for call in collect_calls(deltas)] == [arguments]


def test_stream_of_byte_tokens_finds_stop_strings(tokenizer: PreTrainedTokenizerFast) -> None:
    renderer = TemplateRenderer(tokenizer)
    rng = random.Random(0)
    for _ in range(200):
        before = "".join(rng.choices(["😀", "ok ", "é", "日", "hello"], k=rng.randint(0, 9)))
        ids = renderer.encode(f"{before}🫨STOP{before}")
        parser = renderer.stream(stop=["🫨STOP"])
        deltas = [delta for token in ids for delta in parser.feed([token])] + parser.finish()
        assert "".join(delta.text for delta in deltas).rstrip() == before.rstrip()


def test_stream_finished_twice_emits_an_incomplete_character_only_once(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    for any_tokenizer in (tokenizer, make_tiny_tokenizer()):
        renderer = TemplateRenderer(any_tokenizer)
        parser = renderer.stream()
        parser.feed(renderer.encode("ok 😀")[:-1])
        parser.finish()
        content = parser.message["content"]
        assert parser.finish() == []
        assert parser.message["content"] == content
