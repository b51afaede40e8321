"""Command-line agents of npm, as they are, at a live gateway: the file is edited, and all is recorded."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pytest

from instar.config import ModelConfig, RunConfig, ScriptedEngineConfig
from instar.engines.scripted import ScriptedEngine
from instar.models import DEFAULT_MODEL, resolve_model
from instar.store.sqlite import SqliteStore
from instar.types import Call, CallStatus, Link, Session
from tests.integration.agents.cli import AGENTS, CliAgent, NotInstalled, Target
from tests.integration.agents.hands import AFTER, BEFORE, FILE, task
from tests.serving import ADMIN_KEY, running_gateway


@dataclass
class Run:
    """What is left of a run."""

    file: str
    said: str
    sessions: list[Session]
    calls: list[Call]
    """In the order they were recorded."""


@pytest.fixture(params=AGENTS)
def agent(request: pytest.FixtureRequest) -> CliAgent:
    return installed(request.param)


def installed(name: str) -> CliAgent:
    agent = AGENTS[name]
    try:
        agent.install()
    except NotInstalled as why:
        print(why)
        pytest.skip(str(why))
    return agent


async def run_agent(agent: CliAgent, folder: Path, more: str = "") -> Run:
    """One run of an agent that sends no session of ours: the gateway finds it out."""
    model = ModelConfig(name=str(resolve_model(DEFAULT_MODEL)), max_context=200_000)
    script = f"tests.integration.agents.script:{agent.name.replace('-', '_')}"
    engine = ScriptedEngine(model, ScriptedEngineConfig(function=script))
    store = SqliteStore(folder / "store.db")
    work = folder / "project"
    work.mkdir()
    path = work / FILE
    path.write_text(BEFORE)
    config = RunConfig(name="agents", model=model)
    async with running_gateway(config, store, engine) as url:
        target = Target(url, ADMIN_KEY)
        said = await asyncio.to_thread(agent.run, folder / "home", work, target, task(str(path)) + more)
    sessions = [row.session for row in await store.sessions("agents")]
    calls = [call for session in sessions for call in await store.calls(session.session_id)]
    await engine.close()
    await store.close()
    return Run(path.read_text(), said, sessions, calls)


def conversation(calls: Sequence[Call], words: str) -> list[Call]:
    """The calls that have tools and whose first message of the user with these words is theirs."""
    return [call for call in calls if call.tools and any(words in m["content"] for m in call.messages)]


def check_exact(calls: Sequence[Call]) -> None:
    """Each continues the one before, and its prompt begins with that one's prompt and sampled tokens."""
    assert calls[0].parent_id is None or calls[0].link is Link.BRANCH
    for before, after in pairwise(calls):
        assert after.link is Link.EXTENDS, (after.link, after.messages[len(before.messages) :])
        assert after.parent_id == before.call_id
        whole = [*before.prompt_ids.tolist(), *before.sampled_ids.tolist()]
        assert after.prompt_ids.tolist()[: len(whole)] == whole


async def test_an_agent_edits_a_file_and_is_recorded(agent: CliAgent, tmp_path: Path) -> None:
    run = await run_agent(agent, tmp_path)
    assert run.file == AFTER, run.said
    assert len(run.sessions) == 1
    assert all(call.status is CallStatus.OK for call in run.calls)
    calls = conversation(run.calls, "Change the word world")
    assert len(calls) == 3
    check_exact(calls)
