"""Conversations that are held with the gateway: by Python clients, and by command-line agents."""

from __future__ import annotations

import asyncio
import subprocess
from dataclasses import dataclass, replace
from pathlib import Path

from fidelity_parts.gateway import Gateway, Place

from tests.integration.agents.cli import CliAgent, Target
from tests.integration.agents.hands import AFTER, BEFORE, FILE, task
from tests.integration.clients.environment import Job, run_client
from tests.integration.clients.roster import Client
from tests.integration.clients.script import THANKS, question

DIALECTS = {"claude-code": "messages", "codex": "responses"}
"""Of command-line agents; the others speak chat."""


@dataclass(frozen=True)
class Talk:
    client: str
    dialect: str
    asked: str
    """What its prompts hold, and those of no other."""
    place: Place
    failed: str = ""
    """What the client said when it could not go on."""


async def hold_python(gateway: Gateway, client: Client, number: int, folder: Path) -> list[Talk]:
    """Every way of a client, opened and live at once."""
    live = await gateway.live(f"{client.name}-{number}")
    talks: list[Talk] = []
    jobs: list[Job] = []
    for i, (way, how) in enumerate(client.ways.items()):
        asked = question(number + i, how)
        for place in (await gateway.opened(), live):
            talks.append(Talk(client.name, way.partition("-")[0], asked, place))
            jobs.append(Job(place.url, place.key, way, asked, THANKS))
    outcomes = await run_client(client.name, jobs, folder)
    return [
        replace(talk, failed=_last_line(outcome.error)) for talk, outcome in zip(talks, outcomes, strict=True)
    ]


async def hold_cli(gateway: Gateway, agent: CliAgent, folder: Path) -> list[Talk]:
    """The task of editing a file, opened and live at once."""
    places = {"opened": await gateway.opened(), "live": await gateway.live(agent.name)}
    async with asyncio.TaskGroup() as group:
        runs = [
            group.create_task(asyncio.to_thread(_edit, agent, folder / name, place))
            for name, place in places.items()
        ]
    return [run.result() for run in runs]


def _edit(agent: CliAgent, folder: Path, place: Place) -> Talk:
    work = folder / agent.name
    work.mkdir(parents=True)
    path = work / FILE
    path.write_text(BEFORE)
    talk = Talk(agent.name, DIALECTS.get(agent.name, "chat"), str(path), place)
    try:
        said = agent.run(folder / f"home-{agent.name}", work, Target(place.url, place.key), task(str(path)))
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        return replace(talk, failed=_last_line(str(error.output or error)))
    return talk if path.read_text() == AFTER else replace(talk, failed=_last_line(said) or "no edit")


def _last_line(said: str) -> str:
    lines = said.strip().splitlines()
    return lines[-1][:300] if lines else ""
