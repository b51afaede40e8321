"""Distributes a batch over the ranks, and gathers the results in the order of the batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from instar.types import Floats, Ids, Sample

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class RankSample:
    """The fields of a sample that a rank needs. They are aligned like the fields of `instar.types.Sample`."""

    token_ids: Ids
    mask: Floats
    advantages: Floats
    logprobs: Floats


@dataclass(frozen=True, slots=True)
class RankShares:
    samples: list[list[RankSample]]
    """The samples of each rank. All ranks have equally many, because they run the same number of
    micro-batches."""
    indices: list[list[int]]
    """The index in the batch of each rank's samples. Samples beyond these are padding."""
    max_tokens: int
    """The largest number of tokens in one micro-batch of a rank."""


@dataclass(frozen=True, slots=True)
class RankResult:
    is_finite: bool
    """True if the loss was finite on every rank; otherwise no gradient was added."""
    logprobs: list[Floats]
    micro_batches: int


@dataclass(frozen=True, slots=True)
class SerializedWeight:
    """A weight that rank 0 sends as bytes."""

    name: str
    dtype: str
    shape: list[int]
    content: NDArray[np.uint8]

    def tensor(self) -> Tensor:
        import torch

        # A copy, because arrays in Ray's object store are read-only.
        return torch.from_numpy(self.content.copy()).view(getattr(torch, self.dtype)).view(self.shape)


def distribute_samples(samples: Sequence[Sample], ranks: int, micro_batch_tokens: int) -> RankShares:
    """Return each rank's share of the samples. They are dealt out in alternating directions, longest first,
    to balance the number of tokens."""
    indices: list[list[int]] = [[] for _ in range(ranks)]
    by_length = sorted(range(len(samples)), key=lambda i: -len(samples[i]))
    for turn, i in enumerate(by_length):
        lap, rank = divmod(turn, ranks)
        indices[rank if lap % 2 == 0 else ranks - 1 - rank].append(i)
    padding = _make_padding(samples[by_length[-1]])
    size = max(len(own) for own in indices)
    shares = [[_rank_sample(samples[i]) for i in own] + [padding] * (size - len(own)) for own in indices]
    return RankShares(shares, indices, max(micro_batch_tokens, len(samples[by_length[0]])))


def gather_logprobs(
    shares: RankShares, logprobs: Sequence[Sequence[Floats]], samples: Sequence[Sample]
) -> list[Floats]:
    results: list[Floats] = [np.empty(0, np.float32)] * len(samples)
    for own, values in zip(shares.indices, logprobs, strict=True):
        for i, value in zip(own, values, strict=False):
            results[i] = value
    return results


def _rank_sample(sample: Sample) -> RankSample:
    return RankSample(sample.token_ids, sample.mask, sample.advantages, sample.logprobs)


def _make_padding(sample: Sample) -> RankSample:
    zeros = np.zeros(len(sample), np.float32)
    return RankSample(sample.token_ids, zeros, zeros, zeros)
