"""Types for the curation checks: session summaries, findings and limits."""

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
    """A problem that a check found in some sessions."""

    check: str
    tag: str
    """A tag for the sessions. Its value is ``value``, and its reason is ``reason``."""
    value: str
    reason: str
    session_ids: tuple[str, ...]
    numbers: Json = field(default_factory=dict[str, object])
    """The metrics of the check, by name."""


@dataclass(frozen=True, slots=True)
class CurationLimits:
    """The thresholds at which the checks report a finding."""

    similarity: float = 0.9
    """The minimum Jaccard similarity, over word trigrams, of two outputs that count as near-duplicates."""
    drift: float = 2.0
    """The minimum factor by which output length or repetition grows from the first to the last versions."""
    repetition: float = 0.3
    """The minimum fraction of an output's word trigrams that occurred earlier in the output."""
    disagreement: float = 0.5
    """The minimum difference between a rule's and a judge's reward."""
    identical: float = 0.5
    """The minimum fraction of a group's sessions that have the same output."""
