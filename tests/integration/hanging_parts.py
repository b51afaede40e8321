"""An agent, a reward rule and an engine script that do not return for an hour."""

from __future__ import annotations

import time
from typing import Any

from instar.rewards.base import Transcript
from instar.rollout.base import AgentSession
from tests.torture import workload

HANG_SECONDS = 3600.0


async def block_event_loop(task: dict[str, Any], session: AgentSession, *, ledger: str) -> None:
    await workload.agent(task, session, ledger=ledger)
    time.sleep(HANG_SECONDS)  # noqa: ASYNC251 - must block the event loop


def hang_in_rule(task: dict[str, Any], transcript: Transcript) -> float:
    time.sleep(HANG_SECONDS)
    return 0.0


def hang_in_engine(prompt: str, seed: int | None) -> str:
    time.sleep(HANG_SECONDS)
    return ""
