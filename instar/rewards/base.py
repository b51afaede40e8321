"""The scorer interfaces, and the data about a session and a run that scorers receive."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from instar.errors import InstarError
from instar.store.base import Store
from instar.types import Call, Group, Json, Message, Reward, Score, Session, Task

NO_TASK = Task("", {})
"""The task that scorers receive for sessions without one, such as live sessions."""
JUDGE_AGENT = "instar-judge"
"""The agent id of sessions in which the run's own model is a judge. These sessions are never scored."""
MAX_REASON_CHARS = 1000


def get_task(session: Session, group: Group | None) -> Task:
    """Return the task of a group that accepts the session, else the session's own task, else `NO_TASK`."""
    if group is not None and group.accepts(session):
        return group.task
    data = session.metadata.get("task")
    return Task(session.task_id or "", data) if isinstance(data, dict) else NO_TASK


@dataclass(frozen=True, slots=True)
class Transcript:
    session_id: str
    calls: Sequence[Call]
    returned: float | None
    """The reward that the agent returned, if any. Always None if the session is scored after the rollout."""

    @property
    def final(self) -> Message | None:
        """The reply to the last call, or None if the session has no calls."""
        return self.calls[-1].reply if self.calls else None

    @property
    def final_text(self) -> str:
        return self.final["content"] if self.final else ""


@dataclass(slots=True)
class ScoringContext:
    run_id: str
    store: Store
    base_url: str = ""
    """Base URL of the run's gateway, used if the run's own model is the judge. Empty without a gateway."""
    api_key: str = ""

    def set_gateway_url(self, url: str) -> None:
        """Set `base_url` from the gateway's URL, which changes when the gateway restarts."""
        self.base_url = f"{url}/v1"


class WorkerTextScorer(ABC):
    """A task set's scorer for text from the model. A worker process runs it, as the text is untrusted."""

    check_name: str
    """The name of the check in ``rules/check_worker.py``."""
    check_args: Json
    requires_sandbox: bool

    @abstractmethod
    def build_request(self, task: Task, text: str) -> Json: ...

    @abstractmethod
    def __call__(self, task: Task, text: str) -> float:
        """Return the score of the text, computed in this process."""


class Scorer(ABC):
    """Gives rewards to sessions. ``score`` may be called concurrently."""

    name: str = ""
    """The name that rewards, weights and vetoes use, such as ``returned``, ``math`` or ``judge:outcome``."""
    version: str = ""
    """Identifies the settings that affect the scores, for example by a hash. Empty if there are none."""
    background: bool = False
    """True if rollouts do not wait for this scorer, because it is slow or may be unavailable."""
    scores_open_sessions: bool = False
    """True if `score_open` gives rewards to calls of live sessions that are still open."""
    concurrency_limit: asyncio.Semaphore | None = None
    """Limits concurrent attempts. The timeout of an attempt starts when it acquires the semaphore."""

    @property
    def key(self) -> str:
        """The scorer's name and version. The store keeps one score per session and key."""
        return f"{self.name}@{self.version}" if self.version else self.name

    async def start(self, context: ScoringContext) -> None:  # noqa: B027 - most scorers need no preparation
        """Prepare for scoring. Raises ConfigError if the scorer cannot run on this machine."""

    @abstractmethod
    async def score(self, task: Task, transcript: Transcript) -> list[Reward]:
        """Return any number of rewards for the session and its calls. Raises ScoreError if scoring fails."""

    async def score_open(self, task: Task, transcript: Transcript) -> list[Reward]:
        """Return rewards, each with a ``reward_id``, for calls of an open session that can be scored already.
        Later calls of this method and of ``score`` may repeat them. Raises ScoreError if scoring fails."""
        return []

    async def close(self) -> None:  # noqa: B027 - most scorers have no resources to release
        ...


class GroupScorer(Scorer):
    """A scorer that compares the sessions of a group after all of them have ended."""

    background = True

    async def score(self, task: Task, transcript: Transcript) -> list[Reward]:
        return await self.score_group(task, [transcript])

    @abstractmethod
    async def score_group(self, task: Task, transcripts: Sequence[Transcript]) -> list[Reward]: ...


@dataclass(frozen=True, slots=True)
class ScoringResult:
    """Scores and rewards to record in one transaction."""

    scores: tuple[Score, ...] = ()
    rewards: tuple[Reward, ...] = ()

    @property
    def failure_reason(self) -> str | None:
        """The reason in the first failed score, or None if no scorer failed."""
        return next((score.reason for score in self.scores if score.reason is not None), None)


class RolloutScoring(ABC):
    """Scores a session before its rollout ends."""

    has_background_scorers: bool = False
    """True if a group must wait for background scorers before it is used for training."""

    @abstractmethod
    async def score(self, task: Task, transcript: Transcript) -> ScoringResult:
        """Return the scores and rewards for the session. If a scorer fails, its score contains the reason."""


def describe_error(error: BaseException) -> str:
    """Return the failure reason to record for an exception."""
    # The messages of Instar's own errors are clear without the class name.
    text = str(error) if isinstance(error, InstarError) else f"{type(error).__name__}: {error}"
    return text.strip()[:MAX_REASON_CHARS]
