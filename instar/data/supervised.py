"""The samples that a step trains on with the cross-entropy loss, in addition to its groups."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, field, replace

from instar.types import Claim, Sample


@dataclass(frozen=True, slots=True)
class PreferencePair:
    """Two replies to the same prompt, of which a person prefers the first."""

    chosen: Sample
    rejected: Sample

    @property
    def samples(self) -> tuple[Sample, Sample]:
        return self.chosen, self.rejected


@dataclass(frozen=True, slots=True)
class SupervisedBatch:
    corrections: list[Sample] = field(default_factory=list[Sample])
    """Corrected replies, whose advantages are the weights of their tokens in the loss."""
    pairs: list[PreferencePair] = field(default_factory=list[PreferencePair])
    """Preferences of people. The trainer computes the weights of their tokens."""
    replayed: list[Sample] = field(default_factory=list[Sample])
    """Replies from earlier data, with the weights of their tokens in the loss."""
    replies: list[Sample] = field(default_factory=list[Sample])
    """The policy's own replies that people corrected or compared, on which the KL of the step is measured."""
    claims: list[Claim] = field(default_factory=list[Claim])
    """Claims that the step must store."""
    drops: list[Claim] = field(default_factory=list[Claim])
    """Drops without a step."""

    @property
    def count(self) -> int:
        """The number of corrections and preferences."""
        return len(self.corrections) + len(self.pairs)

    @property
    def is_empty(self) -> bool:
        return not (self.corrections or self.pairs or self.replayed)

    def merge(self, other: SupervisedBatch) -> SupervisedBatch:
        return SupervisedBatch(
            corrections=[*self.corrections, *other.corrections],
            pairs=[*self.pairs, *other.pairs],
            replayed=[*self.replayed, *other.replayed],
            replies=[*self.replies, *other.replies],
            claims=[*self.claims, *other.claims],
            drops=[*self.drops, *other.drops],
        )

    def without(self, session_ids: Set[str]) -> SupervisedBatch:
        """Return the batch without the samples of these sessions. The weights of the others do not change."""
        return replace(
            self,
            corrections=[s for s in self.corrections if s.session_id not in session_ids],
            pairs=[p for p in self.pairs if session_ids.isdisjoint(s.session_id for s in p.samples)],
            replayed=[s for s in self.replayed if s.session_id not in session_ids],
            replies=[s for s in self.replies if s.session_id not in session_ids],
        )
