"""What was acknowledged is there, once: after SIGKILL, beside other writers, when the server restarts and
when the network loses a commit."""

from __future__ import annotations

import asyncio
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator

import pytest

from instar.errors import StoreError
from instar.store.base import Store
from instar.store.postgres import PostgresStore
from instar.store.postgres_server import PostgresServer
from tests.postgres import PASSWORD, PostgresTestServer

from .child_process import open_store
from .factories import POLICY, RUN, make_call, make_session
from .processes import start
from .proxy import Cut, Proxy


@pytest.fixture
def where(postgres: PostgresTestServer) -> str:
    return f"{postgres.socket_url}#{postgres.new_schema()}"


async def stored(where: str) -> list[str]:
    store = open_store(where, read_only=True)
    calls = await store.calls("s")
    await store.close()
    return [call.call_id for call in calls]


async def test_acknowledged_calls_survive_sigkill_beside_other_writers(where: str) -> None:
    """One of three is killed in the middle; the others notice nothing."""
    killed = start("write", where, "killed")
    others = [start("count", where, name) for name in ("a", "b")]
    assert killed.stdout is not None
    acknowledged = {killed.stdout.readline().strip()}
    await asyncio.sleep(0.3)
    killed.send_signal(signal.SIGKILL)
    rest, _ = killed.communicate(timeout=30)
    acknowledged |= {line.strip() for line in rest.splitlines(keepends=True) if line.endswith("\n")}
    for other in others:
        lines, _ = other.communicate(timeout=60)
        assert other.returncode == 0
        acknowledged |= set(lines.split())
    found = await stored(where)
    assert acknowledged <= set(found)
    assert len(found) == len(set(found))
    assert sum(not name.startswith("killed") for name in found) == 400


async def test_processes_claim_each_sample_once(where: str) -> None:
    children = [start("claim", where, name) for name in ("1", "2", "3")]
    said: list[str] = []
    for child in children:
        lines, _ = child.communicate(timeout=60)
        assert child.returncode == 0
        said += lines.split()
    assert Counter(said) == Counter(f"k{number}" for number in range(40))
    store = open_store(where, read_only=True)
    assert len(await store.claims(RUN)) == 40
    await store.close()


async def test_many_open_a_fresh_schema_at_once(where: str) -> None:
    stores = await asyncio.gather(*(asyncio.to_thread(open_store, where) for _ in range(6)))
    await asyncio.gather(*(store.open_session(make_session(str(i))) for i, store in enumerate(stores)))
    assert len(await stores[0].sessions()) == 6
    for store in stores:
        await store.close()


# --- the server goes away ---------------------------------------------------------------------------


@pytest.fixture
def own_server() -> Iterator[PostgresTestServer]:
    """To be stopped in the middle."""
    server = PostgresTestServer()
    yield server
    server.remove()


async def test_a_server_that_restarts_is_waited_for(own_server: PostgresTestServer) -> None:
    """Once in good order and once by a crash, under writes and reads: nobody hears of it."""
    where = f"{own_server.socket_url}#restarted"
    store = open_store(where)
    await store.open_session(make_session())
    acknowledged: list[str] = []
    versions: list[int] = []
    over = asyncio.Event()

    async def write(number: int) -> None:
        turn = 0
        while not over.is_set():
            await store.add_calls([make_call(f"{number}-{turn}")])
            acknowledged.append(f"{number}-{turn}")
            turn += 1

    async def reserve() -> None:
        while not over.is_set():
            versions.append(await store.reserve_version(POLICY, RUN, 0))

    async def read() -> None:
        while not over.is_set():
            before = set(acknowledged)
            assert before <= {part.call_id for part in await store.call_deltas("s")}

    async def restart() -> None:
        for how in (signal.SIGINT, signal.SIGQUIT):
            await asyncio.sleep(0.3)
            await asyncio.to_thread(own_server.stop, how)
            await asyncio.to_thread(own_server.start)
            seen = len(acknowledged)
            deadline = time.monotonic() + 30
            while len(acknowledged) < seen + 20:
                assert time.monotonic() < deadline
                await asyncio.sleep(0.02)
        over.set()

    await asyncio.gather(*(write(number) for number in range(4)), reserve(), read(), restart())
    await store.close()
    found = await stored(where)
    assert Counter(found) == Counter(acknowledged)
    assert versions == list(range(1, len(versions) + 1))


async def test_a_server_that_stays_away_is_told(own_server: PostgresTestServer) -> None:
    store = PostgresStore(PostgresServer(own_server.socket_url, "gone", timeout=1.0))
    await store.open_session(make_session())
    own_server.stop()
    with pytest.raises(StoreError, match=r"gone\) cannot be reached"):
        await asyncio.wait_for(store.add_calls([make_call("lost")]), 30)
    with pytest.raises(StoreError, match=r"gone\) cannot be reached"):
        await asyncio.wait_for(store.calls("s"), 30)
    own_server.start()
    await store.add_calls([make_call("found")])
    assert [call.call_id for call in await store.calls("s")] == ["found"]
    await store.close()


# --- the network loses a commit -----------------------------------------------------------------------


@pytest.fixture
def through(postgres: PostgresTestServer) -> Iterator[tuple[Proxy, Callable[[float], Store]]]:
    with Proxy(postgres.port) as proxy:
        url, schema = f"postgresql://instar@127.0.0.1:{proxy.port}/postgres", postgres.new_schema()
        yield proxy, lambda timeout: PostgresStore(PostgresServer(url, schema, timeout, PASSWORD))


@pytest.mark.parametrize("cut", [Cut.BEFORE, Cut.BEFORE_AND_OPEN, Cut.AFTER])
async def test_a_commit_whose_answer_is_lost_is_done_once(
    through: tuple[Proxy, Callable[[float], Store]], cut: Cut
) -> None:
    """Nothing here could be done twice unnoticed, or repeated without harm."""
    proxy, connect = through
    store = connect(20.0)
    await store.open_session(make_session())
    for number in range(3):
        proxy.cut = cut
        await store.add_calls([make_call(str(number))])
        assert await store.reserve_version(POLICY, RUN, number) == 2 * number + 1
        proxy.cut = cut
        assert await store.reserve_version(POLICY, RUN, number) == 2 * number + 2
    assert proxy.cuts == 6
    assert [call.call_id for call in await store.calls("s")] == ["0", "1", "2"]
    await store.close()


async def test_a_server_that_says_nothing_is_given_up(
    through: tuple[Proxy, Callable[[float], Store]],
) -> None:
    proxy, connect = through
    store = connect(1.0)
    await store.open_session(make_session())
    proxy.cut = Cut.SILENCE
    await asyncio.wait_for(store.add_calls([make_call("once")]), 30)
    assert proxy.cuts == 1
    assert [call.call_id for call in await store.calls("s")] == ["once"]
    await store.close()
