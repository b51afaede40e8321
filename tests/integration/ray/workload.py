"""The tasks, agent and reward function for the runs on Ray."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path

import aiohttp

from instar.rollout.base import AgentSession
from tests.unit.test_learning import make_tasks, score_characters

__all__ = ["agent", "make_tasks", "score_characters"]

MAX_TOKENS = 6


async def agent(
    task: dict[str, str], session: AgentSession, *, ledger: str, pause_seconds: float = 0.0
) -> None:
    """Pause, then send one streamed request and append the reply's id to the ledger file when the reply is
    complete. Raises ConnectionError if the stream ends early or contains an error."""
    await asyncio.sleep(pause_seconds)
    body = {
        "model": session.model,
        "messages": [{"role": "user", "content": task["kind"]}],
        "max_tokens": MAX_TOKENS,
        "stream": True,
    }
    headers = {"Authorization": f"Bearer {session.api_key}"}
    timeout = aiohttp.ClientTimeout(total=60)
    async with (
        aiohttp.ClientSession(headers=headers, timeout=timeout) as http,
        http.post(f"{session.base_url}/chat/completions", json=body) as response,
    ):
        response.raise_for_status()
        is_complete = False
        async for line in response.content:
            if not line.startswith(b"data: {"):
                continue
            chunk = json.loads(line[6:])
            if "error" in chunk:
                raise ConnectionError(chunk["error"])
            if chunk["choices"] and chunk["choices"][0]["finish_reason"]:
                append_to_ledger(ledger, chunk["id"])
                is_complete = True
    if not is_complete:
        raise ConnectionError("the stream ended before the reply was complete")


def append_to_ledger(ledger: str, reply_id: str) -> None:
    """Write the id to disk before returning, so that it is not lost if the process is killed."""
    with Path(ledger).open("a") as file:
        file.write(f"{reply_id}\n")
        file.flush()
        os.fsync(file.fileno())
