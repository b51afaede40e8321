"""Live sessions without calls for `idle_timeout` are closed; active and rollout sessions are not."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from instar.config import GatewayConfig, ModelConfig
from instar.errors import StoreError
from instar.record.base import Renderer
from instar.store.sqlite import SqliteStore
from instar.types import Session, SessionStatus
from tests.unit.gateway.conftest import RunningGateway, StartGateway
from tests.unit.gateway.wire import (
    build_request,
    get_session_id,
    post,
    run_scripted_gateway,
    wait_for_in_flight,
)

SHORT_TIMEOUT_CONFIG = GatewayConfig(idle_timeout=0.4)


async def wait_until_closed(gateway: RunningGateway, session_id: str, timeout_seconds: float = 10) -> Session:
    async with asyncio.timeout(timeout_seconds):
        while True:
            session = await gateway.store.session(session_id)
            assert session is not None
            if session.status is not SessionStatus.OPEN:
                return session
            await asyncio.sleep(0.02)


async def test_idle_session_is_closed_and_the_next_call_opens_a_new_one(start_gateway: StartGateway) -> None:
    gateway = await start_gateway(config=SHORT_TIMEOUT_CONFIG)
    first = get_session_id(await post(gateway, build_request("chat", "hi", user="ann")))
    session = await wait_until_closed(gateway, first)
    assert session.status is SessionStatus.COMPLETED
    assert session.reason == "the session had no call for 0.4 seconds"
    assert session.ended_at
    second = get_session_id(await post(gateway, build_request("chat", "hi", user="ann")))
    assert second != first


async def test_closed_session_is_not_found_by_content(start_gateway: StartGateway) -> None:
    gateway = await start_gateway(config=SHORT_TIMEOUT_CONFIG)
    first = get_session_id(await post(gateway, build_request("chat", "hi")))
    await wait_until_closed(gateway, first)
    retry = await post(gateway, build_request("chat", "hi"), x_stainless_retry_count="1")
    assert get_session_id(retry) != first
    continuation = build_request("chat", "hi", "You said: hi", "more")
    await wait_until_closed(gateway, get_session_id(retry))
    assert get_session_id(await post(gateway, continuation)) not in (first, get_session_id(retry))


async def test_active_session_stays_open(start_gateway: StartGateway) -> None:
    gateway = await start_gateway(config=SHORT_TIMEOUT_CONFIG)
    texts = ["hi"]
    session_ids: set[str] = set()
    for _ in range(8):
        response = await post(gateway, build_request("chat", *texts, user="ann"))
        session_ids.add(get_session_id(response))
        texts += [response.json()["choices"][0]["message"]["content"], "more"]
        await asyncio.sleep(0.15)
    assert len(session_ids) == 1


async def test_call_in_flight_keeps_its_session_open(start_gateway: StartGateway) -> None:
    gateway = await start_gateway(config=SHORT_TIMEOUT_CONFIG, delay=0.12)
    first = get_session_id(await post(gateway, build_request("chat", "hi", user="ann", max_tokens=1)))
    pending_call = asyncio.create_task(post(gateway, build_request("chat", "hello there", user="ann")))
    await wait_for_in_flight(gateway, 1)
    await asyncio.sleep(1.0)
    assert not pending_call.done()
    session = await gateway.store.session(first)
    assert session is not None
    assert session.status is SessionStatus.OPEN
    assert get_session_id(await pending_call) == first


class SlowEndStore(SqliteStore):
    """Takes 0.5 s to end a session."""

    async def end_session(self, *args: Any, **options: Any) -> bool:
        await asyncio.sleep(0.5)
        return await super().end_session(*args, **options)


@pytest.mark.parametrize("has_session_id", [True, False])
async def test_call_during_session_close_opens_a_new_session(
    start_gateway: StartGateway, has_session_id: bool
) -> None:
    gateway = await start_gateway(config=SHORT_TIMEOUT_CONFIG, store_class=SlowEndStore)
    headers = {"x_session_id": "s"} if has_session_id else {}
    first = get_session_id(await post(gateway, build_request("chat", "hi"), **headers))
    # The gateway looks for idle sessions every 0.1 s, and closing one takes 0.5 s.
    await asyncio.sleep(0.8)
    session = await gateway.store.session(first)
    assert session is not None
    assert session.status is SessionStatus.OPEN, "the session was closed before the request was sent"
    response = await post(gateway, build_request("chat", "hi", "You said: hi", "more"), **headers)
    assert get_session_id(response) != first
    assert len(await gateway.store.calls(first)) == 1


class CountingStore(SqliteStore):
    """Counts the sessions that are being ended at the same time. Ending one takes 0.2 s."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._active = self.max_active = 0

    async def end_session(self, *args: Any, **options: Any) -> bool:
        self._active += 1
        self.max_active = max(self.max_active, self._active)
        await asyncio.sleep(0.2)
        self._active -= 1
        return await super().end_session(*args, **options)


