"""Computes a lower bound on the number of tokens in a text, much faster than tokenizing it."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

_CHUNK_BYTES = 1024 * 1024
_MAX_COMPOSED_CHARACTERS = 4
"""NFC composes at most this many characters into one."""
_LOSSLESS_PRE_TOKENIZERS = {"ByteLevel", "Digits", "Punctuation", "Split"}


class TokenBound:
    """Computes the bound for a byte-level BPE tokenizer. For other tokenizers, the bound is 0.

    The tokens of a text partition its bytes. Each byte counts as 1 / (length of the longest token that
    contains it), so no token counts as more than 1.
    """

    def __init__(self, backend: Any) -> None:
        self._is_nfc = backend.normalizer is not None
        self._weights = np.zeros(256)
        if not _is_lossless(backend):
            return
        byte_characters = _list_byte_characters()
        vocabulary: dict[str, int] = backend.get_vocab(with_added_tokens=False)
        added = (token.content.encode() for token in backend.get_added_tokens_decoder().values())
        added_tokens = ["".join(byte_characters[byte] for byte in token) for token in added]
        longest: dict[str, int] = {}
        for token in sorted([*vocabulary, *added_tokens], key=len, reverse=True):
            longest |= dict.fromkeys(set(token).difference(longest), len(token))
        for byte, character in enumerate(byte_characters):
            if character in vocabulary:  # the tokenizer drops unknown bytes
                self._weights[byte] = 1 / longest[character]

    def compute(self, text: str) -> int:
        """Return a lower bound on the number of tokens in the text."""
        data = np.frombuffer(text.encode("utf-8", "replace"), np.uint8)
        nfc_bound = 0.0
        if self._is_nfc and not text.isascii():
            nfc_bound = self._weights.min() * len(text) / _MAX_COMPOSED_CHARACTERS
            # NFC composes an ASCII character only with non-ASCII characters that follow it.
            data = data[:-1][(data[:-1] | data[1:]) < 128]
        chunks = (data[start : start + _CHUNK_BYTES] for start in range(0, len(data), _CHUNK_BYTES))
        byte_bound = sum(float(self._weights[chunk].sum()) for chunk in chunks)
        return int(max(nfc_bound, byte_bound) * (1 - 1e-9))  # the sum may have been rounded up


def _is_lossless(backend: Any) -> bool:
    """Return True for a byte-level BPE that keeps all bytes of a text, or of its NFC normalization."""
    if backend.pre_tokenizer is None or backend.truncation is not None:
        return False
    if any(t.lstrip or t.rstrip or t.normalized for t in backend.get_added_tokens_decoder().values()):
        return False
    if backend.normalizer is not None and _read_state(backend.normalizer)["type"] != "NFC":
        return False
    state = _read_state(backend.pre_tokenizer)
    parts = state.get("pretokenizers", [state])
    types = {part["type"] for part in parts}
    is_byte_level = "ByteLevel" in types and types <= _LOSSLESS_PRE_TOKENIZERS
    is_bpe = type(backend.model).__name__ == "BPE"
    return is_bpe and is_byte_level and all(part.get("behavior") != "Removed" for part in parts)


def _read_state(component: Any) -> dict[str, Any]:
    return json.loads(component.__getstate__())


def _list_byte_characters() -> list[str]:
    """Return the character that represents each byte in the vocabulary of a byte-level tokenizer."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]
