"""What the runs on Ray play: a task that a random model learns, an agent that streams and keeps a ledger."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path

import aiohttp

from instar.rollout.base import AgentSession
from tests.unit.test_learns import share, tasks

__all__ = ["agent", "share", "tasks"]

LENGTH = 6


async def agent(task: dict[str, str], session: AgentSession, *, ledger: str, pause: float = 0.0) -> None:
    """One question, after so many seconds. Notes the id of a reply that has ended for it."""
    await asyncio.sleep(pause)
    body = {
        "model": session.model,
        "messages": [{"role": "user", "content": task["kind"]}],
        "max_tokens": LENGTH,
        "stream": True,
    }
    headers = {"Authorization": f"Bearer {session.api_key}"}
    timeout = aiohttp.ClientTimeout(total=60)
    async with (
        aiohttp.ClientSession(headers=headers, timeout=timeout) as http,
        http.post(f"{session.base_url}/chat/completions", json=body) as response,
    ):
        response.raise_for_status()
        ended = False
        async for line in response.content:
            if not line.startswith(b"data: {"):
                continue
            chunk = json.loads(line[6:])
            if "error" in chunk:
                raise ConnectionError(chunk["error"])
            if chunk["choices"] and chunk["choices"][0]["finish_reason"]:
                append_to_ledger(ledger, chunk["id"])
                ended = True
    if not ended:
        raise ConnectionError("the reply broke off")


def append_to_ledger(ledger: str, reply_id: str) -> None:
    """On disk when this returns, whatever happens to the process after."""
    with Path(ledger).open("a") as file:
        file.write(f"{reply_id}\n")
        file.flush()
        os.fsync(file.fileno())
