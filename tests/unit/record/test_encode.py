from __future__ import annotations

import random

import pytest

from instar.config import ModelConfig
from instar.models import load_tokenizer, resolve_model
from instar.record.encode import CachingEncoder
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


def texts(specials: list[str], count: int) -> list[str]:
    rng = random.Random(0)
    return ["".join(rng.choices([*PIECES, *specials], k=rng.randint(0, 24))) for _ in range(count)]


def check(encoder: CachingEncoder, specials: list[str]) -> None:
    assert encoder._cut is not None
    for text in texts(specials, 2000):
        assert encoder(text) == encoder._whole(text)
        assert encoder(text) == encoder._whole(text)  # from memory


def test_pieces_are_encoded_as_the_whole() -> None:
    tokenizer = make_tiny_tokenizer()
    check(CachingEncoder(tokenizer), list(tokenizer.all_special_tokens))


def test_the_default_models_tokenizer_too() -> None:
    try:
        folder = resolve_model(ModelConfig().name)
    except Exception as error:  # noqa: BLE001 — offline, say
        pytest.skip(f"the default model cannot be had: {error}")
    tokenizer = load_tokenizer(folder)
    check(CachingEncoder(tokenizer), list(tokenizer.all_special_tokens))


def test_a_token_that_swallows_space_is_not_cut_at() -> None:
    from tokenizers import AddedToken

    tokenizer = make_tiny_tokenizer()
    tokenizer.add_tokens([AddedToken("<sep>", lstrip=True, normalized=False)])
    encoder = CachingEncoder(tokenizer)
    assert encoder._cut is None
    assert encoder("a <sep> b") == tokenizer.encode("a <sep> b", add_special_tokens=False)


def test_what_is_kept_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("instar.record.encode._BUDGET", 100)
    encoder = CachingEncoder(make_tiny_tokenizer())
    for i in range(50):
        encoder(f"text number {i}")
    assert sum(map(len, encoder._kept)) <= 100
