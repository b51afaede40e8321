"""Token-level generation and submissions over HTTP."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from instar.config import GatewayConfig
from instar.gateway.base import OpenedSession
from instar.record.base import Renderer
from instar.types import Link
from tests.unit.gateway.conftest import RunningGateway, StartGateway


async def post(gateway: RunningGateway, path: str, body: Any, session: OpenedSession) -> Any:
    headers = {"Authorization": f"Bearer {session.api_key}"}
    return await gateway.http.post(path, json=body, headers=headers)


def render_prompt(renderer: Renderer, text: str) -> list[int]:
    return renderer.render([{"role": "user", "content": text}])


async def test_generate_returns_the_recorded_ids(gateway: RunningGateway, renderer: Renderer) -> None:
    session = await gateway.open_session()
    prompt_ids = render_prompt(renderer, "hello")
    response = await post(gateway, "/v1/generate", {"prompt_ids": prompt_ids, "n": 2}, session)
    assert response.status_code == 200, response.text
    first_choice, second_choice = response.json()["choices"]
    calls = await gateway.calls(session)
    assert [call.sampled_ids.tolist() for call in calls] == [
        first_choice["token_ids"],
        second_choice["token_ids"],
    ]
    assert np.allclose(calls[0].logprobs, first_choice["logprobs"])
    assert (first_choice["text"], first_choice["finish_reason"], first_choice["versions"][0]) == (
        "You said: hello",
        "stop",
        0,
    )
    longer_ids = [*prompt_ids, *first_choice["token_ids"], 5, 6]
    await post(gateway, "/v1/generate", {"prompt_ids": longer_ids}, session)
    third = (await gateway.calls(session))[2]
    assert (third.link, third.parent_id in {c.call_id for c in calls}) == (Link.EXTENDS, True)
    assert third.prompt_ids.tolist() == longer_ids
    assert third.trainable


async def test_generate_streams_json_lines(gateway: RunningGateway, renderer: Renderer) -> None:
    session = await gateway.open_session()
    body = {"prompt_ids": render_prompt(renderer, "hello"), "stream": True}
    response = await post(gateway, f"/s/{session.session_id}/v1/generate", body, session)
    lines = [json.loads(line) for line in response.text.splitlines()]
    (call,) = await gateway.calls(session)
    assert [i for line in lines for i in line["token_ids"]] == call.sampled_ids.tolist()
    assert lines[-1]["finish_reason"] == "stop"
    assert not any("finish_reason" in line for line in lines[:-1])


async def test_generate_unknown_token_id_error_names_the_path(gateway: RunningGateway) -> None:
    session = await gateway.open_session()
    response = await post(gateway, "/v1/generate", {"prompt_ids": [1, 10**6]}, session)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "prompt_ids[1]")
    assert await gateway.calls(session) == []


def make_sampled_fields(ids: list[int], **overrides: Any) -> dict[str, Any]:
    count = len(ids)
    return {
        "sampled_ids": ids,
        "logprobs": [-0.5] * count,
        "versions": [0] * count,
        "finish_reason": "stop",
        **overrides,
    }


async def test_submitted_calls_are_recorded_once(gateway: RunningGateway, renderer: Renderer) -> None:
    session = await gateway.open_session()
    prompt_ids = render_prompt(renderer, "hello")
    reply_ids = [*renderer.encode("fine"), renderer.stop_token_ids[0]]
    first_call = {"prompt_ids": prompt_ids, "client_key": "k1", **make_sampled_fields(reply_ids)}
    second_call = {
        "prompt_ids": [*prompt_ids, *reply_ids, 7],
        "client_key": "k2",
        **make_sampled_fields(reply_ids),
    }
    path = f"/sessions/{session.session_id}/calls"
    response = await gateway.post_json(path, {"calls": [first_call, second_call]})
    assert response.status_code == 201, response.text
    repeated = await gateway.post_json(path, {"calls": [first_call, second_call]})
    assert repeated.json() == response.json()
    root, child = await gateway.calls(session)
    assert (child.link, child.parent_id, child.trainable) == (Link.EXTENDS, root.call_id, True)
    assert root.reply["content"] == "fine"


@pytest.mark.parametrize("is_trusted", [False, True])
async def test_agents_submit_calls_only_if_they_are_trusted(
    start_gateway: StartGateway, renderer: Renderer, is_trusted: bool
) -> None:
    gateway = await start_gateway(config=GatewayConfig(trust_submitted_calls=is_trusted))
    session = await gateway.open_session()
    call = {"prompt_ids": render_prompt(renderer, "hello"), **make_sampled_fields([3, 4])}
    path = f"/sessions/{session.session_id}/calls"
    response = await post(gateway, path, {"calls": [call]}, session)
    assert response.status_code == (201 if is_trusted else 403), response.text
    assert [recorded.trainable for recorded in await gateway.calls(session)] == [True] * is_trusted
    if not is_trusted:
        assert "gateway.trust_submitted_calls" in response.json()["error"]["message"]
        other = await gateway.open_session()
        assert (await post(gateway, path, {"calls": [call]}, other)).status_code == 403


async def test_submitted_messages_extend_the_recorded_call(
    gateway: RunningGateway, renderer: Renderer
) -> None:
    session = await gateway.open_session()
    request_messages = [{"role": "user", "content": "hello"}]
    chat_response = await post(
        gateway, "/v1/chat/completions", {"model": "m", "messages": request_messages}, session
    )
    (root,) = await gateway.calls(session)
    reply = {"role": "assistant", "content": chat_response.json()["choices"][0]["message"]["content"]}
    messages = [*request_messages, reply, {"role": "user", "content": "more"}]
    prompt_ids = renderer.extend(
        root.prompt_ids.tolist(), root.sampled_ids.tolist(), [{"role": "user", "content": "more"}]
    )
    call = {
        "prompt_ids": prompt_ids,
        "messages": messages,
        **make_sampled_fields([3, 4], logprobs=[-1.0, None]),
    }
    response = await gateway.post_json(f"/sessions/{session.session_id}/calls", {"calls": [call]})
    assert response.status_code == 201, response.text
    child = (await gateway.calls(session))[1]
    assert (child.link, child.parent_id) == (Link.EXTENDS, root.call_id)
    assert (child.trainable, child.reason) == (False, "logprobs are missing")


async def test_submitted_version_beyond_the_latest_is_rejected(
    gateway: RunningGateway, renderer: Renderer
) -> None:
    session = await gateway.open_session()
    call = {"prompt_ids": render_prompt(renderer, "hello"), **make_sampled_fields([3], versions=[4])}
    response = await gateway.post_json(f"/sessions/{session.session_id}/calls", {"calls": [call]})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "calls[0].versions[0]")
    assert await gateway.calls(session) == []
