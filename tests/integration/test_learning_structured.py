"""A model with random weights learns from a rule over replies that are constrained by a JSON schema.

The schema allows one of several words. The rule rewards a word of the kind that the prompt names. Held-out
prompts have the same kinds and other numbers. The constraint makes every reply valid, so a higher reward
comes only from a better choice.
"""

from __future__ import annotations

import json
from pathlib import Path
from statistics import mean
from typing import Any

import aiohttp
import numpy as np
import pytest

from instar.backends.factory import create_backend
from instar.config import RunConfig
from instar.data.linearize import linearize
from instar.rewards.base import Transcript
from instar.rollout.base import AgentSession
from instar.store.sqlite import SqliteStore
from instar.types import Call, Channel, Session
from tests.tiny import make_tiny_model
from tests.unit.test_learning import make_config, train

MODULE = "tests.integration.test_learning_structured"
STEPS = 24
KINDS = {"digit": ["1", "2", "3"], "letter": ["a", "b", "c"]}
WORDS = [word for words in KINDS.values() for word in words]
SCHEMA = {
    "type": "object",
    "properties": {"answer": {"enum": WORDS}},
    "required": ["answer"],
    "additionalProperties": False,
}


def make_tasks() -> list[dict[str, str]]:
    return [{"kind": kind, "number": number} for kind in KINDS for number in ("3", "5")]


def make_held_out_tasks() -> list[dict[str, str]]:
    return [{"kind": kind, "number": str(number)} for kind in KINDS for number in range(10, 42)]


async def ask(task: dict[str, str], session: AgentSession) -> None:
    body = {
        "model": session.model,
        "messages": [{"role": "user", "content": f"{task['number']} {task['kind']}"}],
        "max_tokens": 24,
        "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}},
    }
    headers = {"Authorization": f"Bearer {session.api_key}"}
    async with aiohttp.ClientSession(headers=headers) as http:
        async with http.post(f"{session.base_url}/chat/completions", json=body) as response:
            response.raise_for_status()
            await response.read()


def score_answer(task: dict[str, str], transcript: Transcript) -> float:
    return float(json.loads(transcript.final_text)["answer"] in KINDS[task["kind"]])


def make_structured_config(folder: Path) -> RunConfig:
    settings = make_config(folder, seed=0).model_dump()
    settings["rollout"] |= {
        "tasks": {"type": "python", "function": f"{MODULE}:make_tasks"},
        "agent": {"type": "function", "function": f"{MODULE}:ask"},
        "group_size": 16,
    }
    settings["reward"] = {"type": "rule", "function": f"{MODULE}:score_answer"}
    settings["trainer"] |= {"steps": STEPS, "groups_per_step": 4}
    settings["eval"] = {
        "tasks": {"type": "python", "function": f"{MODULE}:make_held_out_tasks"},
        "modes": {"sampled": {}},
    }
    return RunConfig.model_validate(settings)


async def load_calls(config: RunConfig, channel: Channel) -> list[tuple[Session, list[Call]]]:
    store = SqliteStore(config.store_path)
    sessions = [row.session for row in await store.sessions(config.name)]
    loaded = [(s, await store.calls(s.session_id)) for s in sessions if s.channel is channel]
    await store.close()
    return loaded


async def measure_held_out_reward(config: RunConfig, version: int) -> float:
    """Return the mean reward of the replies that this version sampled for held-out prompts."""
    calls = [call for _, calls in await load_calls(config, Channel.VAL) for call in calls]
    return mean(
        float(json.loads(call.reply["content"])["answer"] in KINDS[call.messages[-1]["content"].split()[1]])
        for call in calls
        if (call.versions == version).all()
    )


async def measure_first_ratios(config: RunConfig) -> Any:
    """Return the likelihood ratios, between the untrained backend and the engine, of the tokens that version
    0 sampled for training."""
    loaded = await load_calls(config, Channel.TRAIN)
    samples = [
        sample
        for session, calls in loaded
        if all((call.versions == 0).all() for call in calls)
        for sample in linearize(session, calls)
    ]
    assert all(sample.behavior_logprobs is not None for sample in samples)
    backend = create_backend(config)
    logprobs = await backend.forward(samples)
    await backend.close()
    pairs = zip(logprobs, samples, strict=True)
    return np.concatenate([np.exp((new - s.logprobs)[s.mask > 0]) for new, s in pairs])


@pytest.mark.timeout(600)
async def test_model_learns_from_replies_that_a_json_schema_constrains(tmp_path: Path) -> None:
    make_tiny_model(tmp_path / "model", seed=0, std=0.2)
    config = make_structured_config(tmp_path)
    config.run_dir.mkdir()
    steps = await train(config)
    before, after = [await measure_held_out_reward(config, version) for version in (0, STEPS)]
    ratios = await measure_first_ratios(config)
    assert len(ratios) > 500
    assert np.abs(ratios - 1).max() < 1e-4
    assert abs(steps[0]["ratio_mean"] - 1) < 1e-4
    assert abs(steps[0]["ratio_max"] - 1) < 1e-4
    assert (
        steps[0]["importance_mean"] < 0.5
    )  # the constrained distribution is recorded beside the model's own
    assert before < 0.75
    assert after > 0.9
