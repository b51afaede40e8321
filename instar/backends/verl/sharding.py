"""A batch dealt out to the ranks, and their answers put back into its order."""

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
    """A sample, as far as a rank needs it. Aligned as `instar.types.Sample` is."""

    token_ids: Ids
    mask: Floats
    advantages: Floats
    logprobs: Floats


@dataclass(frozen=True, slots=True)
class RankShares:
    rows: list[list[RankSample]]
    """By rank; as many for each, for verl's ranks go through as many micro-batches as one another."""
    places: list[list[int]]
    """By rank, the sample that each row is; rows beyond are filling."""
    max_tokens: int
    """In one micro-batch of a rank."""


@dataclass(frozen=True, slots=True)
class RankResult:
    """What a rank made of its rows."""

    finite: bool
    """Whether the loss was, on every rank; otherwise nothing was added."""
    logprobs: list[Floats]
    micro_batches: int


@dataclass(frozen=True, slots=True)
class SerializedWeight:
    """A weight on its way from rank 0, as bytes."""

    name: str
    dtype: str
    shape: list[int]
    content: NDArray[np.uint8]

    def tensor(self) -> Tensor:
        import torch

        # A copy: what comes out of Ray's object store can only be read.
        return torch.from_numpy(self.content.copy()).view(getattr(torch, self.dtype)).view(self.shape)


def distribute_samples(samples: Sequence[Sample], ranks: int, micro_batch_tokens: int) -> RankShares:
    """Longest first and back and forth, so that ranks have about as many tokens as one another."""
    places: list[list[int]] = [[] for _ in range(ranks)]
    by_length = sorted(range(len(samples)), key=lambda i: -len(samples[i]))
    for turn, i in enumerate(by_length):
        lap, seat = divmod(turn, ranks)
        places[seat if lap % 2 == 0 else ranks - 1 - seat].append(i)
    filling = _untrained(samples[by_length[-1]])
    height = max(len(mine) for mine in places)
    rows = [[_row(samples[i]) for i in mine] + [filling] * (height - len(mine)) for mine in places]
    return RankShares(rows, places, max(micro_batch_tokens, len(samples[by_length[0]])))


def gather(share: RankShares, found: Sequence[Sequence[Floats]], samples: Sequence[Sample]) -> list[Floats]:
    results: list[Floats] = [np.empty(0, np.float32)] * len(samples)
    for mine, answers in zip(share.places, found, strict=True):
        for i, answer in zip(mine, answers, strict=False):
            results[i] = answer
    return results


def _row(sample: Sample) -> RankSample:
    return RankSample(sample.token_ids, sample.mask, sample.advantages, sample.logprobs)


def _untrained(sample: Sample) -> RankSample:
    nothing = np.zeros(len(sample), np.float32)
    return RankSample(sample.token_ids, nothing, nothing, nothing)
