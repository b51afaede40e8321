from __future__ import annotations

import random

import pytest

from instar.config import ModelConfig
from instar.models import load_tokenizer, resolve_model
from instar.record.render import CachingEncoder
from tests.tiny import make_tiny_tokenizer

PIECES = [
    "Hello",
    " ",
    "\n",
    "\n\n",
    "\t",
    "naïve",
    "日本",
    "🙂",
    "'s",
    "1234",
    "  x",
    "<|im",
    "_start|>",
    "</s>",
    "\u00a0",
]


def make_texts(special_tokens: list[str], count: int) -> list[str]:
    rng = random.Random(0)
    return ["".join(rng.choices([*PIECES, *special_tokens], k=rng.randint(0, 24))) for _ in range(count)]


def check_encoder(encoder: CachingEncoder, special_tokens: list[str]) -> None:
    assert encoder.splitter is not None
    for text in make_texts(special_tokens, 2000):
        assert encoder(text) == encoder.encode_uncached(text)
        assert encoder(text) == encoder.encode_uncached(text)  # From the cache.


def test_caching_encoder_matches_uncached_encoding() -> None:
    tokenizer = make_tiny_tokenizer()
    check_encoder(CachingEncoder(tokenizer), list(tokenizer.all_special_tokens))


def test_caching_encoder_matches_uncached_encoding_of_default_model() -> None:
    try:
        folder = resolve_model(ModelConfig().name)
    except Exception as error:  # noqa: BLE001 — for example without a network
        pytest.skip(f"the default model is not available: {error}")
    tokenizer = load_tokenizer(folder)
    check_encoder(CachingEncoder(tokenizer), list(tokenizer.all_special_tokens))


def test_caching_encoder_does_not_split_at_tokens_that_strip_whitespace() -> None:
    from tokenizers import AddedToken

    tokenizer = make_tiny_tokenizer()
    tokenizer.add_tokens([AddedToken("<sep>", lstrip=True, normalized=False)])
    encoder = CachingEncoder(tokenizer)
    assert encoder.splitter is None
    assert encoder("a <sep> b") == tokenizer.encode("a <sep> b", add_special_tokens=False)


def test_caching_encoder_cache_stays_within_its_limit() -> None:
    encoder = CachingEncoder(make_tiny_tokenizer(), max_cached_chars=100)
    for i in range(50):
        encoder(f"text number {i}")
    assert 0 < encoder.cached_chars <= 100
