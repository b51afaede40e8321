"""Tests for `instar forget` on a run folder with a real store."""

from __future__ import annotations

import asyncio
import io
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from instar.cluster.layout import RunFolder
from instar.config import RunConfig
from instar.gateway.app import HASH_KEY_NAME
from instar.gateway.pipeline.parse import encode_user_id
from instar.record.hashing import MessageHasher
from instar.record.redact import Redactor
from instar.store.base import Run
from instar.store.factory import open_store
from instar.types import Channel, Claim, ClaimOutcome, Group, Message, Session, StepState, Task
from tests.unit.cli.conftest import Instar
from tests.unit.store.factories import make_call

RUN = "private"
SESSIONS = ("ada-1", "ada-2", "ada-3", "bot-1", "rollout")


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    """Create a run with three sessions of Ada, of which one was trained on, one of an agent and a rollout."""
    config = RunConfig.model_validate(
        {"name": RUN, "dir": tmp_path / "run", "gateway": {"redact": {"patterns": [r"\S+@\S+"]}}}
    )
    RunFolder(config.run_dir).create(config)
    asyncio.run(fill_store(config))
    return config


async def fill_store(config: RunConfig) -> None:
    store = open_store(config)
    await store.put_run(Run(RUN, RUN, {}))
    hasher = MessageHasher(await store.secret(HASH_KEY_NAME))
    user = encode_user_id("ada@example.com", Redactor.from_config(config.gateway.redact), hasher)
    await store.open_group(Group("open", RUN, Channel.TRAIN, 0, 1, Task("t", {})))
    sessions: dict[str, tuple[dict[str, Any], list[str]]] = {
        "ada-1": ({}, [user]),
        "ada-2": ({}, [user, "Grace"]),
        "bot-1": ({"agent_id": "bot"}, []),
        "ada-3": ({}, ["ada@example.com"]),  # recorded before the redaction was configured
        "rollout": ({"channel": Channel.TRAIN, "group_id": "open"}, []),
    }
    for session_id, (fields, users) in sessions.items():
        fields = {"agent_id": "default", "channel": Channel.LIVE} | fields
        session = Session(session_id, RUN, policy_id=RUN, **fields)
        messages = (Message(role="user", content=f"text of {session_id}"),)
        call = make_call(f"call-{session_id}", session_id, messages=messages)
        await store.add_calls([call], new_session=session, users=users)
    for step, epoch in ((1, 0), (2, 1)):
        claims = [
            Claim(RUN, epoch, f"ada-1/{sample}", "ada-1", None, ClaimOutcome.TRAINED)
            for sample in range(step)
        ]
        await store.claim_step(RUN, step, claims)
    await store.advance_step(RUN, 1, StepState.COMMITTED, version=7)
    await store.close()


def list_stored_texts(config: RunConfig) -> list[str]:
    """Return the sessions whose text is in the store's files."""
    content = b"".join(file.read_bytes() for file in config.run_dir.glob("store.db*"))
    return [name for name in SESSIONS if f"text of {name}".encode() in content]


def test_forget_user_erases_the_sessions_and_lists_trained_versions(
    instar: Instar, config: RunConfig
) -> None:
    assert list_stored_texts(config) == list(SESSIONS)
    result = instar("forget", config.run_dir, "--user", "ada@example.com", "--yes")
    assert result.code == 0, result.err
    assert "Deleted the data of 3 session(s)." in result.out
    rows = [line.split() for line in result.out.splitlines() if line.startswith(RUN)]
    assert rows == [[RUN, "7", "1", "committed", "1", "1"], [RUN, "2", "claimed", "1", "2"]]
    assert list_stored_texts(config) == ["bot-1", "rollout"]


def test_forget_sessions_again_lists_the_versions_again(instar: Instar, config: RunConfig) -> None:
    first = instar("forget", config.run_dir, "ada-1", "bot-1", "--yes", "--json").json
    second = instar("forget", config.run_dir, "ada-1", "bot-1", "--yes", "--json").json
    assert (first["deleted"], second["deleted"]) == (2, 0)
    assert first["erased"]
    assert first["trained"] == second["trained"]
    trained = {
        "session_id": "ada-1",
        "run_id": RUN,
        "policy_id": RUN,
        "step": 1,
        "state": "committed",
        "version": 7,
        "samples": 1,
    }
    assert first["trained"][0] == trained
    text = instar("forget", config.run_dir, "bot-1", "--yes").out
    assert "The data of 1 session(s) was deleted before." in text
    assert "No policy version was trained on the sessions." in text


def test_forget_agent_keeps_sessions_of_rollouts_in_progress(instar: Instar, config: RunConfig) -> None:
    result = instar("forget", config.run_dir, "--agent", "default", "--yes", "--json")
    assert (result.code, result.json["deleted"], result.json["in_use"]) == (1, 3, ["rollout"])
    assert list_stored_texts(config) == ["bot-1", "rollout"]


def test_forget_without_confirmation_deletes_nothing(
    instar: Instar, config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("n\n"))
    result = instar("forget", config.run_dir, "ada-1")
    assert result.code == 1
    assert "Delete the data of 1 session(s) of run private?" in result.err
    assert "ada-1" in list_stored_texts(config)


def test_forget_without_rewrite_erases_the_rows(instar: Instar, config: RunConfig) -> None:
    assert instar("forget", config.run_dir, "--user", "Grace", "--yes", "--no-rewrite").code == 0
    assert "ada-2" not in list_stored_texts(config)
    database = sqlite3.connect(config.store_path)
    assert database.execute("SELECT COUNT(*) FROM forgotten_sessions").fetchone() == (1,)
    database.close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "Select the sessions in one way"),
        (("ada-1", "--agent", "bot"), "Select the sessions in one way"),
        (("--agent", "bot", "--user", "Grace"), "Select the sessions in one way"),
        (("missing", "--yes"), "There is no session missing in this run"),
    ],
)
def test_forget_with_invalid_selection_deletes_nothing(
    instar: Instar, config: RunConfig, options: tuple[str, ...], message: str
) -> None:
    result = instar("forget", config.run_dir, *options)
    assert result.code == 1
    assert message in result.err
    assert len(list_stored_texts(config)) == 5


def test_forget_unknown_user_deletes_nothing(instar: Instar, config: RunConfig) -> None:
    result = instar("forget", config.run_dir, "--user", "nobody")
    assert (result.code, result.out) == (0, "Deleted the data of 0 session(s).\n")
    assert len(list_stored_texts(config)) == 5
