"""Conformance tests for the versions that serve live sessions, and for the replies of shadow versions."""

from __future__ import annotations

import numpy as np
import pytest

from instar.errors import SessionNotFound
from instar.store.base import ShadowReply, Store
from instar.types import Artifact, Channel, Policy, PolicyStage, SessionStatus
from tests.versions import publish_canary, publish_candidate, publish_serving

from .factories import (
    AGENT_ID,
    POLICY_ID,
    RUN_ID,
    assistant,
    make_call,
    make_claim,
    make_dropped_claim,
    make_session,
)


def make_shadow_reply(session_id: str = "s", text: str = "hello", version: int = 2) -> ShadowReply:
    return ShadowReply(
        session_id=session_id,
        call_id=f"{session_id}-1",
        policy_id=POLICY_ID,
        version=version,
        reply=assistant(text),
        sampled_ids=np.array([7, 8], np.int32),
        logprobs=np.array([-0.5, -1.0], np.float32),
        finish_reason="stop",
        created_at=3.0,
    )


class ServingVersionTests:
    async def test_active_versions_are_the_newest_ones_of_each_stage(self, store: Store) -> None:
        assert await store.active_versions(["p", "q"]) == []
        first = await publish_serving(store, "p")
        second = await publish_serving(store, "p")
        canary = await publish_canary(store, "p", artifact=Artifact("adapter", "y"))
        candidate = await publish_candidate(store, "p")
        await store.advance_version("p", candidate, PolicyStage.SHADOW, "test")
        await publish_serving(store, "q")
        await publish_serving(store, "other")
        unpublished = await store.reserve_version("p", "run", 9, parent=0)
        active = {(row.policy.ref, row.stage): row.policy for row in await store.active_versions(["p", "q"])}
        assert sorted((ref.policy_id, ref.version, stage) for ref, stage in active) == [
            ("p", second, "serving"),
            ("p", canary, "canary"),
            ("p", candidate, "shadow"),
            ("q", 1, "serving"),
        ]
        assert Policy("p", canary, Artifact("adapter", "y")) in active.values()
        assert first < second < canary < candidate < unpublished
        head = await store.roll_back("p", "run", first, "rewards fell")
        (row,) = await store.active_versions(["p"])
        assert (row.policy.version, row.stage) == (head, PolicyStage.SERVING)
        assert (await store.policy_versions("p"))[-1].reason == "rollback to version 1: rewards fell"

    async def test_completed_live_sessions_are_selected_by_time_and_policy(self, store: Store) -> None:
        for number in range(6):
            session = make_session(f"s{number}", channel=Channel.LIVE, created_at=float(number + 1))
            await store.open_session(session)
        await store.open_session(make_session("train", created_at=3.0))
        other = make_session("other", channel=Channel.LIVE, created_at=3.0, policy_id="q")
        await store.open_session(other)
        for session_id in ("s0", "s1", "s2", "s4", "s5", "train", "other"):
            await store.end_session(session_id, SessionStatus.COMPLETED)
        sessions = await store.completed_live_sessions(RUN_ID, POLICY_ID, 2.0, until=6.0)
        assert [session.session_id for session in sessions] == ["s1", "s2", "s4"]
        sessions = await store.completed_live_sessions(RUN_ID, POLICY_ID, 0.0, limit=2)
        assert [session.session_id for session in sessions] == ["s4", "s5"]

    async def test_trained_sessions_are_not_among_the_newest_ones_for_evaluations(self, store: Store) -> None:
        for name in ("trained", "dropped", "unclaimed"):
            await store.open_session(make_session(name, channel=Channel.LIVE))
            await store.end_session(name, SessionStatus.COMPLETED)
        claims = [make_claim("trained/0", session_id="trained", group_id=None)]
        claims.append(make_dropped_claim("dropped/0", session_id="dropped", group_id=None))
        await store.claim_step(RUN_ID, 1, claims)
        assert await store.newest_live_sessions(RUN_ID, [AGENT_ID], 10) == ["unclaimed", "dropped"]

    async def test_canary_version_of_a_session_is_stored(self, store: Store) -> None:
        session = make_session(canary_version=3, created_at=1.0)
        await store.open_session(session)
        assert await store.session("s") == session

    async def test_shadow_reply_is_paired_with_the_served_reply_and_forgotten_with_it(
        self, store: Store
    ) -> None:
        for session_id in ("s", "t"):
            call = make_call(f"{session_id}-1", session_id, reply=assistant("served"))
            await store.add_calls([call], new_session=make_session(session_id, channel=Channel.LIVE))
        shadow = make_shadow_reply()
        for reply in (
            shadow,
            make_shadow_reply(text="later"),
            make_shadow_reply("t"),
            make_shadow_reply(version=3),
        ):
            await store.add_shadow_reply(reply)
        pairs = await store.shadow_pairs(POLICY_ID, 2)
        assert [pair.shadow.reply["content"] for pair in pairs] == ["hello", "later", "hello"]
        assert pairs[0].served_reply == assistant("served")
        assert pairs[0].served_finish_reason == "stop"
        assert pairs[0].shadow.sampled_ids.tolist() == [7, 8]
        assert pairs[0].shadow.logprobs.tolist() == [-0.5, -1.0]
        assert (pairs[0].shadow.created_at, pairs[0].shadow.version) == (3.0, 2)
        assert len(await store.shadow_pairs(POLICY_ID, 2, 1)) == 1
        assert len(await store.calls("s")) == 1
        await store.forget_sessions(RUN_ID, ["s"])
        assert [pair.shadow.session_id for pair in await store.shadow_pairs(POLICY_ID, 2)] == ["t"]
        with pytest.raises(SessionNotFound):
            await store.add_shadow_reply(shadow)
