"""An agent that replays the sessions of the workload.

In each turn, it sends a message of the recorded prompt length and requests a reply of the recorded length.
If the model ends the reply early, the agent asks for more. Then it sleeps for the duration of the recorded
tool call. The reward is the fraction of the characters in all replies, not counting whitespace, that belong
to the rewarded set. Any model can learn this.
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

OPENING_MESSAGES: list[Json] = [
    {"role": "system", "content": "Answer with digits only."},
    {"role": "user", "content": "Next: 31"},
    {"role": "assistant", "content": "4 1 5 9"},
]
"""The first messages of every conversation. After them, SmolLM2 writes digits half of the time."""
CHARACTER_SETS = {"digits": string.digits, "letters and digits": string.ascii_letters + string.digits}
MIN_REPLY_TOKENS = 8
"""A shorter reply counts as this many tokens. If fewer are still missing, no further reply is requested."""
FREE_CONTEXT_TOKENS = 96
"""The number of context tokens to keep free."""
EVAL_PROMPT_TOKENS, EVAL_REPLY_TOKENS = 12, 32
TRAINER_START_TIMEOUT_SECONDS = 120.0


def make_tasks(workload: str, group_size: int, groups: int, run_dir: str) -> list[Json]:
    """Return groups of sessions in file order, starting over at the end of the file.

    Startup is not measured: the function first waits until the trainer is ready, for at most
    TRAINER_START_TIMEOUT_SECONDS, and then writes the time to `started_at` in the run's folder.
    """
    _wait_for_trainer(Path(run_dir))
    _record_start_time(Path(run_dir))
    sessions = read_workload(Path(workload))
    return [
        {
            "index": index,
            "sessions": [
                [list(turn) for turn in sessions[(index * group_size + slot) % len(sessions)].turns]
                for slot in range(group_size)
            ],
        }
        for index in range(groups)
    ]


def make_heldout_tasks(size: int) -> list[Json]:
    return [
        {"index": -1 - index, "sessions": [[[EVAL_PROMPT_TOKENS, EVAL_REPLY_TOKENS, 0.0]]]}
        for index in range(size)
    ]


class WorkloadAgent:
    def __init__(self) -> None:
        self._http: aiohttp.ClientSession | None = None
        self._attempts: Counter[int] = Counter()

    async def __call__(self, task: Json, session: AgentSession, *, context: int, characters: str) -> float:
        sessions = task["sessions"]
        turns = sessions[self._attempts[task["index"]] % len(sessions)]
        self._attempts[task["index"]] += 1
        replies: list[str] = []
        messages = [*OPENING_MESSAGES]
        context_used = 0
        for prompt_tokens, reply_tokens, tool_seconds in turns:
            messages.append({"role": "user", "content": f"Next: 27{' a' * int(prompt_tokens)}"})
            tokens_left = int(reply_tokens)
            limit = context - FREE_CONTEXT_TOKENS
            while tokens_left > 0 and context_used + 2 * int(prompt_tokens) + tokens_left < limit:
                reply, context_used, sampled = await self._complete(session, messages, tokens_left)
                replies.append(reply)
                messages.append({"role": "assistant", "content": reply})
                tokens_left -= max(sampled, MIN_REPLY_TOKENS)
                if tokens_left < MIN_REPLY_TOKENS:
                    break
                messages.append({"role": "user", "content": "Go on."})
            await asyncio.sleep(tool_seconds)
        text = "".join("".join(replies).split())
        return sum(char in CHARACTER_SETS[characters] for char in text) / max(1, len(text))

    async def _complete(
        self, session: AgentSession, messages: list[Json], max_tokens: int
    ) -> tuple[str, int, int]:
        """Return the reply, the token count of the conversation and the token count of the reply."""
        if self._http is None:
            self._http = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=300)
            )
        body: dict[str, Any] = {"model": session.model, "messages": messages, "max_tokens": max_tokens}
        headers = {"Authorization": f"Bearer {session.api_key}"}
        url = f"{session.base_url}/chat/completions"
        async with self._http.post(url, json=body, headers=headers) as response:
            response.raise_for_status()
            completion = await response.json()
        usage = completion["usage"]
        reply = completion["choices"][0]["message"]["content"] or ""
        return reply, usage["prompt_tokens"] + usage["completion_tokens"], usage["completion_tokens"]

    async def aclose(self) -> None:
        if self._http is not None:
            await self._http.close()
            self._http = None


def _wait_for_trainer(run_dir: Path) -> None:
    deadline = time.monotonic() + TRAINER_START_TIMEOUT_SECONDS
    while not _is_trainer_ready(run_dir / "store.db") and time.monotonic() < deadline:
        time.sleep(0.1)


def _record_start_time(run_dir: Path) -> None:
    """Write the current time to `started_at`, unless an earlier process has already done so."""
    start_file = run_dir / "started_at"
    if not start_file.exists():
        start_file.write_text(str(time.time()))


def _is_trainer_ready(store_path: Path) -> bool:
    connection = sqlite3.connect(f"file:{store_path}?mode=ro", uri=True, timeout=5)
    try:
        rows = connection.execute("SELECT doing FROM endpoints WHERE role = 'trainer'").fetchall()
    finally:
        connection.close()
    return any(doing.startswith(("waiting", "step")) for (doing,) in rows)


agent = WorkloadAgent()
