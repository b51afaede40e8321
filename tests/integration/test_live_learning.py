"""Tests that a model learns from the ratings of people who use an agent, once its versions are promoted.

The gateway listens on a socket. A scripted user opens live sessions with the keys of two agents, rates the
replies with feedback keys, and ends the sessions. The model should learn to write digits. One agent is
learned from, the other one is observed.
"""

from __future__ import annotations

import asyncio
import string
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean

import aiohttp
import pytest

from instar.backends.factory import create_backend
from instar.config import RunConfig
from instar.engines.base import Engine
from instar.engines.factory import create_engine
from instar.gateway.auth import create_key
from instar.gateway.base import OpenSession
from instar.rollout.gateway_client import GatewayClient
from instar.store.base import Run, Store
from instar.store.sqlite import SqliteStore
from instar.sync.factory import create_sync_route
from instar.trainer.live import LineageTrainer, LiveTrainer
from instar.trainer.monitor import Monitor
from instar.trainer.publishing import PolicyPublisher
from instar.types import PolicyStage, StepState
from tests.serving import running_gateway
from tests.tiny import make_tiny_model

RUN = "live"
POLICY = "live/learner"
STEPS = 30
SESSIONS_PER_STEP = 32
STEPS_PER_PROMOTION = 3
MAX_TOKENS = 4


def make_config(folder: Path) -> RunConfig:
    return RunConfig.model_validate(
        {
            "name": RUN,
            "dir": folder / "run",
            "model": {"name": str(folder / "model"), "dtype": "fp32", "device": "cpu", "max_context": 128},
            "engine": {"type": "local", "threads": 1},
            "backend": {"type": "local", "threads": 1, "lora": {"rank": 8, "alpha": 16}},
            "agents": {"learner": {"mode": "learn"}, "watched": {}},
            "data": "live",
            "gateway": {"reward_range": [0, 1]},
            "live": {"replay": {"max_base_kl": None}},  # as for max_kl
            "trainer": {
                "steps": STEPS,
                "groups_per_step": SESSIONS_PER_STEP,
                "adam": {"lr": 4e-3},
                "max_kl": None,  # a random model must change more than a trained one
                "tensorboard": False,
            },
        }
    )


@dataclass
class ScriptedUser:
    """Uses an agent and rates each reply by the fraction of its characters that are digits."""

    url: str
    agent_key: str
    feedback_key: str
    ratings: list[float] = field(default_factory=list[float])

    async def use_agent(self, count: int) -> None:
        client = GatewayClient(self.url, self.agent_key)
        async with aiohttp.ClientSession() as http:
            await asyncio.gather(*(self._rate_reply(client, http) for _ in range(count)))
        await client.close()

    async def _rate_reply(self, client: GatewayClient, http: aiohttp.ClientSession) -> None:
        session = await client.open_session(OpenSession())
        body = {"model": "m", "messages": [{"role": "user", "content": "digits"}], "max_tokens": MAX_TOKENS}
        headers = {"Authorization": f"Bearer {session.api_key}"}
        async with http.post(f"{session.base_url}/chat/completions", json=body, headers=headers) as response:
            response.raise_for_status()
            text = (await response.json())["choices"][0]["message"]["content"]
        await client.complete_session(session.session_id)
        score = sum(char in string.digits for char in text) / max(1, len(text))
        feedback = {"session_id": session.session_id, "score": score}
        headers = {"Authorization": f"Bearer {self.feedback_key}"}
        async with http.post(f"{self.url}/feedback", json=feedback, headers=headers) as response:
            response.raise_for_status()
        self.ratings.append(score)


async def create_user(store: Store, url: str, agent: str) -> ScriptedUser:
    keys = [await create_key(store, kind, agent) for kind in ("agent", "feedback")]
    return ScriptedUser(url, *keys)


async def wait_for_step(store: Store, step: int) -> None:
    while [row.state for row in await store.steps(POLICY)][step - 1 : step] != [StepState.COMMITTED]:  # noqa: ASYNC110
        await asyncio.sleep(0.02)


def average(values: Iterable[float]) -> float:
    return round(mean(values), 3)


@pytest.mark.timeout(600)
async def test_rewards_rise_after_promotions_and_only_learning_agents_are_trained_on(tmp_path: Path) -> None:
    make_tiny_model(tmp_path / "model", seed=0, std=0.2)
    config = make_config(tmp_path)
    config.run_dir.mkdir()
    store = SqliteStore(config.store_path)
    await store.put_run(Run(RUN, RUN, {}))
    engine, backend = create_engine(config), create_backend(config)
    monitor = Monitor(config.run_dir, agent="learner")

    async def list_engines() -> list[Engine]:
        return [engine]

    route = await create_sync_route(config, backend, [engine])
    lineage = LineageTrainer(
        config.select_agent("learner"),
        store=store,
        backend=backend,
        publisher=PolicyPublisher(route, list_engines),
        monitor=monitor,
    )
    trainer = LiveTrainer(config, backend, [lineage])
    async with running_gateway(config, store, engine) as url, asyncio.TaskGroup() as group:
        learner, watched = await create_user(store, url, "learner"), await create_user(store, url, "watched")
        training = group.create_task(trainer.run())
        for step in range(1, STEPS + 1):
            await watched.use_agent(1)
            await learner.use_agent(SESSIONS_PER_STEP)
            await wait_for_step(store, step)
            if step == 1:
                assert (await engine.status()).version == 0, "the first candidate must not be served"
            if step % STEPS_PER_PROMOTION == 0:
                await store.promote_version(POLICY, step)
        await training
    promoted = [row for row in await store.policy_versions(POLICY) if row.promoted_at is not None]
    assert len(promoted) == STEPS // STEPS_PER_PROMOTION
    assert promoted[-1].stage is PolicyStage.SERVING
    claims = await store.claims(RUN)
    claimed = [claim.session_id for claim in claims if claim.epoch == 0]  # later epochs are replays
    assert len(claimed) == len(set(claimed)) == STEPS * SESSIONS_PER_STEP
    agents = {row.session.session_id: row.session.agent_id for row in await store.sessions(RUN)}
    assert {agents[session_id] for session_id in claimed} == {"learner"}
    await backend.close()
    await engine.close()
    await store.close()
    monitor.close()
    first, last = (average(learner.ratings[part]) for part in (slice(0, 64), slice(-64, None)))
    assert first < 0.2
    assert last > first + 0.3, f"the mean rating only rose from {first} to {last}"
