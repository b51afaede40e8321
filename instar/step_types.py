"""Types of training steps and of their claims on samples.

`instar.types` re-exports these types, and other modules import them from there.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from instar.model_types import Json


class StepState(StrEnum):
    """The states of a training step, in order. Recovery releases the claims of unsaved steps."""

    CLAIMED = "claimed"
    SUBMITTED = "submitted"
    SAVED = "saved"
    COMMITTED = "committed"
    RELEASED = "released"


SINGLE_EPOCH = 0
"""The epoch of claims on rollouts and corrections. Only exported data is used in several epochs."""


class ClaimOutcome(StrEnum):
    TRAINED = "trained"
    DROPPED = "dropped"


@dataclass(frozen=True, slots=True)
class Claim:
    """Records that a sample was trained on, or dropped and why. There is one per sample, policy and epoch."""

    run_id: str
    epoch: int
    sample_key: str
    session_id: str
    group_id: str | None
    outcome: ClaimOutcome
    step: int | None = None
    reason: str | None = None
    reward: float | None = None
    advantage: float | None = None
    staleness: int | None = None
    """Number of training steps since the policy that sampled the oldest trained token."""
    policy_id: str = ""
    """The policy that the claim is for. If it is empty, the store fills in the policy of the step or, for a
    drop without a step, the one with the run's id."""


@dataclass(frozen=True, slots=True)
class Step:
    policy_id: str
    step: int
    state: StepState
    state_path: str | None = None
    """The path of the step's checkpoint; None until the step is saved."""
    version: int | None = None
    """The policy version that this step published; None until then."""
    metrics: Json = field(default_factory=dict[str, Any])
    updated_at: float = 0.0
    run_id: str = ""
