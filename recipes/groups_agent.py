"""Open groups at a run without a rollout, and run the demo's agent in their slots (docs/groups.md).

    python recipes/groups_agent.py http://127.0.0.1:8000

The admin key is read from INSTAR_ADMIN_KEY. The rule of recipes/groups.yaml scores the sessions, so that the
slots are completed without a reward. Replace the agent and the tasks with your own.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Iterable

from instar.client import Client, Slot
from instar.demo.agent import CalculatorAgent
from instar.demo.tasks import train_tasks
from instar.errors import EngineUnavailable, RunFinished
from instar.rollout.base import AgentSession
from instar.types import Json

GROUP_SIZE = 8
CONCURRENT_GROUPS = 6


async def attempt(agent: CalculatorAgent, slot: Slot, task: Json) -> None:
    try:
        await agent(task, AgentSession(slot.session_id, slot.base_url, slot.api_key))
    except Exception as error:  # noqa: BLE001 — an agent may fail in any way, which is reported
        await slot.fail(f"{type(error).__name__}: {error}")
    else:
        await slot.complete()


async def run_groups(client: Client, tasks: Iterable[Json], size: int) -> int:
    """Run a group for each task until the tasks or the run end. Return the number of groups."""
    agent, count = CalculatorAgent(), 0
    try:
        for task in tasks:
            group = await client.open_group(task, size=size)
            await asyncio.gather(*(attempt(agent, slot, task) for slot in group.slots))
            count += 1
    except (RunFinished, EngineUnavailable):
        pass  # the run has trained all its steps, and its gateway stops shortly after that
    finally:
        await agent.aclose()
    return count


async def main(url: str, admin_key: str, size: int = GROUP_SIZE) -> int:
    tasks = iter(train_tasks(size=4000))  # shared, so that each group gets another task
    async with Client(url, admin_key) as client:
        counts = await asyncio.gather(*(run_groups(client, tasks, size) for _ in range(CONCURRENT_GROUPS)))
    return sum(counts)


if __name__ == "__main__":
    print(f"{asyncio.run(main(sys.argv[1], os.environ['INSTAR_ADMIN_KEY']))} groups")
