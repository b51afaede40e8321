"""Command-line agents of npm, as they are, at a live gateway: the file is edited, and all is recorded."""

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
from instar.models import DEFAULT_MODEL, resolve_model
from instar.rollout.gateway_client import GatewayClient
from instar.store.sqlite import SqliteStore
from instar.types import Call, CallStatus, Channel, Link, Session
from tests.integration.agents.agent_tools import AFTER, BEFORE, FILE, make_task
from tests.integration.agents.cli import AGENTS, AgentInstallError, CliAgent, ServerTarget
from tests.serving import ADMIN_KEY, running_gateway

TASK_PATTERN = re.compile(r"Change the word|Look into .*\.")
OWN_SESSIONS = {"opencode", "qwen-code"}
"""Their sub-agents come under ids of their own, or none: they are sessions unless one was opened for all."""


@dataclass
class AgentRun:
    """What is left of a run."""

    file: str
    output: str
    sessions: list[Session]
    calls: list[Call]
    """In the order they were recorded."""


@pytest.fixture(params=AGENTS)
def agent(request: pytest.FixtureRequest) -> CliAgent:
    return install_agent(request.param)


def install_agent(name: str) -> CliAgent:
    agent = AGENTS[name]
    try:
        agent.install()
    except AgentInstallError as why:
        print(why)
        pytest.skip(str(why))
    return agent


async def run_agent(
    agent: CliAgent, folder: Path, *, helpers: bool = False, opened: bool = False
) -> AgentRun:
    """One run at a gateway of its own. ``opened``: in a session that was opened for it, by URL and key;
    else the agent has a key that opens no session, and the gateway finds out which calls belong together."""
    model = ModelConfig(name=str(resolve_model(DEFAULT_MODEL)), max_context=200_000)
    script = f"tests.integration.agents.script:{agent.name.replace('-', '_')}"
    engine = ScriptedEngine(model, ScriptedEngineConfig(function=script))
    store = SqliteStore(folder / "store.db")
    work = folder / "project"
    work.mkdir()
    path = work / FILE
    path.write_text(BEFORE)
    wanted = make_task(str(path)) + (" with helpers" if helpers else "")
    async with running_gateway(RunConfig(name="agents", model=model), store, engine) as url:
        target = await open_target(url) if opened else ServerTarget(url, ADMIN_KEY)
        said = await asyncio.to_thread(agent.run, folder / "home", work, target, wanted)
    sessions = [row.session for row in await store.sessions("agents")]
    calls = [call for session in sessions for call in await store.calls(session.session_id)]
    await engine.close()
    await store.close()
    return AgentRun(path.read_text(), said, sessions, calls)


async def open_target(url: str) -> ServerTarget:
    client = GatewayClient(url, ADMIN_KEY)
    session = await client.open_session(channel=Channel.TRAIN)
    await client.close()
    return ServerTarget(session.base_url.removesuffix("/v1"), session.api_key)


def group_by_task(calls: Sequence[Call]) -> dict[str, list[Call]]:
    """Calls by what the agent or its sub-agent was asked to do. Those without tools (titles) are left out."""
    found: dict[str, list[Call]] = {}
    for call in calls:
        said = "\n".join(message["content"] for message in call.messages if message["role"] == "user")
        if call.tools and (asked := TASK_PATTERN.search(said)):
            found.setdefault(asked.group(), []).append(call)
    return found


def check_exact(calls: Sequence[Call]) -> None:
    """Each continues the one before, and its prompt begins with that one's prompt and sampled tokens."""
    assert calls[0].parent_id is None or calls[0].link is Link.BRANCH
    for before, after in pairwise(calls):
        assert after.link is Link.EXTENDS, (after.link, after.messages[len(before.messages) :])
        assert after.parent_id == before.call_id
        whole = [*before.prompt_ids.tolist(), *before.sampled_ids.tolist()]
        assert after.prompt_ids.tolist()[: len(whole)] == whole


@pytest.mark.parametrize("opened", [False, True], ids=["live", "opened"])
async def test_cli_agent_edits_a_file_and_is_recorded(agent: CliAgent, opened: bool, tmp_path: Path) -> None:
    run = await run_agent(agent, tmp_path, opened=opened)
    assert run.file == AFTER, run.output
    assert len(run.sessions) == 1
    assert all(call.status is CallStatus.OK for call in run.calls)
    (calls,) = group_by_task(run.calls).values()
    assert len(calls) == 3
    check_exact(calls)


@pytest.mark.parametrize("name", ["claude-code", "codex", "qwen-code", "opencode"])
@pytest.mark.parametrize("opened", [False, True], ids=["live", "opened"])
async def test_sub_agents_have_their_own_conversations(name: str, opened: bool, tmp_path: Path) -> None:
    run = await run_agent(install_agent(name), tmp_path, helpers=True, opened=opened)
    assert run.file == AFTER, run.output
    found = group_by_task(run.calls)
    assert len(found) == 3, list(found)
    for calls in found.values():
        assert len(calls) >= 2
        check_exact(calls)
    assert len(run.sessions) == (1 if opened or name not in OWN_SESSIONS else 3)
