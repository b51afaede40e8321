"""What scores a session."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from instar.types import Call, Message, Reward, Task


@dataclass(frozen=True, slots=True)
class Transcript:
    """What a scorer sees of a finished session."""

    session_id: str
    calls: Sequence[Call]
    returned: float | None
    """What the agent itself returned, if anything."""

    @property
    def final(self) -> Message | None:
        """The reply of the last call."""
        return self.calls[-1].reply if self.calls else None

    @property
    def final_text(self) -> str:
        return self.final["content"] if self.final else ""


class Scorer(ABC):
    @abstractmethod
    async def score(self, task: Task, transcript: Transcript) -> list[Reward]: ...
