"""Arithmetic problems for the demo: a quarter are plain, the rest are six kinds of word problems.

A problem is identified by its kind and its numbers. A hash of the problem decides whether it is held out, so
that the training set and the held-out set never share a problem.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from dataclasses import replace

from instar.rewards.base import Transcript
from instar.rollout.tasksets.word_problems import (
    PEOPLE,
    THINGS,
    WordProblem,
    make_boxes,
    make_compare,
    make_packs,
    make_share,
)
from instar.types import Json

NUMBER = re.compile(r"-?\d+(?:,\d{3})+(?:\.\d+)?|-?\d+(?:\.\d+)?")


ProblemMaker = Callable[[random.Random], WordProblem]


def train_tasks(seed: int = 0, size: int = 2000) -> list[Json]:
    """Return problems to train on."""
    return _generate(seed, size, held_out=False)


def heldout_tasks(seed: int = 0, size: int = 128) -> list[Json]:
    """Return problems that are never trained on."""
    return _generate(seed, size, held_out=True)


def score(task: Json, transcript: Transcript) -> float:
    """Return 1 if the last number in the final reply is the answer, else 0."""
    numbers = NUMBER.findall(transcript.final_text)
    if not numbers:
        return 0.0
    return float(float(numbers[-1].replace(",", "")) == float(task["answer"]))


def _generate(seed: int, size: int, *, held_out: bool) -> list[Json]:
    """Return ``size`` distinct problems. The kinds rotate, so that every prefix has the same mix."""
    rng = random.Random(f"instar-demo/{seed}/{held_out}")
    problems: dict[str, WordProblem] = {}
    for index in range(size):
        makers = PLAIN if index % 4 == 0 else WORDED
        turn = index // 4 if index % 4 == 0 else index - index // 4 - 1
        make = makers[turn % len(makers)]
        problem = make(rng)
        while problem.is_held_out is not held_out or problem.key in problems:
            problem = make(rng)
        problems[problem.key] = problem
    return [{"question": p.question, "answer": p.result, "kind": p.kind} for p in problems.values()]


def _plus(rng: random.Random) -> WordProblem:
    a, b = rng.randint(100, 999), rng.randint(100, 999)
    return WordProblem("plus", (a, b), f"What is {a} plus {b}?", a + b)


def _minus(rng: random.Random) -> WordProblem:
    b, a = sorted((rng.randint(100, 999), rng.randint(100, 999)))
    return WordProblem("minus", (a, b), f"What is {a} minus {b}?", a - b)


def _times(rng: random.Random) -> WordProblem:
    a, b = rng.randint(12, 99), rng.randint(12, 999)
    return WordProblem("times", (a, b), f"What is {a} times {b}?", a * b)


def _more(rng: random.Random) -> WordProblem:
    a, b = rng.randint(100, 999), rng.randint(100, 999)
    who, things = rng.choice(PEOPLE), rng.choice(THINGS)
    question = f"{who} has {a} {things} and gets {b} more. How many {things} does {who} have?"
    return WordProblem("more", (a, b), question, a + b)


def _left(rng: random.Random) -> WordProblem:
    a, b = rng.randint(300, 999), rng.randint(100, 299)
    who, things = rng.choice(PEOPLE), rng.choice(THINGS)
    question = f"{who} has {a} {things} and gives away {b}. How many {things} are left?"
    return WordProblem("left", (a, b), question, a - b)


def _two_step(rng: random.Random) -> WordProblem:
    return replace(make_packs(rng), kind="two_step")


PLAIN: tuple[ProblemMaker, ...] = (_plus, _minus, _times)
WORDED: tuple[ProblemMaker, ...] = (make_boxes, _more, _left, make_compare, make_share, _two_step)


def kinds() -> Iterator[str]:
    rng = random.Random(0)
    return (make(rng).kind for make in (*PLAIN, *WORDED))
