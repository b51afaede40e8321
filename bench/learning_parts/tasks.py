"""The tasks of the comparison, as fragments of a run config, and the development task `dev`.

Instar's settings were chosen with bench/ablations.py on the tasks `calc`, `cmd` and `tools` of
ablation_parts/tasks.py, and TRL's are to be chosen with `--sweep` on `dev`, which has the questions of `cmd`.
The tasks of the comparison share no questions with them, but `calc` resembles `gsm8k`:

- `gsm8k`: a word problem in, one calculation out.
- `calculator`: the agent and the problems of `instar demo`, with several turns and a tool.
- `gym`: a dataset of reasoning-gym, chosen by a rule before anything was trained on it: of all datasets in
  alphabetical order, with their default settings, the first one that the untrained model solves in part. In
  the first 60 tasks from seed 1,000,000, the questions must be distinct and have at most 200 tokens, and the
  answers must be texts of fewer than 24 tokens. The mean greedy score in the first 24 of these tasks, after
  two solved examples (the first two tasks from seed 2,000,000), must be between 0.1 and 0.7.
- `textarena`: two rounds of Kuhn poker against an opponent that moves at random. The untrained model rarely
  makes valid moves. A lost, drawn and won game count as 0, 0.5 and 1 in the held-out score.
- `function_calls`: requests that must be answered with the right call of a function.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ablation_parts.tasks import CMD

from instar.config import RunConfig
from instar.models import DEFAULT_MODEL

if TYPE_CHECKING:
    from instar.rewards.base import Transcript
    from instar.types import Json

TRAIN_SIZE, HELD_OUT_SIZE = 4000, 500
"""The numbers of tasks that are generated. An evaluation uses the first held-out tasks."""
GYM_HELD_OUT_SEED = 1_000_000
HELD_OUT_DIVISOR = 5
"""One in this many questions of the development task is held out."""
GROUP_SIZE = 8
LORA = {"rank": 16, "alpha": 32}
VLLM_GPU_MEMORY = 0.3
"""The share of the GPU's memory for vLLM on both sides, which is TRL's default. The rest is for training."""


@dataclass(frozen=True)
class LearningTask:
    agent: str
    """The agent's function."""
    agent_args: Json
    train: Json
    """The config section of the training tasks."""
    held_out: Json
    reward: Json
    reward_range: tuple[float, float] = (0.0, 1.0)
    """The lowest and the highest reward. They become the held-out scores 0 and 1."""
    max_context: int = 1024

    def make_settings(self) -> Json:
        """Return the part of a run config that is the same for all contenders."""
        return {
            "model": {"name": DEFAULT_MODEL, "max_context": self.max_context},
            "backend": {"type": "local", "lora": LORA},
            "rollout": {
                "tasks": self.train,
                "agent": {"type": "function", "function": self.agent, "args": self.agent_args},
                "group_size": GROUP_SIZE,
            },
            "reward": self.reward,
        }

    def make_config(self) -> RunConfig:
        """Return a config with the held-out tasks, for running episodes without `instar train`."""
        return RunConfig.model_validate({**self.make_settings(), "eval": {"tasks": self.held_out}})

    def compute_score(self, rewards: list[float]) -> float:
        low, high = self.reward_range
        return (sum(rewards) / len(rewards) - low) / (high - low)


def make_command_tasks(size: int, *, held_out: bool, seed: int = 0) -> list[Json]:
    """Return distinct tasks for the development task. A hash decides which questions are held out."""
    tasks: dict[str, Json] = {}
    for example in CMD.make_examples(seed, is_held_out=held_out):
        is_held_out = zlib.crc32(example.question.encode()) % HELD_OUT_DIVISOR == 0
        if is_held_out is held_out:
            tasks[example.question] = {"question": example.question, "answer": example.answer}
        if len(tasks) == size:
            break
    return list(tasks.values())


def score_command(task: Json, transcript: Transcript) -> float:
    return CMD.score(transcript.final_text, task["answer"])


def _make_function_section(function: str, **args: Any) -> Json:
    return {"type": "python", "function": function, "args": args}


def _make_synthetic_section(split: str, size: int) -> Json:
    return {"type": "gsm8k", "synthetic": {"split": split, "size": size}}


