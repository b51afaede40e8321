"""Resolving the session of a call, over a socket."""

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
from tests.unit.gateway.conftest import ADMIN, Serve, Served
from tests.unit.gateway.wire import (
    build_request,
    get_session_id,
    list_all_calls,
    post,
    run_scripted_gateway,
    wait_for_in_flight,
)

CONVERSING = ("chat", "responses", "messages")
UUID = "5c9e7a1c-90f0-4a8f-8bf1-000000000001"


async def code(gateway: Served, body: Any, **sent: Any) -> tuple[int, str | None]:
    answer = await post(gateway, body, **sent)
    return answer.status_code, answer.json()["error"]["code"]


# --- precedence ---------------------------------------------------------------------------------


@pytest.mark.parametrize("dialect", ["chat", "completions", "responses", "messages"])
async def test_session_by_url_key_or_header_precedes_the_agents_id(gateway: Served, dialect: str) -> None:
    agent_ids = {"session_id": "other", "x_session_id": "another"}
    body = build_request(dialect, "hi")
    live = get_session_id(await post(gateway, body, dialect, **agent_ids))
    for sent in (
        lambda s: {"prefix": f"/s/{s.session_id}"},
        lambda s: {"key": s.api_key},
        lambda s: {"x_instar_session": s.session_id},
    ):
        opened = await gateway.open()
        session_id = get_session_id(await post(gateway, body, dialect, **agent_ids, **sent(opened)))
        assert session_id == opened.session_id != live
    assert get_session_id(await post(gateway, body, dialect, **agent_ids)) == live


async def test_session_by_agent_id_precedes_content(gateway: Served) -> None:
    first = get_session_id(await post(gateway, build_request("chat", "hi")))
    goes_on = build_request("chat", "hi", "You said: hi", "more")
    assert get_session_id(await post(gateway, goes_on)) == first
    assert get_session_id(await post(gateway, {**goes_on, "user": "someone"})) != first


async def test_session_names_that_differ_are_refused(gateway: Served) -> None:
    one, two = await gateway.open(), await gateway.open()
    body, url = build_request("chat", "hi"), f"/s/{one.session_id}"
    refused = (403, "session_conflict")
    assert await code(gateway, body, prefix=url, key=two.api_key) == refused
    assert await code(gateway, body, prefix=url, x_instar_session=two.session_id) == refused
    assert await code(gateway, body, key=one.api_key, x_instar_session=two.session_id) == refused
    answer = await post(gateway, build_request("responses", "hi"), "responses", key=one.api_key)
    after = {**build_request("responses", "more"), "previous_response_id": answer.json()["id"]}
    response = await post(gateway, after, "responses", prefix=f"/s/{two.session_id}")
    assert (response.status_code, response.json()["error"]["code"]) == refused
    assert len(await list_all_calls(gateway)) == 1


# --- ids that agents send -----------------------------------------------------------------------

IDS: list[tuple[str, dict[str, Any], dict[str, str]]] = [
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
    ("messages", {"metadata": {"user_id": f"user_abc_account__session_{UUID}"}}, {}),
    ("messages", {"metadata": {"user_id": '{"device_id":"d","session_id":"%s"}' % UUID}}, {}),  # noqa: UP031
    ("messages", {}, {"x-claude-code-session-id": UUID}),
    ("responses", {}, {"session-id": UUID}),
    ("responses", {}, {"session_id": UUID}),
    ("chat", {}, {"x-session-affinity": "ses_1"}),
    ("chat", {}, {"x-session-id": "ses_1"}),
]


def other(value: Any) -> Any:
    """Return the same headers or fields for another session."""
    if isinstance(value, dict):
        return {name: other(item) for name, item in value.items()}
    return value.replace(UUID, UUID[:-1] + "2") if UUID in value else value + "2"


