"""Rules that use a library in a worker process, so that a hard answer cannot block the run: math, JSON schema
and regex."""

from __future__ import annotations

import re
from typing import Any

from instar.config import JsonSchemaRewardConfig, MathRewardConfig, RegexRewardConfig
from instar.errors import ConfigError
from instar.rewards.base import ScoringContext, Transcript
from instar.rewards.rules.answers import (
    NO_ANSWER,
    AnswerRule,
    extract_answer,
    get_expected_answers,
    get_task_field,
)
from instar.rewards.rules.worker_pool import CheckWorkerPool
from instar.types import Reward, Task


class WorkerRule(AnswerRule):
    def __init__(self, section: Any, check: str) -> None:
        super().__init__(section)
        self.seconds: float = section.seconds
        self.workers = CheckWorkerPool(check)
        self.concurrency_limit = self.workers.concurrency_limit

    async def start(self, context: ScoringContext) -> None:
        await self.workers.start()

    async def close(self) -> None:
        await self.workers.close()

    async def check_answer(self, transcript: Transcript, answer: str | None, **request: Any) -> list[Reward]:
        if answer is None:
            return self.reward(transcript, 0.0, reason=NO_ANSWER)
        result = await self.workers.run_check(self.seconds, answer=answer, **request)
        return self.reward(
            transcript, result["ok"], answer=result.get("answer", answer), reason=result.get("reason")
        )


class MathReward(WorkerRule):
    def __init__(self, config: MathRewardConfig) -> None:
        super().__init__(config, "math")
        self.config = config

    async def score(self, task: Task, transcript: Transcript) -> list[Reward]:
        if not task.data:
            return []
        expected = get_expected_answers(task, self.config.expected, self.config.expected_after)
        answer = extract_answer(transcript.final_text, after=self.config.after)
        return await self.check_answer(transcript, answer, expected=expected)


class JsonSchemaReward(WorkerRule):
    def __init__(self, config: JsonSchemaRewardConfig) -> None:
        super().__init__(config, "json_schema")
        self.config = config

    async def score(self, task: Task, transcript: Transcript) -> list[Reward]:
        schema = self.config.against
        if schema is None:
            if not task.data:
                return []
            schema = get_task_field(task, self.config.expected)
        answer = extract_answer(transcript.final_text, part=self.config.part, after=self.config.after)
        return await self.check_answer(transcript, answer, schema=schema)


class RegexReward(WorkerRule):
    def __init__(self, config: RegexRewardConfig) -> None:
        super().__init__(config, "regex")
        self.config = config
        if config.pattern is not None:
            try:
                re.compile(config.pattern)
            except re.error as error:
                raise ConfigError(
                    f"reward.pattern: {config.pattern!r} is not a regular expression: {error}"
                ) from error

    async def score(self, task: Task, transcript: Transcript) -> list[Reward]:
        config = self.config
        pattern = config.pattern
        if pattern is None:
            if not task.data:
                return []
            pattern = str(get_task_field(task, config.expected))
        answer = extract_answer(transcript.final_text, part=config.part, after=config.after)
        return await self.check_answer(
            transcript, answer, pattern=pattern, how=config.how, ignore_case=config.ignore_case
        )
