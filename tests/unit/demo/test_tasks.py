from __future__ import annotations

import random
import re
from collections import Counter

import pytest

from instar.demo.tasks import PLAIN_MAKERS, WORD_PROBLEM_MAKERS, heldout_tasks, score, train_tasks
from instar.rewards.base import Transcript
from instar.types import Json, Message
from tests.unit.data.builders import make_call

PLAIN_KINDS = {"plus", "minus", "times"}


def get_problem_key(task: Json) -> tuple[str, tuple[str, ...]]:
    return task["kind"], tuple(re.findall(r"\d+", task["question"]))


def test_demo_tasks_contain_all_kinds_and_one_quarter_plain() -> None:
    rng = random.Random(0)
    for tasks in (train_tasks(0, 480), heldout_tasks(0, 128)):
        counts = Counter(task["kind"] for task in tasks)
        assert set(counts) == {make(rng).kind for make in (*PLAIN_MAKERS, *WORD_PROBLEM_MAKERS)}
        assert sum(counts[kind] for kind in PLAIN_KINDS) == len(tasks) // 4
        assert max(counts.values()) - min(counts[kind] for kind in counts if kind not in PLAIN_KINDS) <= 1


def test_demo_answers_are_correct() -> None:
    for task in [*train_tasks(3, 300), *heldout_tasks(3, 128)]:
        numbers = [int(number) for number in re.findall(r"\d+", task["question"])]
        expected = {
            "plus": lambda a, b: a + b,
            "minus": lambda a, b: a - b,
            "times": lambda a, b: a * b,
            "boxes": lambda a, b: a * b,
            "more": lambda a, b: a + b,
            "left": lambda a, b: a - b,
            "compare": lambda a, b: a - b,
            "share": lambda a, b: a // b,
            "two_step": lambda a, b, c: a * b - c,
        }[task["kind"]](*numbers)
        assert task["answer"] == expected, task
        assert task["answer"] >= 0


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_demo_training_and_held_out_tasks_are_disjoint(seed: int) -> None:
    trained = [get_problem_key(task) for task in train_tasks(seed, 4000)]
    held_out = [get_problem_key(task) for other_seed in range(4) for task in heldout_tasks(other_seed, 400)]
    assert not set(trained) & set(held_out)
    assert len(set(trained)) == len(trained), "no problem occurs twice"


def test_demo_tasks_are_determined_by_the_seed() -> None:
    assert train_tasks(1, 50) == train_tasks(1, 50)
    assert train_tasks(1, 50) != train_tasks(2, 50)
    assert train_tasks(1, 100)[:50] == train_tasks(1, 50)


@pytest.mark.parametrize(
    ("reply", "reward"),
    [
        ("7440", 1),
        ("The answer is 7,440.", 1),
        ("24 * 310 = 7440", 1),
        ("7440.0", 1),
        ("7440 or 7441", 0),
        ("-7440", 0),
        ("74400", 0),
        ("", 0),
        ("seven", 0),
    ],
)
def test_demo_score_uses_last_number_of_final_reply(reply: str, reward: float) -> None:
    first = make_call("a", [1], [5], reply=Message(role="assistant", content="7440"))
    last = make_call("b", [1], [6], reply=Message(role="assistant", content=reply))
    assert score({"answer": 7440}, Transcript("s", [first, last], None)) == reward
    assert score({"answer": 7440}, Transcript("s", [], None)) == 0.0
