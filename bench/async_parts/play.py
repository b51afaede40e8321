"""The agent of the bench: it plays a session of the workload against the model.

Each turn it says something as long as the workload's prompt, asks for as many tokens as the workload's reply
has (one that the model ends sooner is continued), and then sleeps as long as the workload's tool took. Its
reward is the share of characters of one kind in what the model wrote: any model can learn that.
"""

from __future__ import annotations

import asyncio
import sqlite3
import string
import time
from collections import Counter
from pathlib import Path
from typing import Any

import aiohttp

from instar.rollout.base import AgentSession
from instar.simulate.sessions import read_workload
from instar.types import Json

BEGIN: list[Json] = [
    {"role": "system", "content": "Answer with digits only."},
    {"role": "user", "content": "Next: 31"},
    {"role": "assistant", "content": "4 1 5 9"},
]
"""What every conversation begins with; after it SmolLM2 writes digits half of the time."""
KINDS = {"digits": string.digits, "letters and digits": string.ascii_letters + string.digits}
LEAST = 8
"""Tokens that a reply counts for at least, and that are worth asking for another one."""
MARGIN = 96
"""Tokens of the context left free."""
EVAL_PROMPT, EVAL_TOKENS = 12, 32
GATE_SECONDS = 120.0


def tasks(workload: str, group_size: int, groups: int, run_dir: str) -> list[Json]:
    """Groups of sessions, in the order of the file, over again when it ends. Not before the trainer is up:
    how long that takes is not what is measured. When that was is written down."""
    _wait_for_trainer(Path(run_dir))
    sessions = read_workload(Path(workload))
    return [
        {
            "index": index,
            "plays": [
                [list(turn) for turn in sessions[(index * group_size + slot) % len(sessions)].turns]
                for slot in range(group_size)
            ],
        }
        for index in range(groups)
    ]


def heldout(size: int) -> list[Json]:
    return [{"index": -1 - index, "plays": [[[EVAL_PROMPT, EVAL_TOKENS, 0.0]]]} for index in range(size)]


class Player:
    def __init__(self) -> None:
        self._http: aiohttp.ClientSession | None = None
        self._played: Counter[int] = Counter()

    async def __call__(self, task: Json, session: AgentSession, *, context: int, kind: str) -> float:
        plays = task["plays"]
        turns = plays[self._played[task["index"]] % len(plays)]
        self._played[task["index"]] += 1
        written: list[str] = []
        messages = [*BEGIN]
        used = 0
        for prompt, tokens, tool in turns:
            messages.append({"role": "user", "content": f"Next: 27{' a' * int(prompt)}"})
            left = int(tokens)
            while left > 0 and used + 2 * int(prompt) + left + MARGIN < context:
                reply, used, sampled = await self._ask(session, messages, left)
                written.append(reply)
                messages.append({"role": "assistant", "content": reply})
                left -= max(sampled, LEAST)
                if left < LEAST:
                    break
                messages.append({"role": "user", "content": "Go on."})
            await asyncio.sleep(tool)
        text = "".join("".join(written).split())
        return sum(char in KINDS[kind] for char in text) / max(1, len(text))

    async def _ask(self, session: AgentSession, messages: list[Json], tokens: int) -> tuple[str, int, int]:
        """(the reply, tokens of the conversation, tokens of the reply)"""
        if self._http is None:
            self._http = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=300)
            )
        body: dict[str, Any] = {"model": session.model, "messages": messages, "max_tokens": tokens}
        headers = {"Authorization": f"Bearer {session.api_key}"}
        url = f"{session.base_url}/chat/completions"
        async with self._http.post(url, json=body, headers=headers) as response:
            response.raise_for_status()
            answer = await response.json()
        usage = answer["usage"]
        reply = answer["choices"][0]["message"]["content"] or ""
        return reply, usage["prompt_tokens"] + usage["completion_tokens"], usage["completion_tokens"]

    async def aclose(self) -> None:
        if self._http is not None:
            await self._http.close()
            self._http = None


def _wait_for_trainer(run_dir: Path) -> None:
    deadline = time.monotonic() + GATE_SECONDS
    while not _trainer_waits(run_dir / "store.db") and time.monotonic() < deadline:
        time.sleep(0.1)
    began = run_dir / "began"
    if not began.exists():
        began.write_text(str(time.time()))


def _trainer_waits(store: Path) -> bool:
    connection = sqlite3.connect(f"file:{store}?mode=ro", uri=True, timeout=5)
    try:
        rows = connection.execute("SELECT doing FROM endpoints WHERE role = 'trainer'").fetchall()
    finally:
        connection.close()
    return any(doing.startswith(("waiting", "step")) for (doing,) in rows)


play = Player()