@pytest.mark.parametrize(("dialect", "body", "headers"), IDS)
async def test_session_ids_of_known_agents_are_recognized(
    gateway: Served, dialect: str, body: dict[str, Any], headers: dict[str, str]
) -> None:
    async def ask(more: dict[str, Any], sent: dict[str, str]) -> str:
        body = {**build_request(dialect, "hi"), **more}
        key = {"Authorization": f"Bearer {ADMIN}"}
        path = {"chat": "chat/completions"}.get(dialect, dialect)
        return get_session_id(await gateway.http.post(f"/v1/{path}", json=body, headers={**key, **sent}))

    first = await ask(body, headers)
    assert await ask(body, headers) == first
    assert await ask(other(body), other(headers)) != first
    session = await gateway.store.session(first)
    assert session is not None
    assert session.external_id
    calls = await gateway.store.calls(first)
    assert [call.link for call in calls] == [Link.ROOT, Link.SIBLING]


async def test_session_id_in_claude_code_header_and_body_is_the_same(gateway: Served) -> None:
    body = build_request("messages", "hi", metadata={"user_id": f"user_abc_account__session_{UUID}"})
    by_body = get_session_id(await post(gateway, body, "messages"))
    assert (
        get_session_id(
            await post(gateway, build_request("messages", "x"), "messages", x_claude_code_session_id=UUID)
        )
        == by_body
    )


async def test_session_id_equal_to_a_user_id_is_another_session(gateway: Served) -> None:
    by_user = get_session_id(await post(gateway, build_request("chat", "hi", user="ann")))
    by_session = get_session_id(
        await post(gateway, build_request("chat", "hi", metadata={"session_id": "ann"}))
    )
    assert by_user != by_session


async def test_session_id_of_any_length_is_accepted(gateway: Served) -> None:
    first = get_session_id(await post(gateway, build_request("chat", "hi", user="a" * 20_000)))
    assert get_session_id(await post(gateway, build_request("chat", "hi", user="a" * 20_000))) == first
    session = await gateway.store.session(first)
    assert session is not None
    assert len(session.external_id or "") <= 512


async def test_session_ids_that_differ_at_their_end_are_different(gateway: Served) -> None:
    first = get_session_id(await post(gateway, build_request("chat", "hi", user="a" * 2000 + "1")))
    assert get_session_id(await post(gateway, build_request("chat", "hi", user="a" * 2000 + "2"))) != first


class SlowLookups(SqliteStore):
    """A store that finds sessions slowly, so that requests overlap."""

    async def session(self, session_id: str) -> Session | None:
        await asyncio.sleep(0.1)
        return await super().session(session_id)

    async def session_by_external_id(self, run_id: str, agent_id: str, external_id: str) -> Session | None:
        await asyncio.sleep(0.1)
        return await super().session_by_external_id(run_id, agent_id, external_id)


async def test_concurrent_first_calls_with_one_id_open_one_session(serving: Serve) -> None:
    gateway = await serving(store=SlowLookups)
    answers = await asyncio.gather(
        *(post(gateway, build_request("chat", f"hi {i}", user="ann")) for i in range(12)),
    )
    assert len({get_session_id(answer) for answer in answers}) == 1
    (row,) = await gateway.store.sessions("run")
    assert len(await gateway.store.calls(row.session.session_id)) == 12


async def test_concurrent_calls_after_the_end_open_one_new_session(serving: Serve) -> None:
    gateway = await serving(store=SlowLookups)
    old = get_session_id(await post(gateway, build_request("chat", "hi", user="ann")))
    await gateway.control(f"/sessions/{old}/complete", {})
    answers = await asyncio.gather(
        *(post(gateway, build_request("chat", f"hi {i}", user="ann")) for i in range(12)),
    )
    session_ids = {get_session_id(answer) for answer in answers}
    assert len(session_ids) == 1
    assert old not in session_ids


# --- what is said -------------------------------------------------------------------------------


