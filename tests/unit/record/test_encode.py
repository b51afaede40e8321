from __future__ import annotations

import random
import tracemalloc
from pathlib import Path

from instar.models import load_tokenizer
from instar.record import render
from instar.record.render import CachingEncoder
from tests.tiny import make_tiny_tokenizer

RENDER_FILTER, TEST_FILTER = (tracemalloc.Filter(True, name) for name in (render.__file__, __file__))
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


def test_caching_encoder_matches_uncached_encoding_of_default_model(default_model: Path) -> None:
    tokenizer = load_tokenizer(default_model)
    check_encoder(CachingEncoder(tokenizer), list(tokenizer.all_special_tokens))


def test_caching_encoder_does_not_split_at_tokens_that_strip_whitespace() -> None:
    from tokenizers import AddedToken

    tokenizer = make_tiny_tokenizer()
    tokenizer.add_tokens([AddedToken("<sep>", lstrip=True, normalized=False)])
    encoder = CachingEncoder(tokenizer)
    assert encoder.splitter is None
    assert encoder("a <sep> b") == tokenizer.encode("a <sep> b", add_special_tokens=False)


def test_memory_of_the_cache_stays_within_its_limit() -> None:
    limit = 1_000_000
    encoder = CachingEncoder(make_tiny_tokenizer(), max_cached_bytes=limit)
    tracemalloc.start()
    try:
        for i in range(6000):
            encoder(chr(0x4E00 + i % 5000) * 100 + f" {i} " + "x" * (i % 500))
        snapshot = tracemalloc.take_snapshot().filter_traces([RENDER_FILTER, TEST_FILTER])
    finally:
        tracemalloc.stop()
    assert limit / 2 < encoder.cached_bytes <= limit
    assert sum(trace.size for trace in snapshot.traces) < 1.3 * limit


def test_pieces_that_were_not_used_for_a_minute_are_removed_from_the_cache() -> None:
    now = 0.0
    encoder = CachingEncoder(make_tiny_tokenizer(), clock=lambda: now)
    used, unused = "used " * 100, "unused " * 1000
    ids = encoder(used)
    encoder(unused)
    full_bytes = encoder.cached_bytes
    for now in (31.0, 62.0):
        assert encoder(used) == ids
        encoder(f"new {now}")
    assert encoder.cached_bytes < full_bytes - len(unused)
    assert encoder(unused) == encoder.encode_uncached(unused)
