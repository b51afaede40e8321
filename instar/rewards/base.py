"""What scores a session."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from instar.store.base import Store
from instar.types import Call, Json, Message, Reward, Score, Task

NO_TASK = Task("", {})
"""The task of a session that was given none: a person's own use."""
JUDGE_AGENT = "instar-judge"
"""Whose sessions a judge's own calls are, where the run's model is the judge: nobody scores them."""


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


@dataclass(slots=True)
class ScoringContext:
    """What a scorer may use of the run."""

    run_id: str
    store: Store
    base_url: str = ""
    """The run's own gateway, for a judge that is the run's model. It changes when the gateway moves."""
    api_key: str = ""

    def set_gateway_url(self, url: str) -> None:
        """The gateway is there now: a judge that is the run's model asks it from now on."""
        self.base_url = f"{url}/v1"


class WorkerTextScorer(ABC):
    """A task set's scorer that evaluates what a model wrote: it is made once more in a process that can do no
    harm, and asked there."""

    check_name: str
    """Which it is there."""
    check_args: Json
    """What it is made with."""
    requires_sandbox: bool
    """Whether it is refused where there is no sandbox."""

    @abstractmethod
    def build_request(self, task: Task, text: str) -> Json:
        """About a final text."""

    @abstractmethod
    def __call__(self, task: Task, text: str) -> float:
        """Asked right here."""


class Scorer(ABC):
    """Made with its section of the config. ``score`` may run many times at once."""

    name: str = ""
    """What its rewards are known by: ``returned``, ``math``, ``judge:outcome``."""
    version: str = ""
    """Changes when the same session might be scored otherwise."""
    background: bool = False
    """Whether it is too slow, or too uncertain, for a rollout to wait for it."""
    concurrency_limit: asyncio.Semaphore | None = None
    """How many it can do at once, where that is few. An attempt holds one; waiting for it is no part of the
    attempt, so that the deadline is that of the scoring alone."""

    @property
    def key(self) -> str:
        """What a session is scored by once."""
        return f"{self.name}@{self.version}" if self.version else self.name

    async def start(self, context: ScoringContext) -> None:  # noqa: B027 - most need nothing
        """Before the first score. Raises ConfigError where it cannot work here."""

    @abstractmethod
    async def score(self, task: Task, transcript: Transcript) -> list[Reward]:
        """None, one, or several rewards of the session and of single calls. Raises ScoreError."""

    async def close(self) -> None:  # noqa: B027 - most hold nothing
        """Free what it holds."""


class GroupScorer(Scorer):
    """Compares the sessions of a group, once all of them have ended."""

    background = True

    async def score(self, task: Task, transcript: Transcript) -> list[Reward]:
        return await self.score_group(task, [transcript])

    @abstractmethod
    async def score_group(self, task: Task, transcripts: Sequence[Transcript]) -> list[Reward]:
        """Rewards of any of the sessions. Raises ScoreError."""


@dataclass(frozen=True, slots=True)
class ScoringResult:
    """What scoring came to, to be recorded in one transaction."""

    scores: tuple[Score, ...] = ()
    rewards: tuple[Reward, ...] = ()

    @property
    def failure_reason(self) -> str | None:
        """Why a scorer gave up, where one did."""
        return next((score.reason for score in self.scores if score.reason is not None), None)


class RolloutScoring(ABC):
    """What a rollout has its sessions scored by before it ends them."""

    has_background_scorers: bool = False
    """Whether others score its sessions afterwards, so that a group has to wait for them."""

    @abstractmethod
    async def score(self, task: Task, transcript: Transcript) -> ScoringResult:
        """Never raises what a scorer did: one that fails is recorded as such."""
