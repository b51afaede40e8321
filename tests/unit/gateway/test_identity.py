"""A call's session is found by URL, key, header, id or content."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from instar.config import ModelConfig
from instar.gateway.auth import create_key
from instar.record.base import Renderer
from instar.store.sqlite import SqliteStore
from instar.types import Link, Session, SessionStatus
from tests.unit.gateway.conftest import ADMIN_KEY, RunningGateway, StartGateway
from tests.unit.gateway.wire import (
    PATHS,
    build_request,
    get_session_id,
    list_all_calls,
    post,
    run_scripted_gateway,
    wait_for_in_flight,
)

MESSAGE_DIALECTS = ("chat", "responses", "messages")
TOOLS = [{"type": "function", "function": {"name": "calc", "parameters": {"type": "object"}}}]
SESSION_UUID = "5c9e7a1c-90f0-4a8f-8bf1-000000000001"


async def post_and_get_error(gateway: RunningGateway, body: Any, **options: Any) -> tuple[int, str | None]:
    response = await post(gateway, body, **options)
    return response.status_code, response.json()["error"]["code"]


# --- precedence ---------------------------------------------------------------------------------


@pytest.mark.parametrize("dialect", ["chat", "completions", "responses", "messages"])
async def test_session_by_url_key_or_header_precedes_the_agents_id(
    gateway: RunningGateway, dialect: str
) -> None:
    session_id_headers = {"session_id": "other", "x_session_id": "another"}
    body = build_request(dialect, "hi")
    live_id = get_session_id(await post(gateway, body, dialect, **session_id_headers))
    for make_options in (
        lambda s: {"prefix": f"/s/{s.session_id}"},
        lambda s: {"key": s.api_key},
        lambda s: {"x_instar_session": s.session_id},
    ):
        session = await gateway.open_session()
        session_id = get_session_id(
            await post(gateway, body, dialect, **session_id_headers, **make_options(session))
        )
        assert session_id == session.session_id != live_id
    assert get_session_id(await post(gateway, body, dialect, **session_id_headers)) == live_id


async def test_session_by_agent_id_precedes_content(gateway: RunningGateway) -> None:
    first = get_session_id(await post(gateway, build_request("chat", "hi")))
    continuation = build_request("chat", "hi", "You said: hi", "more")
    assert get_session_id(await post(gateway, continuation)) == first
    assert get_session_id(await post(gateway, {**continuation, "user": "ann"})) != first


async def test_conflicting_session_ids_are_rejected(gateway: RunningGateway) -> None:
    session, other_session = await gateway.open_session(), await gateway.open_session()
    body, url = build_request("chat", "hi"), f"/s/{session.session_id}"
    conflict = (403, "session_conflict")
    assert await post_and_get_error(gateway, body, prefix=url, key=other_session.api_key) == conflict
    assert (
        await post_and_get_error(gateway, body, prefix=url, x_instar_session=other_session.session_id)
        == conflict
    )
    assert (
        await post_and_get_error(
            gateway, body, key=session.api_key, x_instar_session=other_session.session_id
        )
        == conflict
    )
    first = await post(gateway, build_request("responses", "hi"), "responses", key=session.api_key)
    continuation = {**build_request("responses", "more"), "previous_response_id": first.json()["id"]}
    response = await post(gateway, continuation, "responses", prefix=f"/s/{other_session.session_id}")
    assert (response.status_code, response.json()["error"]["code"]) == conflict
    assert len(await list_all_calls(gateway)) == 1


# --- ids that agents send -----------------------------------------------------------------------

AGENT_SESSION_IDS: list[tuple[str, dict[str, Any], dict[str, str]]] = [
    ("chat", {"user": "ann"}, {}),
    ("chat", {"metadata": {"session_id": "s"}}, {}),
    ("chat", {"prompt_cache_key": "k"}, {}),
    ("chat", {"safety_identifier": "ann"}, {}),
    ("completions", {"user": "ann"}, {}),
    ("responses", {"user": "ann"}, {}),
    ("responses", {"metadata": {"session_id": "s"}}, {}),
    ("responses", {"prompt_cache_key": "k"}, {}),
    ("responses", {"safety_identifier": "ann"}, {}),
    ("messages", {"metadata": {"user_id": "ann"}}, {}),
    ("messages", {"metadata": {"user_id": f"user_abc_account__session_{SESSION_UUID}"}}, {}),
    ("messages", {"metadata": {"user_id": '{"device_id":"d","session_id":"%s"}' % SESSION_UUID}}, {}),  # noqa: UP031
    ("messages", {}, {"x-claude-code-session-id": SESSION_UUID}),
    ("responses", {}, {"session-id": SESSION_UUID}),
    ("responses", {}, {"session_id": SESSION_UUID}),
    ("chat", {}, {"x-session-affinity": "ses_1"}),
    ("chat", {}, {"x-session-id": "ses_1"}),
]


def change_session_id(value: Any) -> Any:
    """Return the headers or fields with a different session id."""
    if isinstance(value, dict):
        return {name: change_session_id(item) for name, item in value.items()}
    return value.replace(SESSION_UUID, SESSION_UUID[:-1] + "2") if SESSION_UUID in value else value + "2"


@pytest.mark.parametrize(("dialect", "id_fields", "id_headers"), AGENT_SESSION_IDS)
async def test_session_ids_of_known_agents_are_recognized(
    gateway: RunningGateway, dialect: str, id_fields: dict[str, Any], id_headers: dict[str, str]
) -> None:
    async def find_session(fields: dict[str, Any], headers: dict[str, str]) -> str:
        body = {**build_request(dialect, "hi"), **fields}
        headers = {"Authorization": f"Bearer {ADMIN_KEY}", **headers}
        return get_session_id(await gateway.http.post(PATHS[dialect], json=body, headers=headers))

    first = await find_session(id_fields, id_headers)
    assert await find_session(id_fields, id_headers) == first
    assert await find_session(change_session_id(id_fields), change_session_id(id_headers)) != first
    session = await gateway.store.session(first)
    assert session is not None
    assert session.external_id
    calls = await gateway.store.calls(first)
    assert [call.link for call in calls] == [Link.ROOT, Link.SIBLING]


async def test_session_id_in_claude_code_header_and_body_is_the_same(gateway: RunningGateway) -> None:
    body = build_request("messages", "hi", metadata={"user_id": f"user_abc_account__session_{SESSION_UUID}"})
    by_body = get_session_id(await post(gateway, body, "messages"))
    assert (
        get_session_id(
            await post(
                gateway, build_request("messages", "x"), "messages", x_claude_code_session_id=SESSION_UUID
            )
        )
        == by_body
    )


async def test_session_id_equal_to_a_user_id_is_a_different_session(gateway: RunningGateway) -> None:
    by_user = get_session_id(await post(gateway, build_request("chat", "hi", user="ann")))
    by_session = get_session_id(
        await post(gateway, build_request("chat", "hi", metadata={"session_id": "ann"}))
    )
    assert by_user != by_session


async def test_long_session_id_is_accepted(gateway: RunningGateway) -> None:
    first = get_session_id(await post(gateway, build_request("chat", "hi", user="a" * 20_000)))
    assert get_session_id(await post(gateway, build_request("chat", "hi", user="a" * 20_000))) == first
    session = await gateway.store.session(first)
    assert session is not None
    assert len(session.external_id or "") <= 512


async def test_long_session_ids_that_differ_at_the_end_are_different(gateway: RunningGateway) -> None:
    first = get_session_id(await post(gateway, build_request("chat", "hi", user="a" * 2000 + "1")))
    assert get_session_id(await post(gateway, build_request("chat", "hi", user="a" * 2000 + "2"))) != first


class SlowLookupStore(SqliteStore):
    """Delays session lookups so that requests overlap."""

    async def session(self, session_id: str) -> Session | None:
        await asyncio.sleep(0.1)
        return await super().session(session_id)

    async def session_by_external_id(self, run_id: str, agent_id: str, external_id: str) -> Session | None:
        await asyncio.sleep(0.1)
        return await super().session_by_external_id(run_id, agent_id, external_id)


async def test_concurrent_first_calls_with_one_id_open_one_session(start_gateway: StartGateway) -> None:
    gateway = await start_gateway(store_class=SlowLookupStore)
    responses = await asyncio.gather(
        *(post(gateway, build_request("chat", f"hi {i}", user="ann")) for i in range(12)),
    )
    assert len({get_session_id(response) for response in responses}) == 1
    (row,) = await gateway.store.sessions("run")
    assert len(await gateway.store.calls(row.session.session_id)) == 12


async def test_concurrent_calls_after_session_end_open_one_new_session(start_gateway: StartGateway) -> None:
    gateway = await start_gateway(store_class=SlowLookupStore)
    old = get_session_id(await post(gateway, build_request("chat", "hi", user="ann")))
    await gateway.post_json(f"/sessions/{old}/complete", {})
    responses = await asyncio.gather(
        *(post(gateway, build_request("chat", f"hi {i}", user="ann")) for i in range(12)),
    )
    session_ids = {get_session_id(response) for response in responses}
    assert len(session_ids) == 1
    assert old not in session_ids


# --- sessions by content ------------------------------------------------------------------------


@pytest.mark.parametrize("dialect", MESSAGE_DIALECTS)
async def test_sessions_with_equal_content_differ_by_key_or_id(gateway: RunningGateway, dialect: str) -> None:
    keys = [await create_key(gateway.store, "agent", name) for name in ("ann", "ben")]
    first_body = build_request(dialect, "hi")
    by_key = [get_session_id(await post(gateway, first_body, dialect, key=key)) for key in keys]
    assert by_key[0] != by_key[1]
    continuation = build_request(dialect, "hi", "You said: hi", "more")
    continued = [get_session_id(await post(gateway, continuation, dialect, key=key)) for key in keys]
    assert continued == by_key
    by_id = [get_session_id(await post(gateway, first_body, dialect, x_session_id=f"s{i}")) for i in range(2)]
    continued = [
        get_session_id(await post(gateway, continuation, dialect, x_session_id=f"s{i}")) for i in range(2)
    ]
    assert by_id[0] != by_id[1]
    assert continued == by_id
    for session_id in by_key + by_id:
        assert [c.link for c in await gateway.store.calls(session_id)] == [Link.ROOT, Link.EXTENDS]


async def test_session_with_id_is_not_matched_by_content(gateway: RunningGateway) -> None:
    first_body = build_request("chat", "hi")
    continuation = build_request("chat", "hi", "You said: hi", "more")
    by_content = get_session_id(await post(gateway, first_body))
    opened = await gateway.open_session()
    await post(gateway, first_body, key=opened.api_key)
    await post(gateway, first_body, x_session_id="s")
    assert get_session_id(await post(gateway, continuation)) == by_content


@pytest.mark.parametrize("dialect", MESSAGE_DIALECTS)
async def test_session_is_found_by_content_after_a_restart(
    tmp_path: Path, model: ModelConfig, renderer: Renderer, dialect: str
) -> None:
    gateway_args = (tmp_path / "store.db", model, renderer)
    async with run_scripted_gateway(*gateway_args) as gateway:
        first = get_session_id(await post(gateway, build_request(dialect, "hi"), dialect))
        by_id = get_session_id(await post(gateway, build_request(dialect, "hi"), dialect, x_session_id="s"))
    async with run_scripted_gateway(*gateway_args) as gateway:
        continuation = build_request(dialect, "hi", "You said: hi", "more")
        assert get_session_id(await post(gateway, continuation, dialect)) == first
        assert get_session_id(await post(gateway, continuation, dialect, x_session_id="s")) == by_id
        for session_id in (first, by_id):
            root, continued = await gateway.store.calls(session_id)
            assert (continued.link, continued.parent_id) == (Link.EXTENDS, root.call_id)
            assert continued.prompt_ids[: len(root.sequence)].tolist() == root.sequence.tolist()


async def start_tool_call(gateway: RunningGateway, **options: Any) -> tuple[str, dict[str, Any]]:
    """Request a tool call. Return the session id and the next request, which has the tool's result."""
    messages = [{"role": "user", "content": "24 * 310"}]
    response = await post(gateway, {"model": "m", "messages": messages, "tools": TOOLS}, **options)
    reply = response.json()["choices"][0]["message"]
    result = {"role": "tool", "tool_call_id": reply["tool_calls"][0]["id"], "content": "7440"}
    continuation = {"model": "m", "messages": [*messages, reply, result], "tools": TOOLS}
    return get_session_id(response), continuation


