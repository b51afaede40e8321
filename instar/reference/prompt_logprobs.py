"""The two ways in which a server of ``/v1/completions`` tells the logprobs of a prompt."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from instar.errors import EngineError
from instar.types import Floats, Ids, Json

IMPOSSIBLE = -9999.0
"""What vLLM writes for a probability of 0."""


class PromptLogprobsUnsupported(EngineError):
    """The server does not answer this form of the question."""


@dataclass(frozen=True, slots=True)
class ScoredPrompt:
    logprobs: Floats
    texts: Sequence[str | None]
    """What each token reads as, where the server says."""


class PromptLogprobsFormat(ABC):
    def __init__(self, name: str, asks: Json) -> None:
        self.name = name
        self.asks = asks
        """What the request says beside its prompt."""

    @abstractmethod
    def read(self, answer: Any, ids: Ids) -> ScoredPrompt:
        """Raise PromptLogprobsUnsupported if there are no logprobs, EngineError if they belong to other
        tokens."""


class VllmFormat(PromptLogprobsFormat):
    """As vLLM does it: keyed by token id."""

    def __init__(self) -> None:
        super().__init__("prompt_logprobs", {"prompt_logprobs": 0, "max_tokens": 1})

    def read(self, answer: Any, ids: Ids) -> ScoredPrompt:
        entries = _choice(answer, ids).get("prompt_logprobs")
        if not isinstance(entries, list) or not entries:
            raise PromptLogprobsUnsupported("the answer has no prompt_logprobs")
        given = cast(list[Mapping[str, Json] | None], entries)
        _check_length(len(given), ids)
        values = np.full(len(ids), np.nan, np.float32)
        texts: list[str | None] = [None] * len(ids)
        for position, (token, entry) in enumerate(zip(ids.tolist(), given, strict=True)):
            if position == 0:
                continue
            if entry is None or (told := entry.get(str(token))) is None:
                there = "nothing" if entry is None else ", ".join(entry)
                raise EngineError(
                    f"the teacher was given token {token} at {position} and tells the logprob of {there}"
                )
            values[position] = _number(told.get("logprob"))
            texts[position] = told.get("decoded_token")
        return ScoredPrompt(values, texts)


class EchoFormat(PromptLogprobsFormat):
    """As OpenAI did it: in front of the logprobs of what is sampled. Some servers take ``logprobs: 0`` for
    none at all, others know only those of the chosen tokens; some sample a token in any case."""

    def __init__(self, *, logprobs: int, max_tokens: int) -> None:
        asks = {"echo": True, "logprobs": logprobs, "max_tokens": max_tokens}
        super().__init__(", ".join(f"{name} {value}" for name, value in asks.items()), asks)

    def read(self, answer: Any, ids: Ids) -> ScoredPrompt:
        choice = _choice(answer, ids)
        told = choice.get("logprobs")
        values = told.get("token_logprobs") if isinstance(told, dict) else None
        if not isinstance(values, list) or not values:
            raise PromptLogprobsUnsupported("the answer has no token_logprobs")
        numbers = cast(list[float | None], values)
        if len(numbers) < len(ids):
            raise PromptLogprobsUnsupported(f"the answer has {len(numbers)} logprobs for {len(ids)} tokens")
        # One token may be sampled behind them.
        _check_length(max(len(ids), len(numbers) - 1), ids)
        prompt = [_number(value) for value in numbers[: len(ids)]]
        texts = _texts(cast(Json, told).get("tokens"), ids)
        return ScoredPrompt(np.asarray([np.nan, *prompt[1:]], np.float32), texts)


FORMATS: tuple[PromptLogprobsFormat, ...] = (
    VllmFormat(),
    EchoFormat(logprobs=0, max_tokens=0),
    EchoFormat(logprobs=1, max_tokens=1),
)


def _choice(answer: Any, ids: Ids) -> Json:
    try:
        choice: Json = answer["choices"][0]
        usage: Json = answer.get("usage") or {}
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise EngineError("the teacher's answer has no choices") from error
    read = usage.get("prompt_tokens")
    if isinstance(read, int) and read != len(ids):
        raise EngineError(
            f"the teacher was given {len(ids)} tokens and read {read}: it must take token ids as they are"
        )
    return choice


def _check_length(length: int, ids: Ids) -> None:
    if length != len(ids):
        raise EngineError(f"the teacher told the logprobs of {length} tokens; {len(ids)} were given")


def _texts(tokens: Any, ids: Ids) -> list[str | None]:
    """Servers may name tokens by their ids instead; then those are compared at once."""
    if not isinstance(tokens, list) or len(cast(list[Any], tokens)) < len(ids):
        return [None] * len(ids)
    texts: list[str | None] = []
    for position, (token, text) in enumerate(
        zip(ids.tolist(), cast(list[Any], tokens)[: len(ids)], strict=True)
    ):
        named = str(text).removeprefix("token_id:")
        if named != str(text) and named != str(token):
            raise EngineError(
                f"the teacher was given token {token} at {position} and tells the logprob of {named}"
            )
        texts.append(None if position == 0 or named != str(text) else str(text))
    return texts


def _number(value: Any) -> float:
    """NaN where it is missing, or no probability at all."""
    return float(value) if isinstance(value, int | float) and value > IMPOSSIBLE else np.nan
