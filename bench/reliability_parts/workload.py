"""The scripted replies, tasks, agent and reward rule of the soak test's run."""

from __future__ import annotations

import asyncio
import random
from hashlib import blake2b

import aiohttp

from instar.rewards.base import Transcript
from instar.rollout.base import AgentSession
from instar.types import Json

TURNS = 3
FAILURE_RATE = 0.1
"""The fraction of sessions in which the agent fails."""
PAUSE_SECONDS = 0.5


def reply(prompt: str, seed: int | None) -> str:
    """Return one of three numbers, so that rewards differ within a group."""
    number = blake2b(f"{seed}/{len(prompt)}".encode(), digest_size=1).digest()[0] % 3
    return f"The number is {number}."


def make_tasks(count: int = 256) -> list[Json]:
    return [{"number": number % 3, "text": f"Task {number}: say a number."} for number in range(count)]


def rule(task: Json, transcript: Transcript) -> float:
    """Return 1 if the last reply gives the task's number, else 0. Without a task, as in live sessions, the
    number is 0."""
    return float(transcript.final_text.endswith(f"{task.get('number', 0)}."))


async def agent(task: Json, session: AgentSession) -> None:
    """Take TURNS turns. In some sessions, raise RuntimeError after one of them."""
    headers = {"Authorization": f"Bearer {session.api_key}"}
    messages: list[Json] = []
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60), headers=headers) as client:
        for turn in range(TURNS):
            messages.append({"role": "user", "content": f"{task['text']} Turn {turn}."})
            body = {"model": session.model, "messages": messages}
            async with client.post(f"{session.base_url}/chat/completions", json=body) as response:
                response.raise_for_status()
                completion = await response.json()
            messages.append(completion["choices"][0]["message"])
            if random.random() < FAILURE_RATE / TURNS:
                raise RuntimeError("simulated agent failure")
            await asyncio.sleep(PAUSE_SECONDS)
