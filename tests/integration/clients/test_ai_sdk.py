"""Conversations between Vercel's AI SDK and a live gateway."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from pathlib import Path

import pytest
from transformers import LlamaConfig

from instar.config import ModelConfig
from instar.gateway.auth import create_key
from instar.record.render import load_renderer
from instar.types import Link
from tests.integration.clients.javascript_packages import install_packages
from tests.tiny import make_tiny_tokenizer
from tests.unit.gateway.wire import list_all_calls, run_scripted_gateway

RUN_TIMEOUT_SECONDS = 100


@pytest.mark.timeout(500)
@pytest.mark.skipif(shutil.which("npm") is None, reason="npm is not installed (Debian: npm)")
@pytest.mark.parametrize("mode", ["generate", "stream"])
@pytest.mark.parametrize(
    ("provider", "dialect"),
    [("openai", "responses"), ("anthropic", "messages"), ("openai-compatible", "chat")],
)
async def test_ai_sdk_conversation_continues_the_recorded_tokens(
    tmp_path: Path, provider: str, dialect: str, mode: str
) -> None:
    """The second step of a tool call and a follow-up, as a live agent."""
    folder = await asyncio.to_thread(install_packages)
    make_tiny_tokenizer().save_pretrained(tmp_path)
    LlamaConfig().save_pretrained(tmp_path)
    model = ModelConfig(name=str(tmp_path), max_context=1024)
    renderer = load_renderer(tmp_path, model)
    async with run_scripted_gateway(tmp_path / "store.db", model, renderer) as gateway:
        key = await create_key(gateway.store, "agent", "agent")
        process = await asyncio.create_subprocess_exec(
            *("node", str(folder / "run_ai_sdk.mjs"), gateway.url, key, provider, mode),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={"PATH": os.environ["PATH"]},
        )
        stdout, stderr = await asyncio.wait_for(process.communicate(), RUN_TIMEOUT_SECONDS)
        assert process.returncode == 0, stderr.decode()
        assert json.loads(stdout) == ["The answer is 7440.", "You said: thanks"]
        calls = await list_all_calls(gateway)
    assert [(call.dialect, call.link) for call in calls] == [
        (dialect, Link.ROOT),
        (dialect, Link.EXTENDS),
        (dialect, Link.EXTENDS),
    ]
    assert len({call.session_id for call in calls}) == 1
    assert all(call.trainable for call in calls)