@pytest.mark.parametrize("dialect", CONVERSING)
async def test_sessions_with_equal_content_differ_by_key_or_id(gateway: Served, dialect: str) -> None:
    keys = [await create_key(gateway.store, "agent", name) for name in ("ann", "ben")]
    opening = build_request(dialect, "hi")
    first = [get_session_id(await post(gateway, opening, dialect, key=key)) for key in keys]
    assert first[0] != first[1]
    goes_on = build_request(dialect, "hi", "You said: hi", "more")
    then = [get_session_id(await post(gateway, goes_on, dialect, key=key)) for key in keys]
    assert then == first
    named = [get_session_id(await post(gateway, opening, dialect, x_session_id=f"s{i}")) for i in range(2)]
    then = [get_session_id(await post(gateway, goes_on, dialect, x_session_id=f"s{i}")) for i in range(2)]
    assert named[0] != named[1]
    assert then == named
    for session in first + named:
        assert [c.link for c in await gateway.store.calls(session)] == [Link.ROOT, Link.EXTENDS]


async def test_named_session_with_equal_content_is_not_matched(gateway: Served) -> None:
    opening, goes_on = build_request("chat", "hi"), build_request("chat", "hi", "You said: hi", "more")
    unnamed = get_session_id(await post(gateway, opening))
    opened = await gateway.open()
    await post(gateway, opening, key=opened.api_key)
    await post(gateway, opening, x_session_id="s")
    assert get_session_id(await post(gateway, goes_on)) == unnamed


@pytest.mark.parametrize("dialect", CONVERSING)
async def test_session_is_found_by_content_after_a_restart(
    tmp_path: Path, model: ModelConfig, renderer: Renderer, dialect: str
) -> None:
    at = (tmp_path / "store.db", model, renderer)
    async with run_scripted_gateway(*at) as gateway:
        first = get_session_id(await post(gateway, build_request(dialect, "hi"), dialect))
        named = get_session_id(await post(gateway, build_request(dialect, "hi"), dialect, x_session_id="s"))
    async with run_scripted_gateway(*at) as gateway:
        goes_on = build_request(dialect, "hi", "You said: hi", "more")
        assert get_session_id(await post(gateway, goes_on, dialect)) == first
        assert get_session_id(await post(gateway, goes_on, dialect, x_session_id="s")) == named
        for session in (first, named):
            root, then = await gateway.store.calls(session)
            assert (then.link, then.parent_id) == (Link.EXTENDS, root.call_id)
            assert then.prompt_ids[: len(root.sequence)].tolist() == root.sequence.tolist()


# --- isolation ----------------------------------------------------------------------------------


async def test_session_is_found_by_an_extended_reply(gateway: Served) -> None:
    first = await post(gateway, build_request("chat", "hello"))
    reply_text = first.json()["choices"][0]["message"]["content"]
    again = await post(gateway, build_request("chat", "hello", f"{reply_text}\nCalling tools: none", "more"))
    other = await post(gateway, build_request("chat", "hello", "Something else", "more"))
    assert get_session_id(again) == get_session_id(first) != get_session_id(other)


async def test_response_of_another_agent_cannot_be_continued(gateway: Served) -> None:
    ann, ben = [await create_key(gateway.store, "agent", name) for name in ("ann", "ben")]
    answer = await post(gateway, build_request("responses", "my secret plan"), "responses", key=ann)
    after = {**build_request("responses", "what did I say?"), "previous_response_id": answer.json()["id"]}
    response = await post(gateway, after, "responses", key=ben)
    assert response.status_code == 404
    assert response.json()["error"]["param"] == "previous_response_id"
    assert "plan" not in response.text
    session = await gateway.open()
    assert (await post(gateway, after, "responses", key=session.api_key)).status_code == 404
    assert get_session_id(await post(gateway, after, "responses", key=ann)) == get_session_id(answer)
    assert len(await list_all_calls(gateway)) == 2


