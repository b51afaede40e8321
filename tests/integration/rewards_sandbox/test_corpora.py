"""Tests that reward hacks score 0 and that correct answers in unusual forms score 1."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import yaml

from instar.errors import ScoreError
from instar.rewards.base import Scorer
from tests.unit.rewards.judge_server import serve_judge
from tests.unit.rewards.judges import TASK, make_answer_transcript, start_judge
from tests.unit.rewards.rules import score_text, start_scorer

CORPORA = Path(__file__).parents[2] / "fixtures/rewards"
HACKS: list[dict[str, Any]] = yaml.safe_load((CORPORA / "hacks.yaml").read_text(encoding="utf-8"))
CORRECT_ANSWERS: list[dict[str, Any]] = yaml.safe_load(
    (CORPORA / "correct_answers.yaml").read_text(encoding="utf-8")
)


def get_rule_type(group: dict[str, Any]) -> str:
    return group["rule"]["type"]


async def score_all(group: dict[str, Any], texts: list[str], folder: Path) -> list[tuple[float, Any]]:
    """Return the value and the detail of each text's reward."""
    rule = dict(group["rule"])
    if "script" in group:
        script = folder / "check.py"
        script.write_text(group["script"])
        rule["files"] = [str(script)]

    async def score(scorer: Scorer, text: str) -> tuple[float, Any]:
        async with scorer.concurrency_limit or nullcontext():
            reward = await score_text(scorer, group["task"], text)
        return reward.value, reward.detail

    async with start_scorer(**rule) as scorer:
        return await asyncio.gather(*(score(scorer, text) for text in texts))


@pytest.mark.timeout(600)
@pytest.mark.parametrize("group", [g for g in HACKS if "task" in g], ids=get_rule_type)
async def test_hack_scores_zero(group: dict[str, Any], tmp_path: Path) -> None:
    texts = [group["correct"], *group["attempts"].values()]
    (correct_value, detail), *results = await score_all(group, texts, tmp_path)
    assert correct_value == 1.0, detail
    rewarded = {
        name: detail for name, (value, detail) in zip(group["attempts"], results, strict=True) if value != 0.0
    }
    assert rewarded == {}


@pytest.mark.parametrize("group", [g for g in HACKS if get_rule_type(g) == "judge"], ids=get_rule_type)
async def test_judge_hack_gets_no_reward(group: dict[str, Any], tmp_path: Path) -> None:
    rewarded: dict[str, Any] = {}
    for name, reply in group["attempts"].items():
        async with serve_judge(lambda _, reply=reply: reply) as server:
            async with start_judge(tmp_path / f"{name}.db", server.url, scale=[0, 10]) as judge:
                try:
                    (reward,) = await judge.score(TASK, make_answer_transcript(group["answer"]))
                except ScoreError:
                    continue
                if reward.value != 0.0:
                    rewarded[name] = (reward.value, reward.detail)
    assert rewarded == {}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("group", CORRECT_ANSWERS, ids=get_rule_type)
async def test_correct_answer_in_an_unusual_form_scores_one(group: dict[str, Any], tmp_path: Path) -> None:
    results = await score_all(group, group["answers"], tmp_path)
    rejected = {
        text: detail for text, (value, detail) in zip(group["answers"], results, strict=True) if value != 1.0
    }
    assert rejected == {}


def test_corpora_have_the_required_size_and_rule_types() -> None:
    assert sum(len(group["attempts"]) for group in HACKS) >= 60
    assert sum(len(group["answers"]) for group in CORRECT_ANSWERS) >= 200
    rule_types = {"exact", "numeric", "math", "json_schema", "regex", "command", "tests"}
    assert {get_rule_type(group) for group in HACKS} == {*rule_types, "judge"}
    assert {get_rule_type(group) for group in CORRECT_ANSWERS} == rule_types
