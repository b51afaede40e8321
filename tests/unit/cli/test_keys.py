"""Tests for `instar keys`."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from instar.cluster.layout import RunFolder
from instar.config import RunConfig
from instar.http.auth import hash_key
from instar.store.factory import open_store
from tests.unit.cli.conftest import Instar, Result


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    config = RunConfig(name="keyed", dir=tmp_path / "keyed", agent_id="coder")
    RunFolder(config.run_dir).create(config)
    asyncio.run(open_store(config).close())
    return config


def test_keys_create_prints_the_key_and_stores_its_hash(instar: Instar, config: RunConfig) -> None:
    created = instar("keys", "create", config.run_dir, "--name", "laptop")
    key = created.out.strip()
    assert key.startswith("sk-instar-")
    assert "coder" in created.err
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


def test_keys_create_for_agent_and_admin(instar: Instar, config: RunConfig) -> None:
    agent = instar("keys", "create", config.run_dir, "--agent", "writer", "--json").json
    assert (agent["kind"], agent["agent_id"]) == ("agent", "writer")
    admin = instar("keys", "create", config.run_dir, "--admin", "--json").json
    assert (admin["kind"], admin["agent_id"]) == ("admin", None)
    assert admin["key"] != agent["key"]
    assert len(instar("keys", "ls", config.run_dir, "--json").json) == 2


def test_keys_create_feedback_key_for_one_or_all_agents(instar: Instar, config: RunConfig) -> None:
    created = instar("keys", "create", config.run_dir, "--feedback", "--agent", "writer", "--json").json
    assert (created["kind"], created["agent_id"]) == ("feedback", "writer")
    assert "feedback key for all agents" in instar("keys", "create", config.run_dir, "--feedback").err
    rows = instar("keys", "ls", config.run_dir, "--json").json
    assert [(row["kind"], row["agent_id"]) for row in rows] == [("feedback", "writer"), ("feedback", None)]


@pytest.mark.parametrize("identifier_type", ["key", "name", "hash"])
def test_keys_revoke_by_value_name_or_hash(instar: Instar, config: RunConfig, identifier_type: str) -> None:
    created = instar("keys", "create", config.run_dir, "--name", "laptop", "--json").json
    other = instar("keys", "create", config.run_dir, "--json").json
    identifier = {"key": created["key"], "name": "laptop", "hash": created["key_hash"][:12]}[identifier_type]
    assert instar("keys", "revoke", config.run_dir, identifier, "--json").json == {"revoked": 1}
    revoked = {
        row["key_hash"]: row["revoked_at"] for row in instar("keys", "ls", config.run_dir, "--json").json
    }
    assert revoked[created["key_hash"]] is not None
    assert revoked[other["key_hash"]] is None
    assert_fails(instar("keys", "revoke", config.run_dir, identifier), "No active key matches")


def assert_fails(result: Result, expected: str) -> None:
    assert result.code == 1
    assert expected in result.err
    assert "Traceback" not in result.err


def test_invalid_keys_commands_explain_the_error(instar: Instar, config: RunConfig, tmp_path: Path) -> None:
    instar("keys", "create", config.run_dir, "--name", "laptop")
    assert_fails(instar("keys", "create", config.run_dir, "--name", "laptop"), "'laptop' already exists")
    assert_fails(
        instar("keys", "create", config.run_dir, "--admin", "--agent", "x"),
        "--admin and --agent are mutually exclusive",
    )
    assert_fails(
        instar("keys", "create", config.run_dir, "--admin", "--feedback"),
        "--admin and --feedback are mutually exclusive",
    )
    assert_fails(instar("keys", "revoke", config.run_dir, ""), "No active key matches")
    assert_fails(instar("keys", "ls", tmp_path / "missing"), "missing")
