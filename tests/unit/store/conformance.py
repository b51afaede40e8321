"""What every store must do. A variant's test class inherits these and gives `open_store`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace

import numpy as np
import pytest

from instar.errors import ConflictError, StoreError
from instar.store.base import Run, Store
from instar.types import (
    CallStatus,
    Channel,
    Endpoint,
    Link,
    Message,
    Reward,
    RewardSource,
    SamplingParams,
    SessionStatus,
)

from .conformance_annotations import Annotations
from .conformance_feedback import OfPeople
from .conformance_gateway import Gateway
from .conformance_listing import Listing
from .conformance_records import Records
from .conformance_sharing import ManyHosts
from .conformance_training import GroupsAndSteps, Policies, ProgressOfRun
from .factories import (
    CALCULATOR,
    POLICY,
    RUN,
    assert_same_call,
    follow,
    ids,
    make_call,
    make_session,
    user,
)

OpenStore = Callable[[], Store]


class Conformance:
    """`open_store` opens the same storage each time it is called within one test; empty at first."""

    @pytest.fixture
    def open_store(self) -> OpenStore:
        raise NotImplementedError

    @pytest.fixture
    async def store(self, open_store: OpenStore) -> AsyncIterator[Store]:
        store = open_store()
        yield store
        await store.close()


class RunsAndSessions(Conformance):
    async def test_run_is_replaced_and_keeps_its_birth(self, store: Store) -> None:
        assert await store.run(RUN) is None
        await store.put_run(Run(RUN, POLICY, {"seed": 3}))
        first = await store.run(RUN)
        assert first is not None
        assert first.created_at == pytest.approx(time.time(), abs=30)
        await store.put_run(Run(RUN, POLICY, {"seed": 3}, status="failed", reason="because"))
        await store.put_run(Run("other", POLICY, {}, created_at=first.created_at + 1))
        assert await store.runs() == [
            replace(first, status="failed", reason="because"),
            Run("other", POLICY, {}, created_at=first.created_at + 1),
        ]

    async def test_session_round_trips(self, store: Store) -> None:
        session = make_session(
            group_id="g",
            slot=2,
            attempt=1,
            task_id="t",
            seed=2**62,
            sampling={"temperature": 0},
            metadata={"who": "Ünal \u4e2d", "deep": [1, {"x": None}]},
            created_at=12.5,
        )
        await store.open_session(session, key_hash="hash")
        assert await store.session("s") == session
        assert await store.session_by_key("hash") == session
        assert await store.session("none") is None
        assert await store.session_by_key("none") is None

    async def test_session_id_and_key_are_taken_once(self, store: Store) -> None:
        await store.open_session(make_session("a"), key_hash="hash")
        await store.open_session(make_session("b"))
        await store.open_session(make_session("c"))
        with pytest.raises(ConflictError):
            await store.open_session(make_session("a", task_id="another"))
        with pytest.raises(ConflictError):
            await store.open_session(make_session("d"), key_hash="hash")
        assert await store.session("d") is None

    async def test_session_ends_once_with_its_rewards(self, store: Store) -> None:
        await store.open_session(make_session(metadata={"a": 1, "b": 1}))
        rewards = [
            Reward("s", 0.25, RewardSource.RULE, scorer="exact", detail={"got": "4"}, created_at=5.0),
            Reward("s", -1.0, RewardSource.AGENT, call_id="c"),
        ]
        assert await store.end_session("s", SessionStatus.COMPLETED, None, rewards, {"b": 2})
        assert not await store.end_session("s", SessionStatus.FAILED, "late", [rewards[0]], {"c": 3})
        session = await store.session("s")
        assert session is not None
        assert (session.status, session.reason) == (SessionStatus.COMPLETED, None)
        assert session.metadata == {"a": 1, "b": 2}
        assert session.ended_at == pytest.approx(time.time(), abs=30)
        stored = await store.rewards("s")
        assert stored[0] == rewards[0]
        assert stored[1] == replace(rewards[1], created_at=stored[1].created_at)
        assert stored[1].created_at == pytest.approx(time.time(), abs=30)

    async def test_ending_is_one_transaction(self, store: Store) -> None:
        await store.open_session(make_session())
        with pytest.raises(StoreError):
            await store.end_session(
                "s", SessionStatus.COMPLETED, rewards=[Reward("nobody", 1.0, RewardSource.RULE)]
            )
        session = await store.session("s")
        assert session is not None
        assert session.status is SessionStatus.OPEN
        with pytest.raises(StoreError):
            await store.end_session("nobody", SessionStatus.COMPLETED)

    async def test_reason_of_any_bytes_is_stored(self, store: Store) -> None:
        await store.open_session(make_session())
        assert await store.end_session(
            "s", SessionStatus.FAILED, b"bad \xff byte, \0 too".decode(errors="surrogateescape")
        )
        session = await store.session("s")
        assert session is not None
        assert session.reason is not None
        assert session.reason.startswith("bad ")
        for name in ("\0", "\udcff"):
            assert await store.session(name) is None
            assert await store.call(name) is None
            assert await store.calls(name) == await store.calls_by_request(name) == []
            assert await store.session_by_external_id(RUN, "agent", name) is None
        await store.open_session(make_session("named", external_id="\0"))
        assert await store.session_by_external_id(RUN, "agent", "\0") is not None

    async def test_two_enders_one_wins(self, store: Store) -> None:
        await store.open_session(make_session())
        reward = Reward("s", 1.0, RewardSource.RULE)
        won = await asyncio.gather(
            *(store.end_session("s", SessionStatus.COMPLETED, rewards=[reward]) for _ in range(8))
        )
        assert sum(won) == 1
        assert len(await store.rewards("s")) == 1

    @pytest.mark.parametrize("value", [float("nan"), float("inf")])
    async def test_reward_must_be_finite(self, store: Store, value: float) -> None:
        await store.open_session(make_session())
        with pytest.raises(StoreError, match=r"s.*(nan|inf)"):
            await store.add_rewards(
                [Reward("s", 1.0, RewardSource.RULE), Reward("s", value, RewardSource.RULE)]
            )
        assert await store.rewards("s") == []

    async def test_sessions_are_listed_with_their_totals(self, store: Store) -> None:
        await store.open_session(make_session("a", group_id="g"))
        await store.open_session(make_session("b", channel=Channel.VAL))
        await store.open_session(make_session("c", run_id="other"))
        await store.add_calls([make_call("1", "a"), make_call("2", "a", sampled_ids=ids(1, 2, 3))])
        await store.add_rewards([Reward("a", 0.0, RewardSource.AGENT), Reward("a", 0.5, RewardSource.RULE)])
        await store.add_rewards([Reward("a", 9.0, RewardSource.RULE, call_id="1")])
        await store.end_session("b", SessionStatus.FAILED, "x")
        rows = await store.sessions()
        assert [row.session.session_id for row in rows] == ["a", "b", "c"]
        assert (rows[0].calls, rows[0].sampled_tokens, rows[0].reward) == (2, 5, 0.5)
        assert (rows[1].calls, rows[1].sampled_tokens, rows[1].reward) == (0, 0, None)

        async def found(**filters: object) -> list[str]:
            return [row.session.session_id for row in await store.sessions(**filters)]  # type: ignore[arg-type]

        assert await found(run_id=RUN) == ["a", "b"]
        assert await found(group_id="g") == ["a"]
        assert await found(run_id=RUN, channel=Channel.VAL) == ["b"]
        assert await found(status=SessionStatus.FAILED) == ["b"]
        assert await found(limit=2) == ["b", "c"]

    async def test_endpoints_are_replaced_by_role_and_name(self, store: Store) -> None:
        one = Endpoint(RUN, "gateway", "0", "http://127.0.0.1:1", 10, "serving", "g.log", heartbeat=3.0)
        await store.put_endpoint(one)
        await store.put_endpoint(Endpoint(RUN, "engine", "0", "http://127.0.0.1:2", 11))
        await store.put_endpoint(Endpoint("other", "engine", "0", "http://127.0.0.1:3", 12))
        engine, gateway = await store.endpoints(RUN)
        assert gateway == one
        assert engine.heartbeat == pytest.approx(time.time(), abs=30)
        await store.put_endpoint(replace(one, pid=99, doing="draining"))
        assert (await store.endpoints(RUN))[1] == replace(one, pid=99, doing="draining")
        await store.remove_endpoint(RUN, "gateway", "0")
        assert [endpoint.role for endpoint in await store.endpoints(RUN)] == ["engine"]


class Calls(Conformance):
    async def test_every_field_round_trips(self, store: Store) -> None:
        await store.open_session(make_session())
        reply: Message = {
            "role": "assistant",
            "content": "",
            "reasoning": "hm\x00 \u2028",
            "tool_calls": [{"id": "1", "name": "calc", "arguments": '{"a": 1 }'}],
        }
        call = make_call(
            sampled_ids=ids(7, 8, 2**31 - 1),
            logprobs=np.array([-0.1, np.nan, -np.inf], np.float32),
            behavior_logprobs=np.array([0, np.nan, -3.3], np.float32),
            versions=ids(4, 4, 5),
            messages=(user("lone \ud83d surrogate"), {"role": "tool", "content": "4", "tool_call_id": "1"}),
            reply=reply,
            tools=(CALCULATOR,),
            finish_reason="aborted",
            status=CallStatus.ABORTED,
            trainable=False,
            reason="client gone",
            link=Link.BRANCH,
            parent_id="elsewhere",
            dialect="messages",
            model="some/model",
            client_key="key \u4e2d",
            digests=bytes(range(48)),
            params=SamplingParams(
                max_tokens=5, temperature=0.5, seed=2**63, stop=("x",), stop_token_ids=(2,)
            ),
            started_at=1.0,
            first_token_at=1.5,
            ended_at=2.0,
        )
        await store.add_calls([call])
        found = await store.call("c")
        assert found is not None
        assert_same_call(found, call)
        assert await store.call("none") is None

    async def test_empty_reply_and_defaults(self, store: Store) -> None:
        await store.open_session(make_session())
        await store.add_calls([make_call(sampled_ids=ids())])
        found = await store.call("c")
        assert found is not None
        assert len(found.sampled_ids) == len(found.versions) == len(found.logprobs) == 0
        assert found.behavior_logprobs is None
        assert found.ended_at == pytest.approx(time.time(), abs=30)

    async def test_graph_is_rebuilt_whole(self, store: Store) -> None:
        """A line, a second child of one call, a branch from inside a reply, and a call in another
        session that stands on this one."""
        await store.open_session(make_session())
        await store.open_session(make_session("sub"))
        root = make_call("root", tools=(CALCULATOR,), ended_at=1.0)
        second = follow(root, "second", ids(20, 21), user("and?"), tools=(CALCULATOR,), ended_at=1.0)
        third = follow(second, "third", ids(30), user("more"), ended_at=1.0)
        regenerated = follow(second, "regenerated", ids(30), user("more"), sampled_ids=ids(5), ended_at=1.0)
        within = make_call(
            "within",
            prompt_ids=np.concatenate([second.sequence[:4], ids(90)]),
            messages=(*second.messages[:1], user("rewritten")),
            link=Link.BRANCH,
            base_id="second",
            base_tokens=4,
            base_messages=1,
            ended_at=1.0,
        )
        after = follow(regenerated, "after", ids(31), user("yes"), ended_at=1.0)
        outside = replace(
            follow(third, "outside", ids(40), user("sub-agent"), ended_at=1.0), session_id="sub"
        )
        calls = [root, second, third, regenerated, within, after]
        await store.add_calls(calls[:2])
        for call in [*calls[2:], outside]:
            await store.add_calls([call])
        for found, call in zip(await store.calls("s"), calls, strict=True):
            assert_same_call(found, call)
        (found,) = await store.calls("sub")
        assert_same_call(found, outside)
        for call in [*calls, outside]:
            one = await store.call(call.call_id)
            assert one is not None
            assert_same_call(one, call)
        assert await store.calls("none") == []

    async def test_all_or_none(self, store: Store) -> None:
        await store.open_session(make_session())
        await store.add_calls([make_call("a")])
        with pytest.raises(ConflictError):
            await store.add_calls([make_call("b"), make_call("a")])
        assert [call.call_id for call in await store.calls("s")] == ["a"]

    async def test_refuses_what_could_not_be_rebuilt(self, store: Store) -> None:
        await store.open_session(make_session())
        root = make_call("root")
        await store.add_calls([root])
        good = follow(root, "next", ids(9), user("x"))
        other = good.prompt_ids.copy()
        other[1] += 1
        for bad, why in [
            (replace(good, base_id="none"), "none is not stored"),
            (replace(good, base_id=None), "without a base_id"),
            (replace(good, prompt_ids=other), "does not begin with"),
            (replace(good, prompt_ids=good.prompt_ids[:3]), "beyond its prompt"),
            (replace(good, base_messages=3, messages=(*good.messages, user("y"))), "of 2 messages"),
            (replace(good, logprobs=good.logprobs[:1]), "1 logprobs for 2"),
            (replace(good, session_id="nobody"), "no session nobody"),
        ]:
            with pytest.raises(StoreError, match=why):
                await store.add_calls([bad])
        await store.add_calls([good])
        assert len(await store.calls("s")) == 2

    async def test_call_of_an_ended_session_is_kept(self, store: Store) -> None:
        await store.open_session(make_session())
        await store.end_session("s", SessionStatus.ABANDONED, "retried")
        await store.add_calls([make_call()])
        assert len(await store.calls("s")) == 1

    async def test_long_session_is_read_whole(self, store: Store) -> None:
        await store.open_session(make_session())
        call = make_call("0", prompt_ids=np.arange(500, dtype=np.int32), ended_at=1.0)
        calls = [call]
        for turn in range(1, 60):
            call = follow(call, str(turn), np.full(20, turn, np.int32), user(f"turn {turn}"), ended_at=1.0)
            calls.append(call)
        await store.add_calls(calls)
        for found, expected in zip(await store.calls("s"), calls, strict=True):
            assert_same_call(found, expected)


class Sharing(Conformance):
    async def test_what_one_writes_another_reads_at_once(self, store: Store, open_store: OpenStore) -> None:
        other = open_store()
        await store.open_session(make_session())
        await other.add_calls([make_call()])
        assert len(await store.calls("s")) == 1
        numbers = await asyncio.gather(
            *(each.reserve_version(POLICY, RUN, 0) for each in [store, other] * 10)
        )
        assert sorted(numbers) == list(range(1, 21))
        await other.close()

    async def test_close_finishes_what_was_asked(self, open_store: OpenStore) -> None:
        store = open_store()
        await store.open_session(make_session())
        writes = [asyncio.ensure_future(store.add_calls([make_call(str(i))])) for i in range(40)]
        await asyncio.sleep(0)
        await store.close()
        await asyncio.gather(*writes)
        with pytest.raises(StoreError, match="closed"):
            await store.add_calls([make_call("late")])
        with pytest.raises(StoreError, match="closed"):
            await store.calls("s")
        await store.close()
        again = open_store()
        assert len(await again.calls("s")) == 40
        await again.close()


class StoreConformance(
    RunsAndSessions,
    Calls,
    Gateway,
    Policies,
    GroupsAndSteps,
    ProgressOfRun,
    Sharing,
    ManyHosts,
    Listing,
    OfPeople,
    Annotations,
    Records,
):
    """All of it."""
