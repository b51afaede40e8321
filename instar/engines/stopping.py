"""Decides when a reply ends: at a stop token, at a stop string or at the maximum length."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

from instar.types import FinishReason, SamplingParams


class TokenDecoder(Protocol):
    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str: ...


class StopStrings:
    """Finds stop strings in a growing reply. Text is searched only up to the last complete character. Some
    tokenizers decode the first token differently, so decoding starts a few tokens before the new text."""

    def __init__(self, tokenizer: TokenDecoder, stop: tuple[str, ...]) -> None:
        self._tokenizer = tokenizer
        self._stop = stop
        self._overlap_chars = max(map(len, stop)) - 1
        self._ids: list[int] = []
        self._window_start = 0
        self._searched_tokens = 0
        self._tail = ""

    def push(self, token_id: int) -> str | None:
        """Add a token and return the leftmost stop string that the token completes, or None."""
        self._ids.append(token_id)
        known_text = self._decode(self._ids[self._window_start : self._searched_tokens])
        text = self._decode(self._ids[self._window_start :])
        if len(text) <= len(known_text) or text.endswith("\ufffd"):
            return None
        self._window_start, self._searched_tokens = self._searched_tokens, len(self._ids)
        self._tail += text[len(known_text) :]
        stop = find_stop_string(self._tail, self._stop)
        self._tail = self._tail[-self._overlap_chars :] if self._overlap_chars else ""
        return stop

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False) if ids else ""


def find_stop_string(text: str, stop: Collection[str]) -> str | None:
    """Return the stop string that occurs first in the text, or None."""
    matches = [(text.find(string), string) for string in stop if string in text]
    return min(matches)[1] if matches else None


class StopRule:
    def __init__(
        self, params: SamplingParams, context_left: int, eos_ids: Collection[int], tokenizer: TokenDecoder
    ) -> None:
        self._tokens_left = min(params.max_tokens, context_left)
        self._stop_ids = {*eos_ids, *params.stop_token_ids}
        self._stop_strings = StopStrings(tokenizer, params.stop) if params.stop else None

    def push(self, token_id: int) -> tuple[FinishReason | None, str | None]:
        """Add a token. Return the finish reason and the stop string that ended the reply, each or None."""
        self._tokens_left -= 1
        if token_id in self._stop_ids:
            return "stop", None
        if self._stop_strings is not None and (stop := self._stop_strings.push(token_id)) is not None:
            return "stop", stop
        return ("length", None) if self._tokens_left <= 0 else (None, None)


def collect_eos_ids(*config_values: int | list[int] | None) -> set[int]:
    """Collect the end-of-sequence ids from the ``eos_token_id`` values of configs and tokenizers."""
    eos_ids: set[int] = set()
    for ids in config_values:
        eos_ids.update(ids if isinstance(ids, list) else [] if ids is None else [ids])
    return eos_ids