async def test_sessions_with_equal_text_differ_by_their_tool_call_ids(gateway: RunningGateway) -> None:
    sessions = [await start_tool_call(gateway) for _ in range(3)]
    assert len({session_id for session_id, _ in sessions}) == 3
    for session_id, continuation in sessions:
        response = await post(gateway, continuation)
        assert get_session_id(response) == session_id
        messages = [*continuation["messages"], response.json()["choices"][0]["message"]]
        continuation["messages"] = [*messages, {"role": "user", "content": "Thanks."}]
    for session_id, continuation in reversed(sessions):
        assert get_session_id(await post(gateway, continuation)) == session_id
        calls = await gateway.store.calls(session_id)
        assert [call.link for call in calls] == [Link.ROOT, Link.EXTENDS, Link.EXTENDS]


@pytest.mark.parametrize("is_changed", [False, True])
async def test_sessions_with_equal_text_differ_by_their_tool_call_ids_after_a_restart(
    tmp_path: Path, model: ModelConfig, renderer: Renderer, is_changed: bool
) -> None:
    gateway_args = (tmp_path / "store.db", model, renderer)
    async with run_scripted_gateway(*gateway_args) as gateway:
        sessions = [await start_tool_call(gateway) for _ in range(2)]
    async with run_scripted_gateway(*gateway_args) as gateway:
        sessions.append(await start_tool_call(gateway))
        for session_id, continuation in sessions:
            if is_changed:  # Some agents change the whitespace of a reply.
                continuation["messages"][1]["content"] += "\n"
            assert get_session_id(await post(gateway, continuation)) == session_id


