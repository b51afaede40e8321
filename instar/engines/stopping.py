"""When a reply ends: stop tokens, stop strings, length."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

from instar.types import FinishReason, SamplingParams


class TokenDecoder(Protocol):
    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str: ...


class StopStrings:
    """Finds stop strings in a growing reply, decoding each token about twice.

    A token may end inside a character, so text is taken only up to the last whole one. Decoding
    starts a few tokens back, because some tokenizers write a token differently at the start.
    """

    def __init__(self, tokenizer: TokenDecoder, stop: tuple[str, ...]) -> None:
        self._tokenizer = tokenizer
        self._stop = stop
        self._keep = max(map(len, stop)) - 1
        self._ids: list[int] = []
        self._start = 0
        self._read = 0
        self._tail = ""

    def push(self, token_id: int) -> str | None:
        """The stop string that this token completed, the leftmost if several did."""
        self._ids.append(token_id)
        before = self._decode(self._ids[self._start : self._read])
        text = self._decode(self._ids[self._start :])
        if len(text) <= len(before) or text.endswith("\ufffd"):
            return None
        self._start, self._read = self._read, len(self._ids)
        self._tail += text[len(before) :]
        found = [(self._tail.find(stop), stop) for stop in self._stop if stop in self._tail]
        self._tail = self._tail[-self._keep :] if self._keep else ""
        return min(found)[1] if found else None

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False) if ids else ""


class StopRule:
    """Judges every sampled token of one reply."""

    def __init__(
        self, params: SamplingParams, context_left: int, eos_ids: Collection[int], tokenizer: TokenDecoder
    ) -> None:
        """``room`` is what the context has left for the reply."""
        self._left = min(params.max_tokens, context_left)
        self._ids = {*eos_ids, *params.stop_token_ids}
        self._strings = StopStrings(tokenizer, params.stop) if params.stop else None

    def push(self, token_id: int) -> tuple[FinishReason | None, str | None]:
        """The finish reason, if this token is the last one, and the stop string that made it so."""
        self._left -= 1
        if token_id in self._ids:
            return "stop", None
        if self._strings is not None and (stop := self._strings.push(token_id)) is not None:
            return "stop", stop
        return ("length", None) if self._left <= 0 else (None, None)
