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
class Problem:
    kind: str
    numbers: tuple[int, ...]
    question: str
    answer: int

    @property
    def held_out(self) -> bool:
        key = f"{self.kind}:{','.join(map(str, self.numbers))}"
        return zlib.crc32(key.encode()) % HELD_OUT_SHARE == 0


Maker = Callable[[random.Random], Problem]


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
    taken: dict[tuple[str, tuple[int, ...]], Problem] = {}
    for wanted in range(size):
        makers = PLAIN if wanted % 4 == 0 else WORDED
        turn = wanted // 4 if wanted % 4 == 0 else wanted - wanted // 4 - 1
        make = makers[turn % len(makers)]
        while True:
            problem = make(rng)
            key = (problem.kind, problem.numbers)
            if problem.held_out is held_out and key not in taken:
                taken[key] = problem
                break
    return [{"question": p.question, "answer": p.answer, "kind": p.kind} for p in taken.values()]


# --- plain arithmetic ---------------------------------------------------------------------------


def _plus(rng: random.Random) -> Problem:
    a, b = rng.randint(100, 999), rng.randint(100, 999)
    return Problem("plus", (a, b), f"What is {a} plus {b}?", a + b)


def _minus(rng: random.Random) -> Problem:
    b, a = sorted((rng.randint(100, 999), rng.randint(100, 999)))
    return Problem("minus", (a, b), f"What is {a} minus {b}?", a - b)


def _times(rng: random.Random) -> Problem:
    a, b = rng.randint(12, 99), rng.randint(12, 999)
    return Problem("times", (a, b), f"What is {a} times {b}?", a * b)


# --- word problems ------------------------------------------------------------------------------


def _boxes(rng: random.Random) -> Problem:
    a, b, things = rng.randint(12, 99), rng.randint(12, 399), rng.choice(THINGS)
    question = f"A box holds {a} {things}. How many {things} are in {b} boxes?"
    return Problem("boxes", (a, b), question, a * b)


def _more(rng: random.Random) -> Problem:
    a, b = rng.randint(100, 999), rng.randint(100, 999)
    who, things = rng.choice(PEOPLE), rng.choice(THINGS)
    question = f"{who} has {a} {things} and gets {b} more. How many {things} does {who} have?"
    return Problem("more", (a, b), question, a + b)


def _left(rng: random.Random) -> Problem:
    a, b = rng.randint(300, 999), rng.randint(100, 299)
    who, things = rng.choice(PEOPLE), rng.choice(THINGS)
    question = f"{who} has {a} {things} and gives away {b}. How many {things} are left?"
    return Problem("left", (a, b), question, a - b)


def _compare(rng: random.Random) -> Problem:
    b, a = sorted(rng.sample(range(100, 1000), 2))
    (who, other), things = rng.sample(PEOPLE, 2), rng.choice(THINGS)
    question = (
        f"{who} has {a} {things} and {other} has {b}. How many more {things} does {who} have than {other}?"
    )
    return Problem("compare", (a, b), question, a - b)


def _share(rng: random.Random) -> Problem:
    b, each, things = rng.randint(3, 40), rng.randint(12, 99), rng.choice(THINGS)
    question = f"{b * each} {things} are shared equally among {b} children. How many does each child get?"
    return Problem("share", (b * each, b), question, each)


def _two_step(rng: random.Random) -> Problem:
    a, b, c = rng.randint(12, 60), rng.randint(12, 60), rng.randint(11, 99)
    who, things = rng.choice(PEOPLE), rng.choice(THINGS)
    question = f"{who} buys {a} packs of {b} {things} and loses {c}. How many {things} are left?"
    return Problem("two_step", (a, b, c), question, a * b - c)


PLAIN: tuple[Maker, ...] = (_plus, _minus, _times)
WORDED: tuple[Maker, ...] = (_boxes, _more, _left, _compare, _share, _two_step)


def kinds() -> Iterator[str]:
    """Every kind of problem there is."""
    rng = random.Random(0)
    return (make(rng).kind for make in (*PLAIN, *WORDED))
