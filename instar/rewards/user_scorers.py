"""Rewards from user code: `AgentReward` uses what the agent returned, and `RuleReward` calls the task set's
scorer or a sync or async function ``rule(task, transcript, **args) -> float``, where ``task`` is a dict."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from functools import partial
from typing import Any

from instar import registry
from instar.async_utils import run_in_daemon_thread
from instar.config import AgentRewardConfig, RuleRewardConfig
from instar.errors import ConfigError, InstarError
from instar.rewards.base import Scorer, ScoringContext, Transcript, WorkerTextScorer
from instar.rewards.rules.answers import hash_settings
from instar.rewards.rules.worker_pool import CheckWorkerPool
from instar.types import Reward, RewardSource, Task

WORKER_TIMEOUT_SECONDS = 10.0
"""The time limit for a check in a worker. An answer that takes longer scores 0."""


class AgentReward(Scorer):
    """Uses the reward that the agent function returned. Rewards sent to the gateway are not handled here."""

    name = "returned"

    def __init__(self, config: AgentRewardConfig, reward_range: tuple[float, float]) -> None:
        del config  # this scorer has no settings
        self.reward_range = reward_range

    async def score(self, task: Task, transcript: Transcript) -> list[Reward]:
        if transcript.returned is None:
            return []
        low, high = self.reward_range
        if not (math.isfinite(transcript.returned) and low <= transcript.returned <= high):
            raise InstarError(
                f"the agent's reward must be a finite number between {low:g} and {high:g} "
                f"(gateway.reward_range), got {transcript.returned}"
            )
        return [Reward(transcript.session_id, transcript.returned, RewardSource.AGENT, scorer=self.name)]


class RuleReward(Scorer):
    """Scores with the configured function or, if there is none, with the task set's ``text_scorer``."""

    def __init__(
        self, config: RuleRewardConfig, text_scorer: Callable[[Task, str], float] | None = None
    ) -> None:
        self.args = config.args
        self.runs_in_thread = config.thread
        self.text_scorer = text_scorer
        self.workers: CheckWorkerPool | None = None
        self.function: Callable[..., Any] | None = None
        self.name = config.name or config.function or "task set"
        self.version = hash_settings(config) if config.args else ""
        if config.function is not None:
            self.function = registry.load_object(config.function)
            if not callable(self.function):
                raise ConfigError(f"reward.function: {config.function} is not callable")
            self._is_async = inspect.iscoroutinefunction(self.function)
        elif text_scorer is None:
            raise ConfigError("reward.function is required, because no task set provides a scorer")
        elif isinstance(text_scorer, WorkerTextScorer):
            self.workers = CheckWorkerPool(
                text_scorer.check_name, text_scorer.check_args, requires_sandbox=text_scorer.requires_sandbox
            )
            self.concurrency_limit = self.workers.concurrency_limit

    async def start(self, context: ScoringContext) -> None:
        if self.workers is not None:
            await self.workers.start()

    async def close(self) -> None:
        if self.workers is not None:
            await self.workers.close()

    async def score(self, task: Task, transcript: Transcript) -> list[Reward]:
        if self.function is not None:
            rule = partial(self.function, task.data, transcript, **self.args)
            # A slow rule must not block the event loop, and a thread can be abandoned at the deadline.
            use_thread = self.runs_in_thread and not self._is_async
            value = await run_in_daemon_thread(rule) if use_thread else rule()
            value = await value if inspect.isawaitable(value) else value
        elif self.workers is not None and isinstance(self.text_scorer, WorkerTextScorer):
            request = self.text_scorer.build_request(task, transcript.final_text)
            value = (await self.workers.run_check(WORKER_TIMEOUT_SECONDS, **request)).get("value", 0.0)
        else:
            assert self.text_scorer is not None
            value = self.text_scorer(task, transcript.final_text)
        if not isinstance(value, int | float) or not math.isfinite(value):
            raise InstarError(f"reward rule {self.name} must return a finite number, got {value!r:.200}")
        return [Reward(transcript.session_id, float(value), RewardSource.RULE, scorer=self.name)]
