from __future__ import annotations

import pytest

from instar.engines.stopping import StopStrings
from tests.unit.engines.conformance import TOKENIZER


def stopped_at(text: str, *stop: str) -> tuple[int, str] | None:
    """(characters said by then, the stop string)"""
    strings = StopStrings(TOKENIZER, stop)
    ids: list[int] = []
    for token in TOKENIZER.encode(text):
        ids.append(token)
        if (found := strings.push(token)) is not None:
            return len(TOKENIZER.decode(ids)), found
    return None


@pytest.mark.parametrize("stop", ["w", "wörld", "日本", "🎉!", "\n", "d 日"])
def test_stop_string_is_detected_in_the_token_that_completes_it(stop: str) -> None:
    text = "hello wörld 日本 🎉!\nbye"
    found = stopped_at(text, "absent", stop)
    assert found is not None
    assert found[1] == stop
    assert text.index(stop) + len(stop) <= found[0] <= text.index(stop) + len(stop) + 8


def test_stop_string_matches_special_tokens() -> None:
    assert stopped_at("a<|im_start|>b", "<|im_start|>") == (len("a<|im_start|>"), "<|im_start|>")


def test_leftmost_stop_string_wins() -> None:
    assert stopped_at("The answer is 893", "swer", "answer") == (len("The answer"), "answer")
    assert stopped_at("hello", "hellos", "x") is None
