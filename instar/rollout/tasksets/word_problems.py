"""Generate one-step and two-step word problems in GSM8K's format.

A problem is identified by its kind and its numbers, not by the names and objects in its text. A hash of the
problem determines whether it is held out, so the training set and the held-out set never share a problem.
"""

from __future__ import annotations

import random
import re
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from instar.types import Json

NUMBER = re.compile(r"-?\d+(?:,\d{3})+(?:\.\d+)?|-?\d+(?:\.\d+)?")
HELD_OUT_DIVISOR = 5
"""One in this many problems is held out."""
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
        return zlib.crc32(self.key.encode()) % HELD_OUT_DIVISOR == 0

    def to_record(self) -> Json:
        return {"question": self.question, "answer": f"{self.steps}\n#### {self.result}"}


ProblemMaker = Callable[[random.Random], WordProblem]


def make_problems(split: Literal["train", "heldout"], size: int, seed: int = 0) -> list[Json]:
    """Return ``size`` distinct problems from the split, rotating through the kinds of problems."""
    rng = random.Random(f"gsm8k/{seed}/{split}")
    makers = [PROBLEM_MAKERS[index % len(PROBLEM_MAKERS)] for index in range(size)]
    return [problem.to_record() for problem in generate_problems(rng, makers, held_out=split == "heldout")]


def generate_problems(
    rng: random.Random, makers: Iterable[ProblemMaker], *, held_out: bool
) -> list[WordProblem]:
    """Return one problem from each of the ``makers``. The problems are distinct. If ``held_out`` is True, all
    of them are held out, otherwise none."""
    problems: dict[str, WordProblem] = {}
    for make in makers:
        problem = make(rng)
        while problem.is_held_out is not held_out or problem.key in problems:
            problem = make(rng)
        problems[problem.key] = problem
    return list(problems.values())


def parse_number(number: str) -> float:
    return float(number.replace(",", ""))


def _format_step(expression: str, result: int) -> str:
    """Return a calculation in GSM8K's notation: `24*3=<<24*3=72>>72`."""
    return f"{expression}=<<{expression}={result}>>{result}"


def make_boxes(rng: random.Random) -> WordProblem:
    a, b, things = rng.randint(12, 99), rng.randint(12, 399), rng.choice(THINGS)
    question = f"A box holds {a} {things}. How many {things} are in {b} boxes?"
    steps = f"There are {_format_step(f'{a}*{b}', a * b)} {things} in the boxes."
    return WordProblem("boxes", (a, b), question, a * b, steps)


def _make_more(rng: random.Random) -> WordProblem:
    a, b = rng.randint(100, 999), rng.randint(100, 999)
    who, things = rng.choice(PEOPLE), rng.choice(THINGS)
    question = f"{who} has {a} {things} and finds {b} more. How many {things} does {who} have now?"
    steps = f"{who} has {_format_step(f'{a}+{b}', a + b)} {things}."
    return WordProblem("more", (a, b), question, a + b, steps)


def _make_left(rng: random.Random) -> WordProblem:
    a, b = rng.randint(300, 999), rng.randint(100, 299)
    who, things = rng.choice(PEOPLE), rng.choice(THINGS)
    question = f"{who} has {a} {things} and sells {b} of them. How many {things} does {who} have left?"
    steps = f"{who} has {_format_step(f'{a}-{b}', a - b)} {things} left."
    return WordProblem("left", (a, b), question, a - b, steps)


def make_compare(rng: random.Random) -> WordProblem:
    b, a = sorted(rng.sample(range(100, 1000), 2))
    (who, other), things = rng.sample(PEOPLE, 2), rng.choice(THINGS)
    question = (
        f"{who} has {a} {things} and {other} has {b}. How many more {things} does {who} have than {other}?"
    )
    steps = f"{who} has {_format_step(f'{a}-{b}', a - b)} more {things} than {other}."
    return WordProblem("compare", (a, b), question, a - b, steps)


def make_share(rng: random.Random) -> WordProblem:
    b, each, things = rng.randint(3, 40), rng.randint(12, 99), rng.choice(THINGS)
    question = f"{b * each} {things} are shared equally among {b} children. How many does each child get?"
    steps = f"Each child gets {_format_step(f'{b * each}/{b}', each)} {things}."
    return WordProblem("share", (b * each, b), question, each, steps)


def _make_days(rng: random.Random) -> WordProblem:
    a, b, c = (rng.randint(12, 199) for _ in range(3))
    who, things = rng.choice(PEOPLE), rng.choice(THINGS)
    question = (
        f"{who} sells {a} {things} on Monday, {b} on Tuesday and {c} on Wednesday. "
        f"How many {things} does {who} sell in all?"
    )
    first, second = _format_step(f"{a}+{b}", a + b), _format_step(f"{a + b}+{c}", a + b + c)
    steps = f"{who} sells {first} {things} on two days.\nIn all, that is {second}."
    return WordProblem("days", (a, b, c), question, a + b + c, steps)


def make_packs(rng: random.Random) -> WordProblem:
    a, b, c = rng.randint(12, 60), rng.randint(12, 60), rng.randint(11, 99)
    who, things = rng.choice(PEOPLE), rng.choice(THINGS)
    question = f"{who} buys {a} packs of {b} {things} and loses {c}. How many {things} are left?"
    bought = _format_step(f"{a}*{b}", a * b)
    steps = f"{who} buys {bought} {things}.\n{_format_step(f'{a * b}-{c}', a * b - c)} of them are left."
    return WordProblem("packs", (a, b, c), question, a * b - c, steps)


PROBLEM_MAKERS = (make_boxes, _make_more, _make_left, make_compare, make_share, _make_days, make_packs)
