"""Session access, opening, ending, eviction from memory and URLs."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from contextlib import ExitStack
from itertools import chain, cycle
from typing import Any

import httpx
import openai
import pytest
from pydantic import ValidationError

from instar.config import GatewayConfig, ModelConfig, SamplingConfig, ScriptedEngineConfig
from instar.engines.scripted import ScriptedEngine
from instar.gateway.context import GatewayContext, RunIdentity
from instar.gateway.session_states import SessionState, SessionStates
from instar.http.auth import hash_key
from instar.record.hashing import MessageHasher
from instar.record.redact import Redactor
from instar.types import Channel, Link, RewardSource, SessionStatus
from tests.unit.gateway.conftest import ADMIN_KEY, RunningGateway, StartGateway
from tests.unit.gateway.wire import build_request

CHAT_BODY = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


async def chat(
    gateway: RunningGateway, key: str | None, prefix: str = "", body: Any = CHAT_BODY, **headers: str
) -> httpx.Response:
    if key is not None:
        headers["Authorization"] = f"Bearer {key}"
    return await gateway.http.post(f"{prefix}/v1/chat/completions", json=body, headers=headers)


def get_error(response: httpx.Response) -> tuple[int, str | None]:
    """Return the status and the error code."""
    error_body = response.json()["error"]
    assert error_body["message"]
    return response.status_code, error_body["code"]


async def test_session_is_selected_by_url_key_or_header(gateway: RunningGateway) -> None:
    session = await gateway.open_session()
    url = f"/s/{session.session_id}"
    session_header = {"X-Instar-Session": session.session_id}
    for response in [
        await chat(gateway, session.api_key, url),
        await chat(gateway, session.api_key),
        await chat(gateway, session.api_key, url, **session_header),
        await chat(gateway, ADMIN_KEY, url),
        await chat(gateway, ADMIN_KEY, **session_header),
    ]:
        assert response.status_code == 200
    assert len(await gateway.calls(session)) == 5


async def test_session_requests_without_access_are_rejected(gateway: RunningGateway) -> None:
    session, other = await gateway.open_session(), await gateway.open_session()
    assert get_error(await chat(gateway, None)) == (401, "missing_api_key")
    assert get_error(await chat(gateway, "sk-instar-wrong")) == (401, "invalid_api_key")
    assert get_error(await chat(gateway, session.api_key, f"/s/{other.session_id}")) == (
        403,
        "session_conflict",
    )
    session_header = {"X-Instar-Session": other.session_id}
    assert get_error(await chat(gateway, session.api_key, **session_header)) == (403, "session_conflict")
    assert get_error(await chat(gateway, ADMIN_KEY, f"/s/{session.session_id}", **session_header)) == (
        403,
        "session_conflict",
    )
    assert get_error(await chat(gateway, ADMIN_KEY, "/s/sess-missing")) == (404, "session_not_found")
    assert await gateway.calls(session) == await gateway.calls(other) == []


async def test_session_key_is_limited_to_its_session(gateway: RunningGateway) -> None:
    session, other = await gateway.open_session(), await gateway.open_session()
    key = session.api_key
    assert get_error(await gateway.post_json("/sessions", {}, key)) == (403, "not_allowed")
    path = f"/sessions/{other.session_id}"
    assert get_error(await gateway.post_json(f"{path}/complete", {"reward": 1}, key)) == (
        403,
        "wrong_session",
    )
    assert get_error(await gateway.post_json(f"{path}/fail", {"reason": "x"}, key)) == (403, "wrong_session")
    read = await gateway.http.get(path, headers={"Authorization": f"Bearer {key}"})
    assert get_error(read) == (403, "wrong_session")
    own_path = f"/sessions/{session.session_id}/complete"
    body = {"rewards": [{"value": 1.0, "source": "rule"}]}
    assert get_error(await gateway.post_json(own_path, body, key)) == (403, "not_allowed")


async def test_session_key_is_stored_as_a_hash(gateway: RunningGateway) -> None:
    session = await gateway.open_session()
    stored = await gateway.store.session_by_key(hash_key(session.api_key))
    assert stored is not None
    assert stored.session_id == session.session_id
    await gateway.store.close()
    files = gateway.store_path.parent.glob("store.db*")
    assert all(session.api_key.encode() not in file.read_bytes() for file in files)


async def test_session_is_opened_completed_and_read(gateway: RunningGateway) -> None:
    session = await gateway.open_session(
        channel="train",
        group_id="g",
        slot=3,
        attempt=1,
        task_id="t",
        task={"q": 1},
        metadata={"a": 1},
        seed=9,
    )
    await chat(gateway, session.api_key)
    path = f"/sessions/{session.session_id}"
    body = {"reward": 0.5, "metadata": {"b": 2}}
    response = (await gateway.post_json(f"{path}/complete", body, session.api_key)).json()
    assert response == {"session_id": session.session_id, "status": "completed", "changed": True}
    repeated = (await gateway.post_json(f"{path}/fail", {"reason": "late"})).json()
    assert repeated == {"session_id": session.session_id, "status": "completed", "changed": False}
    view = (await gateway.http.get(path, headers={"Authorization": f"Bearer {session.api_key}"})).json()
    assert (view["status"], view["slot"], view["attempt"], view["task_id"]) == ("completed", 3, 1, "t")
    assert view["metadata"] == {"a": 1, "task": {"q": 1}, "b": 2}
    assert [(r["value"], r.get("source", "agent")) for r in view["rewards"]] == [(0.5, "agent")]
    (call,) = view["calls"]
    assert (call["link"], call["finish_reason"], call["reply"]["content"]) == ("root", "stop", "You said: hi")
    stored = await gateway.store.session(session.session_id)
    assert stored is not None
    assert (stored.channel, stored.group_id, stored.seed) == (Channel.TRAIN, "g", 9)


async def test_failed_session_has_its_reason_and_rewards(gateway: RunningGateway) -> None:
    session = await gateway.open_session()
    body = {"reason": "crashed", "rewards": [{"value": -1.0, "source": "fallback", "scorer": "runner"}]}
    response = (await gateway.post_json(f"/sessions/{session.session_id}/fail", body)).json()
    assert response["status"] == "failed"
    stored = await gateway.store.session(session.session_id)
    assert stored is not None
    assert (stored.status, stored.reason) == (SessionStatus.FAILED, "crashed")
    (reward,) = await gateway.store.rewards(session.session_id)
    assert (reward.value, reward.source, reward.scorer) == (-1.0, RewardSource.FALLBACK, "runner")


async def test_ended_session_rejects_calls(gateway: RunningGateway) -> None:
    session = await gateway.open_session()
    await gateway.post_json(f"/sessions/{session.session_id}/complete", {})
    assert get_error(await chat(gateway, session.api_key)) == (410, "session_ended")


async def test_live_session_is_found_by_content(gateway: RunningGateway) -> None:
    async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key=ADMIN_KEY, max_retries=0) as client:
        messages: list[Any] = [{"role": "user", "content": "one"}]
        response = await client.chat.completions.create(model="m", messages=messages)
        messages += [{"role": "assistant", "content": response.choices[0].message.content}]
        messages += [{"role": "user", "content": "two"}]
        await client.chat.completions.create(model="m", messages=messages)
        await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "other"}])
        models = await client.models.list()
    assert [model.id for model in models.data] == ["policy", "policy@0"]
    rows = await gateway.store.sessions("run")
    assert [(row.session.channel, row.call_count) for row in rows] == [(Channel.LIVE, 2), (Channel.LIVE, 1)]


async def test_evicted_session_is_loaded_again(start_gateway: StartGateway) -> None:
    gateway = await start_gateway(config=GatewayConfig(max_sessions_in_memory=1))
    sessions = [await gateway.open_session() for _ in range(3)]
    for session in sessions:
        await chat(gateway, session.api_key)
    messages = [
        *CHAT_BODY["messages"],
        {"role": "assistant", "content": "You said: hi"},
        {"role": "user", "content": "x"},
    ]
    for session in sessions:
        await chat(gateway, session.api_key, body={"model": "m", "messages": messages})
        assert [call.link for call in await gateway.calls(session)] == [Link.ROOT, Link.EXTENDS]


async def test_long_sessions_are_evicted_before_there_are_too_many(start_gateway: StartGateway) -> None:
    gateway = await start_gateway(config=GatewayConfig(max_sessions_in_memory=4))
    sessions = [await gateway.open_session() for _ in range(4)]
    rest = [{"role": "user", "content": "hi"}] * 100
    for session in sessions:
        for number in range(60):
            messages = [{"role": "user", "content": str(number)}, *rest]
            response = await chat(gateway, session.api_key, body={"model": "m", "messages": messages})
            assert response.status_code == 200, response.text
    stats = (await gateway.http.get("/stats", headers={"Authorization": f"Bearer {ADMIN_KEY}"})).json()
    assert stats["sessions_in_memory"] in (1, 2, 3)
    for session in sessions:
        body = {"model": "m", "messages": [{"role": "user", "content": "14"}, *rest]}
        await chat(gateway, session.api_key, body=body)
        assert (await gateway.calls(session))[-1].link is Link.SIBLING


def create_states(gateway: RunningGateway, max_in_memory: int) -> SessionStates:
    identity = RunIdentity("run", "agent", "policy")
    config = GatewayConfig(max_sessions_in_memory=max_in_memory)
    redactor = Redactor.from_config(config.redact)
    return SessionStates(
        GatewayContext(gateway.store, identity, config, MessageHasher(b""), redactor, SamplingConfig())
    )


async def test_idle_session_is_evicted_although_all_older_ones_are_in_flight(gateway: RunningGateway) -> None:
    states = create_states(gateway, 4)
    session_ids = [(await gateway.open_session()).session_id for _ in range(33)]
    with ExitStack() as calls_in_flight:
        for session_id in session_ids[:3]:
            state = await states.find(session_id)
            assert state is not None
            calls_in_flight.enter_context(states.track_call(state))
        for session_id in session_ids[3:]:
            await states.find(session_id)
            assert len(states) <= 4


async def count_hits(gateway: RunningGateway, max_in_memory: int, session_ids: Iterable[str]) -> int:
    """Use the sessions one after another, and return how often one was still in memory."""
    states = create_states(gateway, max_in_memory)
    seen: dict[str, SessionState] = {}
    hits = 0
    for session_id in session_ids:
        state = await states.find(session_id)
        assert state is not None
        hits += state is seen.get(session_id)
        seen[session_id] = state
        with states.track_call(state):
            pass
        assert len(states) <= max_in_memory
    return hits


async def test_sessions_that_agents_have_left_are_evicted_first(gateway: RunningGateway) -> None:
    used_ids = [(await gateway.open_session()).session_id for _ in range(10)]
    left_ids = [(await gateway.open_session()).session_id for _ in range(300)]
    pairs = zip(cycle(used_ids), left_ids, strict=False)
    hits = await count_hits(gateway, 40, chain.from_iterable(pairs))
    assert hits > 227  # of 300; the mean is 256, and would be 219 if random sessions were evicted


async def test_active_sessions_that_do_not_all_fit_are_mostly_in_memory(gateway: RunningGateway) -> None:
    """If the session that was unused for longest were evicted, every call would have to load its session."""
    session_ids = [(await gateway.open_session()).session_id for _ in range(24)]
    assert await count_hits(gateway, 20, session_ids * 10) > 90  # of 240


async def test_sessions_in_flight_are_not_evicted(start_gateway: StartGateway) -> None:
    gateway = await start_gateway(config=GatewayConfig(max_sessions_in_memory=1))
    sessions = [await gateway.open_session() for _ in range(6)]
    responses = await asyncio.gather(*(chat(gateway, session.api_key) for session in sessions))
    assert [response.status_code for response in responses] == [200] * 6


async def test_session_can_be_read_but_not_ended_during_its_first_call(
    start_gateway: StartGateway, model: ModelConfig
) -> None:
    config = ScriptedEngineConfig(function="tests.unit.gateway.scripts:reply", delay=0.05)
    gateway = await start_gateway(engine=ScriptedEngine(model, config))
    admin_headers = {"Authorization": f"Bearer {ADMIN_KEY}"}
    body = build_request("chat", "long", stream=True)
    async with gateway.http.stream(
        "POST", "/v1/chat/completions", json=body, headers=admin_headers
    ) as stream:
        path = f"/sessions/{stream.headers['x-instar-session']}"
        view = (await gateway.http.get(path, headers=admin_headers)).json()
        assert (view["status"], view["calls"]) == ("open", [])
        response = await gateway.post_json(f"{path}/complete", {})
        assert (response.status_code, "first call" in response.text) == (409, True)


@pytest.mark.parametrize(
    "body", [b'{"metadata": {"a": "\xff"}}', b'{"metadata": {"a": ' + b"[" * 3000 + b"]" * 3000 + b"}}"]
)
async def test_malformed_control_body_returns_400(gateway: RunningGateway, body: bytes) -> None:
    session = await gateway.open_session()
    response = await gateway.http.post(
        f"/sessions/{session.session_id}/complete",
        content=body,
        headers={"Authorization": f"Bearer {session.api_key}"},
    )
    assert response.status_code == 400


@pytest.mark.parametrize("path", ["", "complete", "fail"])
async def test_deeply_nested_metadata_is_rejected_without_a_logged_error(
    gateway: RunningGateway, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    session = await gateway.open_session()
    nested = b"[" * 700 + b"]" * 700  # The decoder accepts this depth, so the gateway must check it.
    reason = b'"reason": "r", ' if path == "fail" else b""
    body = b"{" + reason + b'"metadata": {"a": ' + nested + b"}}"
    url = f"/sessions/{session.session_id}/{path}" if path else "/sessions"
    response = await gateway.http.post(url, content=body, headers={"Authorization": f"Bearer {ADMIN_KEY}"})
    assert (response.status_code, "nested too deeply" in response.text) == (400, True)
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []


async def test_health_check_needs_no_key(gateway: RunningGateway) -> None:
    assert (await gateway.http.get("/healthz")).json() == {"status": "ok", "engine": "up", "version": 0}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"channel": "prod"}, "channel"),
        ({"unknown": 1}, "unknown"),
        ({"sampling": {"temprature": 0}}, "sampling.temprature"),
        ({"sampling": {"temperature": "hot"}}, "sampling.temperature"),
        ({"sampling": {"top_p": 0}}, "sampling.top_p"),
        ({"sampling": {"max_tokens": 0}}, "sampling.max_tokens"),
        ({"seed": "x"}, "seed"),
        ({"slot": 10**22}, "slot"),
    ],
)
async def test_invalid_open_request_error_names_the_field(
    gateway: RunningGateway, body: Any, param: str
) -> None:
    response = await gateway.post_json("/sessions", body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


@pytest.mark.parametrize(
    ("scores", "param"),
    [
        ([{"scorer": "s", "state": "scored", "attempts": -(10**30)}], "scores[0].attempts"),
        ([{"scorer": "s", "state": "scored"}] * 2, "scores[1].scorer"),
    ],
)
async def test_invalid_scores_are_rejected_and_the_session_stays_open(
    gateway: RunningGateway, scores: Any, param: str
) -> None:
    session = await gateway.open_session()
    path = f"/sessions/{session.session_id}/complete"
    response = await gateway.post_json(path, {"scores": scores})
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)
    response = await gateway.post_json(path, {"scores": scores[:1] if len(scores) > 1 else []})
    assert response.json()["changed"] is True


async def test_session_base_url_ignores_the_host_header(gateway: RunningGateway) -> None:
    headers = {
        "Authorization": f"Bearer {ADMIN_KEY}",
        "Host": "attacker.example",
        "X-Forwarded-Host": "b.example",
    }
    response = await gateway.http.post("/sessions", json={}, headers=headers)
    assert response.json()["base_url"].startswith(f"{gateway.url}/s/sess")


async def test_session_base_url_uses_public_url(start_gateway: StartGateway) -> None:
    gateway = await start_gateway(config=GatewayConfig(public_url="https://models.example/instar/"))
    session = await gateway.open_session()
    assert session.base_url == f"https://models.example/instar/s/{session.session_id}/v1"


@pytest.mark.parametrize("url", ["models.example", "ftp://a.example", "https://", "https://a.example/?key=1"])
def test_invalid_public_url_is_rejected(url: str) -> None:
    with pytest.raises(ValidationError, match="public_url"):
        GatewayConfig(public_url=url)


@pytest.mark.parametrize("path", ["/sessions/", "/healthz/", "/v1/models/", "//attacker.example/.."])
async def test_paths_are_not_redirected_to_the_host_header(gateway: RunningGateway, path: str) -> None:
    headers = {"Authorization": f"Bearer {ADMIN_KEY}", "Host": "attacker.example"}
    response = await gateway.http.get(f"{gateway.url}{path}", headers=headers)
    assert (response.is_redirect, response.headers.get("location")) == (False, None)
