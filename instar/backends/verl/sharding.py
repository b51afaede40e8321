"""Data that the backend and its ranks exchange, and the distribution of a batch over the ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from instar.config import LoraConfig
from instar.types import Floats, Ids, Sample

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    folder: str
    """The folder of the base model."""
    device: str
    dtype: str
    """The compute dtype, `fp32` or `bf16`. The sharded weights are always fp32."""
    lora: LoraConfig | None
    ranks: int
    call_timeout: float
    """The timeout for one call, in seconds."""
    threads: int | None = None


@dataclass(frozen=True, slots=True)
class RankSample:
    token_ids: Ids
    mask: Floats
    advantages: Floats
    logprobs: Floats


@dataclass(frozen=True, slots=True)
class DistributedBatch:
    samples: list[list[RankSample]]
    """The samples of each rank, padded to one length, because all ranks run equally many micro-batches."""
    indices: list[list[int]]
    """For each rank, the batch indices of its samples. Its remaining samples are padding."""
    max_tokens: int
    """The maximum number of tokens in a micro-batch, at least the length of the longest sample."""


@dataclass(frozen=True, slots=True)
class RankResult:
    is_finite: bool
    """True if the loss was finite on every rank. Otherwise no gradient was accumulated."""
    logprobs: list[Floats]
    micro_batch_count: int


@dataclass(frozen=True, slots=True)
class SerializedWeight:
    name: str
    dtype: str
    shape: list[int]
    content: NDArray[np.uint8]

    def to_tensor(self) -> Tensor:
        import torch

        # Copied, because arrays in Ray's object store are read-only and torch needs a writable one.
        return torch.from_numpy(self.content.copy()).view(getattr(torch, self.dtype)).view(self.shape)


def distribute_samples(samples: Sequence[Sample], ranks: int, micro_batch_tokens: int) -> DistributedBatch:
    """Distribute the samples over the ranks. To balance the number of tokens, the samples are assigned from
    longest to shortest, round-robin over the ranks, and every second round is reversed."""
    indices: list[list[int]] = [[] for _ in range(ranks)]
    by_length = sorted(range(len(samples)), key=lambda i: -len(samples[i]))
    for position, i in enumerate(by_length):
        round_number, rank = divmod(position, ranks)
        indices[rank if round_number % 2 == 0 else ranks - 1 - rank].append(i)
    zeros = np.zeros(len(samples[by_length[-1]]), np.float32)
    padding = RankSample(samples[by_length[-1]].token_ids, zeros, zeros, zeros)
    rank_samples = [RankSample(s.token_ids, s.mask, s.advantages, s.logprobs) for s in samples]
    size = max(map(len, indices))
    padded = [[rank_samples[i] for i in part] + [padding] * (size - len(part)) for part in indices]
    return DistributedBatch(padded, indices, max(micro_batch_tokens, len(samples[by_length[0]])))


def gather_logprobs(
    batch: DistributedBatch, logprobs: Sequence[Sequence[Floats]], samples: Sequence[Sample]
) -> list[Floats]:
    results: list[Floats] = [np.empty(0, np.float32)] * len(samples)
    for indices, rank_logprobs in zip(batch.indices, logprobs, strict=True):
        for i, row in zip(indices, rank_logprobs, strict=False):  # padding has no index
            results[i] = row
    return results
