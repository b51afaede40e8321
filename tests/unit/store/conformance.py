"""Conformance tests for stores. A store's test class inherits them and overrides `open_store`."""

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

from .conformance_annotations import AnnotationTests
from .conformance_evaluations import EvaluationTests
from .conformance_feedback import FeedbackTests
from .conformance_forgetting import ForgettingTests
from .conformance_gateway import GatewayTests
from .conformance_listing import ListingTests
from .conformance_live import ServingVersionTests
from .conformance_records import RecordTests
from .conformance_sharing import SeveralStoresTests
from .conformance_training import GroupAndStepTests, PolicyTests, ProgressTests
from .factories import (
    CALCULATOR,
    POLICY_ID,
    RUN_ID,
    assert_same_call,
    ids,
    make_call,
    make_next_call,
    make_session,
    user,
)

StoreFactory = Callable[[], Store]


class StoreFixtures:
    """Subclasses override `open_store`, which opens the test's storage. It is empty when a test starts."""

    @pytest.fixture
    def open_store(self) -> StoreFactory:
        raise NotImplementedError

    @pytest.fixture
    async def store(self, open_store: StoreFactory) -> AsyncIterator[Store]:
        store = open_store()
        yield store
        await store.close()


class RunAndSessionTests(StoreFixtures):
    async def test_put_run_again_replaces_it_and_keeps_created_at(self, store: Store) -> None:
        assert await store.run(RUN_ID) is None
        await store.put_run(Run(RUN_ID, POLICY_ID, {"seed": 3}))
        first = await store.run(RUN_ID)
        assert first is not None
        assert first.created_at == pytest.approx(time.time(), abs=30)
        await store.put_run(Run(RUN_ID, POLICY_ID, {"seed": 3}, status="failed", reason="test"))
        await store.put_run(Run("other", POLICY_ID, {}, created_at=first.created_at + 1))
        assert await store.runs() == [
            replace(first, status="failed", reason="test"),
            Run("other", POLICY_ID, {}, created_at=first.created_at + 1),
        ]

    async def test_session_with_every_field_round_trips(self, store: Store) -> None:
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
        assert await store.session("missing") is None
        assert await store.session_by_key("missing") is None

    async def test_open_session_with_a_used_id_or_key_raises_conflict(self, store: Store) -> None:
        await store.open_session(make_session("a"), key_hash="hash")
        await store.open_session(make_session("b"))
        await store.open_session(make_session("c"))
        with pytest.raises(ConflictError):
            await store.open_session(make_session("a", task_id="another"))
        with pytest.raises(ConflictError):
            await store.open_session(make_session("d"), key_hash="hash")
        assert await store.session("d") is None

    async def test_end_session_called_twice_stores_only_the_first_rewards(self, store: Store) -> None:
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

    async def test_end_session_with_an_invalid_reward_leaves_it_open(self, store: Store) -> None:
        await store.open_session(make_session())
        with pytest.raises(StoreError):
            await store.end_session(
                "s", SessionStatus.COMPLETED, rewards=[Reward("missing", 1.0, RewardSource.RULE)]
            )
        session = await store.session("s")
        assert session is not None
        assert session.status is SessionStatus.OPEN
        with pytest.raises(StoreError):
            await store.end_session("missing", SessionStatus.COMPLETED)

    async def test_text_with_nul_or_invalid_utf8_is_stored(self, store: Store) -> None:
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
            assert await store.session_by_external_id(RUN_ID, "agent", name) is None
        await store.open_session(make_session("named", external_id="\0"))
        assert await store.session_by_external_id(RUN_ID, "agent", "\0") is not None

    async def test_end_session_called_concurrently_succeeds_once(self, store: Store) -> None:
        await store.open_session(make_session())
        reward = Reward("s", 1.0, RewardSource.RULE)
        results = await asyncio.gather(
            *(store.end_session("s", SessionStatus.COMPLETED, rewards=[reward]) for _ in range(8))
        )
        assert sum(results) == 1
        assert len(await store.rewards("s")) == 1

    @pytest.mark.parametrize("value", [float("nan"), float("inf")])
    async def test_add_rewards_with_a_non_finite_value_stores_none(self, store: Store, value: float) -> None:
        await store.open_session(make_session())
        with pytest.raises(StoreError, match=r"s.*(nan|inf)"):
            await store.add_rewards(
                [Reward("s", 1.0, RewardSource.RULE), Reward("s", value, RewardSource.RULE)]
            )
        assert await store.rewards("s") == []

    async def test_sessions_lists_totals_and_applies_filters(self, store: Store) -> None:
        await store.open_session(make_session("a", group_id="g"))
        await store.open_session(make_session("b", channel=Channel.VAL))
        await store.open_session(make_session("c", run_id="other"))
        await store.add_calls([make_call("1", "a"), make_call("2", "a", sampled_ids=ids(1, 2, 3))])
        await store.add_rewards([Reward("a", 0.0, RewardSource.AGENT), Reward("a", 0.5, RewardSource.RULE)])
        await store.add_rewards([Reward("a", 9.0, RewardSource.RULE, call_id="1")])
        await store.end_session("b", SessionStatus.FAILED, "x")
        rows = await store.sessions()
        assert [row.session.session_id for row in rows] == ["a", "b", "c"]
        assert (rows[0].call_count, rows[0].sampled_tokens, rows[0].reward) == (2, 5, 0.5)
        assert (rows[1].call_count, rows[1].sampled_tokens, rows[1].reward) == (0, 0, None)

        async def list_ids(**filters: object) -> list[str]:
            return [row.session.session_id for row in await store.sessions(**filters)]  # type: ignore[arg-type]

        assert await list_ids(run_id=RUN_ID) == ["a", "b"]
        assert await list_ids(group_id="g") == ["a"]
        assert await list_ids(run_id=RUN_ID, channel=Channel.VAL) == ["b"]
        assert await list_ids(status=SessionStatus.FAILED) == ["b"]
        assert await list_ids(limit=2) == ["b", "c"]

    async def test_put_endpoint_with_the_same_role_and_name_replaces_it(self, store: Store) -> None:
        gateway_endpoint = Endpoint(
            RUN_ID, "gateway", "0", "http://127.0.0.1:1", 10, "serving", "g.log", heartbeat=3.0
        )
        await store.put_endpoint(gateway_endpoint)
        await store.put_endpoint(Endpoint(RUN_ID, "engine", "0", "http://127.0.0.1:2", 11))
        await store.put_endpoint(Endpoint("other", "engine", "0", "http://127.0.0.1:3", 12))
        engine, gateway = await store.endpoints(RUN_ID)
        assert gateway == gateway_endpoint
        assert engine.heartbeat == pytest.approx(time.time(), abs=30)
        await store.put_endpoint(replace(gateway_endpoint, pid=99, doing="draining"))
        assert (await store.endpoints(RUN_ID))[1] == replace(gateway_endpoint, pid=99, doing="draining")
        await store.remove_endpoint(RUN_ID, "gateway", "0")
        assert [endpoint.role for endpoint in await store.endpoints(RUN_ID)] == ["engine"]


