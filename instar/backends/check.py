"""Validate samples, and select the ones that a backend has to process."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from instar.config import LossConfig
from instar.errors import BackendError
from instar.types import Floats, Sample


def make_nan_logprobs(samples: Sequence[Sample]) -> list[Floats]:
    return [np.full(len(sample), np.nan, np.float32) for sample in samples]


def select_trained(samples: Sequence[Sample]) -> list[int]:
    """Return the indices of the samples with at least one trained token."""
    return [index for index, sample in enumerate(samples) if (sample.mask > 0).any()]


def select_scorable(samples: Sequence[Sample]) -> list[int]:
    """Return the indices of the samples with more than one token. The first token has no logprob."""
    return [index for index, sample in enumerate(samples) if len(sample) > 1]


def check_samples(
    samples: Sequence[Sample], vocab_size: int | None, max_tokens: int | None, loss: LossConfig | None = None
) -> None:
    """Raise BackendError if a sample is invalid. A limit that is None is not checked. The mask, logprobs and
    advantages are checked only if ``loss`` is not None."""
    for sample in samples:
        problem = _find_token_problem(sample, vocab_size, max_tokens)
        if problem is None and loss is not None:
            problem = _find_training_problem(sample, loss)
        if problem is not None:
            raise BackendError(f"sample {sample.sample_key}: {problem}")


def _find_token_problem(sample: Sample, vocab_size: int | None, max_tokens: int | None) -> str | None:
    token_ids = sample.token_ids
    if sample.media:
        return "it contains media, but this backend supports only text"
    if max_tokens is not None and len(token_ids) > max_tokens:
        return f"it has {len(token_ids)} tokens, but the model's context is {max_tokens}"
    end = np.inf if vocab_size is None else vocab_size
    invalid_indices = np.flatnonzero((token_ids < 0) | (token_ids >= end))
    if len(invalid_indices):
        index = invalid_indices[0]
        return f"token id {token_ids[index]} at index {index} is outside the vocabulary (0 to {end - 1})"
    return None


def _find_training_problem(sample: Sample, loss: LossConfig) -> str | None:
    for name in ("mask", "logprobs", "advantages"):
        if (length := len(getattr(sample, name))) != len(sample):
            return f"it has {len(sample)} tokens, but its {name} has {length} entries"
    if np.isnan(sample.mask).any():
        return "the mask contains NaN; use 0 for tokens that are not trained"
    is_trained = sample.mask > 0
    if len(sample) and is_trained[0]:
        return "the mask selects the first token, which has no logprob; set its mask to 0"
    required = {"advantage": sample.advantages}
    if loss.name != "cross_entropy":
        required["logprob"] = sample.logprobs
    for name, values in required.items():
        missing = np.flatnonzero(is_trained & np.isnan(values))
        if len(missing):
            return f"the {name} of the trained token at index {missing[0]} is NaN"
    return None
