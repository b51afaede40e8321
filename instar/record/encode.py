"""Text → tokens, without doing the same work twice.

A tokenizer cuts text at its added tokens (`<|im_start|>` and the like) first and encodes what lies between
piece by piece. So does this, and remembers the pieces: the instructions and tools that open every session
of an agent, and the messages of a history that is rendered anew, are encoded once. That pieces can be
encoded apart is proved when the tokenizer is loaded; where it does not hold, whole texts are.
"""

from __future__ import annotations

import json
import re
from collections import OrderedDict
from itertools import chain
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_BUDGET = 8 * 1024 * 1024
"""Characters kept."""
_PROBES = (
    "{0}user\nHello there.{1}\n{0}assistant\n",
    " {0}  system\n\n\tA  B{1}{1}\n {0}\n",
    "é{0}日本語 naïve{1}🙂 'quoted' {0}x{1}",
    "{0}{1}",
    "a{0} b{1} c\n\n{0}\n d",
)


class CachingEncoder:
    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self._backend: Any = tokenizer.backend_tokenizer
        self._kept: OrderedDict[str, list[int]] = OrderedDict()
        self._size = 0
        self._ids: dict[str, int] = {}
        self._cut = self._cutter()

    def __call__(self, text: str) -> list[int]:
        if self._cut is None:
            return self._whole(text)
        pieces = self._cut.split(text)
        return list(chain.from_iterable(map(self._piece, pieces)))

    def _piece(self, piece: str) -> list[int]:
        if not piece:
            return []
        if (special := self._ids.get(piece)) is not None:
            return [special]
        if (known := self._kept.get(piece)) is not None:
            self._kept.move_to_end(piece)
            return known
        ids = self._whole(piece)
        self._kept[piece] = ids
        self._size += len(piece)
        while self._size > _BUDGET:
            self._size -= len(self._kept.popitem(last=False)[0])
        return ids

    def _whole(self, text: str) -> list[int]:
        return self._backend.encode(text, add_special_tokens=False).ids

    def _cutter(self) -> re.Pattern[str] | None:
        """What cuts a text into pieces that are encoded apart; None when they cannot be."""
        added: list[dict[str, Any]] = json.loads(self._backend.to_str())["added_tokens"]
        if not added or any(t["lstrip"] or t["rstrip"] or t["single_word"] or t["normalized"] for t in added):
            return None
        self._ids = {token["content"]: token["id"] for token in added}
        longest_first = sorted(self._ids, key=len, reverse=True)
        self._cut = re.compile(f"({'|'.join(map(re.escape, longest_first))})")
        pairs = zip(longest_first, longest_first[::-1], strict=True)
        texts = [probe.format(*pair) for pair in list(pairs)[:8] for probe in _PROBES]
        proved = all(self(text) == self._whole(text) for text in texts)
        return self._cut if proved else None
