"""`FamilyRenderer` for Qwen3, on the tiny tokenizer with the special tokens of Qwen3."""

from __future__ import annotations

import copy
import random
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from instar.config import ModelConfig
from instar.errors import ConfigError
from instar.record.base import ReplyDelta
from instar.record.family import FamilyRenderer
from instar.record.render import TemplateRenderer, load_renderer
from instar.types import Message
from tests.tiny import make_tiny_tokenizer
from tests.unit.record.conversations import CALC, collect_calls, make_call_text, make_words

QUESTION = Message(role="user", content="What is 24 * 310?")
REPLY = (
    "<think>\nhm\n</think>\n\nLet me see, 日本.\n"
    '<tool_call>\n{"name": "calc", "arguments": {"expression": "24 * 310"}}\n</tool_call>'
)


@pytest.fixture(scope="module")
def qwen3() -> FamilyRenderer:
    tokenizer = make_tiny_tokenizer()
    tag_names = ["think", "tool_call", "tool_response"]
    tokenizer.add_tokens([tag for name in tag_names for tag in (f"<{name}>", f"</{name}>")])
    return FamilyRenderer(tokenizer, "qwen3")


def test_family_stream_matches_parse(qwen3: FamilyRenderer) -> None:
    ids = [*qwen3.encode(REPLY), qwen3.stop_token_ids[0]]
    message = qwen3.parse(ids, [CALC])
    assert (message["content"], message.get("reasoning")) == ("Let me see, 日本.", "hm")
    assert [call["arguments"] for call in message.get("tool_calls", ())] == ['{"expression": "24 * 310"}']
    rng = random.Random(5)
    for _ in range(10):
        parser, position, deltas = qwen3.stream([CALC]), 0, []
        while position < len(ids):
            size = rng.randint(1, 4)
            deltas += parser.feed(ids[position : position + size])
            position += size
        deltas += parser.finish()
        assert "".join(delta.text for delta in deltas) == message["content"] == parser.message["content"]
        assert "".join(delta.reasoning for delta in deltas) == "hm"
        assert collect_calls(deltas) == parser.message.get("tool_calls")
        assert len(deltas) > 4, "the reply is not streamed"


@pytest.mark.parametrize("ended", [True, False])
def test_family_tool_results_extend_the_sequence(qwen3: FamilyRenderer, ended: bool) -> None:
    prompt = qwen3.render([QUESTION], [CALC])
    sampled = qwen3.encode(REPLY) + ([qwen3.stop_token_ids[0]] if ended else [])
    new = [Message(role="tool", content="7440", tool_call_id="x")]
    extended = qwen3.extend(prompt, sampled, new, [CALC])
    assert extended is not None
    assert extended[: len(prompt) + len(sampled)] == [*prompt, *sampled]


def test_family_question_after_reasoning_is_not_bridged(qwen3: FamilyRenderer) -> None:
    prompt = qwen3.render([QUESTION])
    assert qwen3.extend(prompt, qwen3.encode("<think>\nhm\n</think>\n\nYes"), [QUESTION]) is None


def test_family_malformed_call_is_text(qwen3: FamilyRenderer) -> None:
    reply = qwen3.parse(qwen3.encode("hi <tool_call>\n{bad\n</tool_call>"), [CALC])
    assert "tool_calls" not in reply
    assert reply["content"].startswith("hi")
    assert "<tool_call>\n{bad\n</tool_call>" in reply["content"]


def feed_tokens(
    renderer: FamilyRenderer, text: str, *, stop: tuple[str, ...] = (), eager: bool = True
) -> list[ReplyDelta]:
    """Feed the text token by token and check that the deltas add up to the message."""
    parser = renderer.stream([CALC], stop, eager=eager)
    deltas = [delta for token in renderer.encode(text) for delta in parser.feed([token])]
    deltas += parser.finish()
    message = parser.message
    assert "".join(delta.text for delta in deltas) == message["content"]
    assert "".join(delta.reasoning for delta in deltas) == message.get("reasoning", "")
    assert collect_calls(deltas) == message.get("tool_calls", [])
    return deltas


def join_text(deltas: list[ReplyDelta]) -> str:
    return "".join(delta.text for delta in deltas)


def test_family_stream_emits_arguments_as_written(qwen3: FamilyRenderer) -> None:
    written = '{"expression":  "' + "日本 + \\u00e9 " * 20 + '"}'
    deltas = feed_tokens(qwen3, f'Hm.<tool_call>\n{{"name": "calc", "arguments": {written}}}\n</tool_call>')
    pieces = [delta.call for delta in deltas if delta.call]
    assert len(pieces) > 100
    assert collect_calls(deltas)[0]["arguments"] == written


