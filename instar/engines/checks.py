"""Request checks that all engines share."""

from __future__ import annotations

import math

import numpy as np

from instar.engines.base import EngineInfo, Prompt
from instar.errors import EngineError, PromptTooLong
from instar.types import Ids, Policy, SamplingParams

INT32 = np.iinfo(np.int32)


def to_ids(prompt: Prompt) -> Ids:
    """Return the prompt as an int32 array. Raises EngineError if an id does not fit into int32."""
    if isinstance(prompt, np.ndarray) and prompt.dtype == np.int32:
        return prompt
    try:
        ids = np.asarray(prompt, np.int64)
        if len(ids) and (ids.min() < INT32.min or ids.max() > INT32.max):
            raise OverflowError
    except OverflowError as error:
        token = next(token for token in prompt if not INT32.min <= token <= INT32.max)
        raise EngineError(f"Token id {token} is not in the model's vocabulary; send valid ids.") from error
    return ids.astype(np.int32)


def check_request(info: EngineInfo, prompt_ids: Ids, params: SamplingParams) -> None:
    """Raise EngineError if the request is invalid, or PromptTooLong if no new token fits into the context."""
    _check_ids(info, prompt_ids)
    if params.max_tokens < 1:
        raise EngineError(f"max_tokens is {params.max_tokens}; it must be at least 1.")
    if not (math.isfinite(params.temperature) and params.temperature >= 0):
        raise EngineError(f"temperature is {params.temperature}; it must be finite and at least 0.")
    if not 0 < params.top_p <= 1:
        raise EngineError(f"top_p is {params.top_p}; it must be above 0 and at most 1.")
    if params.top_k < 0:
        raise EngineError(f"top_k is {params.top_k}; it must be at least 0 (0: all tokens).")
    if "" in params.stop:
        raise EngineError("stop contains an empty string; remove it.")
    if len(prompt_ids) >= info.max_context:
        raise PromptTooLong(
            f"The prompt has {len(prompt_ids)} tokens; it must have fewer than {info.max_context}."
        )


def check_score_request(info: EngineInfo, token_ids: Ids) -> None:
    _check_ids(info, token_ids)
    if len(token_ids) > info.max_context:
        raise PromptTooLong(
            f"The prompt has {len(token_ids)} tokens; at most {info.max_context} can be scored."
        )


def check_artifact(info: EngineInfo, policy: Policy) -> None:
    if policy.artifact.kind not in info.artifacts:
        kinds = ", ".join(info.artifacts)
        raise EngineError(f"The {info.kind} engine can load {kinds}, but not {policy.artifact.kind}.")


def _check_ids(info: EngineInfo, ids: Ids) -> None:
    if len(ids) == 0:
        raise EngineError("The prompt is empty; send at least one token id.")
    if ids.min() < 0 or ids.max() >= info.vocab_size:
        raise EngineError(
            f"The token ids are from {ids.min()} to {ids.max()}; allowed are 0 to {info.vocab_size - 1}."
        )
