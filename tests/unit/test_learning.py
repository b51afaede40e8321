"""Tests that a model with random weights learns a task through the complete training loop in one process.

The gateway listens on a socket and records to SQLite, the agent requests replies from it, and the batcher,
the LoRA backend and the trainer produce versions that the engine loads during the run. A task asks for
digits or capital letters, and the reward is the fraction of the reply that consists of them. The model has
to learn to write such characters, and to tell from the prompt which ones to write.
"""

from __future__ import annotations

import asyncio
import string
from pathlib import Path
from statistics import mean
from typing import Any

import aiohttp
import pytest

from instar.backends.factory import create_backend
from instar.config import RunConfig
from instar.data.combine import RewardCombiner
from instar.engines.base import Engine
from instar.engines.factory import create_engine
from instar.rewards.base import Transcript
from instar.rewards.factory import create_scoring
from instar.rollout.agents import create_agent
from instar.rollout.base import AgentSession
from instar.rollout.evaluate import Evaluator
from instar.rollout.gateway_client import GatewayClient
from instar.rollout.runner import RolloutRunner
from instar.rollout.slots import RolloutServices
from instar.rollout.tasks import load_tasks
from instar.store.base import Run
from instar.store.sqlite import SqliteStore
from instar.sync.factory import create_sync_route
from instar.trainer.loop import Trainer
from instar.trainer.monitor import Monitor, read_steps
from instar.trainer.publishing import PolicyPublisher
from instar.types import StepState
from tests.serving import ADMIN_KEY, running_gateway
from tests.tiny import make_tiny_model

MODULE = "tests.unit.test_learning"
CHARACTERS_BY_KIND = {"digits": string.digits, "CAPITALS": string.ascii_uppercase}
STEPS = 60
MAX_TOKENS = 4
MIN_FINAL_REWARD = 0.75
"""The reward for a reply with one wrong character out of four. The model must do better than this, because at
higher learning rates some seeds get stuck at this reward."""


def make_tasks() -> list[dict[str, str]]:
    return [{"kind": kind} for kind in CHARACTERS_BY_KIND]


async def ask(task: dict[str, str], session: AgentSession) -> None:
    """Send one request for a short reply."""
    body = {
        "model": session.model,
        "messages": [{"role": "user", "content": task["kind"]}],
        "max_tokens": MAX_TOKENS,
    }
    headers = {"Authorization": f"Bearer {session.api_key}"}
    async with aiohttp.ClientSession(headers=headers) as http:
        async with http.post(f"{session.base_url}/chat/completions", json=body) as response:
            response.raise_for_status()
            await response.read()


def score_characters(task: dict[str, str], transcript: Transcript) -> float:
    """Return the fraction of the reply's characters that are of the requested kind."""
    text = transcript.final_text
    return sum(char in CHARACTERS_BY_KIND[task["kind"]] for char in text) / max(1, len(text))


def make_config(folder: Path, seed: int) -> RunConfig:
    return RunConfig.model_validate(
        {
            "name": "learning",
            "seed": seed,
            "dir": folder / "run",
            "model": {"name": str(folder / "model"), "dtype": "fp32", "device": "cpu", "max_context": 128},
            "engine": {"type": "local", "threads": 1},
            "backend": {"type": "local", "threads": 1, "lora": {"rank": 8, "alpha": 16}},
            "trainer": {
                "mode": "sync",
                "steps": STEPS,
                "groups_per_step": 2,
                "adam": {"lr": 2e-3},
                "max_kl": None,  # a random model must change more than a trained one
                "warmup_steps": 0,
                "checkpoint_every": 10,
                "tensorboard": False,
            },
            "rollout": {
                "tasks": {"type": "python", "function": f"{MODULE}:make_tasks"},
                "agent": {"type": "function", "function": f"{MODULE}:ask"},
                "group_size": 32,
                "concurrency": 64,
            },
            "reward": {"type": "rule", "function": f"{MODULE}:score_characters"},
        }
    )


async def train(config: RunConfig) -> list[dict[str, Any]]:
    """Run the roles of `instar train` in this process and return the metrics of every step. If the config has
    an evaluation, it runs before and after the training."""
    assert config.rollout is not None
    store = SqliteStore(config.store_path)
    await store.put_run(Run(config.name, config.name, {}))
    engine, backend = create_engine(config), create_backend(config)
    monitor = Monitor(config.run_dir)

    async def list_engines() -> list[Engine]:
        return [engine]

    async with running_gateway(config, store, engine) as url:
        client = GatewayClient(url, ADMIN_KEY)
        taskset = load_tasks(config.rollout.tasks)
        agent = create_agent(config.rollout.agent)
        services = RolloutServices(store, client, agent, create_scoring(config, taskset))
        runner = RolloutRunner(config, taskset, services)
        trainer = Trainer(
            config,
            store=store,
            backend=backend,
            publisher=PolicyPublisher(await create_sync_route(config, backend, [engine]), list_engines),
            monitor=monitor,
        )
        evaluator = None
        if config.eval is not None:
            held_out = load_tasks(config.eval.tasks)
            evaluation_services = RolloutServices(store, client, agent, create_scoring(config, held_out))
            combiner = RewardCombiner(config)
            evaluator = Evaluator(config, held_out, evaluation_services, monitor.record, combine=combiner)
            await evaluator.evaluate_all("start")
        async with asyncio.TaskGroup() as group:
            group.create_task(runner.run())
            group.create_task(trainer.run())
        if evaluator is not None:
            await evaluator.evaluate_all("end")
        await client.close()
    steps = await store.steps(config.name)
    assert [step.state for step in steps] == [StepState.COMMITTED] * config.trainer.steps
    assert (await engine.status()).version == config.trainer.steps
    monitor.close()
    await engine.close()
    await backend.close()
    await store.close()
    return read_steps(config.run_dir)


async def check_model_learns(folder: Path, seed: int) -> None:
    # With smaller weights, no LoRA adapter could make one token dominate the others.
    make_tiny_model(folder / "model", seed=seed, std=0.2)
    config = make_config(folder, seed)
    config.run_dir.mkdir()
    rewards = [record["reward_mean"] for record in await train(config)]
    assert rewards[0] < 0.2
    assert mean(rewards[-3:]) > MIN_FINAL_REWARD, [round(reward, 2) for reward in rewards]


@pytest.mark.timeout(600)  # 40 s of CPU time
async def test_random_model_learns_in_one_process(tmp_path: Path) -> None:
    await check_model_learns(tmp_path, seed=0)
