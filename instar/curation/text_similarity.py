"""Near-duplicate texts, in time that grows with their number alone: MinHash over triples of words, and bands
of its values as what alike texts are found by."""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

HASHES, BANDS = 64, 16
"""Four values make a band: texts that share 90% of their triples have one in common with near certainty,
texts that share 30% hardly ever."""
MOST_WORDS = 4096
"""Of a text; what follows is not looked at."""
_PRIME = np.uint64((1 << 61) - 1)

Shingles = NDArray[np.uint64]


def hash_shingles(text: str) -> Shingles:
    """The distinct triples of words, hashed; of a shorter text, all of it."""
    words = text.lower().split()[:MOST_WORDS]
    triples = [" ".join(words[at : at + 3]) for at in range(max(1, len(words) - 2))]
    # A model may have written half a surrogate pair, and the store keeps it.
    encoded = [triple.encode("utf-8", "surrogatepass") for triple in triples]
    return np.unique(np.array([zlib.crc32(triple) for triple in encoded], np.uint64))


def repetition_ratio(text: str) -> float:
    """Share of the triples of words that have been in the text before; 0 for a text of fewer than three."""
    words = text.lower().split()[:MOST_WORDS]
    triples = len(words) - 2
    return 1.0 - len({tuple(words[at : at + 3]) for at in range(triples)}) / triples if triples > 0 else 0.0


def find_near_duplicates(texts: Sequence[str], similarity: float) -> list[list[int]]:
    """Sets of two and more texts that are alike, each by the places of its texts, in order. Every text is as
    similar as asked for to the first of its set."""
    hashed = [hash_shingles(text) for text in texts]
    values = _minhash(hashed)
    found: dict[int, list[int]] = defaultdict(list)
    leaders: dict[tuple[int, bytes], list[int]] = defaultdict(list)
    for place, mine in enumerate(hashed):
        keys = [(band, part.tobytes()) for band, part in enumerate(values[place].reshape(BANDS, -1))]
        likely = sorted({leader for key in keys for leader in leaders[key]})
        alike = next((each for each in likely if jaccard_similarity(hashed[each], mine) >= similarity), None)
        if alike is not None:
            found[alike].append(place)
            continue
        for key in keys:
            if len(leaders[key]) < HASHES:  # a bound, should thousands share a band and not be alike
                leaders[key].append(place)
    return [[leader, *others] for leader, others in sorted(found.items())]


def jaccard_similarity(one: Shingles, other: Shingles) -> float:
    common = len(np.intersect1d(one, other, assume_unique=True))
    return common / (len(one) + len(other) - common)


def _minhash(hashed: Sequence[Shingles]) -> NDArray[np.uint64]:
    rng = np.random.default_rng(0)
    factors = rng.integers(1, 1 << 31, HASHES, dtype=np.uint64)
    offsets = rng.integers(0, 1 << 60, HASHES, dtype=np.uint64)
    values = np.empty((len(hashed), HASHES), np.uint64)
    for place, mine in enumerate(hashed):
        values[place] = ((mine[:, None] * factors + offsets) % _PRIME).min(axis=0)
    return values
