"""The interfaces of scorers, and the parts of a session and of the run that scorers can see."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from instar.errors import InstarError
from instar.store.base import Store
from instar.types import Call, Json, Message, Reward, Score, Task

NO_TASK = Task("", {})
"""The task of a session without one, such as a person's own use."""
JUDGE_AGENT = "instar-judge"
"""The agent id of sessions that a judge opens to ask the run's own model. They are never scored."""
MAX_REASON_CHARS = 1000


@dataclass(frozen=True, slots=True)
class Transcript:
    """The part of a finished session that a scorer sees."""

    session_id: str
    calls: Sequence[Call]
    returned: float | None
    """The reward that the agent itself returned, if any."""

    @property
    def final(self) -> Message | None:
        """The reply of the last call, if the session has one."""
        return self.calls[-1].reply if self.calls else None

    @property
    def final_text(self) -> str:
        return self.final["content"] if self.final else ""


@dataclass(slots=True)
class ScoringContext:
    """The parts of the run that a scorer may use."""

    run_id: str
    store: Store
    base_url: str = ""
    """The base URL of the run's gateway, for a judge that is the run's own model."""
    api_key: str = ""

    def set_gateway_url(self, url: str) -> None:
        """Send later requests to the gateway at ``url``, which may change during the run."""
        self.base_url = f"{url}/v1"


class WorkerTextScorer(ABC):
    """A task set's scorer that evaluates text from the model, and therefore runs as a check in a worker."""

    check_name: str
    """The name of the check in ``rules/check_worker.py``."""
    check_args: Json
    """The arguments that the worker creates the check with."""
    requires_sandbox: bool
    """True if the scorer must not run where no sandbox is available."""

    @abstractmethod
    def build_request(self, task: Task, text: str) -> Json:
        """Return the request to the worker for one final text."""

    @abstractmethod
    def __call__(self, task: Task, text: str) -> float:
        """Return the score of the text, computed in this process."""


class Scorer(ABC):
    """Gives rewards to sessions. A scorer is created with its section of the config, and ``score`` may be
    called concurrently."""

    name: str = ""
    """The name that rewards, weights and vetoes refer to: ``returned``, ``math``, ``judge:outcome``."""
    version: str = ""
    """A version that changes when the same session may get a different score."""
    background: bool = False
    """True if rollouts do not wait for this scorer, because it is slow or may be unavailable."""
    concurrency_limit: asyncio.Semaphore | None = None
    """Limits concurrent attempts. Waiting for this limit does not count towards an attempt's deadline."""

    @property
    def key(self) -> str:
        """The scorer's name and version. The store keeps one score per session and key."""
        return f"{self.name}@{self.version}" if self.version else self.name

    async def start(self, context: ScoringContext) -> None:  # noqa: B027 - most need nothing
        """Prepare for the first score. Raises ConfigError if the scorer cannot work on this machine."""

    @abstractmethod
    async def score(self, task: Task, transcript: Transcript) -> list[Reward]:
        """Return any number of rewards for the session and its calls. Raises ScoreError."""

    async def close(self) -> None:  # noqa: B027 - most hold nothing
        """Release resources."""


class GroupScorer(Scorer):
    """A scorer that compares the sessions of a group after all of them have ended."""

    background = True

    async def score(self, task: Task, transcript: Transcript) -> list[Reward]:
        return await self.score_group(task, [transcript])

    @abstractmethod
    async def score_group(self, task: Task, transcripts: Sequence[Transcript]) -> list[Reward]:
        """Return rewards for any of the sessions. Raises ScoreError."""


@dataclass(frozen=True, slots=True)
class ScoringResult:
    """Scores and rewards that are recorded in one transaction."""

    scores: tuple[Score, ...] = ()
    rewards: tuple[Reward, ...] = ()

    @property
    def failure_reason(self) -> str | None:
        """Why a scorer gave up, or None if none did."""
        return next((score.reason for score in self.scores if score.reason is not None), None)


class RolloutScoring(ABC):
    """Scores sessions before the rollout ends them."""

    has_background_scorers: bool = False
    """True if other scorers follow in the background; a group waits for them before it is trained on."""

    @abstractmethod
    async def score(self, task: Task, transcript: Transcript) -> ScoringResult:
        """Return the scores and rewards of the session. Errors of scorers are recorded, not raised."""


def describe_error(error: BaseException) -> str:
    """Return the text that is recorded as the reason of a failure."""
    # The messages of Instar's own errors are complete without the name of the class.
    text = str(error) if isinstance(error, InstarError) else f"{type(error).__name__}: {error}"
    return text.strip()[:MAX_REASON_CHARS]
