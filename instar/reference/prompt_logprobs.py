"""The formats in which ``/v1/completions`` endpoints return prompt logprobs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from instar.errors import EngineError
from instar.types import Floats, Ids, Json

ZERO_PROBABILITY_LOGPROB = -9999.0
"""The logprob that vLLM returns for a probability of 0."""


class PromptLogprobsUnsupported(EngineError):
    """The server does not return prompt logprobs in this format."""


@dataclass(frozen=True, slots=True)
class ScoredPrompt:
    logprobs: Floats
    texts: Sequence[str | None]
    """The text of each token, or None where the server does not return it. The first entry is None."""


@dataclass(frozen=True, slots=True)
class PromptLogprobsFormat:
    request_fields: Json
    parse: Callable[[Any, Ids], ScoredPrompt]
    """Parses a response. Raises PromptLogprobsUnsupported if it has no prompt logprobs, and EngineError if it
    is malformed or the logprobs are for different tokens."""


def _parse_vllm_response(response: Any, ids: Ids) -> ScoredPrompt:
    """Parse vLLM's format: ``prompt_logprobs``, keyed by token id."""
    entries = _get_first_choice(response, ids).get("prompt_logprobs")
    if not isinstance(entries, list) or not entries:
        raise PromptLogprobsUnsupported("the response has no prompt_logprobs")
    all_candidates = cast(list[Mapping[str, Json] | None], entries)
    _check_length(len(all_candidates), ids)
    values = np.full(len(ids), np.nan, np.float32)
    texts: list[str | None] = [None] * len(ids)
    for position, token in enumerate(ids.tolist()[1:], 1):
        candidates = all_candidates[position] or {}
        if (candidate := candidates.get(str(token))) is None:
            raise _make_wrong_token_error(token, position, *candidates)
        values[position] = _parse_logprob(candidate.get("logprob"))
        texts[position] = candidate.get("decoded_token")
    return ScoredPrompt(values, texts)


def _parse_echo_response(response: Any, ids: Ids) -> ScoredPrompt:
    """Parse OpenAI's format: with ``echo``, the prompt logprobs precede those of the sampled tokens."""
    logprobs = _get_first_choice(response, ids).get("logprobs")
    values = logprobs.get("token_logprobs") if isinstance(logprobs, dict) else None
    if not isinstance(values, list) or not values:
        raise PromptLogprobsUnsupported("the response has no token_logprobs")
    token_logprobs = cast(list[float | None], values)
    count = len(token_logprobs)
    if count < len(ids):
        raise PromptLogprobsUnsupported(f"the response has {count} logprobs for {len(ids)} tokens")
    # One sampled token may follow the prompt.
    _check_length(max(len(ids), count - 1), ids)
    prompt_logprobs = [_parse_logprob(value) for value in token_logprobs[: len(ids)]]
    texts = _parse_token_texts(cast(Json, logprobs).get("tokens"), ids)
    return ScoredPrompt(np.asarray([np.nan, *prompt_logprobs[1:]], np.float32), texts)


# Servers differ: some return nothing for `logprobs: 0`, and some always sample a token.
FORMATS = {
    "prompt_logprobs": PromptLogprobsFormat({"prompt_logprobs": 0, "max_tokens": 1}, _parse_vllm_response),
    **{
        f"echo True, logprobs {count}, max_tokens {count}": PromptLogprobsFormat(
            {"echo": True, "logprobs": count, "max_tokens": count}, _parse_echo_response
        )
        for count in (0, 1)
    },
}
"""The formats, in the order in which they are tried."""


def _get_first_choice(response: Any, ids: Ids) -> Json:
    try:
        choice: Json = response["choices"][0]
        usage: Json = response.get("usage") or {}
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise EngineError("the teacher's response has no choices") from error
    count = usage.get("prompt_tokens")
    if isinstance(count, int) and count != len(ids):
        raise EngineError(
            f"the teacher read {count} tokens instead of {len(ids)}; the server must not change the prompt"
        )
    return choice


def _check_length(length: int, ids: Ids) -> None:
    if length != len(ids):
        raise EngineError(f"the teacher returned logprobs for {length} tokens instead of {len(ids)}")


def _parse_token_texts(tokens: Any, ids: Ids) -> list[str | None]:
    """Return the text of each token, or None where it is unknown. Raises EngineError if the server returns
    token ids instead of texts and they differ from ``ids``."""
    if not isinstance(tokens, list) or len(cast(list[Any], tokens)) < len(ids):
        return [None] * len(ids)
    texts: list[str | None] = []
    for position, token in enumerate(ids.tolist()):
        text = str(cast(list[Any], tokens)[position])
        token_id = text.removeprefix("token_id:")
        if token_id != text and token_id != str(token):
            raise _make_wrong_token_error(token, position, token_id)
        texts.append(None if position == 0 or token_id != text else text)
    return texts


def _make_wrong_token_error(token: int, position: int, *returned: str) -> EngineError:
    others = f", only for {', '.join(returned)}" if returned else ""
    return EngineError(f"the teacher returned no logprob for token {token} at index {position}{others}")


def _parse_logprob(value: Any) -> float:
    """Return the logprob, or NaN if the value is missing or means a probability of 0."""
    return float(value) if isinstance(value, int | float) and value > ZERO_PROBABILITY_LOGPROB else np.nan