async def test_idle_sessions_are_closed_concurrently(start_gateway: StartGateway) -> None:
    """One commit per session would be slower than a busy gateway opens sessions."""
    gateway = await start_gateway(config=SHORT_TIMEOUT_CONFIG, store_class=CountingStore)
    sessions = await asyncio.gather(*(gateway.open_session() for _ in range(20)))
    for session in sessions:
        await wait_until_closed(gateway, session.session_id, timeout_seconds=30)
    assert isinstance(gateway.store, CountingStore)
    assert gateway.store.max_active > 1


async def test_calls_around_the_idle_timeout_are_recorded_in_open_sessions(
    start_gateway: StartGateway,
) -> None:
    gateway = await start_gateway(config=GatewayConfig(idle_timeout=0.1))
    for i in range(30):
        response = await post(gateway, build_request("chat", f"hi {i}", user="ann"))
        session = await gateway.store.session(get_session_id(response))
        assert session is not None
        calls = await gateway.store.calls(session.session_id)
        assert session.ended_at is None or calls[-1].ended_at <= session.ended_at
        await asyncio.sleep(0.07 + 0.005 * (i % 10))


async def test_idle_sessions_are_closed_after_a_restart(
    tmp_path: Path, model: ModelConfig, renderer: Renderer
) -> None:
    gateway_args = (tmp_path / "store.db", model, renderer)
    async with run_scripted_gateway(*gateway_args) as gateway:
        first = get_session_id(await post(gateway, build_request("chat", "hi", user="ann")))
        opened_session = await gateway.open_session()
    async with run_scripted_gateway(*gateway_args, config=SHORT_TIMEOUT_CONFIG) as gateway:
        await wait_until_closed(gateway, first)
        await wait_until_closed(gateway, opened_session.session_id)


async def test_idle_rollout_sessions_stay_open(start_gateway: StartGateway) -> None:
    """The rollout itself ends the sessions that it opens."""
    gateway = await start_gateway(config=GatewayConfig(idle_timeout=0.1))
    session = await gateway.open_session(channel="train")
    assert (await post(gateway, build_request("chat", "hi"), key=session.api_key)).status_code == 200
    await asyncio.sleep(0.5)
    stored = await gateway.store.session(session.session_id)
    assert stored is not None
    assert stored.status is SessionStatus.OPEN


class FailingEndStore(SqliteStore):
    """Fails to end the first session of a call, while the others wait."""

    failures = 1

    async def end_session(self, *args: Any, **options: Any) -> bool:
        if self.failures:
            self.failures -= 1
            raise StoreError("the database is locked")
        await asyncio.sleep(0.05)
        return await super().end_session(*args, **options)


async def test_idle_sessions_are_closed_after_the_store_failed(start_gateway: StartGateway) -> None:
    gateway = await start_gateway(config=SHORT_TIMEOUT_CONFIG, store_class=FailingEndStore)
    users = ("ann", "bob")
    responses = [await post(gateway, build_request("chat", "hi", user=user)) for user in users]
    for response in responses:
        await wait_until_closed(gateway, get_session_id(response))
