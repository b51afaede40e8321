"""Tests for bench/text_exactness.py: the division into parts, resuming, and the figures."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.tiny import make_tiny_tokenizer


@pytest.fixture
def text_exactness(bench: ModuleType) -> Iterator[Any]:
    yield importlib.import_module("text_exactness")
    del sys.modules["text_exactness"]


def save_tokenizer(folder: Path) -> str:
    """Save the tiny tokenizer and return its folder."""
    make_tiny_tokenizer().save_pretrained(folder / "model")
    (folder / "model" / "config.json").write_text('{"model_type": "llama"}')
    return str(folder / "model")


def test_parts_have_all_sequences_and_alternate_between_tokenizers(text_exactness: Any) -> None:
    parts = text_exactness.list_parts("text", ["a", "b", "c"], 100, 15)
    assert sum(part.count for part in parts) == 100
    assert [part.tokenizer for part in parts[:4]] == ["a", "b", "c", "a"]
    assert len({part.key for part in parts}) == len(parts)


def test_measurement_continues_after_the_last_complete_part(text_exactness: Any, tmp_path: Path) -> None:
    name = save_tokenizer(tmp_path)
    path = tmp_path / "results.jsonl"
    parts = text_exactness.list_parts("turns", [name], 4, 4) + text_exactness.list_parts(
        "text", [name], 60, 20
    )
    first = {"kind": "text", "tokenizer": name, "part": 0, "count": 20, "problems": 7}
    incomplete = json.dumps({**first, "part": 1, "problems": 9})[:-5]
    path.write_text(f"{json.dumps(first)}\n{incomplete}")
    figures = text_exactness.summarize(text_exactness.measure(parts, path))
    assert figures == {
        "sequences": 60,
        "tokenizers": 1,
        "differences": 7,
        "forged_turns": 4,
        "templates": 1,
        "special_tokens": 0,
    }
    size = path.stat().st_size
    assert text_exactness.summarize(text_exactness.measure(parts, path)) == figures
    assert path.stat().st_size == size
