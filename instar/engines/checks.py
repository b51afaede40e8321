"""Request validation shared by all engines."""

from __future__ import annotations

import math

import numpy as np

from instar.engines.base import EngineInfo, Prompt, one_policy_error
from instar.errors import ConstraintError, EngineError, PromptTooLong
from instar.types import BIAS_RANGE, SAMPLING_RANGES, Ids, Policy, PolicyRef, SamplingParams

INT32 = np.iinfo(np.int32)


def to_ids(prompt: Prompt) -> Ids:
    """Return the prompt as an int32 array. Raises EngineError if an id does not fit in int32."""
    if isinstance(prompt, np.ndarray) and prompt.dtype == np.int32:
        return prompt
    try:
        ids = np.asarray(prompt, np.int64)
        if len(ids) and (ids.min() < INT32.min or ids.max() > INT32.max):
            raise OverflowError
    except OverflowError as error:
        token = next(token for token in prompt if not INT32.min <= token <= INT32.max)
        raise EngineError(f"Token id {token} is not in the model's vocabulary.") from error
    return ids.astype(np.int32)


def check_request(
    info: EngineInfo, prompt: Prompt, params: SamplingParams, policy: PolicyRef | None = None
) -> Ids:
    """Return the prompt as an int32 array. Raises EngineError if the request is invalid, PromptTooLong if
    there is no room for a new token, ConstraintError if the engine cannot constrain replies, or
    PolicyNotFound if it cannot serve a named policy."""
    prompt_ids = _check_ids(info, prompt)
    if policy is not None and not info.serves_several_policies:
        raise one_policy_error(info)
    if params.max_tokens < 1:
        raise EngineError(f"max_tokens must be at least 1, got {params.max_tokens}.")
    if not (math.isfinite(params.temperature) and params.temperature >= 0):
        raise EngineError(f"temperature must be finite and at least 0, got {params.temperature}.")
    if params.top_p == 0:
        raise EngineError("top_p must be greater than 0, got 0.")
    for name, (low, high) in SAMPLING_RANGES.items():
        if not low <= (value := getattr(params, name)) <= high:
            raise EngineError(f"{name} must be between {low} and {high}, got {value}.")
    for name in params.optional_settings:
        if name not in info.sampling_fields:
            raise EngineError(f"The {info.kind} engine does not support {name}; leave it out.")
    for token, bias in params.logit_bias.items():
        if not 0 <= token < info.vocab_size:
            raise EngineError(f"logit_bias[{token}]: the token is not in the vocabulary.")
        if not BIAS_RANGE[0] <= bias <= BIAS_RANGE[1]:
            raise EngineError(f"logit_bias[{token}] must be between -100 and 100, got {bias}.")
    if params.constraint is not None and not info.constrains_output:
        raise ConstraintError(f"The {info.kind} engine cannot constrain replies.")
    if "" in params.stop:
        raise EngineError("stop must not contain an empty string.")
    if len(prompt_ids) >= info.max_context:
        raise PromptTooLong(
            f"The prompt has {len(prompt_ids)} tokens; it must have fewer than {info.max_context}."
        )
    return prompt_ids


def check_score_request(info: EngineInfo, prompt: Prompt, policy: PolicyRef | None = None) -> Ids:
    token_ids = _check_ids(info, prompt)
    if policy is not None and not info.serves_several_policies:
        raise one_policy_error(info)
    if len(token_ids) > info.max_context:
        raise PromptTooLong(
            f"The prompt has {len(token_ids)} tokens; at most {info.max_context} can be scored."
        )
    return token_ids


def check_artifact(info: EngineInfo, policy: Policy) -> None:
    if policy.artifact.kind not in info.artifacts:
        kinds = ", ".join(info.artifacts)
        raise EngineError(f"The {info.kind} engine can load {kinds}, but not {policy.artifact.kind}.")


def _check_ids(info: EngineInfo, prompt: Prompt) -> Ids:
    ids = to_ids(prompt)
    if len(ids) == 0:
        raise EngineError("The prompt is empty; send at least one token id.")
    if ids.min() < 0 or ids.max() >= info.vocab_size:
        raise EngineError(
            f"Token ids must be between 0 and {info.vocab_size - 1}, got {ids.min()} to {ids.max()}."
        )
    return ids
