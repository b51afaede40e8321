"""Tests for `instar feedback` on a run folder with a real store and tokenizer."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import LlamaConfig

from instar.cluster.layout import RunFolder
from instar.config import RunConfig
from instar.store.base import Run, Store
from instar.store.factory import open_store
from instar.types import Call, Channel, Feedback, Message, Reward, Session
from tests.tiny import make_tiny_tokenizer
from tests.unit.cli.conftest import Instar


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    """Create a run with one call, and a model with the tiny tokenizer."""
    folder = tmp_path / "model"
    tokenizer = make_tiny_tokenizer()
    tokenizer.save_pretrained(folder)
    LlamaConfig().save_pretrained(folder)
    rollout = {
        "tasks": {"type": "python", "function": "a:b"},
        "agent": {"type": "function", "function": "a:b"},
    }
    config = RunConfig.model_validate(
        {"name": "rated", "dir": tmp_path / "run", "model": {"name": str(folder)}, "rollout": rollout}
    )
    RunFolder(config.run_dir).create(config)
    asyncio.run(fill_store(config, tokenizer))
    return config


async def fill_store(config: RunConfig, tokenizer: Any) -> None:
    def encode(text: str) -> Any:
        return np.asarray(tokenizer.encode(text, add_special_tokens=False), np.int32)

    prompt, reply = encode("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"), encode("Ho.<|im_end|>")
    store = open_store(config)
    await store.put_run(Run("rated", "rated", {}))
    await store.open_session(Session("s-1", "rated", "a", "rated", Channel.TRAIN))
    call = Call(
        call_id="c-1",
        session_id="s-1",
        run_id="rated",
        agent_id="a",
        policy_id="rated",
        request_id="chatcmpl-1",
        prompt_ids=prompt,
        sampled_ids=reply,
        logprobs=np.full(len(reply), -1, np.float32),
        versions=np.zeros(len(reply), np.int32),
        messages=(Message(role="user", content="hi"),),
        reply=Message(role="assistant", content="Ho."),
        finish_reason="stop",
    )
    await store.add_calls([call])
    await store.close()


async def read_rewards_and_corrections(config: RunConfig) -> tuple[list[Reward], list[Feedback]]:
    store: Store = open_store(config)
    try:
        return await store.rewards("s-1"), await store.corrections("rated", 0, 10, ["a"])
    finally:
        await store.close()


def test_feedback_thumb_becomes_a_reward(instar: Instar, config: RunConfig) -> None:
    result = instar(
        "feedback", config.run_dir, "--session", "s-1", "--up", "--text", "nice", "--author", "Ada"
    )
    assert result.code == 0, result.err
    assert "reward 1" in result.out
    instar("feedback", config.run_dir, "--call", "c-1", "--down")
    rewards, _ = asyncio.run(read_rewards_and_corrections(config))
    assert [(reward.value, reward.call_id) for reward in rewards] == [(1.0, None), (0.0, "c-1")]
    rows = instar("feedback", config.run_dir, "ls", "--json").json
    assert [(row["thumbs"], row["text"], row["author"]) for row in rows] == [(1, "nice", "Ada"), (-1, "", "")]
    assert "nice" in instar("feedback", config.run_dir, "ls").out


def test_feedback_correction_becomes_training_data(instar: Instar, config: RunConfig, tmp_path: Path) -> None:
    file = tmp_path / "better.txt"
    file.write_text("Hello.\n")
    arguments = ["--response", "chatcmpl-1", "--correction-file", file, "--id", "f-1"]
    result = instar("feedback", config.run_dir, *arguments)
    assert "the correction will be used when this run trains" in result.out, result.err
    assert "Already recorded" in instar("feedback", config.run_dir, *arguments).out
    _, (correction,) = asyncio.run(read_rewards_and_corrections(config))
    assert correction.correction_ids is not None
    assert make_tiny_tokenizer().decode(correction.correction_ids.tolist()) == "Hello.<|im_end|>"
    conflicting = instar(
        "feedback", config.run_dir, "--response", "chatcmpl-1", "--correction", "Hi.", "--id", "f-1"
    )
    assert (conflicting.code, "already used by different feedback" in conflicting.err) == (1, True)


def test_feedback_over_a_file_becomes_a_preference(instar: Instar, config: RunConfig, tmp_path: Path) -> None:
    file = tmp_path / "worse.txt"
    file.write_text("Go away.\n")
    result = instar("feedback", config.run_dir, "--call", "c-1", "--over-file", file)
    assert "the preference will be used when this run trains" in result.out, result.err
    (row,) = instar("feedback", config.run_dir, "ls", "--json").json
    assert (row["preferred"], row["other_text"], row["trainable"]) == ("this", "Go away.", True)
    assert "over Go away." in instar("feedback", config.run_dir, "ls").out
    conflicting = instar("feedback", config.run_dir, "--call", "c-1", "--over", "a", "--under", "b")
    assert (conflicting.code, "mutually exclusive" in conflicting.err) == (1, True)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"rollout": None}, "this run only serves the model; export its sessions"),
        ({"trainer": {"corrections": {"weight": 0}}}, "trainer.corrections.weight is 0"),
    ],
)
def test_feedback_correction_in_a_run_that_does_not_train_on_it_says_so(
    instar: Instar, config: RunConfig, changes: dict[str, Any], reason: str
) -> None:
    settings = config.model_dump(mode="json") | changes
    RunFolder(config.run_dir).create(RunConfig.model_validate(settings))
    result = instar("feedback", config.run_dir, "--session", "s-1", "--correction", "Hello.")
    assert f"the correction is stored, but this run does not train on it: {reason}" in result.out, result.err
    (row,) = instar("feedback", config.run_dir, "ls", "--json").json
    assert not row["trainable"]
    _, (correction,) = asyncio.run(read_rewards_and_corrections(config))
    assert correction.correction_ids is not None, "another run may train on it after an export"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--session", "s-9", "--up"], "no session 's-9'"),
        (["--up"], "session_id"),
        (["--session", "s-1"], "at least one of"),
        (["--session", "s-1", "--up", "--id", "a b"], "feedback_id"),
        (["--session", "s-1", "--correction", "x", "--correction-file", "y"], "--correction-file"),
        (["--session", "s-1", "--correction-file", "/missing"], "cannot read"),
    ],
)
def test_invalid_feedback_is_explained_and_not_stored(
    instar: Instar, config: RunConfig, arguments: list[str], expected: str
) -> None:
    result = instar("feedback", config.run_dir, *arguments)
    assert result.code == 1
    assert expected in result.err
    assert json.loads(instar("feedback", config.run_dir, "ls", "--json").out) == []
