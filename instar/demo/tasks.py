"""Arithmetic problems for the demo: a quarter are plain calculations, the others are word problems."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import cycle

from instar.rewards.base import Transcript
from instar.rollout.tasksets import word_problems
from instar.rollout.tasksets.word_problems import PEOPLE, THINGS, ProblemMaker, WordProblem
from instar.types import Json


def train_tasks(seed: int = 0, size: int = 2000) -> list[Json]:
    return _generate(seed, size, held_out=False)


def heldout_tasks(seed: int = 0, size: int = 128) -> list[Json]:
    return _generate(seed, size, held_out=True)


def score(task: Json, transcript: Transcript) -> float:
    """Return 1 if the last number in the final reply is the answer, else 0."""
    numbers = word_problems.NUMBER.findall(transcript.final_text)
    return float(bool(numbers) and word_problems.parse_number(numbers[-1]) == float(task["answer"]))


def _generate(seed: int, size: int, *, held_out: bool) -> list[Json]:
    """Return ``size`` distinct problems. Every fourth one is a plain calculation; the kinds rotate."""
    rng = random.Random(f"instar-demo/{seed}/{held_out}")
    plain, worded = cycle(PLAIN_MAKERS), cycle(WORD_PROBLEM_MAKERS)
    makers = [next(worded if index % 4 else plain) for index in range(size)]
    problems = word_problems.generate_problems(rng, makers, held_out=held_out)
    return [{"question": p.question, "answer": p.result, "kind": p.kind} for p in problems]


def _make_plus(rng: random.Random) -> WordProblem:
    a, b = rng.randint(100, 999), rng.randint(100, 999)
    return WordProblem("plus", (a, b), f"What is {a} plus {b}?", a + b)


def _make_minus(rng: random.Random) -> WordProblem:
    b, a = sorted((rng.randint(100, 999), rng.randint(100, 999)))
    return WordProblem("minus", (a, b), f"What is {a} minus {b}?", a - b)


def _make_times(rng: random.Random) -> WordProblem:
    a, b = rng.randint(12, 99), rng.randint(12, 999)
    return WordProblem("times", (a, b), f"What is {a} times {b}?", a * b)


def _make_more(rng: random.Random) -> WordProblem:
    a, b = rng.randint(100, 999), rng.randint(100, 999)
    who, things = rng.choice(PEOPLE), rng.choice(THINGS)
    question = f"{who} has {a} {things} and gets {b} more. How many {things} does {who} have?"
    return WordProblem("more", (a, b), question, a + b)


def _make_left(rng: random.Random) -> WordProblem:
    a, b = rng.randint(300, 999), rng.randint(100, 299)
    who, things = rng.choice(PEOPLE), rng.choice(THINGS)
    question = f"{who} has {a} {things} and gives away {b}. How many {things} are left?"
    return WordProblem("left", (a, b), question, a - b)


def _make_two_step(rng: random.Random) -> WordProblem:
    return replace(word_problems.make_packs(rng), kind="two_step")


PLAIN_MAKERS: tuple[ProblemMaker, ...] = (_make_plus, _make_minus, _make_times)
WORD_PROBLEM_MAKERS: tuple[ProblemMaker, ...] = (
    word_problems.make_boxes,
    _make_more,
    _make_left,
    word_problems.make_compare,
    word_problems.make_share,
    _make_two_step,
)