def _make_gym_section(size: int, seed: int) -> Json:
    # The verifier of this dataset only compares colours, so it needs no sandbox.
    return {
        "type": "reasoning_gym",
        "dataset": "color_cube_rotation",
        "size": size,
        "seed": seed,
        "sandbox": False,
    }


def _make_game_section(size: int, seed: int) -> Json:
    games = {"type": "textarena", "games": ["KuhnPoker-v0"], "args": {"max_rounds": 2}}
    return {**games, "size": size, "seed": seed}


POKER_HINT = """\
Reply with one of the available actions and nothing else.

User: Your available actions are: '[check]', '[bet]'
Assistant: [check]

User: Your available actions are: '[fold]', '[call]'
Assistant: [call]

User: Your available actions are: '[check]', '[bet]'
Assistant: [bet]"""
GYM_EXAMPLES = [
    [
        "A cube has:\n- a gray top side\n- a orange right side\n- a yellow front side\n- a gold left side\n"
        "- a red back side\n- a pink bottom side\n\nThe cube is rotated so that the side which was before at "
        "the right is now at the top.\n\nWhat is now the color of the top side of the cube?\n"
        "Provide only the color as your final answer.",
        "orange",
    ],
    [
        "A cube has:\n- a silver top side\n- a purple right side\n- a indigo front side\n"
        "- a violet left side\n- a brown back side\n- a red bottom side\n\n"
        "The cube is rotated so that the side which was before at the back is now at the top.\n\n"
        "Then the cube is rotated to bring the left side to the top.\n\n"
        "What is now the color of the right side of the cube?\nProvide only the color as your final answer.",
        "brown",
    ],
]

TASKS: dict[str, LearningTask] = {
    "gsm8k": LearningTask(
        agent="learning_parts.gsm8k_agent:solve_in_one_turn",
        agent_args={},
        train=_make_synthetic_section("train", TRAIN_SIZE),
        held_out=_make_synthetic_section("heldout", HELD_OUT_SIZE),
        reward={"type": "agent"},
    ),
    "calculator": LearningTask(
        agent="instar.demo.agent:solve",
        agent_args={},
        train=_make_function_section("instar.demo.tasks:train_tasks", size=TRAIN_SIZE),
        held_out=_make_function_section("instar.demo.tasks:heldout_tasks", size=HELD_OUT_SIZE),
        reward={"type": "rule", "function": "instar.demo.tasks:score"},
    ),
    "gym": LearningTask(
        agent="instar.agents.ask:ask",
        agent_args={"system": "Answer with the answer alone.", "examples": GYM_EXAMPLES, "max_tokens": 24},
        train=_make_gym_section(TRAIN_SIZE, 0),
        held_out=_make_gym_section(HELD_OUT_SIZE, GYM_HELD_OUT_SEED),
        reward={"type": "rule"},
    ),
    "textarena": LearningTask(
        agent="instar.agents.textarena:play",
        agent_args={"hint": POKER_HINT, "max_tokens": 8},
        train=_make_game_section(TRAIN_SIZE, 0),
        held_out=_make_game_section(HELD_OUT_SIZE, 1_000_000),
        reward={"type": "agent"},
        reward_range=(-1.0, 1.0),
    ),
    "function_calls": LearningTask(
        agent="instar.agents.ask:ask",
        agent_args={"max_tokens": 56},
        train=_make_function_section(
            "learning_parts.function_calls:make_tasks", size=TRAIN_SIZE, held_out=False
        ),
        held_out=_make_function_section(
            "learning_parts.function_calls:make_tasks", size=HELD_OUT_SIZE, held_out=True
        ),
        reward={"type": "rule", "function": "learning_parts.function_calls:score"},
    ),
    "dev": LearningTask(
        agent="instar.agents.ask:ask",
        agent_args={
            "system": CMD.instruction,
            "examples": [list(pair) for pair in CMD.demonstrations],
            "max_tokens": 24,
        },
        train=_make_function_section(
            "learning_parts.tasks:make_command_tasks", size=TRAIN_SIZE, held_out=False
        ),
        held_out=_make_function_section(
            "learning_parts.tasks:make_command_tasks", size=HELD_OUT_SIZE, held_out=True
        ),
        reward={"type": "rule", "function": "learning_parts.tasks:score_command"},
    ),
}
COMPARISON_TASKS = [name for name in TASKS if name != "dev"]
GPU_TASKS = ["gsm8k", "calculator"]
"""The tasks of the comparison on a GPU, unless others are chosen."""
