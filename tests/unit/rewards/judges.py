"""Judges and transcripts for tests."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from instar.config import RunConfig
from instar.rewards.base import ScoringContext, Transcript
from instar.rewards.judge.judge import Judge
from instar.rewards.judge.judges import create_judge
from instar.store.sqlite import SqliteStore
from instar.types import Call, Message, Task
from tests.unit.data.builders import RUN, make_call

TASK = Task("t", {"question": "What is 6 times 7?"})


def user(text: str) -> Message:
    return Message(role="user", content=text)


def tool(text: str) -> Message:
    return Message(role="tool", content=text)


def assistant(text: str) -> Message:
    return Message(role="assistant", content=text)


def make_transcript(*turns: tuple[Message, str], session_id: str = "s") -> Transcript:
    """Build a transcript from turns, each a message to the assistant and its reply."""
    calls: list[Call] = []
    for index, (message, reply) in enumerate(turns):
        parent = calls[-1] if calls else None
        history = (*parent.messages, parent.reply) if parent else ()
        call = make_call(
            f"{session_id}-{index + 1}",
            [1],
            [5],
            parent=parent,
            session_id=session_id,
            messages=(*history, message),
            reply=assistant(reply),
        )
        calls.append(call)
    return Transcript(session_id, calls, None)


def make_answer_transcript(text: str, session_id: str = "s") -> Transcript:
    return make_transcript((user("What is 6 times 7?"), text), session_id=session_id)


@asynccontextmanager
async def start_judge(path: Path, url: str, **settings: Any) -> AsyncGenerator[Judge]:
    """Start a judge for a run with its store at ``path``."""
    section = {"type": "judge", "endpoint": url, "model": "m", **settings}
    judge = create_judge(RunConfig.model_validate({"reward": section}).reward[0])  # pyright: ignore[reportArgumentType]
    store = SqliteStore(path)
    await judge.start(ScoringContext(RUN, store))
    try:
        yield judge
    finally:
        await judge.close()
        await store.close()
