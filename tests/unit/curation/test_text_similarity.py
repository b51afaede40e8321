from __future__ import annotations

import random

from instar.curation.text_similarity import (
    find_near_duplicates,
    hash_trigrams,
    jaccard_similarity,
    measure_repetition,
)

WORDS = [f"w{number}" for number in range(2000)]


def make_words(rng: random.Random, length: int = 60) -> list[str]:
    return rng.choices(WORDS, k=length)


def test_find_near_duplicates_among_many_texts_finds_all_pairs() -> None:
    rng = random.Random(0)
    texts = [make_words(rng) for _ in range(500)]
    changed = [*texts[7]]
    changed[30] = "other"
    texts.insert(400, changed)
    texts.append(["W" + word[1:] for word in texts[3]])
    joined = [" ".join(words) for words in texts]
    assert find_near_duplicates(joined, 0.85) == [[3, 501], [7, 400]]
    assert find_near_duplicates(joined, 0.99) == [[3, 501]], (
        "changing one of 60 words changes 3 of 58 trigrams"
    )


def test_jaccard_similarity_is_the_fraction_of_common_trigrams() -> None:
    assert jaccard_similarity(hash_trigrams("a b c d"), hash_trigrams("a b c e")) == 1 / 3
    assert jaccard_similarity(hash_trigrams("hi"), hash_trigrams("HI")) == 1.0
    assert find_near_duplicates(["", "", "x"], 0.9) == [[0, 1]]


def test_measure_repetition_returns_the_fraction_of_repeated_trigrams() -> None:
    assert measure_repetition("one two three four") == 0.0
    assert measure_repetition("a b c a b c a b c") == 4 / 7
    assert measure_repetition("two words") == 0.0


def test_find_near_duplicates_accepts_lone_surrogates() -> None:
    assert find_near_duplicates(["half \ud83d a pair", "half \ud83e a pair", "half \ud83d a pair"], 0.9) == [
        [0, 2]
    ]
