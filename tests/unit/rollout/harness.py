"""A real gateway and store with a scripted engine, and agents that use them."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from starlette.applications import Starlette
from transformers import LlamaConfig

from instar.config import ModelConfig, RunConfig, ScriptedEngineConfig
from instar.data.batcher import Batcher, StepBatch
from instar.data.combine import RewardCombiner
from instar.engines.scripted import ScriptedEngine
from instar.gateway.app import create_app
from instar.gateway.serve import bind, serve
from instar.record.render import load_renderer
from instar.rewards.base import Transcript
from instar.rewards.factory import create_scoring
from instar.rollout.agents import create_agent
from instar.rollout.base import AgentSession
from instar.rollout.evaluate import Evaluator
from instar.rollout.gateway_client import GatewayClient
from instar.rollout.runner import RolloutRunner
from instar.rollout.slots import RolloutServices
from instar.rollout.tasks import TaskSet, load_tasks
from instar.store.base import Run
from instar.store.sqlite import SqliteStore
from instar.types import Artifact, Policy, StepState
from tests.tiny import make_tiny_tokenizer

RUN = "run"
KEY = "sk-admin"
MODULE = "tests.unit.rollout.harness"


# --- scripted replies --------------------------------------------------------------------


def reply(prompt: str, seed: int | None) -> str:
    """Reply `right` to even seeds and `wrong` to odd seeds."""
    return "right" if (seed or 0) % 2 == 0 else "wrong"


def reply_with_calculator(prompt: str, seed: int | None) -> str:
    """Call the demo's calculator with the problem's expression, then reply with its result."""
    role, text = re.findall(r"<\|im_start\|>(\w+)\n(.*?)<\|im_end\|>", prompt, re.DOTALL)[-1]
    if role == "tool" or "<tool_response>" in text:
        return re.findall(r"-?\d+|error", text)[-1]
    numbers = re.findall(r"\d+", text)
    operator = next(
        sign
        for pattern, sign in (
            ("shared", "/"),
            ("packs", "two_step"),
            ("plus|gets", "+"),
            ("minus|gives|more .* than", "-"),
            ("times|box", "*"),
        )
        if re.search(pattern, text)
    )
    # No spaces, because the tiny tokenizer needs a token for almost every character.
    expression = "{}*{}-{}".format(*numbers) if operator == "two_step" else operator.join(numbers)
    return f'<tool_call>{{"name": "calc", "arguments": {{"expression": "{expression}"}}}}</tool_call>'


# --- tasks, agents, rules -----------------------------------------------------------------------


def make_tasks(count: int = 5) -> list[dict[str, Any]]:
    return [{"question": f"number {number}"} for number in range(count)]


def score_reply(task: dict[str, Any], transcript: Transcript) -> float:
    return float(transcript.final_text == "right")


attempts: Counter[str] = Counter()
"""Number of calls to the agents below, by question. `open_harness` resets it."""
questions: list[str] = []
"""The questions that the agents received, in order. `open_harness` resets it."""
gate = asyncio.Event()
"""Agents that wait for it continue when a test sets it. Each such test creates a new event."""


async def ask(task: dict[str, Any], session: AgentSession) -> None:
    """Send one chat request without an SDK."""
    attempts[task["question"]] += 1
    questions.append(task["question"])
    body = {"model": "m", "messages": [{"role": "user", "content": task["question"]}], "max_tokens": 8}
    headers = {"Authorization": f"Bearer {session.api_key}"}
    async with aiohttp.ClientSession() as http:
        async with http.post(f"{session.base_url}/chat/completions", json=body, headers=headers) as response:
            response.raise_for_status()
            await response.read()


async def lose_connection_once(task: dict[str, Any], session: AgentSession) -> None:
    await ask(task, session)
    if attempts[task["question"]] == 1:
        raise RuntimeError("sdk error") from ConnectionResetError("gone")


async def refuse_connection(task: dict[str, Any], session: AgentSession) -> None:
    attempts[task["question"]] += 1
    raise ConnectionRefusedError("connection refused")


async def fail_on_task(
    task: dict[str, Any], session: AgentSession, number: int = 0, times: int = 1_000_000
) -> None:
    await ask(task, session)
    if task["question"] == f"number {number}" and attempts[task["question"]] <= times:
        raise ValueError("agent failed")


async def hang(task: dict[str, Any], session: AgentSession) -> None:
    await ask(task, session)
    await asyncio.sleep(600)


async def wait_for_gate(task: dict[str, Any], session: AgentSession) -> None:
    await ask(task, session)
    await gate.wait()


async def ask_twice(task: dict[str, Any], session: AgentSession) -> None:
    await ask(task, session)
    await gate.wait()
    await ask(task, session)


async def complete_own_session(task: dict[str, Any], session: AgentSession) -> None:
    await ask(task, session)
    root = session.base_url.split("/s/")[0]
    headers = {"Authorization": f"Bearer {session.api_key}"}
    async with aiohttp.ClientSession() as http:
        url = f"{root}/sessions/{session.session_id}/complete"
        async with http.post(url, json={"reward": 0.75}, headers=headers) as response:
            response.raise_for_status()


async def complete_own_session_and_fail(task: dict[str, Any], session: AgentSession) -> None:
    await complete_own_session(task, session)
    raise ValueError("agent failed")


async def wait_until(condition: Callable[[], bool], timeout_seconds: float = 30) -> None:
    async with asyncio.timeout(timeout_seconds):
        while not condition():  # noqa: ASYNC110 - there is no event to wait for
            await asyncio.sleep(0.02)


# --- the harness ----------------------------------------------------------------------------------


def make_config(
    folder: Path, *, agent: str = "ask", trainer: Any = None, reward: Any = None, **rollout: Any
) -> RunConfig:
    args = rollout.pop("args", {})
    held_out = rollout.pop(
        "held_out", {"type": "python", "function": f"{MODULE}:make_tasks", "args": {"count": 4}}
    )
    section = {
        "tasks": {"type": "python", "function": f"{MODULE}:make_tasks"},
        "agent": {
            "type": "function",
            "function": agent if ":" in agent else f"{MODULE}:{agent}",
            "args": args,
        },
        "group_size": 2,
        "timeout": 20,
    } | rollout
    single_session_settings = {"advantage": {"estimator": "running"}} if section["group_size"] == 1 else {}
    return RunConfig.model_validate(
        {
            "name": RUN,
            "dir": folder,
            "model": {"name": str(folder / "model")},
            "trainer": {
                "groups_per_step": 2,
                "steps": 2,
                "mode": "sync",
                **single_session_settings,
                **(trainer or {}),
            },
            "rollout": section,
            "reward": reward or {"type": "rule", "function": f"{MODULE}:score_reply"},
            "eval": {"tasks": held_out},
        }
    )


@dataclass
class RolloutHarness:
    folder: Path
    store: SqliteStore
    engine: ScriptedEngine
    gateway: GatewayClient
    app: Starlette
    port: int
    _stop: asyncio.Event = field(default_factory=asyncio.Event)
    _server: asyncio.Task[None] | None = None

    async def start_gateway(self) -> None:
        self._stop.clear()
        listener = bind("127.0.0.1", self.port)
        self.port = listener.getsockname()[1]
        self.gateway.url = f"http://127.0.0.1:{self.port}"
        self._server = asyncio.create_task(serve(self.app, listener, stop=self._stop, grace=1))

    async def stop_gateway(self) -> None:
        assert self._server is not None
        self._stop.set()
        await self._server

    def create_runner(self, config: RunConfig) -> RolloutRunner:
        assert config.rollout is not None
        tasks = load_tasks(config.rollout.tasks)
        return RolloutRunner(config, tasks, self._create_services(config, tasks, self.gateway))

    def create_evaluator(
        self, config: RunConfig, record: Any = None, gateway: GatewayClient | None = None
    ) -> Evaluator:
        assert config.eval is not None
        tasks = load_tasks(config.eval.tasks)
        services = self._create_services(config, tasks, gateway or self.gateway)
        return Evaluator(config, tasks, services, record, combine=RewardCombiner(config))

    def _create_services(self, config: RunConfig, tasks: TaskSet, gateway: GatewayClient) -> RolloutServices:
        assert config.rollout is not None
        agent = create_agent(config.rollout.agent)
        return RolloutServices(self.store, gateway, agent, create_scoring(config, tasks))

    async def train_step(self, config: RunConfig, batcher: Batcher, step: int, version: int) -> StepBatch:
        """Claim a batch and publish a new version, as the trainer does, but without training."""
        async with asyncio.timeout(20):
            batch = await batcher.next_batch(step, 0, version)
        assert batch is not None
        await self.store.drop_samples(batch.drops)
        await self.store.claim_step(RUN, step, batch.claims)
        published = await self.store.reserve_version(RUN, RUN, step)
        policy = Policy(RUN, published, Artifact("adapter", "path"))
        await self.store.publish(policy)
        await self.engine.load(policy)
        await self.store.advance_step(RUN, step, StepState.COMMITTED, version=published)
        return batch


@asynccontextmanager
async def open_harness(folder: Path, script: str = "reply") -> AsyncIterator[RolloutHarness]:
    model = folder / "model"
    LlamaConfig(vocab_size=320).save_pretrained(model)
    make_tiny_tokenizer().save_pretrained(model)
    settings = ModelConfig(name=str(model), max_context=4096)
    store = SqliteStore(folder / "store.db")
    await store.put_run(Run(RUN, RUN, {}))
    function = script if ":" in script else f"{MODULE}:{script}"
    engine = ScriptedEngine(settings, ScriptedEngineConfig(function=function))
    config = make_config(folder)
    assert config.rollout is not None
    app = create_app(
        store=store,
        engine=engine,
        renderer=load_renderer(model, settings),
        run_id=RUN,
        agent_id="default",
        policy_id=RUN,
        config=config.gateway,
        train_sampling=config.rollout.sampling,
        admin_key=KEY,
    )
    attempts.clear()
    questions.clear()
    client = GatewayClient("http://unset", KEY, max_wait=5)
    harness = RolloutHarness(folder, store, engine, client, app, port=0)
    await harness.start_gateway()
    try:
        yield harness
    finally:
        await client.close()
        await harness.stop_gateway()
        await store.close()
