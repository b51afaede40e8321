"""Conversations that Python clients and command-line agents hold with the gateway."""

from __future__ import annotations

import asyncio
import subprocess
from dataclasses import dataclass, replace
from pathlib import Path

from fidelity_parts.gateway import AgentEndpoint, FidelityGateway

from tests.integration.agents.agent_tools import EDITED_TEXT, FILE_NAME, ORIGINAL_TEXT, make_task
from tests.integration.agents.cli import CliAgent, ServerTarget
from tests.integration.clients.environment import ClientJob, run_client
from tests.integration.clients.script import THANKS, make_question
from tests.integration.clients.supported_clients import Client

DIALECTS = {"claude-code": "messages", "codex": "responses"}
"""The dialects of command-line agents. Agents that are not listed use chat."""


@dataclass(frozen=True)
class ClientConversation:
    client: str
    dialect: str
    prompt_marker: str
    """Text that occurs only in the prompts of this conversation."""
    endpoint: AgentEndpoint
    error: str | None = None
    """The client's error message, or None if it succeeded."""


async def run_python_client(
    gateway: FidelityGateway, client: Client, first_number: int, folder: Path
) -> list[ClientConversation]:
    """Run every variant of a client, both in an opened session and as a live agent, concurrently.

    Each variant asks a different question. The questions are numbered from ``first_number``.
    """
    live_endpoint = await gateway.create_live_agent(f"{client.name}-{first_number}")
    conversations: list[ClientConversation] = []
    jobs: list[ClientJob] = []
    for i, (variant, style) in enumerate(client.variants.items()):
        question = make_question(first_number + i, style)
        for endpoint in (await gateway.open_session(), live_endpoint):
            conversations.append(
                ClientConversation(client.name, variant.partition("-")[0], question, endpoint)
            )
            jobs.append(ClientJob(endpoint.url, endpoint.key, variant, question, THANKS))
    outcomes = await run_client(client.name, jobs, folder)
    return [
        replace(conversation, error=_get_last_line(outcome.error) or None)
        for conversation, outcome in zip(conversations, outcomes, strict=True)
    ]


async def run_cli_agent(gateway: FidelityGateway, agent: CliAgent, folder: Path) -> list[ClientConversation]:
    """Run the file-editing task both in an opened session and as a live agent, concurrently."""
    endpoints = {"opened": await gateway.open_session(), "live": await gateway.create_live_agent(agent.name)}
    async with asyncio.TaskGroup() as group:
        runs = [
            group.create_task(asyncio.to_thread(_run_edit_task, agent, folder / name, endpoint))
            for name, endpoint in endpoints.items()
        ]
    return [run.result() for run in runs]


def _run_edit_task(agent: CliAgent, folder: Path, endpoint: AgentEndpoint) -> ClientConversation:
    work_folder = folder / agent.name
    work_folder.mkdir(parents=True)
    path = work_folder / FILE_NAME
    path.write_text(ORIGINAL_TEXT)
    conversation = ClientConversation(agent.name, DIALECTS.get(agent.name, "chat"), str(path), endpoint)
    try:
        output = agent.run(
            folder / f"home-{agent.name}",
            work_folder,
            ServerTarget(endpoint.url, endpoint.key),
            make_task(str(path)),
        )
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        return replace(conversation, error=_get_last_line(str(error.output or error)) or None)
    return (
        conversation
        if path.read_text() == EDITED_TEXT
        else replace(conversation, error=_get_last_line(output) or "the file was not edited")
    )


def _get_last_line(output: str) -> str:
    lines = output.strip().splitlines()
    return lines[-1][:300] if lines else ""
