"""Tests for `instar serve RUN` and `instar chat RUN`, which use the published versions of a run."""

from __future__ import annotations

import asyncio
import io
import json
import os
import pty
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig

from instar.cli.chat import Conversation
from instar.cluster.layout import RunFolder
from instar.config import RunConfig, ScriptedEngineConfig
from instar.engines.scripted import ScriptedEngine
from instar.models import resolve_tokenizer
from instar.record.base import Renderer
from instar.store.base import Run
from instar.store.factory import open_store
from instar.types import Artifact, Policy, SamplingParams
from tests.tiny import make_tiny_tokenizer
from tests.unit.cli.conftest import Instar

INSTAR = [sys.executable, "-m", "instar.cli.main"]


def create_run(folder: Path, **settings: Any) -> RunConfig:
    """Create a stopped run with version 1, whose files were removed, and the versions 2 and 4."""
    make_tiny_tokenizer().save_pretrained(folder / "model")
    LlamaConfig().save_pretrained(folder / "model")
    config = RunConfig.model_validate(
        {
            "name": "trained",
            "dir": str(folder / "runs" / "trained"),
            "model": {"name": str(folder / "model"), "max_context": 512},
            "gateway": {"port": 0},
            "engine": {"type": "scripted", "replies": ["One.", "Two."]},
            **settings,
        }
    )
    RunFolder(config.run_dir).create(config)
    asyncio.run(_publish_versions(config))
    return config


async def _publish_versions(config: RunConfig) -> None:
    store = open_store(config)
    await store.put_run(Run("trained", "trained", {}))
    for step in (1, 2, 3, 4):
        version = await store.reserve_version("trained", "trained", step)
        adapter = config.run_dir / f"v{version}"
        if step > 1:
            adapter.mkdir()
        if step != 3:
            await store.publish(Policy("trained", version, Artifact("adapter", str(adapter))))
    await store.close()


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    return create_run(tmp_path)