def test_family_stream_emits_a_call_when_it_is_closed(qwen3: FamilyRenderer) -> None:
    parser = qwen3.stream([CALC])
    assert any(delta.call for delta in parser.feed(qwen3.encode(REPLY)))


def test_family_stream_keeps_a_truncated_call_once_emitted(qwen3: FamilyRenderer) -> None:
    truncated = '<tool_call>\n{"name": "calc", "arguments": {"expression": "24 *'
    assert collect_calls(feed_tokens(qwen3, truncated))[0]["arguments"] == '{"expression": "24 *'
    assert join_text(feed_tokens(qwen3, truncated, eager=False)) == truncated


def test_family_stream_ignores_draft_calls_in_reasoning(qwen3: FamilyRenderer) -> None:
    draft = '<tool_call>\n{"name": "calc", "arguments": {"expression": "1"}}\n</tool_call>'
    deltas = feed_tokens(qwen3, f"<think>\nI might {draft}\n</think>\n\nNo.")
    assert collect_calls(deltas) == []
    assert join_text(deltas) == "No."
    assert len(collect_calls(feed_tokens(qwen3, f"<think>\nI will {draft}"))) == 1


def test_family_stream_does_not_emit_stop_strings(qwen3: FamilyRenderer) -> None:
    assert join_text(feed_tokens(qwen3, "one END two", stop=("END",))) == "one "
    assert join_text(feed_tokens(qwen3, "one EN two", stop=("END",))) == "one EN two"
    deltas = feed_tokens(qwen3, "<think>\nhm END", stop=("END",))
    assert "".join(delta.reasoning for delta in deltas) == "hm "
    call = '<tool_call>\n{"name": "calc", "arguments": {"expression": "a END'
    assert collect_calls(feed_tokens(qwen3, call, stop=("END",)))[0]["arguments"] == '{"expression": "a '


def test_family_stream_emits_text_as_sampled(qwen3: FamilyRenderer) -> None:
    parser = qwen3.stream([CALC])
    text = ""
    for i, token in enumerate(qwen3.encode("a < b <b>bold</b> " * 50)):
        text += join_text(parser.feed([token]))
        assert len(text.split()) >= (i - 12) // 12, "the text is more than a few tokens late"


def test_family_stream_deltas_of_random_replies_add_up(qwen3: FamilyRenderer) -> None:
    rng = random.Random(6)
    tags = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
    for _ in range(150):
        parts = [rng.choice([*tags, make_words(rng), make_call_text(rng)]) for _ in range(rng.randint(1, 6))]
        feed_tokens(qwen3, "".join(parts), stop=rng.choice([(), ("stop",)]), eager=rng.random() < 0.7)


@pytest.mark.parametrize("name", ["Qwen/Qwen3-0.6B", "./my-finetune"])
def test_renderer_does_not_depend_on_the_name_of_the_model(tmp_path: Path, name: str) -> None:
    make_tiny_tokenizer().save_pretrained(tmp_path)
    assert isinstance(load_renderer(tmp_path, ModelConfig(name=name)), TemplateRenderer)


def test_renderer_setting_chooses_the_family(tmp_path: Path, qwen3: FamilyRenderer) -> None:
    qwen3._tokenizer.save_pretrained(tmp_path)
    assert isinstance(load_renderer(tmp_path, ModelConfig(renderer="qwen3")), FamilyRenderer)
    with pytest.raises(ConfigError, match=r"model\.renderer: 'qwen' is not known"):
        load_renderer(tmp_path, ModelConfig(renderer="qwen"))


def test_renderer_of_a_model_without_template_needs_one_family(tmp_path: Path, qwen3: FamilyRenderer) -> None:
    tokenizer = load_tokenizer_without_template(qwen3, tmp_path)
    assert tokenizer.chat_template is None
    with pytest.raises(ConfigError, match=r"set model\.renderer"):
        load_renderer(tmp_path, ModelConfig())


def load_tokenizer_without_template(renderer: FamilyRenderer, folder: Path) -> PreTrainedTokenizerFast:
    tokenizer = copy.deepcopy(renderer._tokenizer)
    tokenizer.chat_template = None
    tokenizer.save_pretrained(folder)
    return tokenizer


def test_family_plain_reply_is_text(qwen3: FamilyRenderer) -> None:
    parser = qwen3.stream_text(["END"])
    deltas = [*parser.feed(qwen3.encode(f" {REPLY}\n END")), *parser.finish()]
    assert join_text(deltas) == parser.message["content"] == f" {REPLY}\n "
