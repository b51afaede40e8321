"""Sessions that mix messages, text prompts and token ids."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import httpx
import pytest

from instar.config import GatewayConfig, ModelConfig
from instar.gateway.base import OpenedSession
from instar.record.base import Renderer
from instar.types import Link
from tests.unit.gateway.conftest import RunningGateway, StartGateway
from tests.unit.gateway.wire import build_request, post, run_scripted_gateway

PROMPT_TYPES = ("chat", "completions", "tokens")


async def send_prompt(
    gateway: RunningGateway,
    session: OpenedSession,
    prompt_type: str,
    renderer: Renderer,
    *texts: str,
    **fields: Any,
) -> httpx.Response:
    """Send a conversation as messages, as text or as token ids."""
    if prompt_type != "tokens":
        return await post(gateway, build_request(prompt_type, *texts, **fields), prompt_type, session.api_key)
    turns = [{"role": "assistant" if i % 2 else "user", "content": text} for i, text in enumerate(texts)]
    headers = {"Authorization": f"Bearer {session.api_key}"}
    body = {"prompt_ids": renderer.render(turns), **fields}  # type: ignore[arg-type]  # plain dicts
    return await gateway.http.post("/v1/generate", json=body, headers=headers)


@pytest.mark.parametrize("prompt_types", list(itertools.permutations(PROMPT_TYPES)))
async def test_session_with_mixed_prompts_continues_after_a_restart(
    tmp_path: Path, model: ModelConfig, renderer: Renderer, prompt_types: tuple[str, ...]
) -> None:
    gateway_args = (tmp_path / "store.db", model, renderer)
    texts = ("hi", "You said: hi", "more")
    async with run_scripted_gateway(*gateway_args) as gateway:
        session = await gateway.open_session()
        for prompt_type in prompt_types * 2:
            response = await send_prompt(gateway, session, prompt_type, renderer, "hi", n=2)
            assert response.status_code == 200, (prompt_type, response.text)
    async with run_scripted_gateway(*gateway_args) as gateway:
        for prompt_type in prompt_types:
            response = await send_prompt(gateway, session, prompt_type, renderer, *texts)
            assert response.status_code == 200, (prompt_type, response.text)
        calls = await gateway.calls(session)
    assert [c.link for c in calls[12:]] == [Link.EXTENDS] * 3
    for later in calls[12:]:
        parent = next(c for c in calls if c.call_id == later.parent_id)
        assert later.prompt_ids[: len(parent.sequence)].tolist() == parent.sequence.tolist()


async def test_session_with_mixed_prompts_continues_after_eviction(
    start_gateway: StartGateway, renderer: Renderer
) -> None:
    gateway = await start_gateway(config=GatewayConfig(max_sessions_in_memory=1))
    sessions = [await gateway.open_session() for _ in range(2)]
    for prompt_type in PROMPT_TYPES[::-1] * 2:
        for session in sessions:
            response = await send_prompt(gateway, session, prompt_type, renderer, "hi")
            assert response.status_code == 200, (prompt_type, response.text)
    assert [len(await gateway.calls(session)) for session in sessions] == [6, 6]
