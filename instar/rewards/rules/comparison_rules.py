"""Answers that are compared with the right one: as text, or as a number."""

from __future__ import annotations

from instar.config import ExactRewardConfig, NumericRewardConfig
from instar.errors import ScoreError
from instar.rewards.base import Transcript
from instar.rewards.rules.answers import (
    MINUS,
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
        right = {
            self._plain(text) for text in get_expected_answers(task, config.expected, config.expected_after)
        }
        answer = extract_answer(transcript.final_text, part=config.part, after=config.after)
        if answer is None:
            return self.reward(transcript, 0.0, reason="there is no answer in the final text")
        return self.reward(transcript, self._plain(answer) in right, answer=answer)

    def _plain(self, text: str) -> str:
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
        if not task.data:
            return []
        right = [self._right(task, text) for text in self._expected(task)]
        answer = extract_answer(transcript.final_text, part="last_number", after=self.config.after)
        value = None if answer is None else parse_number(answer)
        if value is None:
            return self.reward(transcript, 0.0, reason="there is no number in the final text")
        return self.reward(transcript, any(self._near(value, one) for one in right), answer=answer)

    def _expected(self, task: Task) -> list[str]:
        return get_expected_answers(task, self.config.expected, self.config.expected_after)

    def _right(self, task: Task, text: str) -> float:
        word = find_last_number(text)
        value = None if word is None else parse_number(word)
        if value is None:
            raise ScoreError(
                f"task {task.task_id!r}: its {self.config.expected!r} is {text!r:.100}, no number"
            )
        return value

    def _near(self, value: float, right: float) -> bool:
        return abs(value - right) <= max(self.config.tolerance, self.config.relative * abs(right))
