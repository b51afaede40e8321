"""Conformance tests for the gateway's queries: session lookup, call deltas, keys and secrets."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from instar.errors import ConflictError, StoreError
from instar.store.base import CallDelta, KeyRow, Store, StoredReply
from instar.types import Call, CallStatus, Channel, Link, SessionStatus

from .factories import (
    AGENT_ID,
    CALCULATOR,
    RUN_ID,
    assert_same_call,
    ids,
    make_call,
    make_next_call,
    make_session,
    user,
)

StoreFactory = Callable[[], Store]


def make_tail_key(number: int) -> bytes:
    return number.to_bytes(16, "big")


class SessionOpeningTests:
    async def test_add_calls_with_new_session_opens_it(self, store: Store) -> None:
        session = make_session(channel=Channel.LIVE, external_id="chat-7", created_at=1.0)
        await store.add_calls([make_call()], new_session=session, key_hash="hash")
        assert await store.session("s") == session
        assert await store.session_by_key("hash") == session
        assert len(await store.calls("s")) == 1
        assert (await store.progress(RUN_ID, Channel.LIVE)).sessions == {"open": 1}

    async def test_add_calls_with_new_session_stores_all_or_nothing(self, store: Store) -> None:
        await store.add_calls([make_call("a", "taken")], new_session=make_session("taken"))
        with pytest.raises(StoreError, match="no session missing"):
            await store.add_calls([make_call("b", "missing")], new_session=make_session("t"))
        with pytest.raises(ConflictError):
            await store.add_calls([make_call("c", "taken")], new_session=make_session("taken"))
        assert await store.session("t") is None
        assert [call.call_id for call in await store.calls("taken")] == ["a"]

    async def test_add_calls_concurrently_stores_all_but_the_conflicting_one(self, store: Store) -> None:
        """There are too many calls for one statement. The conflict does not affect the other sessions."""
        await store.open_session(make_session("old"))

        async def add(number: int) -> None:
            first = make_call(f"{number}", f"s{number}", tools=(CALCULATOR,), ended_at=1.0)
            second = make_next_call(first, f"{number}b", ids(9), user("x"), ended_at=1.0)
            new_session = make_session("old" if number == 20 else f"s{number}", channel=Channel.LIVE)
            await store.add_calls(
                [first, second], new_session=new_session, tail_keys={first.call_id: make_tail_key(number)}
            )
            stored = await store.calls(f"s{number}")
            assert_same_call(stored[0], first)
            assert_same_call(stored[1], second)

        results = await asyncio.gather(*(add(number) for number in range(75)), return_exceptions=True)
        assert [type(result) for result in results] == [
            ConflictError if number == 20 else type(None) for number in range(75)
        ]
        assert len(await store.sessions(channel=Channel.LIVE)) == 74


class ReplyTests:
    async def test_replies_returns_the_calls_of_the_requests_oldest_first(self, store: Store) -> None:
        await store.open_session(make_session("s"))
        fields = {"store": True, "metadata": {"text": "a\x00b 🦎"}}
        first = make_call("1", request_id="r1")
        await store.add_calls([first, make_call("2", request_id="r1")], response_fields=fields)
        await store.add_calls([make_call("3", request_id="r3")])
        await store.add_calls([make_call("4", request_id="r4")])
        replies = await store.replies(["r3", "r1", "missing", "\x00", "\ud83d"])
        assert [reply.call_id for reply in replies] == ["1", "2", "3"]
        assert replies[0] == StoredReply("1", "r1", "s", CallStatus.OK, first.reply, fields)
        assert replies[2].response_fields is None
        assert await store.replies([]) == []


class SessionLookupTests:
    async def test_session_by_external_id_returns_the_newest_open_session(self, store: Store) -> None:
        await store.open_session(make_session("a", external_id="x"))
        await store.open_session(make_session("b", external_id="x"))
        await store.open_session(make_session("c", external_id="x", agent_id="other"))
        await store.open_session(make_session("d", external_id="x", run_id="other"))
        await store.open_session(make_session("e"))

        async def find_session(external_id: str, agent_id: str = AGENT_ID) -> str | None:
            session = await store.session_by_external_id(RUN_ID, agent_id, external_id)
            return session.session_id if session else None

        assert await find_session("x") == "b"
        assert await find_session("x", "other") == "c"
        assert await find_session("y") is None
        await store.end_session("b", SessionStatus.COMPLETED)
        assert await find_session("x") == "a"
        await store.end_session("a", SessionStatus.COMPLETED)
        assert await find_session("x") is None

    async def test_sessions_by_tail_returns_the_open_live_sessions_newest_first(self, store: Store) -> None:
        for name in ("a", "b", "other-agent"):
            agent_id = "other" if name == "other-agent" else AGENT_ID
            await store.open_session(make_session(name, channel=Channel.LIVE, agent_id=agent_id))
        await store.open_session(make_session("train"))
        await store.add_calls([make_call("1", "a")], tail_keys={"1": make_tail_key(1)})
        await store.add_calls(
            [make_call("2", "b"), make_call("3", "b")],
            tail_keys={"2": make_tail_key(2), "3": make_tail_key(1)},
        )
        await store.add_calls([make_call("4", "other-agent")], tail_keys={"4": make_tail_key(1)})
        await store.add_calls([make_call("5", "train")], tail_keys={"5": make_tail_key(5)})
        await store.add_calls([make_call("6", "a")])

        async def find_sessions(*numbers: int, agent_id: str = AGENT_ID) -> list[str]:
            return await store.sessions_by_tail(
                RUN_ID, agent_id, [make_tail_key(number) for number in numbers]
            )

        assert await find_sessions(1) == ["b", "a"]
        assert await find_sessions(1, agent_id="other") == ["other-agent"]
        assert await find_sessions(9, 2, 1) == ["b"]
        assert await find_sessions(5) == []
        assert await find_sessions() == []
        assert await store.sessions_by_tail("other", AGENT_ID, [make_tail_key(1)]) == []
        await store.end_session("b", SessionStatus.COMPLETED)
        assert await find_sessions(2, 1) == ["a"]
        assert await find_sessions(2) == []
        assert await find_sessions(*range(100, 1000), 1) == ["a"]

    async def test_sessions_by_tail_with_several_keys_uses_the_first_match(self, store: Store) -> None:
        for number, name in enumerate(("a", "b", "c")):
            session = make_session(name, channel=Channel.LIVE)
            await store.add_calls(
                [make_call(name, name)], new_session=session, tail_keys={name: make_tail_key(number)}
            )
        keys = [make_tail_key(number) for number in range(3)]
        assert await store.sessions_by_tail(RUN_ID, AGENT_ID, keys) == ["a"]
        assert await store.sessions_by_tail(RUN_ID, AGENT_ID, keys[::-1]) == ["c"]

    async def test_idle_sessions_returns_open_live_sessions_without_recent_calls(self, store: Store) -> None:
        live_fields = {"channel": Channel.LIVE, "created_at": 10.0}
        for name in ("idle", "quiet", "busy", "ended"):
            await store.open_session(make_session(name, **live_fields))
        await store.open_session(make_session("fresh", channel=Channel.LIVE, created_at=90.0))
        await store.open_session(make_session("train", created_at=10.0))
        await store.open_session(make_session("other-run", run_id="other", **live_fields))
        await store.add_calls([make_call("1", "quiet", ended_at=2.0), make_call("2", "quiet", ended_at=40.0)])
        await store.add_calls([make_call("3", "busy", ended_at=90.0), make_call("4", "busy", ended_at=2.0)])
        await store.end_session("ended", SessionStatus.COMPLETED)

        async def list_idle(before: float, **page: int) -> list[str]:
            return [row.session_id for row in await store.idle_sessions(RUN_ID, before=before, **page)]

        assert await list_idle(50.0) == ["idle", "quiet"]
        assert await list_idle(40.0) == ["idle"]
        assert await list_idle(10.0) == []
        (first,) = await store.idle_sessions(RUN_ID, before=50.0, limit=1)
        assert first.session_id == "idle"
        assert await list_idle(50.0, after=first.seq, limit=1) == ["quiet"]

    async def test_calls_by_request_returns_all_calls_of_the_request(self, store: Store) -> None:
        await store.open_session(make_session())
        root = make_call("root", ended_at=1.0)
        first = make_next_call(root, "first", ids(9), user("x"), request_id="request", ended_at=1.0)
        second = replace(
            first,
            call_id="second",
            link=Link.SIBLING,
            base_id="first",
            base_tokens=len(first.prompt_ids),
            base_messages=len(first.messages),
        )
        await store.add_calls([root])
        await store.add_calls([first, second])
        for stored, call in zip(await store.calls_by_request("request"), [first, second], strict=True):
            assert_same_call(stored, call)
        assert await store.calls_by_request("missing") == []


class CallDeltaTests:
    async def test_call_deltas_return_only_new_tokens(self, store: Store) -> None:
        await store.open_session(make_session())
        root = make_call("root", tools=(CALCULATOR,), digests=b"d" * 48, client_key="k", model="m")
        second = make_next_call(
            root,
            "second",
            ids(20, 21),
            user("and?"),
            digests=b"e" * 48,
            status=CallStatus.ABORTED,
            trainable=False,
            reason="client disconnected",
        )
        await store.add_calls([root, second])
        first, last = await store.call_deltas("s")
        assert_same_delta(first, root)
        assert_same_delta(last, second)
        assert last.prompt_tail.tolist() == [20, 21]
        assert await store.call_deltas("missing") == []

    async def test_call_deltas_without_digests_include_messages(self, store: Store) -> None:
        await store.open_session(make_session())
        root = make_call("root", tools=(CALCULATOR,))
        second = make_next_call(root, "second", ids(20), user("and?"))
        third = make_next_call(second, "third", ids(30), user("so?"), tools=(CALCULATOR,), digests=b"e" * 48)
        await store.add_calls([root, second, third])
        deltas = await store.call_deltas("s")
        assert [delta.messages for delta in deltas] == [(user("hello"),), (user("and?"),), ()]
        assert [delta.tools for delta in deltas] == [(CALCULATOR,), (), ()]
        for delta, call in zip(deltas, [root, second, third], strict=True):
            assert_same_delta(delta, call)

    async def test_call_deltas_of_a_long_session_take_less_than_100_ms(self, store: Store) -> None:
        """The session has 100 turns and up to 120k tokens of context. Each turn stores 1200 new tokens."""
        await store.open_session(make_session())
        call = make_call("0", prompt_ids=np.arange(1000, dtype=np.int32), digests=b"d" * 48)
        calls = [call]
        for turn in range(1, 100):
            new, sampled = np.full(1000, turn, np.int32), np.full(200, turn, np.int32)
            call = make_next_call(
                call, str(turn), new, user("word " * 1000), sampled_ids=sampled, digests=b"d" * 48
            )
            calls.append(call)
        await store.add_calls(calls)
        best_seconds = float("inf")
        for _ in range(5):
            started = time.perf_counter()
            deltas = await store.call_deltas("s")
            best_seconds = min(best_seconds, time.perf_counter() - started)
        assert sum(len(delta.prompt_tail) for delta in deltas) == 100_000
        assert best_seconds < 0.1


def assert_same_delta(delta: CallDelta, call: Call) -> None:
    for name in CallDelta.__dataclass_fields__:
        if name not in ("prompt_tail", "sampled_ids", "message_count", "messages", "tools"):
            assert getattr(delta, name) == getattr(call, name), name
    assert delta.prompt_tail.dtype == delta.sampled_ids.dtype == np.int32
    assert delta.prompt_tail.tolist() == call.prompt_ids[call.base_tokens :].tolist()
    assert delta.sampled_ids.tolist() == call.sampled_ids.tolist()
    assert delta.message_count == len(call.messages)


class KeyAndSecretTests:
    async def test_revoke_key_by_name_or_hash_prefix_sets_revoked_at(self, store: Store) -> None:
        laptop = KeyRow("a1" * 32, "agent", "coder", "laptop", created_at=1.0)
        admin = KeyRow("b2" * 32, "admin", name="server", created_at=2.0)
        unnamed = [KeyRow(digit * 64, "agent", "coder", created_at=3.0) for digit in "cd"]
        for key in (laptop, admin, *unnamed):
            await store.put_key(key)
        assert await store.keys() == [laptop, admin, *unnamed]
        assert await store.key(laptop.key_hash) == laptop
        assert await store.key("missing") is None
        assert await store.revoke_key("laptop") == 1
        assert await store.revoke_key("laptop") == 0
        assert await store.revoke_key("b2b2b2b2b2") == 1
        revoked = await store.key(laptop.key_hash)
        assert revoked is not None
        assert revoked.revoked_at == pytest.approx(time.time(), abs=30)
        assert [key.revoked_at is None for key in await store.keys()] == [False, False, True, True]

    async def test_revoke_key_by_wildcard_short_prefix_or_agent_revokes_none(self, store: Store) -> None:
        await store.put_key(KeyRow("a1" * 32, "agent", "coder"))
        for pattern in ("", "a", "a1a1a1a", "%", "%%%%%%%%", "________", "coder"):
            assert await store.revoke_key(pattern) == 0, pattern

    async def test_put_key_with_a_used_hash_or_name_raises_conflict(self, store: Store) -> None:
        await store.put_key(KeyRow("a" * 64, "agent", "coder", "laptop"))
        with pytest.raises(ConflictError):
            await store.put_key(KeyRow("a" * 64, "agent", "coder", "another"))
        with pytest.raises(ConflictError):
            await store.put_key(KeyRow("b" * 64, "agent", "coder", "laptop"))
        await store.revoke_key("laptop")
        await store.put_key(KeyRow("b" * 64, "agent", "coder", "laptop"))

    async def test_secret_is_the_same_in_all_stores(self, store: Store, open_store: StoreFactory) -> None:
        other = open_store()
        values = await asyncio.gather(*(client.secret("messages") for client in [store, other] * 5))
        assert len(set(values)) == 1
        assert len(values[0]) == 32
        assert await store.secret("another") != values[0]
        await other.close()
        reopened = open_store()
        assert await reopened.secret("messages") == values[0]
        await reopened.close()


class GatewayTests(SessionOpeningTests, ReplyTests, SessionLookupTests, CallDeltaTests, KeyAndSecretTests):
    """All tests for the gateway's queries."""
