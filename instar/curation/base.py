"""What the checks see of a session, and what they say."""

from __future__ import annotations

from dataclasses import dataclass, field

from instar.types import Json, Reward, Session


@dataclass(frozen=True, slots=True)
class SessionSummary:
    """A session that has ended, as far as the checks care."""

    session: Session
    prompt: str
    """The first message of a user."""
    output: str
    """All that the model wrote, its calls of tools too."""
    tokens: int
    """Sampled in all."""
    version: int
    """The oldest that sampled any of it."""
    reward: float | None
    """What its rewards come to."""
    rewards: tuple[Reward, ...] = ()


@dataclass(frozen=True, slots=True)
class CurationFinding:
    """What a check has to say, of these sessions."""

    check: str
    tag: str
    value: str
    reason: str
    session_ids: tuple[str, ...]
    numbers: Json = field(default_factory=dict[str, object])


@dataclass(frozen=True, slots=True)
class CurationLimits:
    """From where on the checks speak up."""

    similarity: float = 0.9
    """Share of word triples that near-duplicates have in common."""
    drift: float = 2.0
    """How many times as long as at first, or as repetitive, the latest versions' outputs are."""
    repetition: float = 0.3
    """Share of an output's word triples that have been in it before."""
    disagreement: float = 0.5
    """Distance between what the rules and the judges gave."""
    identical: float = 0.5
    """Share of a group's sessions with the same output."""