async def test_response_is_continued_after_a_restart(
    tmp_path: Path, model: ModelConfig, renderer: Renderer
) -> None:
    at = (tmp_path / "store.db", model, renderer)
    async with run_scripted_gateway(*at) as gateway:
        answer = await post(gateway, build_request("responses", "hi"), "responses")
    async with run_scripted_gateway(*at) as gateway:
        after = {**build_request("responses", "more"), "previous_response_id": answer.json()["id"]}
        assert get_session_id(await post(gateway, after, "responses")) == get_session_id(answer)
        assert [call.link for call in await list_all_calls(gateway)] == [Link.ROOT, Link.EXTENDS]


async def test_agent_cannot_use_sessions_of_another_agent(gateway: Served) -> None:
    ann, ben = [await create_key(gateway.store, "agent", name) for name in ("ann", "ben")]
    session = get_session_id(await post(gateway, build_request("chat", "hi"), key=ann))
    as_ben = {"Authorization": f"Bearer {ben}"}
    path = f"/sessions/{session}"
    tries = [
        await gateway.http.get(path, headers=as_ben),
        await gateway.control(f"{path}/complete", {"reward": 1}, ben),
        await gateway.control(f"{path}/fail", {"reason": "x"}, ben),
        await gateway.control(f"{path}/calls", {"calls": []}, ben),
        await post(gateway, build_request("chat", "hi"), key=ben, prefix=f"/s/{session}"),
        await post(gateway, build_request("chat", "hi"), key=ben, x_instar_session=session),
        await gateway.http.post(f"/s/{session}/v1/generate", json={"prompt_ids": [1]}, headers=as_ben),
        await gateway.control(f"{path}/complete", {"rewards": [{"value": 1.0}]}, ann),
        await gateway.http.get("/stats", headers=as_ben),
    ]
    assert [answer.status_code for answer in tries] == [403] * len(tries)
    stored = await gateway.store.session(session)
    assert stored is not None
    assert stored.status is SessionStatus.OPEN
    assert await gateway.store.rewards(session) == []
    assert len(await gateway.store.calls(session)) == 1


async def test_session_key_cannot_use_other_sessions(gateway: Served) -> None:
    session, another = await gateway.open(), await gateway.open()
    key = session.api_key
    path = f"/sessions/{another.session_id}"
    tries = [
        await gateway.control("/sessions", {}, key),
        await gateway.http.get(path, headers={"Authorization": f"Bearer {key}"}),
        await gateway.http.get("/stats", headers={"Authorization": f"Bearer {key}"}),
        await gateway.control(f"{path}/complete", {}, key),
        await gateway.control(f"{path}/calls", {"calls": []}, key),
        await post(gateway, build_request("chat", "hi"), key=key, prefix=f"/s/{another.session_id}"),
    ]
    assert [answer.status_code for answer in tries] == [403] * len(tries)
    assert await gateway.calls(another) == []


# --- when a live session begins -----------------------------------------------------------------


async def test_live_session_is_stored_with_its_first_call(serving: Serve) -> None:
    gateway = await serving(delay=0.02)
    first_call = asyncio.create_task(post(gateway, build_request("chat", "hi", user="ann")))
    await wait_for_in_flight(gateway, 1)
    assert await gateway.store.sessions("run") == []
    session = get_session_id(await first_call)
    assert [row.session.session_id for row in await gateway.store.sessions("run")] == [session]


async def test_refused_first_call_stores_no_session(gateway: Served) -> None:
    for i in range(3):
        too_long = build_request("chat", "word " * 2000, user="ann")
        assert (await post(gateway, too_long)).status_code == 400, i
        unsupported = build_request("chat", "hi", user="ann", store=True)
        assert (await post(gateway, unsupported)).status_code == 400
    assert await gateway.store.sessions("run") == []
    stats = await gateway.http.get("/stats", headers={"Authorization": f"Bearer {ADMIN}"})
    assert stats.json()["sessions_in_memory"] == 0
    assert get_session_id(await post(gateway, build_request("chat", "hi", user="ann")))
    assert len(await gateway.store.sessions("run")) == 1
