"""Generates word problems with one or two steps in GSM8K's format.

A problem is identified by its kind and its numbers; names and things are decoration. A hash of the problem
decides whether it is held out, so that the training set and the held-out set never share a problem.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from instar.types import Json

HELD_OUT_SHARE = 5
"""One problem in this many is held out."""
PEOPLE = ("Ada", "Ben", "Cleo", "Dan", "Eva", "Finn", "Gus", "Hana", "Ivan", "Jo", "Kim", "Lena")
THINGS = ("apples", "books", "cards", "coins", "eggs", "marbles", "pens", "shells", "stamps", "stickers")


@dataclass(frozen=True, slots=True)
class WordProblem:
    kind: str
    numbers: tuple[int, ...]
    question: str
    result: int
    steps: str = ""
    """The worked solution."""

    @property
    def key(self) -> str:
        return f"{self.kind}:{','.join(map(str, self.numbers))}"

    @property
    def is_held_out(self) -> bool:
        return zlib.crc32(self.key.encode()) % HELD_OUT_SHARE == 0

    def record(self) -> Json:
        return {"question": self.question, "answer": f"{self.steps}\n#### {self.result}"}


def make_problems(split: Literal["train", "heldout"], size: int, seed: int = 0) -> list[Json]:
    """Return distinct problems of the split. The kinds rotate, so that every prefix has the same mix."""
    rng = random.Random(f"gsm8k/{seed}/{split}")
    problems: dict[str, WordProblem] = {}
    for index in range(size):
        make = KINDS[index % len(KINDS)]
        problem = make(rng)
        while problem.is_held_out is not (split == "heldout") or problem.key in problems:
            problem = make(rng)
        problems[problem.key] = problem
    return [problem.record() for problem in problems.values()]


def _worked(expression: str, result: int) -> str:
    """Return a calculation in GSM8K's notation: `24*3=<<24*3=72>>72`."""
    return f"{expression}=<<{expression}={result}>>{result}"


def make_boxes(rng: random.Random) -> WordProblem:
    a, b, things = rng.randint(12, 99), rng.randint(12, 399), rng.choice(THINGS)
    question = f"A box holds {a} {things}. How many {things} are in {b} boxes?"
    steps = f"There are {_worked(f'{a}*{b}', a * b)} {things} in the boxes."
    return WordProblem("boxes", (a, b), question, a * b, steps)


def _more(rng: random.Random) -> WordProblem:
    a, b = rng.randint(100, 999), rng.randint(100, 999)
    who, things = rng.choice(PEOPLE), rng.choice(THINGS)
    question = f"{who} has {a} {things} and finds {b} more. How many {things} does {who} have now?"
    steps = f"{who} has {_worked(f'{a}+{b}', a + b)} {things}."
    return WordProblem("more", (a, b), question, a + b, steps)


def _left(rng: random.Random) -> WordProblem:
    a, b = rng.randint(300, 999), rng.randint(100, 299)
    who, things = rng.choice(PEOPLE), rng.choice(THINGS)
    question = f"{who} has {a} {things} and sells {b} of them. How many {things} does {who} have left?"
    steps = f"{who} has {_worked(f'{a}-{b}', a - b)} {things} left."
    return WordProblem("left", (a, b), question, a - b, steps)


def make_compare(rng: random.Random) -> WordProblem:
    b, a = sorted(rng.sample(range(100, 1000), 2))
    (who, other), things = rng.sample(PEOPLE, 2), rng.choice(THINGS)
    question = (
        f"{who} has {a} {things} and {other} has {b}. How many more {things} does {who} have than {other}?"
    )
    steps = f"{who} has {_worked(f'{a}-{b}', a - b)} more {things} than {other}."
    return WordProblem("compare", (a, b), question, a - b, steps)


def make_share(rng: random.Random) -> WordProblem:
    b, each, things = rng.randint(3, 40), rng.randint(12, 99), rng.choice(THINGS)
    question = f"{b * each} {things} are shared equally among {b} children. How many does each child get?"
    steps = f"Each child gets {_worked(f'{b * each}/{b}', each)} {things}."
    return WordProblem("share", (b * each, b), question, each, steps)


def _days(rng: random.Random) -> WordProblem:
    a, b, c = (rng.randint(12, 199) for _ in range(3))
    who, things = rng.choice(PEOPLE), rng.choice(THINGS)
    question = (
        f"{who} sells {a} {things} on Monday, {b} on Tuesday and {c} on Wednesday. "
        f"How many {things} does {who} sell in all?"
    )
    first = _worked(f"{a}+{b}", a + b)
    steps = (
        f"{who} sells {first} {things} on two days.\nIn all, that is {_worked(f'{a + b}+{c}', a + b + c)}."
    )
    return WordProblem("days", (a, b, c), question, a + b + c, steps)


def make_packs(rng: random.Random) -> WordProblem:
    a, b, c = rng.randint(12, 60), rng.randint(12, 60), rng.randint(11, 99)
    who, things = rng.choice(PEOPLE), rng.choice(THINGS)
    question = f"{who} buys {a} packs of {b} {things} and loses {c}. How many {things} are left?"
    bought = _worked(f"{a}*{b}", a * b)
    steps = f"{who} buys {bought} {things}.\n{_worked(f'{a * b}-{c}', a * b - c)} of them are left."
    return WordProblem("packs", (a, b, c), question, a * b - c, steps)


KINDS: tuple[Callable[[random.Random], WordProblem], ...] = (
    *(make_boxes, _more, _left, make_compare, make_share),
    *(_days, make_packs),
)
