"""Types for the curation checks: session summaries, findings and thresholds."""

from __future__ import annotations

from dataclasses import dataclass, field

from instar.types import Json, Reward, Session


@dataclass(frozen=True, slots=True)
class SessionSummary:
    """The parts of an ended session that the checks use."""

    session: Session
    prompt: str
    """The first user message of the first call; empty if there is none."""
    output: str
    """The text of all replies: reasoning, content and tool calls."""
    tokens: int
    """The number of sampled tokens."""
    version: int
    """The oldest policy version that sampled any of the session's tokens, or 0 if there are none."""
    reward: float | None
    """The session's combined reward, or None if it has none (see `RewardCombiner`)."""
    rewards: tuple[Reward, ...] = ()


@dataclass(frozen=True, slots=True)
class CurationFinding:
    """A problem that a check found in some sessions, and the tag for these sessions."""

    check: str
    tag: str
    value: str
    """The tag's value, such as a group id."""
    reason: str
    session_ids: tuple[str, ...]
    numbers: Json = field(default_factory=dict[str, object])
    """The numbers behind the finding, by name."""


@dataclass(frozen=True, slots=True)
class Thresholds:
    """The minimum values at which the checks report a finding."""

    similarity: float = 0.9
    """The Jaccard similarity, over word trigrams, of two outputs that count as near-duplicates."""
    drift_ratio: float = 2.0
    """The factor by which output length or repetition grows from the first to the last versions."""
    repetition: float = 0.3
    """The fraction of an output's word trigrams that occurred earlier in the output."""
    disagreement: float = 0.5
    """The difference between a rule's and a judge's reward."""
    identical_fraction: float = 0.5
    """The fraction of a group's sessions that have the same output."""
