"""Rules that check an answer. Math, JSON schema and regex run in a worker process, because a check with their
libraries may take forever."""

from __future__ import annotations

import re
from abc import abstractmethod
from typing import Any, TypeVar

from instar.config import (
    ExactRewardConfig,
    JsonSchemaRewardConfig,
    MathRewardConfig,
    NumericRewardConfig,
    RegexRewardConfig,
)
from instar.errors import ConfigError, ScoreError
from instar.rewards.base import ScoringContext, Transcript
from instar.rewards.rules.answers import (
    MINUS,
    AnswerRule,
    ComparisonConfig,
    WorkerConfig,
    extract_answer,
    find_last_number,
    get_expected_answers,
    get_task_field,
    parse_number,
)
from instar.rewards.rules.worker_pool import CheckWorkerPool
from instar.types import Reward, Task

NO_ANSWER = "there is no answer in the final text"
ComparisonC = TypeVar("ComparisonC", bound=ComparisonConfig)
WorkerC = TypeVar("WorkerC", bound=WorkerConfig)


class ComparisonRule(AnswerRule[ComparisonC]):
    """A rule that compares the answer with the expected answers. Sessions without a task get no reward."""

    async def score(self, task: Task, transcript: Transcript) -> list[Reward]:
        config = self.config
        if not task.data:
            return []
        expected = get_expected_answers(task, config.expected, config.expected_after)
        part = config.part if isinstance(config, ExactRewardConfig) else "last_number"
        answer = extract_answer(transcript.final_text, part=part, after=config.after)
        return self.compare(task, transcript, answer, expected)

    @abstractmethod
    def compare(
        self, task: Task, transcript: Transcript, answer: str | None, expected: list[str]
    ) -> list[Reward]: ...


class ExactReward(ComparisonRule[ExactRewardConfig]):
    def compare(
        self, task: Task, transcript: Transcript, answer: str | None, expected: list[str]
    ) -> list[Reward]:
        if answer is None:
            return self.reward(transcript, 0.0, reason=NO_ANSWER)
        is_correct = self._normalize(answer) in map(self._normalize, expected)
        return self.reward(transcript, is_correct, answer=answer)

    def _normalize(self, text: str) -> str:
        if self.config.part == "last_number":
            text = text.replace(MINUS, "-")
        if self.config.ignore_whitespace:
            text = " ".join(text.split())
        if self.config.strip:
            text = text.strip()
        return text.casefold() if self.config.ignore_case else text


class NumericReward(ComparisonRule[NumericRewardConfig]):
    def compare(
        self, task: Task, transcript: Transcript, answer: str | None, expected: list[str]
    ) -> list[Reward]:
        config = self.config
        numbers = [self._parse_expected(task, text) for text in expected]
        value = None if answer is None else parse_number(answer)
        if value is None:
            return self.reward(transcript, 0.0, reason="there is no number in the final text")
        is_correct = any(
            abs(value - number) <= max(config.tolerance, config.relative * abs(number)) for number in numbers
        )
        return self.reward(transcript, is_correct, answer=answer)

    def _parse_expected(self, task: Task, text: str) -> float:
        number = find_last_number(text)
        value = None if number is None else parse_number(number)
        if value is None:
            raise ScoreError(
                f"task {task.task_id!r}: its {self.config.expected!r} is {text!r:.100}, which has no number"
            )
        return value


class WorkerRule(AnswerRule[WorkerC]):
    check_name: str
    """The name of the check in ``check_worker.py``."""

    def __init__(self, config: WorkerC) -> None:
        super().__init__(config)
        self.workers = CheckWorkerPool(self.check_name)
        self.concurrency_limit = self.workers.concurrency_limit

    async def start(self, context: ScoringContext) -> None:
        await self.workers.start()

    async def close(self) -> None:
        await self.workers.close()

    async def check_answer(self, transcript: Transcript, part: str, **request: Any) -> list[Reward]:
        answer = extract_answer(transcript.final_text, part=part, after=self.config.after)
        if answer is None:
            return self.reward(transcript, 0.0, reason=NO_ANSWER)
        result = await self.workers.run_check(self.config.seconds, answer=answer, **request)
        return self.reward(
            transcript, result["ok"], answer=result.get("answer", answer), reason=result.get("reason")
        )


class MathReward(WorkerRule[MathRewardConfig]):
    check_name = "math"

    async def score(self, task: Task, transcript: Transcript) -> list[Reward]:
        if not task.data:
            return []
        expected = get_expected_answers(task, self.config.expected, self.config.expected_after)
        return await self.check_answer(transcript, "whole", expected=expected)


class JsonSchemaReward(WorkerRule[JsonSchemaRewardConfig]):
    check_name = "json_schema"

    async def score(self, task: Task, transcript: Transcript) -> list[Reward]:
        schema = self.config.against
        if schema is None:
            if not task.data:
                return []
            schema = get_task_field(task, self.config.expected)
        return await self.check_answer(transcript, self.config.part, schema=schema)


class RegexReward(WorkerRule[RegexRewardConfig]):
    check_name = "regex"

    def __init__(self, config: RegexRewardConfig) -> None:
        super().__init__(config)
        try:
            re.compile(config.pattern or "")
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
        return await self.check_answer(
            transcript, config.part, pattern=pattern, how=config.how, ignore_case=config.ignore_case
        )
