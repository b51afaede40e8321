"""Tests for `instar sessions close` and the export of open sessions."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path

import httpx
import pytest
from transformers import LlamaConfig

from instar.cli.close_sessions import complete_in_gateway
from instar.cluster.layout import RunFolder
from instar.cluster.live_run import serve_run
from instar.config import RunConfig
from instar.store.base import Run, Store
from instar.store.factory import open_store
from instar.types import Channel, Session, SessionStatus
from tests.tiny import make_tiny_tokenizer
from tests.unit.cli.conftest import Instar

HOUR = 3600.0


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    """Create a stopped run with an old and a new open live session, and an open rollout session."""
    make_tiny_tokenizer().save_pretrained(tmp_path / "model")
    LlamaConfig().save_pretrained(tmp_path / "model")
    config = RunConfig.model_validate(
        {
            "name": "live",
            "dir": str(tmp_path / "run"),
            "model": {"name": str(tmp_path / "model"), "max_context": 1024},
            "gateway": {"port": 0},
            "engine": {"type": "scripted", "replies": ["fine"]},
        }
    )
    RunFolder(config.run_dir).create(config)
    asyncio.run(fill_store(config))
    return config


async def fill_store(config: RunConfig) -> None:
    store = open_store(config)
    await store.put_run(Run("live", "live", {}))
    for session_id, channel, age in (
        ("old", Channel.LIVE, 2 * HOUR),
        ("new", Channel.LIVE, 0.0),
        ("rollout", Channel.TRAIN, 2 * HOUR),
    ):
        created_at = time.time() - age
        await store.open_session(Session(session_id, "live", "a", "live", channel, created_at=created_at))
    await store.close()


def read_sessions(config: RunConfig) -> dict[str, Session]:
    async def read() -> list[Session]:
        store: Store = open_store(config, read_only=True)
        try:
            return [row.session for row in await store.sessions("live")]
        finally:
            await store.close()

    return {session.session_id: session for session in asyncio.run(read())}


def list_closed(config: RunConfig) -> list[str]:
    sessions = read_sessions(config).values()
    return [session.session_id for session in sessions if session.status is SessionStatus.COMPLETED]


def test_sessions_close_with_ids_closes_only_these(instar: Instar, config: RunConfig) -> None:
    assert instar("sessions", "close", config.run_dir, "new", "--json").json == {"closed": 1}
    closed = read_sessions(config)["new"]
    assert (closed.status, closed.reason) == (SessionStatus.COMPLETED, "closed with `instar sessions close`")
    assert closed.ended_at
    assert list_closed(config) == ["new"]
    assert instar("sessions", "close", config.run_dir, "new", "--json").json == {"closed": 0}


def test_sessions_close_idle_keeps_recent_sessions(instar: Instar, config: RunConfig) -> None:
    assert instar("sessions", "close", config.run_dir, "--idle", "1h").out == "1 session(s) closed\n"
    assert list_closed(config) == ["old"]


def test_sessions_close_all_keeps_rollout_sessions(instar: Instar, config: RunConfig) -> None:
    assert instar("sessions", "close", config.run_dir, "--all", "--json").json == {"closed": 2}
    assert sorted(list_closed(config)) == ["new", "old"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "Select the sessions to close"),
        (("new", "--all"), "Select the sessions to close"),
        (("--idle", "soon"), "--idle: 'soon' is not a duration"),
        (("missing",), "There is no session missing in this run"),
        (("new", "rollout"), "The session rollout is on the channel train"),
    ],
)
def test_sessions_close_with_invalid_arguments_closes_nothing(
    instar: Instar, config: RunConfig, arguments: tuple[str, ...], message: str
) -> None:
    result = instar("sessions", "close", config.run_dir, *arguments)
    assert (result.code, result.err.startswith(f"error: {message}")) == (1, True), result.err
    assert list_closed(config) == []


def test_export_with_open_includes_open_sessions(instar: Instar, config: RunConfig, tmp_path: Path) -> None:
    instar("sessions", "close", config.run_dir, "old")

    def export(*options: str) -> list[str]:
        folder = tmp_path / f"export{len(list(tmp_path.iterdir()))}"
        result = instar("sessions", "export", config.run_dir, "--to", folder, "--channel", "live", *options)
        assert result.code == 0, result.err
        lines = (folder / "sessions.jsonl").read_text().splitlines()
        return [json.loads(line)["session_id"] for line in lines]

    assert export() == ["old"]
    assert export("--open") == ["old", "new"]
    assert export("--status", "open") == ["new"]


async def test_sessions_close_in_a_running_run_makes_the_next_call_open_a_session(
    instar: Instar, config: RunConfig
) -> None:
    async with serve_run(config, resume=True, log=lambda _: None) as run:
        headers = {"Authorization": f"Bearer {run.admin_key}"}
        async with httpx.AsyncClient(base_url=run.gateway_url, headers=headers, timeout=30) as http:

            async def send_chat() -> str:
                body = {"model": "any", "user": "ann", "messages": [{"role": "user", "content": "hi"}]}
                response = await http.post("/v1/chat/completions", json=body)
                assert response.status_code == 200, response.text
                return response.headers["x-instar-session"]

            first = await send_chat()
            result = await asyncio.to_thread(instar, "sessions", "close", config.run_dir, first, "--json")
            assert result.json == {"closed": 1}
            second = await send_chat()
            assert second != first
            assert [key.revoked_at is None for key in await run.store.keys()] == [False]
    sessions = await asyncio.to_thread(read_sessions, config)
    assert sessions[first].reason == "closed with `instar sessions close`"
    stopped = sessions[second]
    assert (stopped.status, stopped.reason) == (SessionStatus.COMPLETED, "the gateway was stopped")
    assert sessions["rollout"].status is SessionStatus.OPEN


async def test_complete_in_gateway_skips_sessions_that_were_deleted_meanwhile(config: RunConfig) -> None:
    async with serve_run(config, resume=True, log=lambda _: None) as run:
        headers = {"Authorization": f"Bearer {run.admin_key}"}
        async with httpx.AsyncClient(base_url=run.gateway_url, headers=headers, timeout=30) as http:
            assert (await http.get("/sessions/old")).status_code == 200  # the gateway has it in memory
            await run.store.forget_sessions("live", ["old"])
            assert (await http.post("/sessions/old/complete", json={})).status_code == 404
        assert await complete_in_gateway(run.store, run.gateway_url, ["old", "new"]) == 1
    assert await asyncio.to_thread(list_closed, config) == ["new"]


async def test_conversation_continued_after_a_restart_opens_a_session(config: RunConfig) -> None:
    async def serve_one_call(*messages: tuple[str, str]) -> str:
        async with serve_run(config, resume=True, log=lambda _: None) as run:
            headers = {"Authorization": f"Bearer {run.admin_key}"}
            async with httpx.AsyncClient(base_url=run.gateway_url, headers=headers, timeout=30) as http:
                conversation = [{"role": role, "content": content} for role, content in messages]
                body = {"model": "any", "user": "ann", "messages": conversation}
                response = await http.post("/v1/chat/completions", json=body)
                assert response.status_code == 200, response.text
                return response.headers["x-instar-session"]

    first = await serve_one_call(("user", "hi"))
    second = await serve_one_call(("user", "hi"), ("assistant", "fine"), ("user", "more"))
    assert first != second
    sessions = await asyncio.to_thread(read_sessions, config)
    assert sessions[first].external_id == sessions[second].external_id
