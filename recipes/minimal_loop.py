"""The complete training loop in one file: an agent with a tool learns to answer questions.

    python recipes/minimal_loop.py [MODEL]

Everything runs in this process, one step after another. `instar train` runs each part in its own process,
asynchronously, and resumes after a crash.
"""

from __future__ import annotations

import asyncio
import re
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai

from instar.agents.calculator import CALC_TOOL, calculate
from instar.backends.local.backend import LocalBackend
from instar.config import (
    AdamConfig,
    GatewayConfig,
    LocalBackendConfig,
    LocalEngineConfig,
    LossConfig,
    ModelConfig,
)
from instar.data.advantages import grpo, has_signal, normalize
from instar.data.linearize import linearize, with_advantage
from instar.demo.agent import make_prompt
from instar.demo.tasks import train_tasks
from instar.engines.local.engine import LocalEngine
from instar.gateway.app import create_app
from instar.gateway.auth import new_key
from instar.gateway.base import OpenSession
from instar.gateway.serve import bind, serve
from instar.models import resolve_model
from instar.record.render import load_renderer
from instar.rollout.base import AgentSession
from instar.rollout.gateway_client import GatewayClient
from instar.store.sqlite import SqliteStore
from instar.types import Channel, Json, Policy, Reward, RewardSource, Sample

RewardFunction = Callable[[Json, str], float]

NAME = "minimal"
GROUPS_PER_STEP, GROUP_SIZE = 3, 8
LOSS, ADAM = LossConfig(name="importance_sampling"), AdamConfig(lr=3e-4)


async def agent(task: Json, session: AgentSession) -> str:
    """Answer the question with the help of the tool. An agent is any program that calls a model."""
    messages: list[Any] = [*make_prompt(), {"role": "user", "content": task["question"]}]
    async with openai.AsyncOpenAI(base_url=session.base_url, api_key=session.api_key) as client:
        for max_tokens in (44, 16):
            response = await client.chat.completions.create(
                model=session.model, messages=messages, tools=[CALC_TOOL], max_tokens=max_tokens
            )
            reply = response.choices[0].message
            messages.append(reply.model_dump(exclude_none=True))
            for call in reply.tool_calls or ():
                arguments = call.function.arguments if call.type == "function" else ""
                messages.append({"role": "tool", "tool_call_id": call.id, "content": calculate(arguments)})
            if not reply.tool_calls:
                break
    return reply.content or ""


def score_answer(task: Json, answer: str) -> float:
    """Return 1 if the last number in the answer is correct, else 0."""
    numbers = re.findall(r"-?\d+", answer)
    return float(bool(numbers) and int(numbers[-1]) == task["answer"])


async def main(folder: Path, model: str, steps: int = 40, reward: RewardFunction = score_answer) -> None:
    config = ModelConfig(name=model)
    tasks = train_tasks(size=steps * GROUPS_PER_STEP)

    # The engine samples, the backend trains, the store records.
    engine = LocalEngine(config, LocalEngineConfig())
    backend = LocalBackend(config, LocalBackendConfig())
    store = SqliteStore(folder / "store.db")

    # The agent talks to the gateway: an OpenAI endpoint that records every token the engine samples.
    admin_key = new_key()
    app = create_app(
        store=store,
        engine=engine,
        renderer=load_renderer(resolve_model(model), config),
        run_id=NAME,
        agent_id=NAME,
        policy_id=NAME,
        config=GatewayConfig(),
        admin_key=admin_key,
    )
    listener, stop = bind("127.0.0.1", 0), asyncio.Event()
    server = asyncio.create_task(serve(app, listener, stop=stop))
    gateway = GatewayClient(f"http://127.0.0.1:{listener.getsockname()[1]}", admin_key)

    async def attempt(task: Json, seed: int) -> tuple[float, list[Sample]]:
        """Run one session. Return its reward and its calls as samples."""
        opened = await gateway.open_session(OpenSession(channel=Channel.TRAIN, seed=seed))
        value = reward(task, await agent(task, opened))
        rewards = [Reward(opened.session_id, value, RewardSource.RULE)]
        await gateway.complete_session(opened.session_id, rewards)
        session = await store.session(opened.session_id)
        assert session
        return value, linearize(session, await store.calls(opened.session_id))

    for step in range(steps):
        batch = tasks[step * GROUPS_PER_STEP : (step + 1) * GROUPS_PER_STEP]
        attempts = [attempt(task, step * GROUP_SIZE + i) for task in batch for i in range(GROUP_SIZE)]
        results = await asyncio.gather(*attempts)

        # The advantage of an attempt is relative to the other attempts at the same task.
        samples: list[Sample] = []
        for start in range(0, len(results), GROUP_SIZE):
            group = results[start : start + GROUP_SIZE]
            advantages = grpo([value for value, _ in group])
            if has_signal(advantages):
                for (_, attempt_samples), advantage in zip(group, advantages, strict=True):
                    samples += [with_advantage(sample, advantage or 0.0) for sample in attempt_samples]

        # Train, publish, and load the new weights into the engine.
        if samples:
            await backend.forward_backward(normalize(samples, "batch_sessions"), LOSS)
            await backend.optim_step(ADAM)
            version = await store.reserve_version(NAME, NAME, step)
            policy = Policy(NAME, version, await backend.publish(folder / f"v{version}"))
            await store.publish(policy)
            await engine.load(policy)

        mean = sum(value for value, _ in results) / len(results)
        print(f"step {step}  reward {mean:.2f}  {len(samples)} samples", flush=True)

    stop.set()
    await server
    await gateway.close()
    await engine.close()
    await backend.close()
    await store.close()


if __name__ == "__main__":
    run_dir = Path(tempfile.mkdtemp(prefix="instar-"))
    asyncio.run(main(run_dir, sys.argv[1] if len(sys.argv) > 1 else "smollm2-135m"))
