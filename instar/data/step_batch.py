"""The batch of a training step."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, field, replace

from instar.data.supervised import SupervisedBatch
from instar.types import Claim, Floats, Json, Sample


@dataclass(frozen=True, slots=True)
class StepBatch:
    samples: list[Sample]
    """The samples to train on, with normalized advantages."""
    scales: list[Floats]
    """For each sample, the scale of every token's advantage (see `compute_token_scales`)."""
    divisor: float
    """The divisor of the step's per-token terms (see `compute_divisor`)."""
    claims: list[Claim]
    """Claims for all samples in the step's groups, trained or dropped."""
    drops: list[Claim]
    """Drops without a step and, for late sessions, drops in an earlier step."""
    recomputed: frozenset[str]
    """The keys of the samples whose logprobs the trainer must recompute."""
    session_starts: list[float]
    """For each sample that is not exported data, the Unix time at which its session started."""
    is_full: bool
    """True if the batch has all its groups except exported ones, and at least one group if it needs only
    exported ones."""
    report: Json
    supervised: SupervisedBatch = field(default_factory=SupervisedBatch)

    def without(self, session_ids: Set[str]) -> StepBatch:
        """Return the batch without the samples of these sessions. The advantages, which are relative to the
        rewards of all sessions, and the divisor do not change."""
        if not session_ids:
            return self
        supervised = self.supervised.without(session_ids)
        kept = [
            (s, scale)
            for s, scale in zip(self.samples, self.scales, strict=True)
            if s.session_id not in session_ids
        ]
        samples, scales = [sample for sample, _ in kept], [scale for _, scale in kept]
        return replace(self, samples=samples, scales=scales, supervised=supervised)
