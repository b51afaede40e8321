"""Decides when a reply ends: at a stop token, at a stop string or by its length."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

from instar.types import FinishReason, SamplingParams


class TokenDecoder(Protocol):
    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str: ...


class StopStrings:
    """Finds stop strings in a growing reply, decoding each token about twice.

    A token may end inside a character, so text is used only up to the last complete one. Decoding starts a
    few tokens back, because some tokenizers decode the first token differently.
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
        """Add a token and return the stop string that it completed, if any; the leftmost one if there are
        several."""
        self._ids.append(token_id)
        before = self._decode(self._ids[self._start : self._read])
        text = self._decode(self._ids[self._start :])
        if len(text) <= len(before) or text.endswith("\ufffd"):
            return None
        self._start, self._read = self._read, len(self._ids)
        self._tail += text[len(before) :]
        stop = find_stop_string(self._tail, self._stop)
        self._tail = self._tail[-self._keep :] if self._keep else ""
        return stop

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False) if ids else ""


def find_stop_string(text: str, stop: Collection[str]) -> str | None:
    """Return the stop string that occurs first in the text, or None."""
    matches = [(text.find(string), string) for string in stop if string in text]
    return min(matches)[1] if matches else None


class StopRule:
    """Decides after each sampled token whether the reply ends with it."""

    def __init__(
        self, params: SamplingParams, context_left: int, eos_ids: Collection[int], tokenizer: TokenDecoder
    ) -> None:
        self._left = min(params.max_tokens, context_left)
        self._ids = {*eos_ids, *params.stop_token_ids}
        self._strings = StopStrings(tokenizer, params.stop) if params.stop else None

    def push(self, token_id: int) -> tuple[FinishReason | None, str | None]:
        """Add a token. Returns the finish reason if this token is the last one, and the stop string that it
        completed."""
        self._left -= 1
        if token_id in self._ids:
            return "stop", None
        if self._strings is not None and (stop := self._strings.push(token_id)) is not None:
            return "stop", stop
        return ("length", None) if self._left <= 0 else (None, None)
