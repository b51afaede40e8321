"""Tests in which unmodified npm command-line agents edit a file through a gateway, which must record every
call exactly."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pytest

from instar.config import ModelConfig, RunConfig, ScriptedEngineConfig
from instar.engines.scripted import ScriptedEngine
from instar.gateway.base import OpenSession
from instar.models import DEFAULT_MODEL, resolve_model
from instar.rollout.gateway_client import GatewayClient
from instar.store.sqlite import SqliteStore
from instar.types import Call, CallStatus, Channel, Link, Session
from tests.integration.agents.agent_tools import EDITED_TEXT, FILE_NAME, ORIGINAL_TEXT, make_task
from tests.integration.agents.cli import AGENTS, AgentInstallError, CliAgent, ServerTarget
from tests.serving import ADMIN_KEY, running_gateway

TASK_PATTERN = re.compile(r"Change the word|Look into .*\.")
AGENTS_WITH_SUBAGENT_SESSIONS = {"opencode", "qwen-code"}
"""Agents whose sub-agents send a session id of their own or none. Each sub-agent is recorded in a separate
session, unless a session was opened for the run."""


@dataclass
class AgentRun:
    """The results of running an agent."""

    file_text: str
    """The content of the file that the agent had to edit."""
    output: str
    sessions: list[Session]
    calls: list[Call]
    """The calls of all sessions. Those of one session are in the order in which they were recorded."""


@pytest.fixture(params=AGENTS)
def agent(request: pytest.FixtureRequest) -> CliAgent:
    return install_agent(request.param)


def install_agent(name: str) -> CliAgent:
    """Install the agent. Skip the test if that fails."""
    agent = AGENTS[name]
    try:
        agent.install()
    except AgentInstallError as error:
        print(error)
        pytest.skip(str(error))
    return agent


async def run_agent(
    agent: CliAgent, folder: Path, *, asks_for_helpers: bool = False, in_opened_session: bool = False
) -> AgentRun:
    """Run the agent with its own gateway.

    If ``asks_for_helpers`` is True, the task asks for sub-agents. If ``in_opened_session`` is True, the agent
    gets the URL and key of an open session. Otherwise its key belongs to no session, and the gateway has to
    group its calls into sessions.
    """
    model = ModelConfig(name=str(resolve_model(DEFAULT_MODEL)), max_context=200_000)
    script = f"tests.integration.agents.script:{agent.name.replace('-', '_')}"
    engine = ScriptedEngine(model, ScriptedEngineConfig(function=script))
    store = SqliteStore(folder / "store.db")
    work_folder = folder / "project"
    work_folder.mkdir()
    path = work_folder / FILE_NAME
    path.write_text(ORIGINAL_TEXT)
    task = make_task(str(path)) + (" with helpers" if asks_for_helpers else "")
    async with running_gateway(RunConfig(name="agents", model=model), store, engine) as url:
        target = await open_session(url) if in_opened_session else ServerTarget(url, ADMIN_KEY)
        output = await asyncio.to_thread(agent.run, folder / "home", work_folder, target, task)
    sessions = [row.session for row in await store.sessions("agents")]
    calls = [call for session in sessions for call in await store.calls(session.session_id)]
    await engine.close()
    await store.close()
    return AgentRun(path.read_text(), output, sessions, calls)


async def open_session(url: str) -> ServerTarget:
    client = GatewayClient(url, ADMIN_KEY)
    session = await client.open_session(OpenSession(channel=Channel.TRAIN))
    await client.close()
    return ServerTarget(session.base_url.removesuffix("/v1"), session.api_key)


def group_by_task(calls: Sequence[Call]) -> dict[str, list[Call]]:
    """Group the calls by the task of the agent or sub-agent. Calls without tools (titles) are left out."""
    calls_by_task: dict[str, list[Call]] = {}
    for call in calls:
        user_text = "\n".join(message["content"] for message in call.messages if message["role"] == "user")
        if call.tools and (task_match := TASK_PATTERN.search(user_text)):
            calls_by_task.setdefault(task_match.group(), []).append(call)
    return calls_by_task


def check_exact(calls: Sequence[Call]) -> None:
    """Check that each call extends the previous one and that its prompt starts with that call's tokens."""
    assert calls[0].parent_id is None or calls[0].link is Link.BRANCH
    for previous, call in pairwise(calls):
        assert call.link is Link.EXTENDS, (call.link, call.messages[len(previous.messages) :])
        assert call.parent_id == previous.call_id
        previous_tokens = [*previous.prompt_ids.tolist(), *previous.sampled_ids.tolist()]
        assert call.prompt_ids.tolist()[: len(previous_tokens)] == previous_tokens


@pytest.mark.parametrize("in_opened_session", [False, True], ids=["live", "opened"])
async def test_cli_agent_edits_file_and_is_recorded_exactly(
    agent: CliAgent, in_opened_session: bool, tmp_path: Path
) -> None:
    run = await run_agent(agent, tmp_path, in_opened_session=in_opened_session)
    assert run.file_text == EDITED_TEXT, run.output
    assert len(run.sessions) == 1
    assert all(call.status is CallStatus.OK for call in run.calls)
    (calls,) = group_by_task(run.calls).values()
    assert len(calls) == 3
    check_exact(calls)


@pytest.mark.parametrize("name", ["claude-code", "codex", "qwen-code", "opencode"])
@pytest.mark.parametrize("in_opened_session", [False, True], ids=["live", "opened"])
async def test_sub_agents_are_recorded_as_separate_conversations(
    name: str, in_opened_session: bool, tmp_path: Path
) -> None:
    run = await run_agent(
        install_agent(name), tmp_path, asks_for_helpers=True, in_opened_session=in_opened_session
    )
    assert run.file_text == EDITED_TEXT, run.output
    calls_by_task = group_by_task(run.calls)
    assert len(calls_by_task) == 3, list(calls_by_task)
    for calls in calls_by_task.values():
        assert len(calls) >= 2
        check_exact(calls)
    assert len(run.sessions) == (1 if in_opened_session or name not in AGENTS_WITH_SUBAGENT_SESSIONS else 3)
