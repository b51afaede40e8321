"""Rules that compare the answer with the expected one: as text, or as a number."""

from __future__ import annotations

from instar.config import ExactRewardConfig, NumericRewardConfig
from instar.errors import ScoreError
from instar.rewards.base import Transcript
from instar.rewards.rules.answers import (
    MINUS,
    NO_ANSWER,
    AnswerRule,
    extract_answer,
    find_last_number,
    get_expected_answers,
    parse_number,
)
from instar.types import Reward, Task


class ExactReward(AnswerRule):
    def __init__(self, config: ExactRewardConfig) -> None:
        super().__init__(config)
        self.config = config

    async def score(self, task: Task, transcript: Transcript) -> list[Reward]:
        config = self.config
        if not task.data:
            return []
        texts = get_expected_answers(task, config.expected, config.expected_after)
        expected = {self._normalize(text) for text in texts}
        answer = extract_answer(transcript.final_text, part=config.part, after=config.after)
        if answer is None:
            return self.reward(transcript, 0.0, reason=NO_ANSWER)
        return self.reward(transcript, self._normalize(answer) in expected, answer=answer)

    def _normalize(self, text: str) -> str:
        if self.config.part == "last_number":
            text = text.replace(MINUS, "-")
        if self.config.ignore_whitespace:
            text = " ".join(text.split())
        if self.config.strip:
            text = text.strip()
        return text.casefold() if self.config.ignore_case else text


class NumericReward(AnswerRule):
    def __init__(self, config: NumericRewardConfig) -> None:
        super().__init__(config)
        self.config = config

    async def score(self, task: Task, transcript: Transcript) -> list[Reward]:
        config = self.config
        if not task.data:
            return []
        texts = get_expected_answers(task, config.expected, config.expected_after)
        expected = [self._parse_expected(task, text) for text in texts]
        answer = extract_answer(transcript.final_text, part="last_number", after=config.after)
        value = None if answer is None else parse_number(answer)
        if value is None:
            return self.reward(transcript, 0.0, reason="there is no number in the final text")
        return self.reward(transcript, any(self._is_close(value, each) for each in expected), answer=answer)

    def _parse_expected(self, task: Task, text: str) -> float:
        number = find_last_number(text)
        value = None if number is None else parse_number(number)
        if value is None:
            raise ScoreError(
                f"task {task.task_id!r}: its {self.config.expected!r} is {text!r:.100}, which has no number"
            )
        return value

    def _is_close(self, value: float, expected: float) -> bool:
        return abs(value - expected) <= max(self.config.tolerance, self.config.relative * abs(expected))
