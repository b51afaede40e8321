"""The lower bound on the number of tokens never exceeds the actual number."""

from __future__ import annotations

import random
import unicodedata

import pytest
from tokenizers import normalizers, pre_tokenizers
from transformers import AddedToken

from instar.record.token_bounds import TokenBound
from tests.tiny import make_tiny_tokenizer

TEXTS = (
    "",
    "You are a helpful assistant. The answer is 893. " * 50,
    '<tool_call>\n{"name": "calc", "arguments": {"expression": "12 * 34"}}\n</tool_call>' * 20,
    "<|im_start|>system\n<|im_end|>" * 50,
    " " * 3000,
    "\n\n\t  \r\n" * 300,
    "日本語のテキスト。" * 100,
    "e\u0301 \u212a\u1fbe\u0308\u0301 a" * 200,
    "🙂\u200d\x00\x7f" * 100,
)


@pytest.mark.parametrize("use_nfc", [False, True])
@pytest.mark.parametrize("vocab_size", [260, 320, 2000])
def test_token_bound_is_at_most_the_number_of_tokens(vocab_size: int, use_nfc: bool) -> None:
    backend = make_tiny_tokenizer(vocab_size).backend_tokenizer
    if use_nfc:
        backend.normalizer = normalizers.NFC()
    bound, rng = TokenBound(backend), random.Random(0)
    characters = "".join(TEXTS)
    texts = [*TEXTS, *("".join(rng.choices(characters, k=500)) for _ in range(50))]
    for text in (*texts, *(unicodedata.normalize("NFD", text) for text in texts)):
        assert bound.compute(text) <= len(backend.encode(text, add_special_tokens=False).ids)


@pytest.mark.parametrize("use_nfc", [False, True])
def test_token_bound_for_a_long_text_is_not_zero(use_nfc: bool) -> None:
    backend = make_tiny_tokenizer().backend_tokenizer
    if use_nfc:
        backend.normalizer = normalizers.NFC()
    bound = TokenBound(backend)
    assert bound.compute("some words " * 1000) > 500
    assert bound.compute("some words é " * 1000) > 500


def test_token_bound_is_zero_if_the_tokenizer_may_drop_text() -> None:
    lowercase = make_tiny_tokenizer().backend_tokenizer
    lowercase.normalizer = normalizers.Lowercase()
    split = make_tiny_tokenizer().backend_tokenizer
    split.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(" ", "removed"), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    words = make_tiny_tokenizer().backend_tokenizer
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    truncated = make_tiny_tokenizer().backend_tokenizer
    truncated.enable_truncation(10)
    stripping = make_tiny_tokenizer()
    stripping.add_tokens([AddedToken("<sep>", lstrip=True, normalized=False)])
    for backend in (lowercase, split, words, truncated, stripping.backend_tokenizer):
        assert TokenBound(backend).compute("some words " * 1000) == 0
