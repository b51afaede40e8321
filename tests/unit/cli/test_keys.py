"""`instar keys` on a small run: made, listed, revoked, and how it fails."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from instar.cluster.layout import RunFolder
from instar.config import RunConfig
from instar.gateway.auth import hash_key
from instar.store.factory import open_store
from tests.unit.cli.conftest import Instar, Result


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    config = RunConfig(name="keyed", dir=tmp_path / "keyed", agent_id="coder")
    RunFolder(config.run_dir).create(config)
    asyncio.run(open_store(config).close())
    return config


def test_a_key_is_printed_once_and_kept_as_its_hash(instar: Instar, config: RunConfig) -> None:
    made = instar("keys", "create", config.run_dir, "--name", "laptop")
    key = made.out.strip()
    assert key.startswith("sk-instar-")
    assert "coder" in made.err
    assert key.encode() not in b"".join(file.read_bytes() for file in config.run_dir.rglob("*.db*"))
    (row,) = instar("keys", "ls", config.run_dir, "--json").json
    assert (row["kind"], row["agent_id"], row["name"], row["revoked_at"]) == (
        "agent",
        "coder",
        "laptop",
        None,
    )
    assert row["key_hash"] == hash_key(key)
    table = instar("keys", "ls", config.run_dir).out
    assert hash_key(key)[:12] in table
    assert "laptop" in table


def test_keys_of_an_agent_and_of_an_admin(instar: Instar, config: RunConfig) -> None:
    agent = instar("keys", "create", config.run_dir, "--agent", "writer", "--json").json
    assert (agent["kind"], agent["agent_id"]) == ("agent", "writer")
    admin = instar("keys", "create", config.run_dir, "--admin", "--json").json
    assert (admin["kind"], admin["agent_id"]) == ("admin", None)
    assert admin["key"] != agent["key"]
    assert len(instar("keys", "ls", config.run_dir, "--json").json) == 2


@pytest.mark.parametrize("how", ["key", "name", "hash"])
def test_a_key_is_revoked_by_itself_its_name_or_its_hash(instar: Instar, config: RunConfig, how: str) -> None:
    made = instar("keys", "create", config.run_dir, "--name", "laptop", "--json").json
    other = instar("keys", "create", config.run_dir, "--json").json
    given = {"key": made["key"], "name": "laptop", "hash": made["key_hash"][:12]}[how]
    assert instar("keys", "revoke", config.run_dir, given, "--json").json == {"revoked": 1}
    revoked = {
        row["key_hash"]: row["revoked_at"] for row in instar("keys", "ls", config.run_dir, "--json").json
    }
    assert revoked[made["key_hash"]] is not None
    assert revoked[other["key_hash"]] is None
    failed(instar("keys", "revoke", config.run_dir, given), "No key was revoked")


def failed(result: Result, said: str) -> None:
    assert result.code == 1
    assert said in result.err
    assert "Traceback" not in result.err


def test_mistakes_are_told(instar: Instar, config: RunConfig, tmp_path: Path) -> None:
    instar("keys", "create", config.run_dir, "--name", "laptop")
    failed(instar("keys", "create", config.run_dir, "--name", "laptop"), "'laptop' exists")
    failed(
        instar("keys", "create", config.run_dir, "--admin", "--agent", "x"),
        "--admin and --agent exclude each other",
    )
    failed(instar("keys", "revoke", config.run_dir, ""), "No key was revoked")
    failed(instar("keys", "ls", tmp_path / "nowhere"), "nowhere")