def serve_and_list_models(folder: Path, *arguments: str) -> list[str]:
    process = subprocess.Popen(
        [*INSTAR, "serve", *arguments, "--json"], cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        served = json.loads(process.stdout.readline())
        headers = {"Authorization": f"Bearer {served['api_key']}"}
        request = urllib.request.Request(f"{served['base_url']}/models", headers=headers)
        with urllib.request.urlopen(request, timeout=60) as response:
            models = json.load(response)["data"]
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 0, errors
    finally:
        process.kill()
    return [model["id"] for model in models]


def test_serve_with_a_run_name_serves_its_newest_version(config: RunConfig, tmp_path: Path) -> None:
    assert serve_and_list_models(tmp_path, "trained") == ["trained", "trained@4"]


@pytest.mark.parametrize("count", [1, 2])
def test_serve_with_a_version_serves_that_version(tmp_path: Path, count: int) -> None:
    engine = {"type": "scripted", "replies": ["One."], "count": count}
    config = create_run(tmp_path, engine=engine)
    models = serve_and_list_models(tmp_path, str(config.run_dir), "--version", "2")
    assert models == ["trained", "trained@2"]
    assert RunFolder(config.run_dir).read_config().engine == config.engine


def test_serve_after_a_rollback_to_the_base_model_serves_its_new_version(
    config: RunConfig, tmp_path: Path
) -> None:
    async def roll_back() -> int:
        store = open_store(config)
        version = await store.roll_back("trained", "trained", 0)
        await store.close()
        return version

    assert asyncio.run(roll_back()) == 5
    assert serve_and_list_models(tmp_path, "trained") == ["trained", "trained@5"]


@pytest.mark.parametrize("command", ["serve", "chat"])
@pytest.mark.parametrize(
    ("version", "problem"), [(1, "has no files that an engine can load"), (3, "was not published")]
)
def test_version_that_cannot_be_served_is_an_error_that_lists_the_others(
    instar: Instar, config: RunConfig, command: str, version: int, problem: str
) -> None:
    result = instar(command, config.run_dir, "--version", version)
    assert result.code == 1
    assert result.err.splitlines()[-1] == (
        f"error: Version {version} of 'trained' {problem}. Versions that can be served: 0, 2, 4; choose one "
        "with --version"
    )


def test_serve_with_a_folder_that_is_not_a_run_is_an_error(instar: Instar, tmp_path: Path) -> None:
    result = instar("serve", tmp_path)
    assert (result.code, result.err) == (
        1,
        f"error: {tmp_path} is not a run folder: it has no config.json\n",
    )


@pytest.fixture
def chat(instar: Instar, config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> Any:
    def run(text: str, *options: str) -> Any:
        monkeypatch.setattr(sys, "stdin", io.StringIO(text))
        result = instar("chat", config.run_dir, *options)
        assert result.code == 0, result.err
        return result

    return run


def test_chat_with_a_pipe_answers_each_line_in_one_conversation(chat: Any) -> None:
    assert chat("first\n\nsecond\n").out == "One.\nTwo.\n"


def test_chat_with_compare_answers_with_both_models(chat: Any) -> None:
    assert chat("first\nsecond\n", "--compare", "base", "--version", "2").out == (
        "version 2: One.\nbase: One.\nversion 2: Two.\nbase: Two.\n"
    )
    output = chat("first\n", "--compare", "base", "--json").json
    assert output == {"message": "first", "answers": {"version 4": "One.", "base": "One."}}


async def test_conversation_samples_from_its_own_version(config: RunConfig) -> None:
    engine = ScriptedEngine(config.model, ScriptedEngineConfig())
    renderer = Renderer.load(resolve_tokenizer(config.model.name), config.model)
    params = SamplingParams(stop_token_ids=renderer.stop_token_ids)
    trained = Conversation(engine, renderer, Policy("trained", 2, Artifact("adapter", "v2")), params)
    base = Conversation(engine, renderer, Policy("trained", 0, Artifact("base")), params)
    for conversation in (trained, base, trained):
        assert await conversation.answer("hi") == "Hello from the scripted engine."
        assert (await engine.status()).version == conversation.policy.version
    assert [len(conversation.messages) for conversation in (trained, base)] == [4, 2]
    await engine.close()


async def test_conversation_loads_the_adapter_from_which_the_run_started(config: RunConfig) -> None:
    engine = ScriptedEngine(config.model, ScriptedEngineConfig())
    renderer = Renderer.load(resolve_tokenizer(config.model.name), config.model)
    params = SamplingParams(stop_token_ids=renderer.stop_token_ids)
    policy = Policy("trained", 0, Artifact("adapter", "initial"))
    conversation = Conversation(engine, renderer, policy, params)
    await conversation.answer("hi")
    assert (await engine.status()).policies == (policy.ref,)  # not the base model, which is also version 0
    assert conversation.label == "version 0"
    await engine.close()


def test_chat_compare_with_the_base_model_itself_is_an_error(instar: Instar, config: RunConfig) -> None:
    result = instar("chat", config.run_dir, "--version", "0", "--compare", "base")
    assert result.err.startswith("error: --compare base: the chosen version is version 0 itself")


def test_version_of_a_provider_model_is_an_error(instar: Instar, tmp_path: Path) -> None:
    config = create_run(tmp_path, engine={"type": "upstream", "base_url": "http://127.0.0.1:9/v1"})
    assert instar("chat", config.run_dir).err.startswith("error: engine.type: a provider serves")
    served = instar("serve", config.run_dir, "--version", "2")
    assert served.err.startswith("error: --version 2: a provider serves this run's model")


def test_chat_with_a_message_that_is_too_long_is_an_error(
    instar: Instar, config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("word " * 5000))
    result = instar("chat", config.run_dir)
    assert (result.code, result.err.startswith("error: ")) == (1, True), result.err


def test_chat_in_a_terminal_streams_answers_until_the_end_of_input(config: RunConfig) -> None:
    controller, terminal = pty.openpty()
    process = subprocess.Popen(
        [*INSTAR, "chat", str(config.run_dir)], stdin=terminal, stdout=terminal, stderr=terminal
    )
    os.close(terminal)
    output = ""

    def read_until(text: str) -> None:
        nonlocal output
        while text not in output:
            output += os.read(controller, 10_000).decode()

    try:
        read_until("\n> ")
        os.write(controller, b"hello\n")
        read_until("One.")
        os.write(controller, b"more\n")
        read_until("Two.")
        os.write(controller, b"\x04")
        assert process.wait(timeout=60) == 0
    finally:
        process.kill()
        os.close(controller)
    assert "Chat with version 4." in output
