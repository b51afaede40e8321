"""Builders for sessions, calls and groups in tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from instar.config import RunConfig
from instar.store.base import Run, Store
from instar.store.rows import encode_session
from instar.store.schema import SESSIONS
from instar.types import (
    Call,
    Channel,
    Group,
    GroupStatus,
    Link,
    Message,
    Reward,
    RewardSource,
    Session,
    SessionStatus,
    Task,
)

RUN = "run"


def make_session(session_id: str = "s", **fields: Any) -> Session:
    defaults: dict[str, Any] = {
        "channel": Channel.TRAIN,
        "run_id": RUN,
        "agent_id": "default",
        "policy_id": RUN,
    }
    return Session(session_id=session_id, **{**defaults, **fields})


def make_call(
    call_id: str,
    prompt: Sequence[int],
    sampled: Sequence[int],
    *,
    parent: Call | None = None,
    version: int = 0,
    session_id: str = "s",
    **fields: Any,
) -> Call:
    """Return a call whose logprobs are -0.01 × token id. ``prompt`` continues the parent's tokens, if any."""
    parent_ids = parent.sequence.tolist() if parent else []
    defaults: dict[str, Any] = {
        "logprobs": np.array([-0.01 * token for token in sampled], np.float32),
        "versions": np.full(len(sampled), version, np.int32),
        "parent_id": parent.call_id if parent else None,
        "link": Link.EXTENDS if parent else Link.ROOT,
        "messages": (Message(role="user", content="hi"),),
        "reply": Message(role="assistant", content="ok"),
        "finish_reason": "stop",
    }
    return Call(
        call_id=call_id,
        session_id=session_id,
        run_id=RUN,
        agent_id="default",
        policy_id=RUN,
        request_id=call_id,
        prompt_ids=np.array([*parent_ids, *prompt], np.int32),
        sampled_ids=np.array(sampled, np.int32),
        **{**defaults, **fields},
    )


def make_config(**trainer: Any) -> RunConfig:
    """Return a config with the trainer settings, the rollout's ``failed_reward`` and ``group_size``, and
    ``sync``."""
    sync = trainer.pop("sync", {})
    rollout = {
        "tasks": {"type": "python", "function": "instar.demo.tasks:train_tasks", "args": {"size": 4}},
        "agent": {"type": "function", "function": "instar.demo.agent:solve"},
        "failed_reward": trainer.pop("failed_reward", None),
        "group_size": trainer.pop("group_size", 2),
    }
    return RunConfig.model_validate({"name": RUN, "trainer": trainer, "rollout": rollout, "sync": sync})


async def put_test_run(store: Store) -> None:
    await store.put_run(Run(RUN, RUN, {}))


async def insert_session(store: Store, session: Session, key_hash: str | None = None) -> None:
    """Insert a session, also into a closed group, which `Store.open_session` rejects. Earlier versions
    allowed it, so a store may contain such sessions."""
    await store.write(lambda db: db.execute(SESSIONS.insert_sql, encode_session(session, key_hash)))


async def add_session(
    store: Store,
    group_id: str,
    slot: int,
    reward: float | None,
    *,
    version: int = 0,
    attempt: int = 0,
    status: SessionStatus = SessionStatus.COMPLETED,
    call_count: int = 1,
    source: RewardSource = RewardSource.RULE,
) -> str:
    """Add an ended session of ``call_count`` calls with two sampled tokens each, and return its id."""
    session_id = f"{group_id}:{slot}.{attempt}"
    session = make_session(session_id, group_id=group_id, slot=slot, attempt=attempt)
    await insert_session(store, session)
    call: Call | None = None
    for turn in range(call_count):
        call = make_call(
            f"{session_id}#{turn}",
            [1, 2 + turn],
            [7 + slot, 9],
            parent=call,
            version=version,
            session_id=session_id,
        )
        await store.add_calls([call])
    rewards = [] if reward is None else [Reward(session_id, reward, source, "test")]
    reason = "test failure" if status is SessionStatus.FAILED else None
    await store.end_session(session_id, status, reason, rewards)
    return session_id


async def add_group(
    store: Store,
    index: int,
    rewards: Sequence[float | None],
    *,
    version: int = 0,
    status: GroupStatus = GroupStatus.READY,
    reason: str | None = None,
) -> str:
    """Add a group with a session per reward, close it unless ``status`` is OPEN, and return its id."""
    group_id = f"{RUN}/train/{index:06d}"
    size = max(len(rewards), 4)  # leaves room for sessions that a test adds
    group = Group(group_id, RUN, Channel.TRAIN, index, size, Task(f"t{index}", {}))
    await store.open_group(group)
    for slot, reward in enumerate(rewards):
        await add_session(store, group_id, slot, reward, version=version)
    if status is not GroupStatus.OPEN:
        await store.close_group(group_id, status, reason)
    return group_id
