"""Measures repetition in a text, and finds near-duplicate texts in linear time with MinHash and banding."""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

NUM_HASHES, NUM_BANDS = 64, 16
"""The number of hashes per text, and the number of bands that they are split into. Texts that share 90% of
their trigrams almost always have a band in common; texts that share 30% rarely do."""
MAX_LEADERS_PER_BAND = 64  # bounds the time if thousands of dissimilar texts share a band
MAX_WORDS = 4096
"""The maximum number of words to read from a text. The rest is ignored."""
_PRIME = np.uint64((1 << 61) - 1)

TrigramHashes = NDArray[np.uint64]


def hash_trigrams(text: str) -> TrigramHashes:
    """Hash the distinct word trigrams in the text. Fewer than three words count as one trigram."""
    words = text.lower().split()[:MAX_WORDS]
    trigrams = [" ".join(words[start : start + 3]) for start in range(max(1, len(words) - 2))]
    # A model may generate a lone surrogate, which the store keeps.
    encoded = [trigram.encode("utf-8", "surrogatepass") for trigram in trigrams]
    return np.unique(np.array([zlib.crc32(trigram) for trigram in encoded], np.uint64))


def measure_repetition(text: str) -> float:
    """Return the fraction of word trigrams that occurred earlier in the text, or 0 if there are none."""
    words = text.lower().split()[:MAX_WORDS]
    count = len(words) - 2
    return 1.0 - len({tuple(words[i : i + 3]) for i in range(count)}) / count if count > 0 else 0.0


def find_near_duplicates(texts: Sequence[str], similarity: float) -> list[list[int]]:
    """Return the indices of each set of two or more similar texts. Every text in a set has a Jaccard
    similarity of at least ``similarity`` to the first one. A few similar texts may be missed."""
    trigram_sets = [hash_trigrams(text) for text in texts]
    signatures = _minhash(trigram_sets)
    duplicates: dict[int, list[int]] = defaultdict(list)
    leaders: dict[tuple[int, bytes], list[int]] = defaultdict(list)  # the first texts of sets, by band
    for index, trigram_set in enumerate(trigram_sets):
        keys = [(band, part.tobytes()) for band, part in enumerate(signatures[index].reshape(NUM_BANDS, -1))]
        candidates = sorted({leader for key in keys for leader in leaders[key]})
        similar = (i for i in candidates if jaccard_similarity(trigram_sets[i], trigram_set) >= similarity)
        if (match := next(similar, None)) is not None:
            duplicates[match].append(index)
            continue
        for key in keys:
            if len(leaders[key]) < MAX_LEADERS_PER_BAND:
                leaders[key].append(index)
    return [[leader, *others] for leader, others in sorted(duplicates.items())]


def jaccard_similarity(a: TrigramHashes, b: TrigramHashes) -> float:
    common = len(np.intersect1d(a, b, assume_unique=True))
    return common / (len(a) + len(b) - common)


def _minhash(trigram_sets: Sequence[TrigramHashes]) -> NDArray[np.uint64]:
    rng = np.random.default_rng(0)
    factors = rng.integers(1, 1 << 31, NUM_HASHES, dtype=np.uint64)
    offsets = rng.integers(0, 1 << 60, NUM_HASHES, dtype=np.uint64)
    signatures = np.empty((len(trigram_sets), NUM_HASHES), np.uint64)
    for index, trigram_set in enumerate(trigram_sets):
        signatures[index] = ((trigram_set[:, None] * factors + offsets) % _PRIME).min(axis=0)
    return signatures