class CallTests(StoreFixtures):
    async def test_call_with_every_field_round_trips(self, store: Store) -> None:
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
            reason="client disconnected",
            link=Link.BRANCH,
            parent_id="other",
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
        stored = await store.call("c")
        assert stored is not None
        assert_same_call(stored, call)
        assert await store.call("missing") is None

    async def test_call_with_an_empty_reply_round_trips(self, store: Store) -> None:
        await store.open_session(make_session())
        await store.add_calls([make_call(sampled_ids=ids())])
        stored = await store.call("c")
        assert stored is not None
        assert len(stored.sampled_ids) == len(stored.versions) == len(stored.logprobs) == 0
        assert stored.behavior_logprobs is None
        assert stored.ended_at == pytest.approx(time.time(), abs=30)

    async def test_calls_with_shared_prefixes_are_rebuilt_exactly(self, store: Store) -> None:
        """The calls are a chain, a regenerated reply with a follow-up, a branch from the middle of a reply,
        and a call in another session that continues the chain."""
        await store.open_session(make_session())
        await store.open_session(make_session("sub"))
        root = make_call("root", tools=(CALCULATOR,), ended_at=1.0)
        second = make_next_call(root, "second", ids(20, 21), user("and?"), tools=(CALCULATOR,), ended_at=1.0)
        third = make_next_call(second, "third", ids(30), user("more"), ended_at=1.0)
        regenerated = make_next_call(
            second, "regenerated", ids(30), user("more"), sampled_ids=ids(5), ended_at=1.0
        )
        branch = make_call(
            "branch",
            prompt_ids=np.concatenate([second.sequence[:4], ids(90)]),
            messages=(*second.messages[:1], user("rewritten")),
            link=Link.BRANCH,
            base_id="second",
            base_tokens=4,
            base_messages=1,
            ended_at=1.0,
        )
        follow_up = make_next_call(regenerated, "follow_up", ids(31), user("yes"), ended_at=1.0)
        sub_agent = replace(
            make_next_call(third, "sub_agent", ids(40), user("sub-agent"), ended_at=1.0), session_id="sub"
        )
        calls = [root, second, third, regenerated, branch, follow_up]
        await store.add_calls(calls[:2])
        for call in [*calls[2:], sub_agent]:
            await store.add_calls([call])
        for stored, call in zip(await store.calls("s"), calls, strict=True):
            assert_same_call(stored, call)
        (stored,) = await store.calls("sub")
        assert_same_call(stored, sub_agent)
        for call in [*calls, sub_agent]:
            stored_call = await store.call(call.call_id)
            assert stored_call is not None
            assert_same_call(stored_call, call)
        assert await store.calls("missing") == []

    async def test_add_calls_with_a_duplicate_id_stores_none(self, store: Store) -> None:
        await store.open_session(make_session())
        await store.add_calls([make_call("a")])
        with pytest.raises(ConflictError):
            await store.add_calls([make_call("b"), make_call("a")])
        assert [call.call_id for call in await store.calls("s")] == ["a"]

    async def test_add_calls_that_cannot_be_rebuilt_raises(self, store: Store) -> None:
        await store.open_session(make_session())
        root = make_call("root")
        await store.add_calls([root])
        valid = make_next_call(root, "next", ids(9), user("x"))
        different_ids = valid.prompt_ids.copy()
        different_ids[1] += 1
        for invalid, message in [
            (replace(valid, base_id="missing"), "missing is not stored"),
            (replace(valid, base_id=None), "but no base_id"),
            (replace(valid, prompt_ids=different_ids), "does not begin with"),
            (replace(valid, prompt_ids=valid.prompt_ids[:3]), "must be between 0 and 3"),
            (
                replace(valid, base_messages=3, messages=(*valid.messages, user("y"))),
                "its base has 2 messages",
            ),
            (replace(valid, logprobs=valid.logprobs[:1]), "1 logprobs for 2"),
            (replace(valid, session_id="missing"), "no session missing"),
        ]:
            with pytest.raises(StoreError, match=message):
                await store.add_calls([invalid])
        await store.add_calls([valid])
        assert len(await store.calls("s")) == 2

    async def test_add_calls_to_an_ended_session_stores_them(self, store: Store) -> None:
        await store.open_session(make_session())
        await store.end_session("s", SessionStatus.ABANDONED, "retried")
        await store.add_calls([make_call()])
        assert len(await store.calls("s")) == 1

    async def test_calls_of_a_long_session_are_rebuilt_exactly(self, store: Store) -> None:
        await store.open_session(make_session())
        call = make_call("0", prompt_ids=np.arange(500, dtype=np.int32), ended_at=1.0)
        calls = [call]
        for turn in range(1, 60):
            call = make_next_call(
                call, str(turn), np.full(20, turn, np.int32), user(f"turn {turn}"), ended_at=1.0
            )
            calls.append(call)
        await store.add_calls(calls)
        for stored, expected in zip(await store.calls("s"), calls, strict=True):
            assert_same_call(stored, expected)


class LifecycleTests(StoreFixtures):
    async def test_write_is_visible_to_another_store_immediately(
        self, store: Store, open_store: StoreFactory
    ) -> None:
        other = open_store()
        await store.open_session(make_session())
        await other.add_calls([make_call()])
        assert len(await store.calls("s")) == 1
        versions = await asyncio.gather(
            *(client.reserve_version(POLICY_ID, RUN_ID, 0) for client in [store, other] * 10)
        )
        assert sorted(versions) == list(range(1, 21))
        await other.close()

    async def test_close_completes_queued_writes(self, open_store: StoreFactory) -> None:
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
        reopened = open_store()
        assert len(await reopened.calls("s")) == 40
        await reopened.close()


class StoreConformance(
    RunAndSessionTests,
    CallTests,
    GatewayTests,
    PolicyTests,
    EvaluationTests,
    GroupAndStepTests,
    ProgressTests,
    LifecycleTests,
    SeveralStoresTests,
    ListingTests,
    ServingVersionTests,
    FeedbackTests,
    ForgettingTests,
    AnnotationTests,
    RecordTests,
):
    """All conformance tests."""
