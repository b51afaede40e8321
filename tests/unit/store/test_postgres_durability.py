"""Acknowledged writes are stored exactly once: after SIGKILL, with concurrent writers, when the server
restarts and when the network loses a commit."""

from __future__ import annotations

import asyncio
import signal
import time
from collections import Counter
from collections.abc import Iterator

import pytest

from instar.errors import StoreUnavailable
from instar.store.postgres import PostgresStore
from instar.store.postgres_server import PostgresServer
from tests.postgres import PASSWORD, PostgresTestServer

from .child_process import open_store
from .factories import POLICY_ID, RUN_ID, make_call, make_session
from .processes import kill_child, start_child
from .proxy import CommitFailure, Proxy


@pytest.fixture
def location(postgres: PostgresTestServer) -> str:
    return f"{postgres.socket_url}#{postgres.make_schema_name()}"


async def load_call_ids(location: str) -> list[str]:
    store = open_store(location, read_only=True)
    calls = await store.calls("s")
    await store.close()
    return [call.call_id for call in calls]


async def test_acknowledged_calls_survive_sigkill_with_other_writers(location: str) -> None:
    """One of three processes is killed; the others are not affected."""
    killed = start_child("write", location, "killed")
    others = [start_child("count", location, name) for name in ("a", "b")]
    assert killed.stdout is not None
    acknowledged = {killed.stdout.readline().strip()}
    await asyncio.sleep(0.3)
    acknowledged.update(kill_child(killed))
    for other in others:
        lines, _ = other.communicate(timeout=60)
        assert other.returncode == 0
        acknowledged |= set(lines.split())
    call_ids = await load_call_ids(location)
    assert acknowledged <= set(call_ids)
    assert len(call_ids) == len(set(call_ids))
    assert sum(not name.startswith("killed") for name in call_ids) == 400


async def test_claim_step_from_several_processes_claims_each_sample_once(location: str) -> None:
    children = [start_child("claim", location, name) for name in ("1", "2", "3")]
    claimed: list[str] = []
    for child in children:
        lines, _ = child.communicate(timeout=60)
        assert child.returncode == 0
        claimed += lines.split()
    assert Counter(claimed) == Counter(f"k{number}" for number in range(40))
    store = open_store(location, read_only=True)
    assert len(await store.claims(RUN_ID)) == 40
    await store.close()


async def test_new_schema_opened_concurrently_is_created_once(location: str) -> None:
    stores = await asyncio.gather(*(asyncio.to_thread(open_store, location) for _ in range(6)))
    await asyncio.gather(*(store.open_session(make_session(str(i))) for i, store in enumerate(stores)))
    assert len(await stores[0].sessions()) == 6
    for store in stores:
        await store.close()


# --- the server is stopped --------------------------------------------------------------------------


@pytest.fixture
def stoppable_server() -> Iterator[PostgresTestServer]:
    """A separate server that the test may stop. The server of the `postgres` fixture is shared."""
    server = PostgresTestServer()
    yield server
    server.remove()


async def test_store_waits_for_a_restarting_server(stoppable_server: PostgresTestServer) -> None:
    """The server stops once cleanly and once with a crash, and no writer or reader gets an error."""
    location = f"{stoppable_server.socket_url}#restarted"
    store = open_store(location)
    await store.open_session(make_session())
    acknowledged: list[str] = []
    versions: list[int] = []
    finished = asyncio.Event()

    async def write(number: int) -> None:
        turn = 0
        while not finished.is_set():
            await store.add_calls([make_call(f"{number}-{turn}")])
            acknowledged.append(f"{number}-{turn}")
            turn += 1

    async def reserve() -> None:
        while not finished.is_set():
            versions.append(await store.reserve_version(POLICY_ID, RUN_ID, 0))

    async def read() -> None:
        while not finished.is_set():
            before = set(acknowledged)
            assert before <= {delta.call_id for delta in await store.call_deltas("s")}

    async def restart() -> None:
        for stop_signal in (signal.SIGINT, signal.SIGQUIT):
            await asyncio.sleep(0.3)
            await asyncio.to_thread(stoppable_server.stop, stop_signal)
            await asyncio.to_thread(stoppable_server.start)
            count = len(acknowledged)
            deadline = time.monotonic() + 30
            while len(acknowledged) < count + 20:
                assert time.monotonic() < deadline
                await asyncio.sleep(0.02)
        finished.set()

    await asyncio.gather(*(write(number) for number in range(4)), reserve(), read(), restart())
    await store.close()
    assert Counter(await load_call_ids(location)) == Counter(acknowledged)
    assert versions == list(range(1, len(versions) + 1))


async def test_store_reports_a_stopped_server_and_recovers(stoppable_server: PostgresTestServer) -> None:
    store = PostgresStore(PostgresServer(stoppable_server.socket_url, "stopped", timeout=1.0))
    await store.open_session(make_session())
    stoppable_server.stop()
    with pytest.raises(StoreUnavailable, match=r"stopped\) cannot be reached"):
        await asyncio.wait_for(store.add_calls([make_call("lost")]), 30)
    with pytest.raises(StoreUnavailable, match=r"stopped\) cannot be reached"):
        await asyncio.wait_for(store.calls("s"), 30)
    stoppable_server.start()
    await store.add_calls([make_call("after")])
    assert [call.call_id for call in await store.calls("s")] == ["after"]
    await store.close()


# --- network failures during a commit ---------------------------------------------------------------


@pytest.fixture
def proxy(postgres: PostgresTestServer) -> Iterator[Proxy]:
    with Proxy(postgres.port) as proxy:
        yield proxy


def open_proxied_store(postgres: PostgresTestServer, proxy: Proxy, timeout: float) -> PostgresStore:
    url = f"postgresql://instar@127.0.0.1:{proxy.port}/postgres"
    return PostgresStore(PostgresServer(url, postgres.make_schema_name(), timeout, PASSWORD))


@pytest.mark.parametrize(
    "failure", [CommitFailure.LOST, CommitFailure.LOST_WITH_SERVER_OPEN, CommitFailure.RESPONSE_LOST]
)
async def test_write_whose_commit_fails_is_applied_once(
    postgres: PostgresTestServer, proxy: Proxy, failure: CommitFailure
) -> None:
    """If a write were applied twice, `add_calls` would raise and `reserve_version` would skip a version."""
    store = open_proxied_store(postgres, proxy, timeout=20.0)
    await store.open_session(make_session())
    for number in range(3):
        proxy.next_failure = failure
        await store.add_calls([make_call(str(number))])
        assert await store.reserve_version(POLICY_ID, RUN_ID, number) == 2 * number + 1
        proxy.next_failure = failure
        assert await store.reserve_version(POLICY_ID, RUN_ID, number) == 2 * number + 2
    assert proxy.failure_count == 6
    assert [call.call_id for call in await store.calls("s")] == ["0", "1", "2"]
    await store.close()


async def test_store_reconnects_to_a_server_that_does_not_respond(
    postgres: PostgresTestServer, proxy: Proxy
) -> None:
    store = open_proxied_store(postgres, proxy, timeout=1.0)
    await store.open_session(make_session())
    proxy.next_failure = CommitFailure.UNRESPONSIVE
    await asyncio.wait_for(store.add_calls([make_call("call")]), 30)
    assert proxy.failure_count == 1
    assert [call.call_id for call in await store.calls("s")] == ["call"]
    await store.close()
