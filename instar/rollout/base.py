"""The interface of an agent, and the rule for repeating its sessions."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from instar.config import GroupConfig
from instar.types import Json, Session, SessionStatus, Task


@dataclass(frozen=True, slots=True)
class AgentSession:
    """The URL and API key with which an agent calls the model. The key assigns calls to the session."""

    session_id: str
    base_url: str
    api_key: str
    model: str = "instar"
    metadata: Json = field(default_factory=dict[str, Any])


@dataclass(frozen=True, slots=True)
class AgentResult:
    reward: float | None = None
    turns: int | None = None
    metadata: Json = field(default_factory=dict[str, Any])


class Agent(ABC):
    @abstractmethod
    async def run(self, task: Task, session: AgentSession) -> AgentResult:
        """Attempt the task once. If this raises a transient error, the attempt may be repeated in a new
        session. Any other error fails the session."""

    async def close(self) -> None:  # noqa: B027 — optional
        """Release resources."""


def find_next_attempt(attempts: Sequence[Session], settings: GroupConfig) -> tuple[int, int] | None:
    """Return the number of a slot's next attempt and of its failed sessions, or None if one of the slot's
    ``attempts`` is its final session. Open sessions do not count as final."""
    failures = sum(session.status is SessionStatus.FAILED for session in attempts)
    can_refill = settings.group_policy == "refill" and failures <= settings.refills
    is_completed = any(session.status is SessionStatus.COMPLETED for session in attempts)
    if is_completed or (failures and not can_refill):
        return None
    return 1 + max((session.attempt for session in attempts), default=-1), failures
