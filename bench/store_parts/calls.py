"""Calls of a fixed size, as a gateway would record them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from instar.types import Call, Channel, Link, Message, Session, new_id

RUN = "bench"
WORDS = "the cat sat on a mat and looked at what there was to see from it today "


def make_session(**fields: object) -> Session:
    return Session(new_id("sess"), RUN, "agent", RUN, Channel.TRAIN, **fields)  # type: ignore[arg-type]


def make_turns(session: Session, size: int, count: int, version: int = 0) -> Iterator[Call]:
    """Yield a conversation in which every call adds about ``size`` bytes.

    An eighth of the bytes are sampled tokens with their logprobs, a quarter are prompt tokens, and the rest
    is text.
    """
    sampled_count, prompt_count = max(1, size // 64), max(1, size // 16)
    text = (WORDS * (size // len(WORDS) + 1))[: max(8, size // 2)]
    rng = np.random.default_rng(size)
    previous: Call | None = None
    for _ in range(count):
        previous = _make_call(session, previous, rng, prompt_count, sampled_count, text, version)
        yield previous


def _make_call(
    session: Session,
    previous: Call | None,
    rng: np.random.Generator,
    prompt_count: int,
    sampled_count: int,
    text: str,
    version: int,
) -> Call:
    new_ids = rng.integers(0, 150_000, prompt_count, dtype=np.int32)
    user_message: Message = {"role": "user", "content": text}
    call_id = new_id("call")
    return Call(
        call_id=call_id,
        session_id=session.session_id,
        run_id=session.run_id,
        agent_id=session.agent_id,
        policy_id=session.policy_id,
        request_id=call_id,
        prompt_ids=new_ids if previous is None else np.concatenate([previous.sequence, new_ids]),
        sampled_ids=rng.integers(0, 150_000, sampled_count, dtype=np.int32),
        logprobs=-rng.random(sampled_count, dtype=np.float32),
        versions=np.full(sampled_count, version, np.int32),
        messages=(user_message,) if previous is None else (*previous.messages, previous.reply, user_message),
        reply={"role": "assistant", "content": text[: 4 * sampled_count]},
        finish_reason="stop",
        parent_id=previous and previous.call_id,
        link=Link.EXTENDS if previous else Link.ROOT,
        base_id=previous and previous.call_id,
        base_tokens=len(previous.sequence) if previous else 0,
        base_messages=len(previous.messages) + 1 if previous else 0,
        started_at=1.0,
        ended_at=2.0,
    )
