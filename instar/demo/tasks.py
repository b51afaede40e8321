"""Arithmetic, a quarter of it plain and the rest told as six kinds of word problem.

A problem is its kind and its numbers; the names and things in it are decoration. Whether a problem
may be trained on is decided by a hash of the problem, so no seed and no size can make the training
and the held-out set share one.
"""

from __future__ import annotations

import random
import re
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from instar.rewards.base import Transcript
from instar.types import Json

HELD_OUT_SHARE = 5
"""One problem in so many is held out."""
NUMBER = re.compile(r"-?\d+(?:,\d{3})+(?:\.\d+)?|-?\d+(?:\.\d+)?")
PEOPLE = ("Ada", "Ben", "Cleo", "Dan", "Eva", "Finn", "Gus", "Hana", "Ivan", "Jo", "Kim", "Lena")
THINGS = ("apples", "books", "cards", "coins", "eggs", "marbles", "pens", "shells", "stamps", "stickers")


@dataclass(frozen=True, slots=True)
class ArithmeticProblem:
    kind: str
    numbers: tuple[int, ...]
    question: str
    answer: int

    @property
    def is_held_out(self) -> bool:
        key = f"{self.kind}:{','.join(map(str, self.numbers))}"
        return zlib.crc32(key.encode()) % HELD_OUT_SHARE == 0


ProblemMaker = Callable[[random.Random], ArithmeticProblem]


def train_tasks(seed: int = 0, size: int = 2000) -> list[Json]:
    """Problems to train on."""
    return _take(seed, size, held_out=False)


def heldout_tasks(seed: int = 0, size: int = 128) -> list[Json]:
    """Problems that training never sees."""
    return _take(seed, size, held_out=True)


def score(task: Json, transcript: Transcript) -> float:
    """1 if the last number of the final reply is the answer, else 0."""
    numbers = NUMBER.findall(transcript.final_text)
    if not numbers:
        return 0.0
    return float(float(numbers[-1].replace(",", "")) == float(task["answer"]))


def _take(seed: int, size: int, *, held_out: bool) -> list[Json]:
    """The first ``size`` distinct problems of that side, kinds in a fixed rotation so that every
    prefix of the list has the same mix."""
    rng = random.Random(f"instar-demo/{seed}/{held_out}")
    taken: dict[tuple[str, tuple[int, ...]], ArithmeticProblem] = {}
    for wanted in range(size):
        makers = PLAIN if wanted % 4 == 0 else WORDED
        turn = wanted // 4 if wanted % 4 == 0 else wanted - wanted // 4 - 1
        make = makers[turn % len(makers)]
        while True:
            problem = make(rng)
            key = (problem.kind, problem.numbers)
            if problem.is_held_out is held_out and key not in taken:
                taken[key] = problem
                break
    return [{"question": p.question, "answer": p.answer, "kind": p.kind} for p in taken.values()]


# --- plain arithmetic ---------------------------------------------------------------------------


def _plus(rng: random.Random) -> ArithmeticProblem:
    a, b = rng.randint(100, 999), rng.randint(100, 999)
    return ArithmeticProblem("plus", (a, b), f"What is {a} plus {b}?", a + b)


def _minus(rng: random.Random) -> ArithmeticProblem:
    b, a = sorted((rng.randint(100, 999), rng.randint(100, 999)))
    return ArithmeticProblem("minus", (a, b), f"What is {a} minus {b}?", a - b)


def _times(rng: random.Random) -> ArithmeticProblem:
    a, b = rng.randint(12, 99), rng.randint(12, 999)
    return ArithmeticProblem("times", (a, b), f"What is {a} times {b}?", a * b)


# --- word problems ------------------------------------------------------------------------------


def _boxes(rng: random.Random) -> ArithmeticProblem:
    a, b, things = rng.randint(12, 99), rng.randint(12, 399), rng.choice(THINGS)
    question = f"A box holds {a} {things}. How many {things} are in {b} boxes?"
    return ArithmeticProblem("boxes", (a, b), question, a * b)


def _more(rng: random.Random) -> ArithmeticProblem:
    a, b = rng.randint(100, 999), rng.randint(100, 999)
    who, things = rng.choice(PEOPLE), rng.choice(THINGS)
    question = f"{who} has {a} {things} and gets {b} more. How many {things} does {who} have?"
    return ArithmeticProblem("more", (a, b), question, a + b)


def _left(rng: random.Random) -> ArithmeticProblem:
    a, b = rng.randint(300, 999), rng.randint(100, 299)
    who, things = rng.choice(PEOPLE), rng.choice(THINGS)
    question = f"{who} has {a} {things} and gives away {b}. How many {things} are left?"
    return ArithmeticProblem("left", (a, b), question, a - b)


def _compare(rng: random.Random) -> ArithmeticProblem:
    b, a = sorted(rng.sample(range(100, 1000), 2))
    (who, other), things = rng.sample(PEOPLE, 2), rng.choice(THINGS)
    question = (
        f"{who} has {a} {things} and {other} has {b}. How many more {things} does {who} have than {other}?"
    )
    return ArithmeticProblem("compare", (a, b), question, a - b)


def _share(rng: random.Random) -> ArithmeticProblem:
    b, each, things = rng.randint(3, 40), rng.randint(12, 99), rng.choice(THINGS)
    question = f"{b * each} {things} are shared equally among {b} children. How many does each child get?"
    return ArithmeticProblem("share", (b * each, b), question, each)


def _two_step(rng: random.Random) -> ArithmeticProblem:
    a, b, c = rng.randint(12, 60), rng.randint(12, 60), rng.randint(11, 99)
    who, things = rng.choice(PEOPLE), rng.choice(THINGS)
    question = f"{who} buys {a} packs of {b} {things} and loses {c}. How many {things} are left?"
    return ArithmeticProblem("two_step", (a, b, c), question, a * b - c)


PLAIN: tuple[ProblemMaker, ...] = (_plus, _minus, _times)
WORDED: tuple[ProblemMaker, ...] = (_boxes, _more, _left, _compare, _share, _two_step)


def kinds() -> Iterator[str]:
    """Every kind of problem there is."""
    rng = random.Random(0)
    return (make(rng).kind for make in (*PLAIN, *WORDED))
