"""Helpers that fill a store with all types of exportable data, and export it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from instar.config import RunConfig
from instar.data.combine import RewardCombiner
from instar.data.linearize import linearize
from instar.datasets.export import ExportHooks, ExportOptions, export_sessions
from instar.datasets.manifest import DatasetManifest
from instar.store.base import Run, Store
from instar.types import (
    Artifact,
    Call,
    CallStatus,
    Channel,
    Feedback,
    Group,
    GroupStatus,
    Link,
    Message,
    Policy,
    Reward,
    RewardSource,
    SamplingParams,
    Score,
    ScoreState,
    SessionStatus,
    Tag,
    Task,
    Tool,
)
from tests.unit.data.builders import RUN, insert_session, make_call, make_session

SEARCH = Tool(name="search", description="Looks it up.", parameters={"type": "object", "properties": {}})


def make_hooks(config: RunConfig | None = None) -> ExportHooks:
    combiner = RewardCombiner(config or RunConfig())
    return ExportHooks(linearize, lambda record: combiner(record.rewards, record.scores))


async def export_all(store: Store, folder: Path, **options: Any) -> DatasetManifest:
    return await export_sessions(
        store, RUN, folder, ExportOptions(**options), make_hooks(), store_type="sqlite"
    )


async def add_session(
    store: Store,
    session_id: str,
    replies: Sequence[str],
    reward: float | None,
    *,
    group_id: str | None = None,
    slot: int = 0,
    channel: Channel = Channel.TRAIN,
    tools: tuple[Tool, ...] = (SEARCH,),
    version: int = 0,
) -> list[Call]:
    """Add a completed session with one turn per reply, each based on the previous turn."""
    await insert_session(
        store, make_session(session_id, group_id=group_id, slot=slot, channel=channel, task_id="t", seed=7)
    )
    calls: list[Call] = []
    messages: list[Message] = [Message(role="system", content="Be brief."), Message(role="user", content="Q")]
    for turn, reply in enumerate(replies):
        previous = calls[-1] if calls else None
        reply_message = Message(role="assistant", content=reply)
        if turn + 1 < len(replies):
            reply_message["tool_calls"] = [{"id": f"c{turn}", "name": "search", "arguments": '{"q": "ä"}'}]
        call = make_call(
            f"{session_id}#{turn}",
            [1, 2 + turn],
            [7 + slot, 9, 11 + turn],
            parent=previous,
            version=version,
            session_id=session_id,
            messages=tuple(messages),
            reply=reply_message,
            tools=tools,
            base_id=previous.call_id if previous else None,
            base_tokens=len(previous.sequence) if previous else 0,
            base_messages=len(previous.messages) + 1 if previous else 0,
            digests=bytes([turn]) * 8,
            logprobs=np.log(np.random.default_rng(turn).random(3, np.float32)),
            params=SamplingParams(temperature=0.7, stop=("a", "b")),
            started_at=1.5 + turn,
            ended_at=2.5 + turn,
        )
        await store.add_calls([call])
        calls.append(call)
        messages += [reply_message, Message(role="tool", content="found", tool_call_id=f"c{turn}")]
    rewards = [] if reward is None else [Reward(session_id, reward, RewardSource.RULE, "math", cost=0.25)]
    await store.end_session(session_id, SessionStatus.COMPLETED, None, rewards)
    return calls


async def fill_store(store: Store, groups: int = 3) -> None:
    """Add groups sampled by different policy versions, and sessions with unusual content."""
    await store.put_run(Run(RUN, RUN, {}))
    for index in range(groups):
        group_id = f"{RUN}/train/{index:06d}"
        task = Task(f"t{index}", {"q": "ü", "n": index})
        await store.open_group(Group(group_id, RUN, Channel.TRAIN, index, 2, task))
        for slot in range(2):
            replies = ["thinking", f"answer {slot}"] if index else [f"answer {slot}"]
            await add_session(
                store, f"s{index}-{slot}", replies, float(slot), group_id=group_id, slot=slot, version=index
            )
        await store.close_group(group_id, GroupStatus.READY)
    await _add_unusual_sessions(store)
    version = await store.reserve_version(RUN, RUN, 1)
    await store.publish(Policy(RUN, version, Artifact("adapter", "/somewhere/policies/v000001")))


async def _add_unusual_sessions(store: Store) -> None:
    """Add a session that has an aborted call without logprobs, a lone surrogate and annotations. Also add a
    failed session and an open one."""
    (first,) = await add_session(store, "odd", ["one"], None, channel=Channel.LIVE, tools=())
    regenerated = make_call(
        "odd#regenerated",
        first.prompt_ids.tolist(),
        [5],
        session_id="odd",
        link=Link.SIBLING,
        parent_id=first.call_id,
        base_id=first.call_id,
        base_tokens=len(first.prompt_ids),
        base_messages=len(first.messages),
        messages=first.messages,
        reply=Message(role="assistant", content="half \ud83d a pair"),
        logprobs=np.array([np.nan], np.float32),
        behavior_logprobs=np.array([-np.inf], np.float32),
        status=CallStatus.ABORTED,
        trainable=False,
        reason="the client disconnected",
        first_token_at=3.0,
        client_key="k",
    )
    await store.add_calls([regenerated])
    await store.add_rewards(
        [
            Reward("odd", 0.1 + 0.2, RewardSource.JUDGE, "judge:outcome", first.call_id,
                   {"reason": ["x", None]}, reward_id="r1", scorer_version="1f03"),
            Reward("odd", 1.0, RewardSource.HUMAN, "feedback"),
        ]
    )  # fmt: skip
    await store.record_scores([Score("odd", "judge:outcome@1f03", ScoreState.FALLBACK, 3, "timed out")], [])
    await store.add_tags([Tag("odd", "quality", "low", "short", "me"), Tag("odd", "seen")])
    correction = Feedback(
        "f1", "odd", first.call_id, thumbs=-1, score=0.5, text="no", correction="two",
        correction_ids=np.array([3, 4], np.int32), author="me",
    )  # fmt: skip
    await store.add_feedback(correction)
    await insert_session(store, make_session("failed", group_id=f"{RUN}/train/000000", slot=2))
    await store.end_session("failed", SessionStatus.FAILED, "the agent crashed")
    await store.open_session(make_session("open", channel=Channel.LIVE))
