"""What a judge answered, read out of JSON or out of text with JSON in it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Literal, NoReturn, TypeVar

import msgspec

from instar.rewards.judge.wire import JudgeReply
from instar.types import Json

MOST_TRIES = 200
"""Opening braces in a text that are tried as the beginning of an answer."""


class UnparseableAnswer(Exception):
    """It is no answer to what was asked."""


class ScoreAnswer(msgspec.Struct):
    score: float
    reasons: str = ""


class StepScoreAnswer(msgspec.Struct):
    step: int
    score: float
    reasons: str = ""


class StepScoresAnswer(msgspec.Struct):
    steps: list[StepScoreAnswer]


class ComparisonAnswer(msgspec.Struct):
    winner: Literal["A", "B", "tie"]
    reasons: str = ""


Signal = Literal[
    "accepted", "corrected", "repeated", "tests_passed", "tests_failed", "tool_failed", "unclear"
]


class StepSignalAnswer(msgspec.Struct):
    step: int
    signal: Signal
    reasons: str = ""


class StepSignalsAnswer(msgspec.Struct):
    steps: list[StepSignalAnswer]


T = TypeVar("T")


def candidate_answers(reply: JudgeReply) -> Iterator[Json]:
    """Every object that may be the answer: what was given as one, else those in the text, the last first (a
    judge may quote before it answers)."""
    if reply.structured_answer is not None:
        yield reply.structured_answer
    yield from reversed(_objects(reply.text))


def convert_answer(answer: Json, kind: type[T]) -> T:
    """Raises UnparseableAnswer."""
    try:
        return msgspec.convert(answer, kind, strict=False)
    except msgspec.ValidationError as error:
        raise UnparseableAnswer(str(error)) from error


def _objects(text: str) -> list[Json]:
    decoder = json.JSONDecoder(parse_constant=_no_number)
    found: list[Json] = []
    at = text.find("{")
    for _ in range(MOST_TRIES):
        if at < 0:
            break
        try:
            value, end = decoder.raw_decode(text, at)
        except (ValueError, RecursionError):
            end = at + 1
        else:
            found.append(value)
        at = text.find("{", end)
    return found


def _no_number(word: str) -> NoReturn:
    raise ValueError(f"{word} is no number")


def scale_to_unit(score: float, scale: tuple[float, float]) -> float:
    """A score on the scale, brought to 0..1. Raises UnparseableAnswer for one that is off it."""
    low, high = scale
    if not low <= score <= high:
        raise UnparseableAnswer(f"a score of {score:g} is not on the scale from {low:g} to {high:g}")
    return (score - low) / (high - low)


def truncate(text: Any, most: int = 500) -> str:
    return str(text)[:most]
