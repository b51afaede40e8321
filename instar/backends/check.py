"""Validate samples before a backend computes with them, and select the samples that it computes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from instar.config import LossConfig
from instar.errors import BackendError
from instar.types import Floats, Sample


def nan_logprobs(samples: Sequence[Sample]) -> list[Floats]:
    return [np.full(len(sample), np.nan, np.float32) for sample in samples]


def select_trained(samples: Sequence[Sample]) -> list[int]:
    """Return the indices of the samples that have at least one trained token."""
    return [index for index, sample in enumerate(samples) if (sample.mask > 0).any()]


def select_scorable(samples: Sequence[Sample]) -> list[int]:
    """Return the indices of the samples with more than one token. The first token has no logprob."""
    return [index for index, sample in enumerate(samples) if len(sample) > 1]


def check_samples(
    samples: Sequence[Sample],
    vocab_size: int | None,
    max_tokens: int | None,
    loss: LossConfig | None = None,
) -> None:
    """Raise BackendError, naming the sample and the index, if a sample is invalid. A limit of None is not
    checked. The fields for training are checked only if ``loss`` is not None."""
    for sample in samples:
        _check_tokens(sample, vocab_size, max_tokens)
        if loss is not None:
            _check_training_fields(sample, loss)


def _check_tokens(sample: Sample, vocab_size: int | None, max_tokens: int | None) -> None:
    ids = sample.token_ids
    if sample.media:
        raise BackendError(
            f"sample {sample.sample_key} contains media, and this backend can train on text only"
        )
    if max_tokens is not None and len(ids) > max_tokens:
        raise BackendError(
            f"sample {sample.sample_key} has {len(ids)} tokens, but the model supports at most {max_tokens}"
        )
    end = np.inf if vocab_size is None else vocab_size
    outside = np.flatnonzero((ids < 0) | (ids >= end))
    if len(outside):
        raise BackendError(
            f"sample {sample.sample_key}: token id {ids[outside[0]]} at index {outside[0]} is outside the "
            f"vocabulary; valid ids are 0 to {end - 1}"
        )


def _check_training_fields(sample: Sample, loss: LossConfig) -> None:
    for name in ("mask", "logprobs", "advantages"):
        if (length := len(getattr(sample, name))) != len(sample):
            raise BackendError(
                f"sample {sample.sample_key} has {len(sample)} tokens, but its {name} has {length} entries"
            )
    if np.isnan(sample.mask).any():
        raise BackendError(f"sample {sample.sample_key}: the mask contains NaN")
    is_trained = sample.mask > 0
    if len(sample) and is_trained[0]:
        raise BackendError(
            f"sample {sample.sample_key}: the mask selects the first token, which has no logprob"
        )
    required = {"advantage": sample.advantages}
    if loss.name != "cross_entropy":
        required["logprob"] = sample.logprobs
    for name, values in required.items():
        missing = np.flatnonzero(is_trained & np.isnan(values))
        if len(missing):
            raise BackendError(
                f"sample {sample.sample_key}: the {name} of the trained token at index {missing[0]} is NaN"
            )
