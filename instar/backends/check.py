"""Checks samples before anything is computed, and selects the samples to compute."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from instar.config import LossConfig
from instar.errors import BackendError
from instar.types import Floats, Sample


def nan_logprobs(samples: Sequence[Sample]) -> list[Floats]:
    return [np.full(len(sample), np.nan, np.float32) for sample in samples]


def select_trained(samples: Sequence[Sample]) -> list[int]:
    """Return the indices of the samples that have a trained token; the others are not part of the loss."""
    return [index for index, sample in enumerate(samples) if (sample.mask > 0).any()]


def select_scorable(samples: Sequence[Sample]) -> list[int]:
    """Return the indices of the samples with more than one token; a single token has no logprob."""
    return [index for index, sample in enumerate(samples) if len(sample) > 1]


def check_samples(
    samples: Sequence[Sample],
    vocab_size: int | None,
    max_tokens: int | None,
    loss: LossConfig | None = None,
) -> None:
    """Raise BackendError, naming the sample and the index, if a sample is invalid. A limit of None is
    unknown. Without a loss, the fields for training are not checked."""
    for sample in samples:
        _check_tokens(sample, vocab_size, max_tokens)
        if loss is not None:
            _check_training_fields(sample, loss)


def _check_tokens(sample: Sample, vocab_size: int | None, max_tokens: int | None) -> None:
    ids = sample.token_ids
    if sample.media:
        raise BackendError(f"sample {sample.sample_key}: this backend does not train on media")
    if max_tokens is not None and len(ids) > max_tokens:
        raise BackendError(
            f"sample {sample.sample_key} has {len(ids)} tokens; the model takes at most {max_tokens}"
        )
    outside = np.flatnonzero((ids < 0) | (ids >= (np.inf if vocab_size is None else vocab_size)))
    if len(outside):
        index = int(outside[0])
        raise BackendError(
            f"sample {sample.sample_key}: token {int(ids[index])} at index {index} is outside the vocabulary "
            f"of {vocab_size}"
        )


def _check_training_fields(sample: Sample, loss: LossConfig) -> None:
    for name in ("mask", "logprobs", "advantages"):
        if len(getattr(sample, name)) != len(sample):
            raise BackendError(
                f"sample {sample.sample_key}: {name} has {len(getattr(sample, name))} entries for "
                f"{len(sample)} tokens"
            )
    if np.isnan(sample.mask).any():
        raise BackendError(f"sample {sample.sample_key}: the mask contains NaN")
    trained = sample.mask > 0
    if len(sample) and trained[0]:
        raise BackendError(f"sample {sample.sample_key}: index 0 is trained, but no token precedes it")
    required = {"advantage": sample.advantages}
    if loss.name != "cross_entropy":
        required["logprob"] = sample.logprobs
    for name, values in required.items():
        missing = np.flatnonzero(trained & np.isnan(values))
        if len(missing):
            raise BackendError(f"sample {sample.sample_key}: no {name} for the token trained at {missing[0]}")
