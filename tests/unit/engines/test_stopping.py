from __future__ import annotations

import pytest

from instar.engines.stopping import StopStrings
from tests.unit.engines.conformance import TOKENIZER


def find_stop(text: str, *stop: str) -> tuple[int, str] | None:
    """Return the number of characters generated until a stop string is detected, and the string, or None."""
    strings = StopStrings(TOKENIZER, stop)
    ids: list[int] = []
    for token in TOKENIZER.encode(text):
        ids.append(token)
        if (matched := strings.push(token)) is not None:
            return len(TOKENIZER.decode(ids)), matched
    return None


@pytest.mark.parametrize("stop", ["w", "wörld", "日本", "🎉!", "\n", "d 日"])
def test_stop_string_is_detected_in_the_token_that_completes_it(stop: str) -> None:
    text = "hello wörld 日本 🎉!\nbye"
    result = find_stop(text, "absent", stop)
    assert result is not None
    assert result[1] == stop
    assert text.index(stop) + len(stop) <= result[0] <= text.index(stop) + len(stop) + 8


def test_stop_string_matches_special_tokens() -> None:
    assert find_stop("a<|im_start|>b", "<|im_start|>") == (len("a<|im_start|>"), "<|im_start|>")


def test_leftmost_stop_string_wins() -> None:
    assert find_stop("The answer is 893", "swer", "answer") == (len("The answer"), "answer")
    assert find_stop("hello", "hellos", "x") is None
