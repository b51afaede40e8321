"""Rules that check an answer, either in this process or with a library in a worker process."""

from __future__ import annotations

import re
import unicodedata
from abc import abstractmethod
from collections.abc import Callable
from typing import Any, TypeVar

from instar.config import rules
from instar.errors import ConfigError, ScoreError
from instar.rewards.base import ScoringContext, Transcript
from instar.rewards.rules import answers
from instar.rewards.rules.answers import AnswerRule, extract_answer, get_expected_answers, get_task_field
from instar.rewards.rules.worker_pool import CheckWorkerPool
from instar.types import Reward, Task

NO_ANSWER = "there is no answer in the final text"
ComparisonConfigT = TypeVar("ComparisonConfigT", bound=answers.ComparisonConfig)
WorkerConfigT = TypeVar("WorkerConfigT", bound=answers.WorkerConfig)


class ComparisonRule(AnswerRule[ComparisonConfigT]):
    """A rule that compares the answer with the expected answers. Sessions without a task get no reward."""

    no_answer_reason = NO_ANSWER

    async def score(self, task: Task, transcript: Transcript) -> list[Reward]:
        config = self.config
        if not task.data:
            return []
        expected = get_expected_answers(task, config.expected, config.expected_after)
        part = config.part if isinstance(config, rules.ExactRewardConfig) else "last_number"
        answer = extract_answer(transcript.final_text, part=part, after=config.after)
        is_correct = self.compare(task, answer, expected)
        if is_correct is None:
            return self.build_rewards(transcript, 0.0, reason=self.no_answer_reason)
        return self.build_rewards(transcript, is_correct, answer=answer)

    @abstractmethod
    def compare(self, task: Task, answer: str | None, expected: list[str]) -> bool | None:
        """Return whether the answer is one of the expected answers, or None if there is no answer."""


class ExactReward(ComparisonRule[rules.ExactRewardConfig]):
    def compare(self, task: Task, answer: str | None, expected: list[str]) -> bool | None:
        return None if answer is None else self._normalize(answer) in map(self._normalize, expected)

    def _normalize(self, text: str) -> str:
        text = unicodedata.normalize("NFC", text.removeprefix("\ufeff"))
        if self.config.part == "last_number":
            text = text.replace(answers.MINUS, "-").replace("$", "")
        if self.config.ignore_whitespace:
            text = " ".join(text.split())
        if self.config.strip:
            text = text.strip()
        return text.casefold() if self.config.ignore_case else text


class NumericReward(ComparisonRule[rules.NumericRewardConfig]):
    no_answer_reason = "there is no number in the final text"

    def compare(self, task: Task, answer: str | None, expected: list[str]) -> bool | None:
        config = self.config
        numbers: list[float] = []
        for text in expected:
            if (number := answers.parse_number(answers.find_last_number(text) or "")) is None:
                raise ScoreError(
                    f"task {task.task_id!r}: field {config.expected!r} contains no number: {text!r:.100}"
                )
            numbers.append(number)
        if answer is None or (value := answers.parse_number(answer)) is None:
            return None
        tolerances = [max(config.tolerance, config.relative * abs(number)) for number in numbers]
        return any(abs(value - n) <= limit for n, limit in zip(numbers, tolerances, strict=True))


class WorkerRule(AnswerRule[WorkerConfigT]):
    check_name: str
    """The name of the check in ``check_worker.py``."""

    def __init__(self, config: WorkerConfigT) -> None:
        super().__init__(config)
        self.workers = CheckWorkerPool(self.check_name)
        self.concurrency_limit = self.workers.concurrency_limit

    async def start(self, context: ScoringContext) -> None:
        await self.workers.start()

    async def close(self) -> None:
        await self.workers.close()

    async def check_answer(
        self, transcript: Transcript, part: str, normalize: Callable[[str], str] = str, **request: Any
    ) -> list[Reward]:
        answer = extract_answer(transcript.final_text, part=part, after=self.config.after)
        if answer is None:
            return self.build_rewards(transcript, 0.0, reason=NO_ANSWER)
        answer = normalize(answer)
        result = await self.workers.run_check(self.config.seconds, answer=answer, **request)
        return self.build_rewards(
            transcript, result["ok"], answer=result.get("answer", answer), reason=result.get("reason")
        )


class MathReward(WorkerRule[rules.MathRewardConfig]):
    check_name = "math"

    async def score(self, task: Task, transcript: Transcript) -> list[Reward]:
        if not task.data:
            return []
        expected = get_expected_answers(task, self.config.expected, self.config.expected_after)
        return await self.check_answer(transcript, "whole", answers.simplify_characters, expected=expected)


class JsonSchemaReward(WorkerRule[rules.JsonSchemaRewardConfig]):
    check_name = "json_schema"

    async def score(self, task: Task, transcript: Transcript) -> list[Reward]:
        schema = self.config.against
        if schema is None:
            if not task.data:
                return []
            schema = get_task_field(task, self.config.expected)
        return await self.check_answer(
            transcript, self.config.part, lambda answer: answer.removeprefix("\ufeff"), schema=schema
        )


class RegexReward(WorkerRule[rules.RegexRewardConfig]):
    check_name = "regex"

    def __init__(self, config: rules.RegexRewardConfig) -> None:
        super().__init__(config)
        try:
            re.compile(config.pattern or "")
        except re.error as error:
            raise ConfigError(
                f"reward.pattern: {config.pattern!r} is not a valid regular expression: {error}"
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
