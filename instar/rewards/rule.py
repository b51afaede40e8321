"""A Python rule: ``rule(task, transcript, **args) -> float``, sync or async, given the task's data."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

from instar import registry
from instar.config import RuleRewardConfig
from instar.errors import ConfigError, InstarError
from instar.rewards.base import Scorer, Transcript
from instar.types import Reward, RewardSource, Task


class RuleReward(Scorer):
    """The configured function, or else ``own``: the task set's scorer of a final text."""

    def __init__(self, config: RuleRewardConfig, own: Callable[[Task, str], float] | None = None) -> None:
        self.args = config.args
        self.own = own
        self.function: Callable[..., Any] | None = None
        self.name = config.function or "task set"
        if config.function is not None:
            self.function = registry.load_object(config.function)
            if not callable(self.function):
                raise ConfigError(f"reward.function: {config.function} is not callable")
        elif own is None:
            raise ConfigError(
                "reward.function: missing, and these tasks have no scorer of their own (reasoning_gym's do)"
            )

    async def score(self, task: Task, transcript: Transcript) -> list[Reward]:
        if self.function is not None:
            value = self.function(task.data, transcript, **self.args)
            if inspect.isawaitable(value):
                value = await value
        else:
            assert self.own is not None
            value = self.own(task, transcript.final_text)
        if not isinstance(value, int | float) or not math.isfinite(value):
            raise InstarError(f"reward rule {self.name} returned {value!r:.200}; a finite number is needed")
        return [Reward(transcript.session_id, float(value), RewardSource.RULE, scorer=self.name)]
