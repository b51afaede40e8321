"""What an agent is to the rollout runner."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any

from instar.types import Json, Task


@dataclass(frozen=True, slots=True)
class AgentSession:
    """What an agent is given: where its model is, and the key that makes its calls one session."""

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
        """Try the task once. Raises AgentError when the program failed; transport errors pass through."""

    async def close(self) -> None:  # noqa: B027 — most agents hold nothing
        """Free what it holds. Nothing by default."""
