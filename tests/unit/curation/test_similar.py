from __future__ import annotations

import random

from instar.curation.similar import jaccard, near_duplicates, repetition, shingles

WORDS = [f"w{number}" for number in range(2000)]


def text(rng: random.Random, length: int = 60) -> list[str]:
    return rng.choices(WORDS, k=length)


def test_near_duplicates_are_found_among_many_others() -> None:
    rng = random.Random(0)
    texts = [text(rng) for _ in range(500)]
    changed = [*texts[7]]
    changed[30] = "other"
    texts.insert(400, changed)
    texts.append(["W" + word[1:] for word in texts[3]])
    joined = [" ".join(words) for words in texts]
    assert near_duplicates(joined, 0.85) == [[3, 501], [7, 400]]
    assert near_duplicates(joined, 0.99) == [[3, 501]], "one word of sixty makes three triples of 58 differ"


def test_a_text_is_as_similar_as_its_triples() -> None:
    assert jaccard(shingles("a b c d"), shingles("a b c e")) == 1 / 3
    assert jaccard(shingles("hi"), shingles("HI")) == 1.0
    assert near_duplicates(["", "", "x"], 0.9) == [[0, 1]]


def test_repetition_is_the_share_of_triples_seen_before() -> None:
    assert repetition("one two three four") == 0.0
    assert repetition("a b c a b c a b c") == 4 / 7
    assert repetition("two words") == 0.0


def test_half_a_surrogate_pair_is_a_text_like_any_other() -> None:
    assert near_duplicates(["half \ud83d a pair", "half \ud83e a pair", "half \ud83d a pair"], 0.9) == [
        [0, 2]
    ]
