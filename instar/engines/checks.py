"""Checks that every engine applies to a request before it starts the request."""

from __future__ import annotations

import math

import numpy as np

from instar.engines.base import EngineInfo, Prompt
from instar.errors import EngineError, PromptTooLong
from instar.types import Ids, SamplingParams

INT32 = np.iinfo(np.int32)


def to_ids(prompt: Prompt) -> Ids:
    """Return the prompt as an int32 array, without a copy if it already is one. Raises EngineError for ids
    that do not fit into int32."""
    if isinstance(prompt, np.ndarray) and prompt.dtype == np.int32:
        return prompt
    try:
        wide = np.asarray(prompt, np.int64)
    except OverflowError as error:
        raise EngineError("Token ids must fit into 32 bits.") from error
    if len(wide) and (wide.min() < INT32.min or wide.max() > INT32.max):
        raise EngineError("Token ids must fit into 32 bits.")
    return wide.astype(np.int32)


def check_request(info: EngineInfo, prompt_ids: Ids, params: SamplingParams) -> None:
    """Raise EngineError if the request is invalid, or PromptTooLong if the context has no room for one new
    token."""
    _check_ids(info, prompt_ids)
    if params.max_tokens < 1:
        raise EngineError(f"max_tokens must be at least 1, not {params.max_tokens}.")
    if not (math.isfinite(params.temperature) and params.temperature >= 0):
        raise EngineError(f"temperature must be 0 or greater, not {params.temperature}.")
    if not 0 < params.top_p <= 1:
        raise EngineError(f"top_p must be above 0 and at most 1, not {params.top_p}.")
    if params.top_k < 0:
        raise EngineError(f"top_k must be 0 or greater, not {params.top_k}.")
    if "" in params.stop:
        raise EngineError("A stop string is empty; send only non-empty strings.")
    if len(prompt_ids) >= info.max_context:
        raise PromptTooLong(
            f"A prompt of {len(prompt_ids)} tokens leaves no room in a context of {info.max_context}."
        )


def check_score_request(info: EngineInfo, token_ids: Ids) -> None:
    """Raise EngineError or PromptTooLong if the tokens cannot be scored."""
    _check_ids(info, token_ids)
    if len(token_ids) > info.max_context:
        raise PromptTooLong(f"{len(token_ids)} tokens do not fit into a context of {info.max_context}.")


def _check_ids(info: EngineInfo, ids: Ids) -> None:
    if len(ids) == 0:
        raise EngineError("The prompt is empty; send at least one token id.")
    if ids.min() < 0 or ids.max() >= info.vocab_size:
        raise EngineError(f"Token ids must be from 0 to {info.vocab_size - 1}.")
