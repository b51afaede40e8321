"""Factories for the rows that tests put into a store."""

from __future__ import annotations

from typing import Any

import numpy as np

from instar.types import (
    Call,
    Channel,
    Claim,
    ClaimOutcome,
    Group,
    Ids,
    Link,
    Message,
    Session,
    Task,
    Tool,
)

RUN_ID, AGENT_ID, POLICY_ID = "run", "agent", "policy"
CALCULATOR: Tool = {"name": "calc", "description": "Computes.", "parameters": {"type": "object"}}


def ids(*values: int) -> Ids:
    return np.array(values, np.int32)


def user(content: str) -> Message:
    return {"role": "user", "content": content}


def assistant(content: str) -> Message:
    return {"role": "assistant", "content": content}


def make_session(session_id: str = "s", **overrides: Any) -> Session:
    fields: dict[str, Any] = {
        "run_id": RUN_ID,
        "agent_id": AGENT_ID,
        "policy_id": POLICY_ID,
        "channel": Channel.TRAIN,
    }
    return Session(session_id, **(fields | overrides))


def make_group(group_id: str = "g", index: int = 0, **overrides: Any) -> Group:
    fields: dict[str, Any] = {
        "run_id": RUN_ID,
        "channel": Channel.TRAIN,
        "size": 2,
        "task": Task("t", {"q": 1}),
    }
    return Group(group_id=group_id, index=index, **(fields | overrides))


def make_call(call_id: str = "c", session_id: str = "s", **overrides: Any) -> Call:
    sampled: Ids = overrides.pop("sampled_ids", ids(7, 8))
    fields: dict[str, Any] = {
        "request_id": f"request-{call_id}",
        "prompt_ids": ids(1, 2, 3),
        "sampled_ids": sampled,
        "logprobs": np.linspace(-1, -0.25, len(sampled), dtype=np.float32),
        "versions": np.full(len(sampled), 4, np.int32),
        "messages": (user("hello"),),
        "reply": assistant("hi"),
        "finish_reason": "stop",
    }
    return Call(call_id, session_id, RUN_ID, AGENT_ID, POLICY_ID, **(fields | overrides))


def make_next_call(base: Call, call_id: str, new_ids: Ids, message: Message, **overrides: Any) -> Call:
    """Return a call that extends the base call by new tokens and a message."""
    fields: dict[str, Any] = {
        "prompt_ids": np.concatenate([base.sequence, new_ids]),
        "messages": (*base.messages, base.reply, message),
        "parent_id": base.call_id,
        "link": Link.EXTENDS,
        "base_id": base.call_id,
        "base_tokens": len(base.sequence),
        "base_messages": len(base.messages) + 1,
    }
    return make_call(call_id, base.session_id, **(fields | overrides))


def make_claim(sample_key: str, **overrides: Any) -> Claim:
    fields: dict[str, Any] = {
        "run_id": RUN_ID,
        "epoch": 0,
        "session_id": "s",
        "group_id": "g",
        "outcome": ClaimOutcome.TRAINED,
    }
    fields |= overrides
    return Claim(sample_key=sample_key, **({"policy_id": fields["run_id"]} | fields))


def make_dropped_claim(sample_key: str, reason: str = "too old", **overrides: Any) -> Claim:
    return make_claim(sample_key, outcome=ClaimOutcome.DROPPED, reason=reason, **overrides)


def assert_same_call(left: Call, right: Call) -> None:
    """Check that all fields are equal. Arrays are compared as bytes, so NaN equals NaN."""
    for name in Call.__dataclass_fields__:
        a, b = getattr(left, name), getattr(right, name)
        if isinstance(a, np.ndarray):
            assert a.dtype == b.dtype, name
            assert a.tobytes() == b.tobytes(), name
        else:
            assert a == b, name