async def test_sessions_with_equal_text_differ_by_the_ids_of_earlier_tool_calls(
    gateway: RunningGateway,
) -> None:
    """The client chose the ids of these tool calls, not the gateway."""
    sessions: list[tuple[str, list[Any]]] = []
    for i in range(2):
        call = {"id": f"client-{i}", "type": "function", "function": {"name": "calc", "arguments": "{}"}}
        messages: list[Any] = [
            {"role": "user", "content": "24 * 310"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": f"client-{i}", "content": "7440"},
        ]
        response = await post(gateway, {"model": "m", "messages": messages, "tools": TOOLS})
        messages += [response.json()["choices"][0]["message"], {"role": "user", "content": "Thanks."}]
        sessions.append((get_session_id(response), messages))
    for session_id, messages in sessions:
        response = await post(gateway, {"model": "m", "messages": messages, "tools": TOOLS})
        assert get_session_id(response) == session_id


@pytest.mark.parametrize("dialect", ["chat", "completions"])
async def test_call_that_matches_two_sessions_opens_a_new_session(
    tmp_path: Path, model: ModelConfig, renderer: Renderer, dialect: str
) -> None:
    gateway_args = (tmp_path / "store.db", model, renderer)
    first_body = build_request(dialect, "hi")
    continuation = build_request(dialect, "hi", "You said: hi", "more")
    async with run_scripted_gateway(*gateway_args) as gateway:
        session_ids = [get_session_id(await post(gateway, first_body, dialect)) for _ in range(2)]
        third_id = get_session_id(await post(gateway, continuation, dialect))
        assert third_id not in session_ids
        await gateway.post_json(f"/sessions/{session_ids[1]}/complete", {})
        await gateway.post_json(f"/sessions/{third_id}/complete", {})
        assert get_session_id(await post(gateway, continuation, dialect)) == session_ids[0]


async def test_call_that_matches_two_stored_sessions_opens_a_new_session(
    tmp_path: Path, model: ModelConfig, renderer: Renderer
) -> None:
    gateway_args = (tmp_path / "store.db", model, renderer)
    async with run_scripted_gateway(*gateway_args) as gateway:
        session_ids = [get_session_id(await post(gateway, build_request("chat", "hi"))) for _ in range(2)]
    async with run_scripted_gateway(*gateway_args) as gateway:
        continuation = build_request("chat", "hi", "You said: hi", "more")
        assert get_session_id(await post(gateway, continuation)) not in session_ids


async def test_session_is_found_if_the_agent_appends_to_a_reply(gateway: RunningGateway) -> None:
    first = await post(gateway, build_request("chat", "hello"))
    reply_text = first.json()["choices"][0]["message"]["content"]
    extended = await post(
        gateway, build_request("chat", "hello", f"{reply_text}\nCalling tools: none", "more")
    )
    other = await post(gateway, build_request("chat", "hello", "Something else", "more"))
    assert get_session_id(extended) == get_session_id(first) != get_session_id(other)


# --- isolation ----------------------------------------------------------------------------------


async def test_response_of_another_agent_cannot_be_continued(gateway: RunningGateway) -> None:
    ann, ben = [await create_key(gateway.store, "agent", name) for name in ("ann", "ben")]
    first = await post(gateway, build_request("responses", "my secret plan"), "responses", key=ann)
    continuation = {
        **build_request("responses", "what did I say?"),
        "previous_response_id": first.json()["id"],
    }
    response = await post(gateway, continuation, "responses", key=ben)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "previous_response_id"
    assert "plan" not in response.text
    session = await gateway.open_session()
    assert (await post(gateway, continuation, "responses", key=session.api_key)).status_code == 400
    assert get_session_id(await post(gateway, continuation, "responses", key=ann)) == get_session_id(first)
    assert len(await list_all_calls(gateway)) == 2


async def test_response_is_continued_after_a_restart(
    tmp_path: Path, model: ModelConfig, renderer: Renderer
) -> None:
    gateway_args = (tmp_path / "store.db", model, renderer)
    async with run_scripted_gateway(*gateway_args) as gateway:
        response = await post(gateway, build_request("responses", "hi"), "responses")
    async with run_scripted_gateway(*gateway_args) as gateway:
        continuation = {**build_request("responses", "more"), "previous_response_id": response.json()["id"]}
        assert get_session_id(await post(gateway, continuation, "responses")) == get_session_id(response)
        assert [call.link for call in await list_all_calls(gateway)] == [Link.ROOT, Link.EXTENDS]


async def test_agent_cannot_use_sessions_of_another_agent(gateway: RunningGateway) -> None:
    ann, ben = [await create_key(gateway.store, "agent", name) for name in ("ann", "ben")]
    session_id = get_session_id(await post(gateway, build_request("chat", "hi"), key=ann))
    ben_headers = {"Authorization": f"Bearer {ben}"}
    path = f"/sessions/{session_id}"
    responses = [
        await gateway.http.get(path, headers=ben_headers),
        await gateway.post_json(f"{path}/complete", {"reward": 1}, ben),
        await gateway.post_json(f"{path}/fail", {"reason": "x"}, ben),
        await gateway.post_json(f"{path}/calls", {"calls": []}, ben),
        await post(gateway, build_request("chat", "hi"), key=ben, prefix=f"/s/{session_id}"),
        await post(gateway, build_request("chat", "hi"), key=ben, x_instar_session=session_id),
        await gateway.http.post(
            f"/s/{session_id}/v1/generate", json={"prompt_ids": [1]}, headers=ben_headers
        ),
        await gateway.http.get("/stats", headers=ben_headers),
        # The session's own agent may send `reward`, but not `rewards`.
        await gateway.post_json(f"{path}/complete", {"rewards": [{"value": 1.0}]}, ann),
    ]
    assert [response.status_code for response in responses] == [403] * len(responses)
    stored = await gateway.store.session(session_id)
    assert stored is not None
    assert stored.status is SessionStatus.OPEN
    assert await gateway.store.rewards(session_id) == []
    assert len(await gateway.store.calls(session_id)) == 1


async def test_session_key_cannot_use_other_sessions(gateway: RunningGateway) -> None:
    session, other_session = await gateway.open_session(), await gateway.open_session()
    key = session.api_key
    path = f"/sessions/{other_session.session_id}"
    responses = [
        await gateway.post_json("/sessions", {}, key),
        await gateway.http.get(path, headers={"Authorization": f"Bearer {key}"}),
        await gateway.http.get("/stats", headers={"Authorization": f"Bearer {key}"}),
        await gateway.post_json(f"{path}/complete", {}, key),
        await gateway.post_json(f"{path}/calls", {"calls": []}, key),
        await post(gateway, build_request("chat", "hi"), key=key, prefix=f"/s/{other_session.session_id}"),
    ]
    assert [response.status_code for response in responses] == [403] * len(responses)
    assert await gateway.calls(other_session) == []


# --- first calls of live sessions ---------------------------------------------------------------


async def test_live_session_is_stored_with_its_first_call(start_gateway: StartGateway) -> None:
    gateway = await start_gateway(delay=0.02)
    first_call = asyncio.create_task(post(gateway, build_request("chat", "hi", user="ann")))
    await wait_for_in_flight(gateway, 1)
    assert await gateway.store.sessions("run") == []
    session_id = get_session_id(await first_call)
    assert [row.session.session_id for row in await gateway.store.sessions("run")] == [session_id]


async def test_rejected_first_call_stores_no_session(gateway: RunningGateway) -> None:
    for _ in range(3):
        too_long = build_request("chat", "word " * 2000, user="ann")
        assert (await post(gateway, too_long)).status_code == 400
        unsupported = build_request("chat", "hi", user="ann", store=True)
        assert (await post(gateway, unsupported)).status_code == 400
    assert await gateway.store.sessions("run") == []
    stats = await gateway.http.get("/stats", headers={"Authorization": f"Bearer {ADMIN_KEY}"})
    assert stats.json()["sessions_in_memory"] == 0
    assert get_session_id(await post(gateway, build_request("chat", "hi", user="ann")))
    assert len(await gateway.store.sessions("run")) == 1
