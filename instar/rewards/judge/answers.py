"""Parses a judge's answer, which is JSON or text that contains JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Generic, Literal, NoReturn, TypeVar

import msgspec

from instar.rewards.judge.endpoint import JudgeReply
from instar.types import Json

MAX_PARSE_ATTEMPTS = 200
"""The maximum number of opening braces in a text at which parsing is attempted."""
MAX_TEXT_CHARS = 500
"""The maximum length of a judge's reasons in a reward, and of an unusable reply. Judgments are not cut."""
ONLY_OBJECT = re.compile(r"\s*(?:```\w*)?\s*\{.*\}\s*(?:```)?\s*", re.DOTALL)


T = TypeVar("T")


class UnparseableAnswer(Exception):
    """The reply contains no valid answer to the question."""


class JudgeAnswer(msgspec.Struct, kw_only=True):
    reasons: str = ""

    def __post_init__(self) -> None:
        self.reasons = self.reasons[:MAX_TEXT_CHARS]


class ScoreAnswer(JudgeAnswer):
    score: float


class StepScoreAnswer(JudgeAnswer):
    step: int
    score: float


class ComparisonAnswer(JudgeAnswer):
    winner: Literal["A", "B", "tie"]


Signal = Literal[
    "accepted", "corrected", "repeated", "tests_passed", "tests_failed", "tool_failed", "unclear"
]


class StepSignalAnswer(JudgeAnswer):
    step: int
    signal: Signal


class StepsAnswer(msgspec.Struct, Generic[T]):
    steps: list[T]


def find_candidate_answers(reply: JudgeReply, question: str = "") -> Iterator[Json]:
    """Yield the JSON objects in the reply that may be the answer. The structured answer comes first, then the
    objects in the text from last to first, because a judge may quote other JSON before its answer. Objects
    that also occur in the question are skipped as quotations, unless the text is a single object."""
    if reply.structured_answer is not None:
        yield reply.structured_answer
    objects = _find_objects(reply.text)
    is_single_object = ONLY_OBJECT.fullmatch(reply.text) is not None and len(objects) == 1
    yield from (answer for answer, source in reversed(objects) if is_single_object or source not in question)


def convert_answer(answer: Json, answer_type: type[T]) -> T:
    try:
        return msgspec.convert(answer, answer_type, strict=False)
    except msgspec.ValidationError as error:
        raise UnparseableAnswer(str(error)) from error


def _find_objects(text: str) -> list[tuple[Json, str]]:
    """Return the outermost JSON objects in the text, each with its source text."""
    decoder = json.JSONDecoder(parse_constant=_reject_constant)
    objects: list[tuple[Json, str]] = []
    position = text.find("{")
    for _ in range(MAX_PARSE_ATTEMPTS):
        if position < 0:
            break
        try:
            value, end = decoder.raw_decode(text, position)
        except (ValueError, RecursionError):
            end = position + 1
        else:
            objects.append((value, text[position:end]))
        position = text.find("{", end)
    return objects


def _reject_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not allowed in JSON")


def scale_to_unit(score: float, scale: tuple[float, float]) -> float:
    """Map a score from the scale to 0..1. Raises UnparseableAnswer if it is outside the scale."""
    low, high = scale
    if not low <= score <= high:
        raise UnparseableAnswer(f"the score {score:g} is not between {low:g} and {high:g}")
    return (score - low) / (high - low)
