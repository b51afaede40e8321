"""The interface of an agent."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any

from instar.types import Json, Task


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
