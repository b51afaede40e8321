"""A `verifiers` environment with word problems, a calculator, and a rubric that checks the last number."""

from __future__ import annotations

from typing import Any

import verifiers as vf
from datasets import Dataset

from instar.agents.calculator import evaluate
from instar.demo.agent import make_prompt
from instar.rollout.tasksets.gsm8k import find_final_number
from instar.rollout.tasksets.word_problems import make_problems


async def calc(expression: str) -> str:
    """Evaluate arithmetic."""
    return f"{evaluate(expression):g}"


async def score_answer(completion: list[Any], answer: str) -> float:
    """Return 1 if the last number in the last reply is the answer, else 0."""
    return float(find_final_number(completion[-1].content or "") == find_final_number(answer))


def make_dataset(split: Any, size: int) -> Dataset:
    """Return the problems as a dataset. Each prompt starts with the demo's worked examples."""
    return Dataset.from_list(
        [
            {
                "prompt": [*make_prompt(), {"role": "user", "content": problem["question"]}],
                "answer": problem["answer"],
            }
            for problem in make_problems(split, size)
        ]
    )


def load_environment(size: int = 600) -> vf.Environment:
    return vf.ToolEnv(
        dataset=make_dataset("train", size),
        eval_dataset=make_dataset("heldout", 105),
        tools=[calc],
        rubric=vf.Rubric(funcs=[score_answer]),
        max_turns=4,
    )
